"""Labels of rollouts: which version made them, how old that is and how far from the newest, recomputed from outside."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from clusterenv import AdaptiveSync, BasePolicy, ClusterEnv, Decision, EveryUpdate, NeverSync, SyncBudget
from clusterenv.errors import PolicyError
from clusterenv.head.worker import Version
from clusterenv.policy import Categorical, Custom, Deterministic, QValues, SquashedGaussian, divergence
from clusterenv.policy.distribution import Distribution
from clusterenv.policy.measure import MEASURES, Measure, measure_divergence
from clusterenv.rollout import Rollout
from tests.conftest import Backend
from tests.policies import Linear
from tests.test_stream import Gated

Floats = NDArray[np.float32]


class Alike(gym.Env[Floats, Any]):
    """All its states are much alike, so that a few tell what two policies do in all of them."""

    def __init__(self, length: int = 23, action_space: gym.Space[Any] | None = None) -> None:
        self.observation_space = spaces.Box(-2, 2, (4,), np.float32)
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._observe(), 1.0, self._step == self._length, False, {}

    def _observe(self) -> Floats:
        found: Floats = (1 + 0.05 * self.np_random.normal(size=4)).astype(np.float32)
        return found


def recompute(weights: dict[int, Floats], version: int, newest: int) -> float:
    """Return the divergence of two versions of a Linear policy where states are alike."""
    obs = (1 + 0.05 * np.random.default_rng(0).normal(size=(4096, 4))).astype(np.float32)
    return float(divergence(Categorical(obs @ weights[version]), Categorical(obs @ weights[newest])).mean())


def learn(agent: Linear, size: float) -> None:
    """Prefer one action more, or less: where states are alike, all parts of this step act in the same direction."""
    agent.matrix[:, 0] += size if agent.matrix[:, 0].sum() < agent.matrix[:, 1].sum() + 2 else -size


def is_asleep(pid: int) -> bool:
    """Whether a process waits, as a worker does whose answer has left, and the head that waits for another's."""

    def switches() -> list[tuple[str, ...]]:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
        status = [dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines()) for task in tasks]
        return [(each["Pid"], each["State"][0], each["voluntary_ctxt_switches"]) for each in status]

    found = switches()
    return all(state == "S" for _, state, _ in found) and switches() == found


def assert_labelled(rollout: Rollout, weights: dict[int, Floats]) -> None:
    newest = len(weights)
    for column, version in enumerate(rollout.versions.tolist()):
        assert rollout.ages[column] == newest - version
        logits = rollout.obs[:, column] @ weights[version]
        logprob = np.take_along_axis(
            logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)), rollout.actions[:, column, None], axis=-1
        )[:, 0]
        np.testing.assert_allclose(rollout.logprob[:, column], logprob, rtol=1e-4, atol=1e-5)
        if version == newest:
            assert rollout.divergences[column] == 0.0
        else:
            expected = recompute(weights, version, newest)
            np.testing.assert_allclose(rollout.divergences[column], expected, rtol=0.15, atol=1e-6)


@pytest.mark.parametrize("in_flight", [1, 12])
def test_in_streams_with_pulls_under_way_labels_are_those_of_the_version_that_made_the_rollout(
    remote: Backend, in_flight: int
) -> None:
    agent = Linear()
    weights = {1: agent.matrix.copy()}
    ages, versions = set(), set()
    with ClusterEnv(Alike, 4, **remote, sync=AdaptiveSync(0.02, plateau=None)) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, in_flight=in_flight, max_lag=1000) as stream:
            for rollout in itertools.islice(stream, 60):
                assert_labelled(rollout, weights)
                ages |= set(rollout.ages.tolist())
                versions |= set(rollout.versions.tolist())
                learn(agent, 0.03)
                weights[len(weights) + 1] = agent.matrix.copy()
        assert envs.stats["pulls"] > 4
    assert len(versions) > 3
    assert max(ages) > 2


