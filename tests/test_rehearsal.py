"""What `AdaptiveSync` would have saved, said of a run that pulls every version: true, cheap, and never in the way."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, NeverSync
from clusterenv.policy import Categorical
from clusterenv.policy.rehearsal import Rehearsal
from clusterenv.policy.sync import SyncRule
from tests.conftest import Backend
from tests.policies import Linear
from tests.test_labels import Alike, Recurrent

ROUNDS = 60


class Clock:
    """Time that passes only when told, and with every evaluation of a policy."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow(Linear):
    """A policy whose evaluation takes a while."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds
        self.num_evaluations = 0

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        self._clock.now_s += self._seconds
        self.num_evaluations += 1
        return super().distribution(obs, state)


def train(rule: SyncRule, backend: Backend, mode: str = "rollout", agent: Linear | None = None) -> tuple[str, int]:
    """Learn in even steps; returns the summary, and the number of pulls."""
    agent = agent or Linear()
    with ClusterEnv(Alike, 8, **backend, sync=rule) as envs:
        envs.reset(seed=1)
        stream = envs.stream(agent, 8, max_lag=1000) if mode == "stream" else None
        for _ in range(ROUNDS):
            if mode == "rollout":
                envs.rollout(agent, 8)
            elif mode == "step":
                envs.step(agent)
            elif stream is not None:
                next(stream)
            agent.matrix[:, 0] += 0.02
        return envs.summary(), envs.stats["pulls"]


def read_pulls(summary: str) -> int:
    found = re.search(r"AdaptiveSync\(0\.05\) would have pulled about (\d+) times and sent about", summary)
    assert found is not None, summary
    return int(found[1])


@pytest.mark.parametrize("mode", ["rollout", "step"])
def test_the_summary_says_how_often_adaptive_sync_would_have_pulled(backend: Backend, mode: str) -> None:
    _, pulls = train(AdaptiveSync(), backend, mode)
    said = read_pulls(train(EveryUpdate(), backend, mode)[0])
    assert pulls / 1.4 <= said <= pulls * 1.4
    assert said < ROUNDS * 2 / 3


def test_the_summary_says_what_checks_would_have_sent() -> None:
    sent = re.search(r"\. ([\d.]+) kB for weights and checks", train(AdaptiveSync(), {"num_workers": 2})[0])
    said = re.search(r"sent about ([\d.]+) kB with its checks, \d+% more", train(EveryUpdate(), {"num_workers": 2})[0])
    assert sent is not None
    assert said is not None, "checks of so small a policy are larger than its weights"
    assert float(sent[1]) / 1.5 <= float(said[1]) <= float(sent[1]) * 1.5


def test_streams_and_recurrent_policies_are_rehearsed_too() -> None:
    assert read_pulls(train(EveryUpdate(), {"num_workers": 2}, "stream")[0]) < 2 * ROUNDS
    assert read_pulls(train(EveryUpdate(), {"num_workers": 2}, agent=Recurrent())[0]) < 2 * ROUNDS


def test_other_rules_say_only_what_they_did_themselves() -> None:
    for rule in (NeverSync(), AdaptiveSync()):
        assert "would have pulled about" not in train(rule, {"num_workers": 0})[0]


def test_a_policy_that_fails_to_be_compared_ends_the_rehearsal_and_nothing_else() -> None:
    class Unreadable(Linear):
        def act(self, obs: Any, state: Any = None, call: Any = None) -> Any:
            return Linear.distribution(self, obs), {}

        def distribution(self, obs: Any, state: Any = None) -> Any:
            raise ZeroDivisionError

    rehearsal = Rehearsal(lambda leaves: leaves[0], Clock())
    rehearsal.adopt(1)
    policy = Unreadable()
    rehearsal.take(policy, 1, [np.ones((4, 4), np.float32)], {})
    assert not rehearsal.wants_states_of(policy)
    rehearsal.judge(policy, 2)
    assert (rehearsal.num_versions, rehearsal.num_judged) == (2, 0)


@pytest.mark.parametrize("seconds", [1e-4, 1e-2, 1.0])
def test_it_takes_a_hundredth_of_the_time_at_most_whatever_an_evaluation_costs(seconds: float) -> None:
    clock = Clock()
    policy, rehearsal = Slow(clock, seconds), Rehearsal(lambda leaves: leaves[0], clock)
    rehearsal.adopt(1)
    for version in itertools.count(1):
        if version > 1:
            rehearsal.judge(policy, version)
        if rehearsal.wants_states_of(policy):
            rehearsal.take(policy, version, [np.ones((4, 4), np.float32)], {})
        clock.now_s += 0.5  # What the learner takes.
        policy.matrix[:, 0] += 0.02
        if version == 1000:
            break
    spent_s = policy.num_evaluations * seconds
    assert spent_s <= 0.011 * clock.now_s + 0.1 + 4 * seconds
    assert rehearsal.num_judged > 0
    if seconds == 1e-4:  # Then every version is judged.
        assert rehearsal.num_judged == rehearsal.num_versions - 1
        assert 3 < rehearsal.num_pulls < 500


def test_a_learners_own_module_is_not_run_for_it() -> None:
    torch = pytest.importorskip("torch")
    from clusterenv.adapters.torch import TorchPolicy

    class Counting(torch.nn.Linear):  # type: ignore[misc, name-defined]  # what is imported here has no types
        """Counts what it is shown, as normalisers do that people write themselves."""

        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("num_seen", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.num_seen: Any = self.num_seen + len(x)
            return super().forward(x)

    def categorical(module: Any, obs: Any) -> Any:
        return torch.distributions.Categorical(logits=module(obs))

    seen = []
    for rule in (EveryUpdate(), NeverSync()):
        agent = Counting()
        with ClusterEnv("CartPole-v1", 2, num_workers=1, sync=rule) as envs:
            envs.reset(seed=1)
            policy = TorchPolicy(agent, distribution=categorical)
            for _ in range(4):
                envs.rollout(policy, 4)
                with torch.no_grad():
                    agent.weight.add_(0.1)
        seen.append(float(agent.num_seen))
    assert seen[0] == seen[1]
