"""Every way to work, one after another over the same environments, delivers every transition once and in order."""

from __future__ import annotations

import numpy as np
import pytest
from chaos.modes import MODES, Calls, Shifted

from clusterenv import ClusterEnv, EveryUpdate
from tests.conftest import Backend
from tests.numbered import Checker, make_numbered

NUM_ENVS = 5


@pytest.mark.quick
def test_every_mode_delivers_every_transition_once_and_in_order(remote: Backend) -> None:
    checker, agent, rng = Checker(NUM_ENVS), Shifted(), np.random.default_rng(1)
    with ClusterEnv(make_numbered(NUM_ENVS), sync=EveryUpdate(), **remote) as envs:
        checker.reset(envs.reset(seed=1)[0])
        for mode in (*MODES, *reversed(list(MODES))):
            before = checker.delivered.copy()
            learner = MODES[mode](envs, agent, checker, Calls(), rng)
            learner.begin()
            while (checker.delivered < before + 20).any():
                learner.advance()
            learner.end()
        assert envs.losses == ()