def test_rollouts_of_all_environments_are_labelled_by_what_each_worker_held(backend: Backend) -> None:
    agent = Linear()
    weights = {1: agent.matrix.copy()}
    with ClusterEnv(Alike, 4, **backend, sync=AdaptiveSync(0.02, plateau=None)) as envs:
        envs.reset(seed=1)
        for _ in range(25):
            assert_labelled(envs.rollout(agent, 8), weights)
            learn(agent, 0.03)
            weights[len(weights) + 1] = agent.matrix.copy()
        assert 2 < envs.stats["pulls_diverged"] < 25 * max(1, envs.num_workers)


def test_an_unchanged_policy_is_never_found_to_have_diverged(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **remote, sync=AdaptiveSync(1e-6, plateau=None, max_lag=10**6)) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, in_flight=12, max_lag=10**6) as stream:
            for rollout in itertools.islice(stream, 60):
                assert np.abs(rollout.divergences).max() < 1e-9
                agent.critic += 1  # A new version that acts just the same.
        assert envs.stats["pulls"] == 2
        assert envs.stats["updates"] > 50


def test_a_worker_that_has_not_said_how_it_acts_obeys_max_lag_all_the_same(remote: Backend, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    agent = Linear()
    makers = [lambda: gym.make("CartPole-v1"), lambda: Gated(gym.make("CartPole-v1"), gate)]
    rule = AdaptiveSync(1e6, plateau=None, max_lag=4)
    with ClusterEnv(makers, **remote, sync=rule) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, max_lag=1000) as stream:
            with open(gate, "wb"):  # From when the second worker has begun.
                for rollout in itertools.islice(stream, 20):
                    assert rollout.env_indices.tolist() == [0]
                    agent.nudge(0.001)
            found = (rollout for rollout in stream if 1 in rollout.env_indices)
            first, second = itertools.islice(found, 2)
    assert first.versions.tolist() == [1]
    assert second.ages.max() <= 4 + 1


class Recurrent(Linear):
    """A policy that remembers the mean of what it saw."""

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        memory = 0.5 * state["memory"] + 0.5 * obs
        return BasePolicy.act(self, obs, state)._replace(state={"memory": memory})

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        return Categorical(logits=(obs + state["memory"]) @ self.matrix)

    def initial_state(self, num_envs: int) -> dict[str, Any]:
        return {"memory": np.zeros((num_envs, 4), np.float32)}


class Shaped(Linear):
    """A policy of any family."""

    def __init__(self, make: Callable[[Any], Distribution]) -> None:
        super().__init__()
        self._make = make

    def distribution(self, obs: Any, state: Any = None) -> Any:
        return self._make(obs @ self.matrix)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        found = self.distribution(obs)
        action = np.zeros(len(obs), np.int64) if isinstance(found, Custom) else found.sample(self.rng)[0]
        return Decision(action, {})


def squared(own: Any, newest: Any) -> Any:
    return np.square(own["place"] - newest["place"]).sum(axis=1)


BOX = spaces.Box(-1, 1, (2,), np.float32)
POLICIES: dict[str, tuple[Callable[[], Linear], gym.Space[Any] | None]] = {
    "recurrent": (Recurrent, None),
    "q values": (lambda: Shaped(QValues), None),
    "squashed": (lambda: Shaped(lambda out: SquashedGaussian(out, np.zeros(2, np.float32))), BOX),
    "deterministic": (lambda: Shaped(lambda out: Deterministic(np.tanh(out))), BOX),
    "custom": (lambda: Shaped(lambda out: Custom({"place": out, "unit": np.ones(3)}, squared)), None),
}


