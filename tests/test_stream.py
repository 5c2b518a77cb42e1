"""Streams: workers go on while the learner learns; what they deliver is in order, labelled, and bounded in age."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from clusterenv import AdaptiveSync, ClusterEnv, EveryUpdate, Faults, NeverSync, PeriodicSync
from clusterenv.errors import ConfigError, WorkerFailed, WorkerLost
from clusterenv.rollout import Rollout
from tests.conftest import Backend, wait_until_gone
from tests.policies import Linear


def columns(rollout: Rollout) -> dict[str, Any]:
    """What a rollout holds, by name."""
    return {
        "obs": rollout.obs,
        "actions": rollout.actions,
        "rewards": rollout.rewards,
        "terminations": rollout.terminations,
        "valid": rollout.valid,
        "logprob": rollout.extras["logprob"],
        "next_obs": rollout.next_obs[None],
    }


def test_each_workers_rollouts_are_those_that_rollout_would_have_made(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 5, **backend, sync=NeverSync()) as envs:
        envs.reset(seed=3)
        agent = Linear()
        wanted = [columns(envs.rollout(agent, 16)) for _ in range(4)]
    with ClusterEnv("CartPole-v1", 5, **backend, sync=NeverSync()) as envs:
        envs.reset(seed=3)
        seen: dict[int, int] = {}
        with envs.stream(Linear(), 16) as stream:
            while min(seen.values(), default=0) < 4 or len(seen) < max(1, envs.num_workers):
                rollout = next(stream)
                first = int(rollout.env_indices[0])
                number = seen[first] = seen.get(first, 0) + 1
                if number > 4:
                    continue
                for name, array in columns(rollout).items():
                    np.testing.assert_array_equal(array, wanted[number - 1][name][:, rollout.env_indices], name)


def test_a_group_has_the_columns_of_several_workers(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 5, **remote) as envs:
        envs.reset(seed=1)
        with envs.stream(Linear(), 8, min_envs=5) as stream:
            for rollout in itertools.islice(stream, 6):
                assert rollout.num_envs >= 5
                assert rollout.rewards.shape == (8, rollout.num_envs)
                assert len(rollout.env_indices) == len(rollout.versions) == rollout.num_envs
                assert set(rollout.episodes.env_indices) <= set(rollout.env_indices)


def test_weights_are_picked_up_and_every_rollout_is_labelled_with_those_that_made_it(remote: Backend) -> None:
    agent = Linear()
    history = {1: agent.matrix.copy()}
    with ClusterEnv("CartPole-v1", 4, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8) as stream:
            for rollout in itertools.islice(stream, 40):
                (version,) = set(rollout.versions.tolist())
                model = Linear()
                model.matrix[...] = history[version]
                logprob, _ = model.evaluate(rollout.obs, rollout.actions)
                np.testing.assert_allclose(rollout.extras["logprob"], logprob, rtol=1e-4, atol=1e-6)
                assert (rollout.ages == len(history) - version).all()
                agent.nudge()
                history[len(history) + 1] = agent.matrix.copy()
        assert max(rollout.versions) > 30
        assert rollout.ages.max() <= 8


class Heavy(Linear):
    """Carries so much that a stream does not send it to two workers before a rollout has come in between."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = np.zeros(70 << 20, np.uint8)

    def weights(self) -> dict[str, Any]:
        return {**super().weights(), "ballast": self.ballast}

    def nudge(self, size: float = 0.1) -> None:
        self.matrix += self.source.normal(scale=size, size=self.matrix.shape).astype(np.float32)


def expect_labelled(rollout: Rollout, history: dict[int, Any]) -> None:
    """Check that every column was made by the version that it is labelled with."""
    for column, version in enumerate(rollout.versions.tolist()):
        model = Linear()
        model.matrix[...] = history[version]
        logprob, _ = model.evaluate(rollout.obs[:, [column]], rollout.actions[:, [column]])
        np.testing.assert_allclose(rollout.extras["logprob"][:, [column]], logprob, rtol=1e-4, atol=1e-6)


def test_large_weights_reach_the_workers_one_after_another_and_labels_stay_true(remote: Backend) -> None:
    agent = Heavy()
    history = {1: agent.matrix.copy()}
    with ClusterEnv("CartPole-v1", 4, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8) as stream:
            copies = []
            for rollout in itertools.islice(stream, 6):
                copies.append(rollout.stats["bytes_weights"] / agent.ballast.nbytes)
                expect_labelled(rollout, history)
                agent.nudge()
                history[len(history) + 1] = agent.matrix.copy()
            assert 1 in np.round(copies, 2)  # And not always two at once.
            newest = [rollout for rollout in itertools.islice(stream, 40) if (rollout.ages == 0).all()]
            assert {index for rollout in newest for index in rollout.env_indices.tolist()} == set(range(4))


