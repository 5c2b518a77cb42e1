"""A worker that holds the run's key can at worst fail its own shard: the rows of others stay right, and it is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from clusterenv import ClusterEnv, Faults, Network, NeverSync, Timeouts
from clusterenv.errors import PolicyError, WireError, WorkerFailed, WorkerLost
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import TICKET_VARIABLE, WORKER_VARIABLE, Ticket
from tests import hostile
from tests.launchers import OwnLauncher
from tests.policies import Hashing, Linear
from tests.worlds import assert_same

NUM_ENVS = 4
OURS, THEIRS = slice(0, 2), slice(2, 4)  # Whose worker is honest, and whose is not.


class SecondIsHostile(OwnLauncher):
    """Starts `tests.hostile` in place of the second of two workers."""

    def __init__(self, tricks: Sequence[str]) -> None:
        self._tricks = ",".join(tricks)

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        def start(worker_index: int, log: BinaryIO) -> subprocess.Popen[bytes]:
            module = "tests.hostile" if worker_index == 1 else "clusterenv.worker"
            environment = os.environ | {
                TICKET_VARIABLE: ticket.encode(),
                WORKER_VARIABLE: str(worker_index),
                hostile.TRICKS_VARIABLE: self._tricks,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            return subprocess.Popen([sys.executable, "-m", module], env=environment, stdout=log, stderr=log)

        return ProcessFleet(start, num_workers)


def start(tricks: Sequence[str], **options: Any) -> ClusterEnv:
    options = {"network": Network(transport="zmq"), "faults": Faults(on_loss="raise"), **options}
    return ClusterEnv("CartPole-v1", NUM_ENVS, num_workers=2, launcher=SecondIsHostile(tricks), **options)


def reference() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gym.make("CartPole-v1")] * NUM_ENVS)


def test_what_is_refused_changes_nothing() -> None:
    tricks = list(hostile.REFUSED)
    with start(tricks) as envs:
        envs.action_space.seed(1)
        true = reference()
        assert_same(envs.reset(seed=1), true.reset(seed=1))
        for name in [*tricks, "honest"]:
            actions = envs.action_space.sample()
            assert_same(envs.step(actions), true.step(actions), name)
        true.close()


def test_nonsense_in_an_answer_is_an_error_that_names_the_worker_and_no_more() -> None:
    check_nonsense([*hostile.NONSENSE_VALUES, "objects nobody has", "another kind of answer"], transport="zmq")


def test_nonsense_about_infos_in_shared_memory_is_an_error_that_names_the_worker_and_no_more() -> None:
    check_nonsense(list(hostile.NONSENSE_NAMES), transport="shm")


def check_nonsense(tricks: Sequence[str], transport: str) -> None:
    with start([trick for name in tricks for trick in (name, "honest")], network=Network(transport=transport)) as envs:
        envs.action_space.seed(1)
        true = reference()
        assert_same(envs.reset(seed=1), true.reset(seed=1))
        for name in tricks:
            actions = envs.action_space.sample()
            true.step(actions)
            with pytest.raises(WireError, match=r"worker 1 .*environments 2 to 3") as caught:
                envs.step(actions)
            assert len(str(caught.value)) < 1000, name
            actions = envs.action_space.sample()
            assert_same(envs.step(actions), true.step(actions), f"after {name}")
        true.close()


def test_an_error_of_a_dangerous_type_is_told_and_not_made() -> None:
    tricks = [f"a dangerous error {place}" for place in range(len(hostile.DANGEROUS_TYPES))]
    with start(tricks) as envs:
        envs.reset(seed=1)
        for _ in tricks:
            with pytest.raises(WorkerFailed, match="harm") as caught:
                envs.step(np.zeros(NUM_ENVS, np.int64))
            assert (caught.value.worker_index, caught.value.env_indices) == (1, (2, 3))
            assert caught.value.__cause__ is None
        envs.step(np.zeros(NUM_ENVS, np.int64))


def test_results_of_one_worker_never_move_to_the_rows_of_another() -> None:
    with start(["a result too few", "results too many"]) as envs:
        envs.reset(seed=1)
        for _ in range(2):
            with pytest.raises(WireError, match="worker 1"):
                envs.get_attr("gravity")
        assert envs.get_attr("gravity") == (9.8,) * NUM_ENVS


@pytest.mark.parametrize("trick", ["a nonsense mailbox", "an overfull mailbox"])
def test_nonsense_in_shared_memory_loses_the_worker_that_wrote_it(trick: str) -> None:
    with start([trick], network=Network(transport="shm")) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerLost, match="malformed into its mailbox") as caught:
            envs.step(np.zeros(NUM_ENVS, np.int64))
        assert (caught.value.worker_index, caught.value.env_indices) == (1, (2, 3))


def test_bools_in_shared_memory_are_bools_whatever_a_worker_writes_there() -> None:
    with start(["bools that are none"], network=Network(transport="shm")) as envs:
        envs.reset(seed=1)
        infos = envs.step(np.zeros(NUM_ENVS, np.int64))[4]
        assert infos["_flag"].tolist() == [False, False, True, True]
        assert infos["flag"].view(np.uint8).tolist() == [0, 0, 1, 1]


def test_infos_are_not_looked_for_in_memory_that_is_not_shared() -> None:
    with start(["infos where no memory is shared"]) as envs:
        envs.reset(seed=1)
        with pytest.raises(WireError, match=r"worker 1 .*shares no memory"):
            envs.step(np.zeros(NUM_ENVS, np.int64))


def test_a_worker_that_talks_without_answering_cannot_stretch_a_deadline() -> None:
    with start(["a flood without an answer"], timeouts=Timeouts(call_s=3.0, close_s=0.5)) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerLost, match=r"Worker 1 .*hangs"):
            envs.step(np.zeros(NUM_ENVS, np.int64))


def test_a_summary_that_makes_no_sense_names_the_worker_and_changes_no_others() -> None:
    tricks = list(hostile.NONSENSE_SUMMARIES)
    agent = Linear()
    with start(tricks, autoreset_mode=AutoresetMode.SAME_STEP, sync=NeverSync()) as envs:
        envs.reset(seed=1)
        for name in tricks:
            with pytest.raises(WireError, match=r"environments 2 to 3|worker 1") as caught:
                envs.rollout(agent, 60)
            assert len(str(caught.value)) < 1000, name
        rollout = envs.rollout(agent, 60)
        assert set(rollout.episodes.env_indices.tolist()) == {0, 1, 2, 3}


def test_parts_of_a_rollout_land_only_where_they_are_due() -> None:
    agent = Hashing(gym.spaces.Discrete(2))
    with (
        start(["parts out of order"], sync=NeverSync()) as envs,
        ClusterEnv(
            "CartPole-v1", NUM_ENVS, num_workers=2, network=Network(transport="zmq"), sync=NeverSync()
        ) as honest,
    ):
        rollouts = []
        for run in (envs, honest):
            run.reset(seed=1)
            rollouts.append(run.rollout(agent, 40))
        ours, theirs = rollouts
        for name in ("obs", "actions", "rewards", "terminations", "truncations", "valid", "next_obs"):
            assert_same(getattr(ours, name), getattr(theirs, name), name)


def test_a_policy_that_is_said_to_return_terabytes_is_refused() -> None:
    with start(["giant extras"], sync=NeverSync()) as envs:
        envs.reset(seed=1)
        with pytest.raises((WireError, PolicyError), match="worker 1"):
            envs.rollout(Linear(), 4)