def streamed(envs: ClusterEnv, agent: Any) -> Callable[[], Rollout]:
    """Return what takes the next rollout from a stream that begins with the first."""

    def rollouts() -> Iterator[Rollout]:
        yield from envs.stream(agent, 4)

    return rollouts().__next__


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_of_policy_is_compared_in_every_mode(name: str) -> None:
    make, action_space = POLICIES[name]
    agent = make()
    with ClusterEnv(partial(Alike, 23, action_space), 4, num_workers=2, sync=AdaptiveSync(0.005, plateau=None)) as envs:
        envs.reset(seed=1)
        make_next: dict[str, Callable[[], object]] = {
            "rollout": lambda: envs.rollout(agent, 4),
            "step": lambda: envs.step(agent),
            "stream": streamed(envs, agent),
        }
        for mode, make_one in make_next.items():
            before = envs.stats
            # In a stream, both workers may hold one version that neither has acted by for as long as four rollouts.
            for _ in range(36):
                make_one()
                agent.matrix[...] = agent.source.normal(size=(4, 2))
            stats = envs.stats
            assert stats["checks"] - before["checks"] > 3, mode
            assert stats["pulls_diverged"] > before.get("pulls_diverged", 0), mode
            assert "pulls_unmeasured" not in stats
            assert 0 < stats["divergence"] < np.inf


def test_steps_are_judged_by_how_workers_acted_and_ask_only_until_enough_is_known(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 64, **backend, sync=AdaptiveSync(0.05, plateau=None)) as envs:
        envs.reset(seed=1)
        for _ in range(12):
            envs.step(agent)
        asked = envs.stats["bytes_checks"]
        for _ in range(12):
            envs.step(agent)
        assert envs.stats["bytes_checks"] == asked > 0  # 512 rows are known.
        agent.matrix[:, 0] += 5
        *_, infos = envs.step(agent)
        assert (infos["policy_version"] == 2).all()
        assert envs.stats["checks"] == 1


def test_a_rule_that_does_not_compare_asks_workers_for_nothing(backend: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, **backend, sync=EveryUpdate()) as envs:
        envs.rollout(agent, 8)
        envs.step(agent)
        agent.nudge()
        assert np.isfinite(envs.rollout(agent, 8).divergences).all()
        assert envs.stats["bytes_checks"] == envs.stats["checks"] == 0


def test_pulls_saved_in_a_stream_are_those_that_every_update_would_have_made(remote: Backend) -> None:
    saved = {}
    for rule in (EveryUpdate(), AdaptiveSync(1e6, plateau=None, max_lag=10**6)):
        agent = Linear()
        with ClusterEnv(Alike, 4, **remote, sync=rule) as envs:
            envs.reset(seed=1)
            with envs.stream(agent, 8, max_lag=10**6) as stream:
                for _ in itertools.islice(stream, 60):
                    agent.nudge(0.001)
            saved[type(rule)] = envs.stats["pulls_saved"], envs.stats["pulls"]
    # Those of the last rollouts are on their way when it ends.
    assert 0 <= saved[EveryUpdate][0] <= 2
    assert saved[AdaptiveSync][1] == 2
    assert saved[AdaptiveSync][0] <= 2 * 60