def test_a_stream_that_ends_before_all_have_their_weights_leaves_nobody_with_other_ones(remote: Backend) -> None:
    agent = Heavy()
    history = {1: agent.matrix.copy()}
    with ClusterEnv("CartPole-v1", 4, **remote, sync=PeriodicSync(2)) as envs:
        envs.reset(seed=1)
        stream = envs.stream(agent, 8)
        for version in (2, 3, 4):
            expect_labelled(next(stream), history)
            agent.nudge()
            history[version] = agent.matrix.copy()
        rollout = envs.rollout(agent, 8)  # Who was sent version 3 is only one behind; who was not has the newest.
        assert set(rollout.versions.tolist()) <= {3, 4}
        expect_labelled(rollout, history)


def test_adaptive_sync_measures_on_the_rollouts_own_probes_and_pulls_less(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **remote, sync=AdaptiveSync(threshold=0.05)) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8) as stream:
            for _ in itertools.islice(stream, 60):
                agent.nudge(0.01)
        stats = envs.stats
    assert stats["checks"] > 10
    assert stats["bytes_checks"] > 0
    assert stats["pulls"] < stats["pulls_saved"]


def test_what_is_too_old_is_thrown_away_and_counted(remote: Backend) -> None:
    agent = Linear()
    with ClusterEnv("CartPole-v1", 4, **remote, sync=NeverSync()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, max_lag=2) as stream:
            for rollout in itertools.islice(stream, 30):
                assert rollout.ages.max() <= 2
                agent.nudge()
        stats = envs.stats
    assert stats["rollouts_discarded"] > 0
    assert stats["env_steps_discarded"] == 16 * stats["rollouts_discarded"]