def test_pulls_on_their_way_to_a_busy_worker_do_not_exceed_those_of_every_update(
    remote: Backend, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    agent = Linear()
    makers = [lambda: gym.make("CartPole-v1"), lambda: Gated(gym.make("CartPole-v1"), gate)]
    saved = []
    with ClusterEnv(makers, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, max_lag=math.inf) as stream:
            with open(gate, "wb"):  # From when the second worker has begun.
                for _ in itertools.islice(stream, 20):
                    agent.nudge()
                    saved.append(envs.stats["pulls_saved"])
            for _ in itertools.islice(stream, 20):
                agent.nudge()
                saved.append(envs.stats["pulls_saved"])
    assert min(saved) >= 0


def test_a_budget_is_spent_on_one_worker_after_the_other(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, **remote, sync=SyncBudget(pulls_per_update=1)) as envs:
        envs.reset(seed=1)
        ages = []
        for _ in range(20):
            ages.append(envs.rollout(agent, 8).ages[[0, 2]].tolist())
            agent.matrix[:, 0] += 0.03  # Always on: the older a version, the farther it is.
        assert ages[4:] == [[0, 1], [1, 0]] * 8 or ages[4:] == [[1, 0], [0, 1]] * 8
        assert envs.stats["pulls_budget"] == 19
        assert 0 < envs.stats["threshold"] < 1


def test_a_budget_in_bytes_is_kept_and_says_which_threshold_it_came_to(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, **remote, sync=SyncBudget(bytes_per_second=1e9)) as envs:
        envs.reset(seed=1)
        for _ in range(4):  # There is more than anybody can spend, but for the time before the first version.
            envs.rollout(agent, 8)
            agent.matrix[:, 0] += 0.03
        assert envs.stats["pulls_budget"] >= 4
        assert f"The budget came to a threshold of {envs.stats['threshold']:.2g} nats" in envs.summary()
    with ClusterEnv(Alike, 4, **remote, sync=SyncBudget(bytes_per_second=1e-6)) as envs:
        envs.reset(seed=1)
        for _ in range(4):
            envs.rollout(agent, 8)
            agent.matrix[:, 0] += 0.03
        assert "pulls_budget" not in envs.stats


@pytest.mark.parametrize("measure", MEASURES)
def test_workers_pull_and_rollouts_are_labelled_by_the_measure_of_the_rule(measure: Measure) -> None:
    agent = Linear()
    first = agent.matrix.copy()
    obs = (1 + 0.05 * np.random.default_rng(0).normal(size=(4096, 4))).astype(np.float32)
    rule = AdaptiveSync(0.02, measure=measure, plateau=None)
    with ClusterEnv(Alike, 4, num_workers=1, sync=rule) as envs:
        envs.reset(seed=1)
        for _ in range(60):
            rollout = envs.rollout(agent, 8)
            if rollout.versions[0] > 1:
                break
            own, newest = Categorical(obs @ first), Categorical(obs @ agent.matrix)
            expected = measure_divergence(own, newest, measure)
            np.testing.assert_allclose(rollout.divergences, expected, rtol=0.15, atol=1e-6)
            agent.matrix[:, 0] += 0.01
        assert envs.stats["pulls_diverged"] == 1
        assert 0.02 < envs.stats["threshold"] < 0.04


def test_workers_that_hold_one_version_pull_in_turn(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, **remote, sync=AdaptiveSync(0.02, plateau=None)) as envs:
        envs.reset(seed=1)
        ages = []
        for _ in range(40):
            ages.append(envs.rollout(agent, 8).ages.tolist())
            learn(agent, 0.01)
        assert envs.stats["pulls_staggered"] == 1
        assert envs.stats["pulls_diverged"] > 2
    split = next(number for number, each in enumerate(ages) if each[0] != each[-1])
    assert 1 < split < 39
    assert all(each[0] == each[1] != each[2] == each[3] for each in ages[split:])


@pytest.mark.parametrize("measure", ["tv", "ess"])
def test_a_measure_of_probabilities_is_refused_where_there_are_none(measure: Measure) -> None:
    with ClusterEnv("CartPole-v1", 2, num_workers=0, sync=AdaptiveSync(measure=measure)) as envs:
        envs.reset(seed=1)
        with pytest.raises(PolicyError, match=f'measure="{measure}" is computed from the probabilities of actions'):
            envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 8)
        with pytest.raises(PolicyError, match="Custom distributions have no probabilities"):
            envs.rollout(POLICIES["custom"][0](), 8)
        envs.rollout(Linear(), 8)


class Heavy(Linear):
    """A policy whose weights are larger than a check is worth where memory is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = np.zeros(50_000, np.float32)

    def weights(self) -> dict[str, Any]:
        return {**super().weights(), "ballast": self.ballast}


@pytest.mark.parametrize("mode", ["rollout", "step"])
def test_workers_that_share_memory_pull_large_weights_instead_of_being_judged(remote: Backend, mode: str) -> None:
    """There a pull takes less time than a check, so keeping old weights would be slower as well as staler."""
    shares_memory = remote["network"].transport == "shm"
    for rule in (AdaptiveSync(1e6, plateau=None), AdaptiveSync(1e6, plateau=None, everywhere=True)):
        agent = Heavy()
        with ClusterEnv(Alike, 4, **remote, sync=rule) as envs:
            envs.reset(seed=1)
            for _ in range(6):
                if mode == "rollout":
                    rollout = envs.rollout(agent, 8)
                else:
                    envs.step(agent)
                learn(agent, 0.03)
            if shares_memory and not rule.everywhere:
                assert envs.stats["pulls_shared_memory"] == 10
                assert envs.stats["bytes_checks"] == envs.stats["checks"] == 0
                assert "Workers that share the head's memory pulled all versions" in envs.summary()
                if mode == "rollout":
                    assert rollout.ages.tolist() == rollout.divergences.tolist() == [0] * 4
            else:
                assert envs.stats["pulls"] == 2
                assert envs.stats["checks"] >= 5
            assert envs.stats["age"] == (0 if shares_memory and not rule.everywhere else 5)


def test_small_weights_are_judged_wherever_workers_are(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, **remote, sync=AdaptiveSync(1e6, plateau=None)) as envs:
        envs.reset(seed=1)
        for _ in range(6):
            envs.rollout(agent, 8)
            learn(agent, 0.03)
        assert envs.stats["pulls"] == 2
        assert envs.stats["checks"] >= 5


class Mute(Linear):
    """Says how it acts only where it is the learner's own."""

    def __init__(self) -> None:
        super().__init__()
        self._learner = os.getpid()

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        return Decision(np.zeros(len(obs), np.int64), {})

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        is_learner = os.getpid() == self._learner
        return super().distribution(obs, state) if is_learner else None  # type: ignore[return-value]  # as many do


def test_a_budget_reaches_workers_that_do_not_say_how_they_act(remote: Backend) -> None:
    agent = Mute()
    with ClusterEnv(Alike, 4, **remote, sync=SyncBudget(pulls_per_update=1)) as envs:
        envs.reset(seed=1)
        versions = []
        for _ in range(10):
            versions.append(envs.rollout(agent, 8).versions[[0, 2]].tolist())
            agent.matrix[:, 0] += 0.03
        for _ in range(10):
            versions.append(envs.step(agent)[-1]["policy_version"][[0, 2]].tolist())
            agent.matrix[:, 0] += 0.03
        behind = [[number - version for version in pair] for number, pair in enumerate(versions, 1)]
        assert behind == [[0, 0], *[[0, 1], [1, 0]] * 9, [0, 1]]
        assert envs.stats["pulls_budget"] == 19