class Gated(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose first step waits for a writer to come to and leave the named pipe `gate`."""

    def __init__(self, env: gym.Env[Any, Any], gate: str) -> None:
        super().__init__(env)
        self._gate = gate

    def step(self, action: Any) -> Any:
        if self._gate:
            with open(self._gate, "rb") as gate:
                gate.read()
            self._gate = ""
        return super().step(action)


@pytest.mark.parametrize("max_lag", [None, math.inf])
def test_a_rollout_that_took_far_too_long_is_delivered_only_where_that_was_allowed(
    remote: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture, max_lag: float | None
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    agent = Linear()
    makers = [lambda: gym.make("CartPole-v1"), lambda: Gated(gym.make("CartPole-v1"), gate)]
    with ClusterEnv(makers, **remote, sync=EveryUpdate()) as envs:
        envs.reset(seed=1)
        with envs.stream(agent, 8, max_lag=max_lag) as stream:
            with open(gate, "wb"):  # From when the second worker has begun.
                for rollout in itertools.islice(stream, 20):
                    assert rollout.env_indices.tolist() == [0]
                    agent.nudge()
            held = next(rollout for rollout in stream if 1 in rollout.env_indices)
        stats = envs.stats
    if max_lag is None:
        # One version behind by the rule, and three rollouts of each of the two workers.
        assert held.ages.max() <= 1 + 3 * 2
        assert stats["rollouts_discarded"] >= 1
        assert "max_lag is 7" in caplog.text
    else:
        assert held.ages.max() >= 19
        assert "thrown away" not in caplog.text


def test_workers_stop_when_they_are_as_far_ahead_as_they_may_be(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **remote) as envs:
        envs.reset(seed=1)
        with envs.stream(Linear(), 4, in_flight=3) as stream:
            next(stream)
        # One was delivered, and three more may be under way on its worker; three on the other.
        assert envs.stats["rollouts_discarded"] <= 6


def test_rollouts_under_way_when_a_stream_ends_are_taken_in_and_counted(
    remote: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    with ClusterEnv("CartPole-v1", 64, **remote) as envs:
        envs.reset(seed=1)
        while envs.stats["rollouts_discarded"] < 3:  # None was under way if the workers had no core just then.
            with envs.stream(Linear(), 64) as stream:
                next(stream)
    assert "refused" not in caplog.text


def test_a_stream_can_be_left_and_taken_up_again(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **remote) as envs:
        envs.reset(seed=1)
        stream = envs.stream(Linear(), 4)
        first = [rollout.env_indices[0] for rollout in itertools.islice(stream, 5)]
        second = [rollout.env_indices[0] for rollout in itertools.islice(stream, 5)]
        assert len(first) == len(second) == 5
        assert envs.stats["rollouts"] == 10
        assert envs.stats["rollouts_discarded"] == 0


def test_any_other_call_ends_the_stream_and_goes_on_from_where_it_was(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        agent = Linear()
        stream = envs.stream(agent, 4)
        next(stream)
        envs.step(np.zeros(4, dtype=np.int64))
        with pytest.raises(StopIteration):
            next(stream)
        assert envs.rollout(agent, 4).num_envs == 4
        assert next(envs.stream(agent, 4)).num_steps == 4
        assert envs.call("spec")[0].id == "CartPole-v1"


def test_values_change_with_the_rollouts_that_are_asked_for_next(backend: Backend) -> None:
    class Curious(Linear):
        def act(self, obs: Any, state: Any = None, call: Any = None) -> Any:
            decision = super().act(obs, state)
            level = np.full(len(obs), (call or {}).get("level", -1.0), np.float32)
            return decision._replace(extras={**decision.extras, "level": level})

    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        envs.reset(seed=1)
        with envs.stream(Curious(), 4, values={"level": 0.0}) as stream:
            levels: dict[int, list[float]] = {}
            number = 0
            while max(itertools.chain(*levels.values()), default=0) < 5:
                rollout = next(stream)
                levels.setdefault(int(rollout.env_indices[0]), []).append(float(rollout.extras["level"].max()))
                stream.values["level"] = float(number := number + 1)
        for seen in levels.values():
            assert seen[0] == 0.0
            assert seen == sorted(seen)


def test_when_a_worker_dies_the_others_go_on_and_a_new_one_takes_its_place(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        agent = Linear()
        with envs.stream(agent, 16) as stream:
            next(stream)
            (old,) = [envs.worker_pids[0]]
            os.kill(old, signal.SIGKILL)
            others = 0
            while not envs.losses:
                others += next(stream).env_indices[0] == 2
            while next(stream).env_indices[0] != 0:
                pass
        assert others > 0
        (loss,) = envs.losses
        assert (loss.worker_index, loss.env_indices, len(loss.seeds)) == (0, (0, 1), 2)
        assert "SIGKILL" in loss.reason
        assert wait_until_gone([old]) == []
        assert envs.rollout(agent, 4).num_envs == 4


def test_a_lost_worker_ends_the_stream_if_losses_are_to_be_raised(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote, faults=Faults(on_loss="raise")) as envs:
        envs.reset(seed=1)
        stream = envs.stream(Linear(), 16)
        next(stream)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"(?i)worker 1"):
            list(stream)


def test_an_environments_exception_ends_the_stream_with_its_traceback(remote: Backend) -> None:
    class Fragile(gym.Wrapper[Any, Any, Any, Any]):
        count = 0

        def step(self, action: Any) -> Any:
            self.count += 1
            if self.count > 40:
                raise RuntimeError("worn out")
            return super().step(action)

    with ClusterEnv(lambda: Fragile(gym.make("CartPole-v1")), 2, **remote) as envs:
        envs.reset(seed=1)
        stream = envs.stream(Linear(), 16)
        with pytest.raises(WorkerFailed, match="worn out"):
            list(stream)
        envs.reset(seed=1)


def test_closing_the_environments_ends_the_stream(remote: Backend) -> None:
    envs = ClusterEnv("CartPole-v1", 2, **remote)
    stream = envs.stream(Linear(), 16)
    next(stream)
    envs.close()
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()


def test_a_stream_keeps_its_environments_and_whoever_forgets_it_ends_them(remote: Backend) -> None:
    envs = ClusterEnv("CartPole-v1", 2, **remote)
    pids, stream = envs.worker_pids, envs.stream(Linear(), 8)
    del envs
    gc.collect()
    assert {int(next(stream).env_indices[0]) for _ in range(20)} == {0, 1}
    del stream  # In the middle.
    gc.collect()
    assert wait_until_gone(pids) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_steps": 0},
        {"num_steps": 4, "in_flight": 0},
        {"num_steps": 4, "min_envs": 3},
        {"num_steps": 4, "max_lag": -1},
    ],
)
def test_nonsense_is_refused(backend: Backend, wrong: dict[str, Any]) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs, pytest.raises(ConfigError):
        envs.stream(Linear(), **wrong)


def test_a_stream_says_whether_it_goes_on(backend: Backend) -> None:
    with ClusterEnv("CartPole-v1", 2, **backend) as envs:
        with envs.stream(Linear(), 4) as stream:
            next(stream)
            assert stream.is_open
        assert not stream.is_open