class Watched(Linear):
    """Notes in a file on how many states it was asked for its distributions, where it is the learner's own."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._learner = os.getpid()

    def distribution(self, obs: Any, state: Any = None) -> Categorical:
        if os.getpid() == self._learner:
            with open(self._path, "a") as file:
                file.write(f"{len(obs)}\n")
        return super().distribution(obs, state)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_newest_policy_is_evaluated_once_for_all_holders_of_a_version(num_workers: int, tmp_path: Path) -> None:
    path = tmp_path / "evaluations"
    agent = Watched(str(path))
    with ClusterEnv(Alike, 16, num_workers=num_workers, sync=AdaptiveSync(1e6, plateau=None)) as envs:
        envs.reset(seed=1)
        for _ in range(3):  # Of 1,024 states each: the pool is full.
            envs.rollout(agent, 64)
        path.write_text("")
        for _ in range(5):
            learn(agent, 0.01)
            envs.rollout(agent, 64)
    assert path.read_text().split() == ["512"] * 5


def test_versions_that_nobody_holds_any_more_are_forgotten() -> None:
    agent = Linear()
    with ClusterEnv(Alike, 4, num_workers=0, sync=AdaptiveSync(1e-9, plateau=None)) as envs:
        envs.reset(seed=1)
        for _ in range(30):
            envs.step(agent)
            learn(agent, 0.1)
        assert envs.stats["pulls"] > 20
        assert sum(isinstance(each, Version) and each.number > 1 for each in gc.get_objects()) < 4


def test_a_worker_that_is_lost_when_it_has_answered_leaves_its_label(remote: Backend, tmp_path: Path) -> None:
    class Fatal(Alike):
        """The first one's resets are noted in a file; the last one once ends the first's worker, and awaits another."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self._index = index

        def reset(self, **options: Any) -> Any:
            if self._index == 0:
                (tmp_path / f"{os.getpid()}").touch()
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            doomed = tmp_path / "doomed"
            if self._index == 1 and doomed.exists():
                pid = int(doomed.read_text())
                doomed.unlink()
                wait_for(lambda: (tmp_path / "done").exists() and is_asleep(pid) and is_asleep(head))
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: any(path.name not in ("done", str(pid)) for path in tmp_path.iterdir()))
            elif self._index == 0 and self._step == 8:
                (tmp_path / "done").touch()
            return super().step(action)

    def wait_for(holds: Callable[[], bool]) -> None:
        while not holds():
            time.sleep(0.01)

    agent, head = Linear(), os.getpid()
    never = AdaptiveSync(1e9, max_lag=10**6, plateau=None)
    with ClusterEnv([partial(Fatal, 0), partial(Fatal, 1)], sync=never, **remote) as envs:
        envs.reset(seed=1)
        assert set(envs.rollout(agent, 8).versions) == {1}
        learn(agent, 0.01)
        (tmp_path / "doomed").write_text(str(envs.worker_pids[0]))
        rollout = envs.rollout(agent, 8)
        assert rollout.versions.tolist() == [1, 1]
        assert envs.rollout(agent, 8).versions.tolist() == [2, 1]
        assert [loss.worker_index for loss in envs.losses] == [0]


class Marking(Linear):
    """Leaves a file named after the process in which it acts."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = str(directory)

    def act(self, obs: Any, state: Any = None, call: Any = None) -> Decision:
        Path(self._directory, f"acted-{os.getpid()}").touch()
        return super().act(obs, state, call)


def test_what_a_lost_worker_said_of_its_last_step_is_not_taken_for_what_its_successor_does(
    remote: Backend, tmp_path: Path
) -> None:
    doomed, done = tmp_path / "doomed", tmp_path / "done"

    class Fatal(Alike):
        """The last one once ends the first's worker when that has answered, and waits until another has the policy."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self._index = index

        def step(self, action: Any) -> Any:
            if self._index == 0 and doomed.exists():
                done.touch()
            elif self._index == 1 and doomed.exists():
                pid = int(doomed.read_text())
                old = {f"acted-{each}" for each in (pid, os.getpid(), head)}
                wait_for(lambda: done.exists() and is_asleep(pid) and is_asleep(head))
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: bool(successors(old)))
                wait_for(lambda: all(is_asleep(int(name.removeprefix("acted-"))) for name in successors(old)))
                doomed.unlink()
            return super().step(action)

    def successors(old: set[str]) -> set[str]:
        return {path.name for path in tmp_path.glob("acted-*")} - old

    def wait_for(holds: Callable[[], bool]) -> None:
        while not holds():
            time.sleep(0.01)

    agent, head = Marking(tmp_path), os.getpid()
    never = AdaptiveSync(1e9, max_lag=10**6, plateau=None)
    with ClusterEnv([partial(Fatal, 0), partial(Fatal, 1)], sync=never, **remote) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(agent)
        agent.matrix[:, 0] += 8
        doomed.write_text(str(envs.worker_pids[0]))
        envs.step(agent)
        agent.matrix[:, 0] += 1e-3
        rollout = envs.rollout(agent, 4)
        assert rollout.versions.tolist() == [2, 1]
        assert rollout.divergences[0] < 1e-3 < rollout.divergences[1]


def test_weights_that_were_changed_before_a_worker_took_over_are_not_taken_for_the_version_before(
    remote: Backend,
) -> None:
    agent = Linear()
    weights = {1: agent.matrix.copy()}
    with ClusterEnv(Alike, 2, sync=NeverSync(), **remote) as envs:
        envs.reset(seed=1)
        assert_labelled(envs.rollout(agent, 8), weights)
        learn(agent, 0.5)
        weights[2] = agent.matrix.copy()
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        while not envs.losses:  # Somebody takes over while the learner does not speak of its policy.
            envs.step(envs.action_space.sample())
        rollout = envs.rollout(agent, 8)
        assert rollout.versions.tolist() == [2, 1]
        for column, version in enumerate(rollout.versions.tolist()):
            logits = rollout.obs[:, column] @ weights[version]
            logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            expected = np.take_along_axis(logprobs, rollout.actions[:, column, None], axis=-1)[:, 0]
            np.testing.assert_allclose(rollout.logprob[:, column], expected, rtol=1e-4, atol=1e-5)


def test_a_worker_that_took_long_to_take_a_policy_over_is_given_the_newest_weights(
    remote: Backend, tmp_path: Path
) -> None:
    def wait_for(name: str) -> None:
        while not (tmp_path / name).exists():
            time.sleep(0.01)

    class Slow(Linear):
        """From when it is said, takes its time to come to a worker."""

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if (tmp_path / "slow").exists():
                (tmp_path / "coming").touch()
                wait_for("go on")

    class Fatal(Alike):
        """The last one once ends the first, which has answered, and waits until a successor is given the policy."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self._index = index

        def step(self, action: Any) -> Any:
            doomed = tmp_path / "doomed"
            if self._index == 1 and doomed.exists():
                pid, head = map(int, doomed.read_text().split())
                doomed.unlink()
                wait_for("done")
                while not (is_asleep(pid) and is_asleep(head)):
                    time.sleep(0.01)
                (tmp_path / "slow").touch()
                os.kill(pid, signal.SIGKILL)
                wait_for("coming")
            elif self._index == 0 and self._step == 8:
                (tmp_path / "done").touch()
            return super().step(action)

    agent = Slow()
    with ClusterEnv([partial(Fatal, 0), partial(Fatal, 1)], sync=EveryUpdate(), **remote) as envs:
        envs.reset(seed=1)
        assert set(envs.rollout(agent, 8).versions) == {1}
        learn(agent, 0.01)
        (tmp_path / "doomed").write_text(f"{envs.worker_pids[0]} {os.getpid()}")
        assert envs.rollout(agent, 8).versions.tolist() == [2, 2]
        learn(agent, 0.01)
        (tmp_path / "go on").touch()
        rollout = envs.rollout(agent, 8)
        assert rollout.versions.tolist() == [3, 3]
        assert_labelled(rollout, {3: agent.matrix.copy(), 2: agent.matrix, 1: agent.matrix})
        assert [loss.worker_index for loss in envs.losses] == [0]


def test_deviations_that_are_alike_in_some_states_only_are_compared(remote: Backend) -> None:
    class Folding(BasePolicy):
        """Says once what holds for all states that it is shown, as networks that were read do."""

        def __init__(self) -> None:
            super().__init__()
            self.matrix = np.full((4, 1), 0.1, np.float32)

        def weights(self) -> dict[str, Any]:
            return {"matrix": self.matrix}

        def distribution(self, obs: Any, state: Any = None) -> Distribution:
            mean = (obs @ self.matrix).astype(np.float32)
            log_std = mean - 1
            return SquashedGaussian(mean, log_std[0] if (log_std == log_std[:1]).all() else log_std)

    agent = Folding()
    box = spaces.Box(-1, 1, (1,), np.float32)
    with ClusterEnv([partial(Alike, 23, box)] * 4, sync=AdaptiveSync(0.05, max_lag=10**6), **remote) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            rollout = envs.rollout(agent, 8)
            agent.matrix = agent.matrix + np.float32(1e-3)
        assert np.isfinite(rollout.divergences).all()
        assert rollout.versions.max() < 3  # Judged, and found near enough.
