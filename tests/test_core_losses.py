"""A step that was lost with its worker: the rows are exactly what was seen last, over every transport and mode."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from numpy.typing import NDArray

from clusterenv import ClusterEnv, EveryUpdate, Faults, NativeVector, Network, Recorder, Timeouts
from clusterenv.errors import CallTimeout, WorkerFailed, WorkerLost
from tests.conftest import Backend, wait_until_gone
from tests.counted import EPISODE, INDEX, STEP, Counted, Kind, Mishap, Rows, choose, make_counted, rows_of
from tests.tally import Tally, truth
from tests.worlds import assert_same

NUM_ENVS = 6  # Three on each of two workers.
ACTIONS = np.zeros(NUM_ENVS, np.int64)
SECOND = np.arange(NUM_ENVS) >= 3  # The rows of the second worker.
Answer = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


def kill(envs: ClusterEnv, worker_index: int) -> None:
    pid = envs.worker_pids[worker_index]
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []


def step_to(envs: ClusterEnv, count: int) -> Rows:
    """Reset, step so many times, and return the rows seen last."""
    observations = envs.reset(seed=1)[0]
    for _ in range(count):
        observations = envs.step(ACTIONS)[0]
    return rows_of(observations)


def assert_lost(answer: Answer, seen: Rows, lost: NDArray[np.bool_], mode: AutoresetMode) -> None:
    """Demand that a step's answer flags these rows as lost, shows what was seen, and that the others went on."""
    observations, rewards, terminated, truncated, infos = answer
    assert infos["worker_lost"].tolist() == infos["_worker_lost"].tolist() == lost.tolist()
    assert truncated.tolist() == lost.tolist()
    assert not terminated.any()
    assert not rewards[lost].any()
    rows = rows_of(observations)
    assert rows[:, INDEX].tolist() == seen[:, INDEX].tolist()
    assert (rows[~lost, STEP] == seen[~lost, STEP] + 1).all(), "the others were stepped once"
    if mode is AutoresetMode.SAME_STEP:
        assert infos["_final_obs"].tolist() == lost.tolist()
        assert rows_of(list(infos["final_obs"][lost])).tolist() == seen[lost].tolist()
        assert (rows[lost, STEP] == 0).all(), "new episodes have begun"
    else:
        assert rows[lost].tolist() == seen[lost].tolist()


def assert_goes_on(envs: ClusterEnv, lost: NDArray[np.bool_], mode: AutoresetMode) -> None:
    """Demand that after a loss was told, new episodes begin as the autoreset mode says, and nothing is told again."""
    if mode is AutoresetMode.DISABLED:
        with pytest.raises(WorkerFailed, match="reset_mask"):
            envs.step(ACTIONS)  # They have ended, and stay so until they are reset.
        rows = rows_of(envs.reset(options={"reset_mask": lost})[0])
        assert (rows[lost, STEP] == 0).all()
        first = 1
    else:
        first = 0 if mode is AutoresetMode.NEXT_STEP else 1
    for count in (first, first + 1):
        observations, rewards, terminated, truncated, infos = envs.step(ACTIONS)
        assert rows_of(observations)[lost, STEP].tolist() == rewards[lost].tolist() == [count] * lost.sum()
        assert not terminated.any()
        assert not truncated.any()
        assert not infos.get("_worker_lost", np.zeros(1)).any()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        (AutoresetMode.NEXT_STEP, "box"),
        (AutoresetMode.SAME_STEP, "box"),
        (AutoresetMode.DISABLED, "box"),
        (AutoresetMode.NEXT_STEP, "dict"),
        (AutoresetMode.SAME_STEP, "mixed"),
        (AutoresetMode.NEXT_STEP, "text"),
    ],
)
def test_rows_of_a_worker_killed_in_the_middle_of_a_step_are_what_was_seen_last(
    remote: Backend, mode: AutoresetMode, kind: Kind, tmp_path: Path
) -> None:
    makers = make_counted(NUM_ENVS, {5: [Mishap("kill", str(tmp_path / "a"), at=5)]}, kind=kind)
    with ClusterEnv(makers, **remote, autoreset_mode=mode) as envs:
        seen = step_to(envs, 4)
        assert_lost(envs.step(ACTIONS), seen, SECOND, mode)
        assert_goes_on(envs, SECOND, mode)
        assert len(envs.losses) == 1


def test_rows_that_were_not_copied_are_what_was_seen_last_too(remote: Backend, tmp_path: Path) -> None:
    makers = make_counted(NUM_ENVS, {5: [Mishap("kill", str(tmp_path / "a"), at=5)]})
    with ClusterEnv(makers, **remote, copy=False) as envs:
        seen = step_to(envs, 4)
        assert_lost(envs.step(ACTIONS), seen, SECOND, AutoresetMode.NEXT_STEP)
        assert_goes_on(envs, SECOND, AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("kind", ["box", "text"])
@pytest.mark.parametrize("moment", ["in the step", "between steps"])
def test_rows_whose_episode_had_ended_begin_their_new_one_and_do_not_end_again(
    remote: Backend, moment: str, kind: Kind, tmp_path: Path
) -> None:
    mishaps = {5: [Mishap("kill", str(tmp_path / "a"), at=5)]} if moment == "in the step" else {}
    with ClusterEnv(make_counted(NUM_ENVS, mishaps, lengths={4: 4}, kind=kind), **remote) as envs:
        seen = step_to(envs, 3)
        observations, _, terminated, _, _ = envs.step(ACTIONS)
        seen = rows_of(observations)
        assert terminated.tolist() == (np.arange(NUM_ENVS) == 4).tolist()
        if not mishaps:
            kill(envs, 1)
        observations, rewards, terminated, truncated, infos = envs.step(ACTIONS)
        rows = rows_of(observations)
        assert len(envs.losses) == 1
        assert truncated.tolist() == infos["_worker_lost"].tolist() == [False, False, False, True, False, True]
        assert not terminated.any()
        assert rows[[3, 5]].tolist() == seen[[3, 5]].tolist()
        assert (rows[4, STEP], rewards[4]) == (0, 0.0), "environment 4 has begun its next episode"
        observations, _, terminated, truncated, infos = envs.step(ACTIONS)
        assert rows_of(observations)[:, STEP].tolist() == [6, 6, 6, 0, 1, 0]
        assert not (terminated | truncated).any()
        assert not infos.get("_worker_lost", np.zeros(1)).any()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_second_worker_lost_while_it_takes_over_changes_nothing_of_what_was_seen(
    remote: Backend, mode: AutoresetMode, tmp_path: Path
) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    mishaps = {
        4: [Mishap("kill", second, "reset", given=first)],
        5: [Mishap("kill", first, at=5)],
    }
    with ClusterEnv(make_counted(NUM_ENVS, mishaps), **remote, autoreset_mode=mode) as envs:
        seen = step_to(envs, 4)
        assert_lost(envs.step(ACTIONS), seen, SECOND, mode)
        assert os.path.exists(second)
        assert_goes_on(envs, SECOND, mode)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_successor_lost_before_the_loss_was_told_leaves_it_to_the_next(remote: Backend, mode: AutoresetMode) -> None:
    with ClusterEnv(make_counted(NUM_ENVS), **remote, autoreset_mode=mode) as envs:
        seen = step_to(envs, 3)
        kill(envs, 1)
        assert envs.call("index") == tuple(range(NUM_ENVS))  # The loss is noticed here, and not told yet.
        kill(envs, 1)
        assert_lost(envs.step(ACTIONS), seen, SECOND, mode)
        assert len(envs.losses) == 2
        assert_goes_on(envs, SECOND, mode)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("moment", ["in the reset", "before the reset"])
def test_a_loss_at_a_reset_of_some_environments_is_told_of_the_others(
    remote: Backend, mode: AutoresetMode, moment: str, tmp_path: Path
) -> None:
    mishaps = {3: [Mishap("kill", str(tmp_path / "a"), "reset", at=2)]} if moment == "in the reset" else {}
    with ClusterEnv(make_counted(NUM_ENVS, mishaps), **remote, autoreset_mode=mode) as envs:
        seen = step_to(envs, 4)
        if not mishaps:
            kill(envs, 1)
        mask = np.array([True, False, False, True, False, False])
        rows = rows_of(envs.reset(options={"reset_mask": mask})[0])
        assert len(envs.losses) == 1
        assert rows[~mask].tolist() == seen[~mask].tolist()
        assert (rows[mask, STEP] == 0).all()
        assert rows[0, EPISODE] == 1
        lost = np.array(
            [False, False, False, False, True, True]
        )  # Environment 3 has begun the episode it was asked to.
        assert_lost(envs.step(ACTIONS), rows, lost, mode)
        assert_goes_on(envs, lost, mode)


def test_rows_sent_to_one_by_one_are_what_was_seen_last(remote: Backend, tmp_path: Path) -> None:
    makers = make_counted(NUM_ENVS, {5: [Mishap("kill", str(tmp_path / "a"), at=5)]})
    with ClusterEnv(makers, **remote) as envs:
        seen = rows_of(envs.reset(seed=1)[0])
        for number in range(1, 8):
            envs.send(ACTIONS, np.arange(NUM_ENVS))
            waiting = set(range(NUM_ENVS))
            before = seen.copy()
            while waiting:
                observations, rewards, _, truncated, infos = envs.recv()
                ids = infos["env_id"]
                seen[ids] = rows_of(observations)
                waiting -= set(ids.tolist())
                lost = number == 5 and 5 in ids
                assert truncated.tolist() == infos.get("_worker_lost", truncated).tolist() == [lost] * len(ids)
                if lost:
                    assert seen[SECOND].tolist() == before[SECOND].tolist()
                    assert not rewards.any()
            assert seen[~SECOND, STEP].tolist() == [number] * 3
        assert seen[SECOND, STEP].tolist() == [1] * 3
        assert len(envs.losses) == 1


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_run_with_losses_is_the_same_over_every_transport(mode: AutoresetMode, tmp_path: Path) -> None:
    def record(transport: str) -> list[Any]:
        marks = tmp_path / transport
        marks.mkdir()
        mishaps = {
            1: [Mishap("kill", str(marks / "1"), at=9)],
            4: [Mishap("exit", str(marks / "4"), at=4), Mishap("kill", str(marks / "again"), given=str(marks / "go"))],
        }
        makers = make_counted(NUM_ENVS, mishaps, lengths={0: 3, 2: 4, 3: 3, 5: 8})
        network = Network(transport=transport)
        with ClusterEnv(makers, num_workers=2, network=network, autoreset_mode=mode) as envs:
            answers: list[Any] = [envs.reset(seed=3)]
            for number in range(30):
                if number == 20:
                    (marks / "go").touch()
                answers.append(envs.step(ACTIONS))
            losses = [(loss.worker_index, loss.seeds) for loss in envs.losses]
            assert [index for index, _ in losses] == [1, 0, 1]
            return [*answers, losses]

    over_memory, over_socket = record("shm"), record("zmq")
    for number, (ours, theirs) in enumerate(zip(over_memory, over_socket, strict=True)):
        assert_same(ours, theirs, f"answer {number}")


def test_seeds_of_replacements_follow_from_the_runs_seed_after_a_reset_without_one(remote: Backend) -> None:
    runs = []
    for _ in range(2):
        with ClusterEnv(make_counted(NUM_ENVS), **remote) as envs:
            envs.reset(seed=11)
            envs.step(ACTIONS)
            envs.reset()
            kill(envs, 1)
            envs.step(ACTIONS)
            rows = rows_of(envs.step(ACTIONS)[0])
            runs.append((envs.losses[0].seeds, rows[SECOND].tolist()))
    assert runs[0] == runs[1]


def goes_on_by_rollout(envs: ClusterEnv) -> Rows:
    return rows_of(envs.rollout(choose, 2).obs[0])


def goes_on_by_step(envs: ClusterEnv) -> Rows:
    """Return what the policy was shown, told by the action it chose: without one's own index nothing adds up."""
    rows = rows_of(envs.call("observe"))
    actions = envs.step(choose)[4]["action"]
    assert actions.tolist() == choose(rows).tolist()
    return rows


@pytest.mark.parametrize("go_on", [goes_on_by_rollout, goes_on_by_step])
def test_after_an_exception_in_a_rollout_every_row_is_the_newest_of_its_environment(
    backend: Backend, go_on: Callable[[ClusterEnv], Rows], tmp_path: Path
) -> None:
    makers = make_counted(NUM_ENVS, {4: [Mishap("raise", str(tmp_path / "a"), at=5)]})
    with ClusterEnv(makers, **backend) as envs:
        envs.reset(seed=1)
        with pytest.raises((WorkerFailed, ValueError), match="a mishap in the step"):
            envs.rollout(choose, 8)
        newest = rows_of(envs.call("observe"))
        assert newest[SECOND, STEP].tolist() == [5, 4, 4]
        assert go_on(envs).tolist() == newest.tolist()


def lose_in_lockstep(envs: ClusterEnv) -> None:
    kill(envs, 1)
    envs.step(ACTIONS)
    envs.rollout(choose, 2)  # It was of use: this is not a crash loop.


def lose_in_a_stream(envs: ClusterEnv) -> None:
    num_losses = len(envs.losses)
    with envs.stream(choose, 4) as stream:
        while next(stream).env_indices[0] != 3:
            pass
        kill(envs, 1)
        while len(envs.losses) == num_losses:
            next(stream)
        while next(stream).env_indices[0] != 3:
            pass


@pytest.mark.parametrize(
    ("lose", "most"), [(lose_in_lockstep, 0), (lose_in_lockstep, 2), (lose_in_a_stream, 0), (lose_in_a_stream, 2)]
)
def test_restarts_are_bounded_over_the_whole_run(
    remote: Backend, lose: Callable[[ClusterEnv], None], most: int
) -> None:
    with ClusterEnv(make_counted(NUM_ENVS), **remote, faults=Faults(max_restarts=most)) as envs:
        envs.reset(seed=1)
        for _ in range(most):
            lose(envs)
        assert len(envs.losses) == most
        with pytest.raises(WorkerLost, match="max_restarts") as caught:
            lose(envs)
        assert (caught.value.worker_index, caught.value.env_indices) == (1, (3, 4, 5))


@pytest.mark.parametrize("what", ["reset", "set_attr", "rollout"])
def test_one_that_takes_over_for_a_worker_that_had_answered_has_what_the_others_have(
    remote: Backend, what: str, tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with ClusterEnv([Tally, lambda: Tally(gate)], **remote, sync=EveryUpdate()) as envs:
        envs.reset_async(seed=1)
        first = envs.worker_pids[0]
        writer = open(gate, "wb")  # noqa: SIM115 - the second worker is in its reset until this is closed
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone([first]) == []
        os.unlink(gate)
        writer.close()
        envs.reset_wait()
        if what == "reset":
            np.testing.assert_array_equal(envs.step(ACTIONS[:2])[0][:, 0], truth(envs)[:, 0])
        elif what == "set_attr":
            envs.set_attr("color", "red")
            os.kill(envs.worker_pids[0], signal.SIGKILL)
            assert envs.get_attr("color") == ("red", "red")
        else:
            assert envs.rollout(lambda obs: np.zeros(len(obs), np.int64), 3).num_steps == 3


def test_a_seed_that_was_refused_is_not_remembered(remote: Backend) -> None:
    with ClusterEnv("CartPole-v1", 4, **remote) as envs:
        envs.reset(seed=1)
        with pytest.raises(WorkerFailed, match="Seed must be"):
            envs.reset(seed=-3)
        envs.reset(seed=2)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        assert envs.step(ACTIONS[:4])[4]["worker_lost"].tolist() == [False, False, True, True]


def answer_and_leave(directory: Path, at: int, leaver: int = 5) -> dict[int, list[Mishap]]:
    """Let the leaver's worker go after this step, once it has answered; environment 0 is in the step until then."""
    gate = str(directory / "gate")
    os.mkfifo(gate)
    return {
        0: [Mishap("wait", str(directory / "waits"), at=at, gate=gate)],
        leaver: [Mishap("leave", str(directory / "leaves"), at=at)],
    }


def step_until_replaced(envs: ClusterEnv, directory: Path) -> None:
    """Begin a step that the second worker answers; it is lost and replaced before the first has answered, too."""
    envs.step_async(np.zeros(envs.num_envs, np.int64))
    while not envs.losses:
        with pytest.raises(CallTimeout, match="worker 0"):
            envs.step_wait(timeout=0.1)
    open(directory / "gate", "wb").close()


@pytest.mark.parametrize("is_native", [False, True], ids=["plain", "native"])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_loss_after_the_answer_to_a_step_changes_none_of_its_flags(
    remote: Backend, mode: AutoresetMode, is_native: bool, tmp_path: Path
) -> None:
    makers: list[Any] = make_counted(7, answer_and_leave(tmp_path, at=2, leaver=6), lengths={5: 2})
    plain, makers[4] = makers[4], lambda: TimeLimit(plain(), 2)
    shards = {4: makers[:4], 3: makers[4:]}

    def make_shard(num_envs: int) -> SyncVectorEnv:
        return SyncVectorEnv(shards.get(num_envs, [Counted] * num_envs), autoreset_mode=mode)

    env: Any = NativeVector(make_shard) if is_native else makers
    with ClusterEnv(env, 7, **remote, autoreset_mode=mode, timeouts=Timeouts(call_s=60, close_s=1)) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(7, np.int64))
        step_until_replaced(envs, tmp_path)
        _, rewards, terminated, truncated, infos = envs.step_wait()
        assert truncated.tolist() == (np.arange(7) == 4).tolist()
        assert terminated.tolist() == (np.arange(7) == 5).tolist()
        assert rewards.tolist() == [2.0] * 7
        assert "worker_lost" not in infos
        if mode is AutoresetMode.DISABLED:
            envs.reset(options={"reset_mask": terminated | truncated})
        lost = np.arange(7) >= (4 if mode is AutoresetMode.SAME_STEP else 6)
        assert envs.step(np.zeros(7, np.int64))[4]["_worker_lost"].tolist() == lost.tolist()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_loss_after_the_answer_to_a_step_is_told_with_what_that_step_showed(
    remote: Backend, mode: AutoresetMode, tmp_path: Path
) -> None:
    makers = make_counted(NUM_ENVS, answer_and_leave(tmp_path, at=2), kind="mixed")
    with ClusterEnv(makers, **remote, autoreset_mode=mode, timeouts=Timeouts(call_s=60, close_s=1)) as envs:
        step_to(envs, 1)
        step_until_replaced(envs, tmp_path)
        seen = rows_of(envs.step_wait()[0])
        assert seen[:, STEP].tolist() == [2] * NUM_ENVS
        assert_lost(envs.step(ACTIONS), seen, SECOND, mode)


def test_a_loss_after_a_step_in_which_another_worker_failed_is_told_with_what_that_step_showed(
    remote: Backend, tmp_path: Path
) -> None:
    makers = make_counted(NUM_ENVS, {0: [Mishap("raise", str(tmp_path / "a"), at=2)]}, kind="mixed")
    with ClusterEnv(makers, **remote) as envs:
        step_to(envs, 1)
        with pytest.raises(WorkerFailed, match="a mishap"):
            envs.step(ACTIONS)
        kill(envs, 1)
        assert rows_of(envs.step(ACTIONS)[0])[SECOND, STEP].tolist() == [2] * 3


class Telling(gym.Wrapper[Any, Any, Any, Any]):
    """Reports one info more with steps than with resets."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        *results, info = self.env.step(action)
        return *results, {**info, "twice": 2 * info["count"]}


def test_a_loss_after_the_answer_to_a_step_leaves_its_infos(remote: Backend, tmp_path: Path) -> None:
    makers = make_counted(NUM_ENVS, answer_and_leave(tmp_path, at=1))
    telling = [lambda make=make: Telling(make()) for make in makers]
    with ClusterEnv(telling, **remote, timeouts=Timeouts(call_s=60, close_s=1)) as envs:
        envs.reset(seed=1)
        step_until_replaced(envs, tmp_path)
        infos = envs.step_wait()[4]
        assert (infos["count"].tolist(), infos["twice"].tolist()) == ([1] * NUM_ENVS, [2] * NUM_ENVS)


@pytest.mark.parametrize("where", ["head", "worker"])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_loss_after_a_part_of_a_rollout_is_told_with_what_that_ended_with(
    remote: Backend, mode: AutoresetMode, where: Literal["head", "worker"], tmp_path: Path
) -> None:
    mishaps = answer_and_leave(tmp_path, at=7)
    opened = Mishap("open", str(tmp_path / "opened"), "reset", given=mishaps[5][0].mark, gate=str(tmp_path / "gate"))
    makers = make_counted(NUM_ENVS, {**mishaps, 3: [opened]}, lengths={4: 4})
    options: Any = {"autoreset_mode": mode, "timeouts": Timeouts(call_s=60, close_s=1)}
    with ClusterEnv(makers, **remote, **options) as envs, Recorder(envs, tmp_path / "r-v0", where=where) as recorder:
        step_to(envs, 4)  # Environment 4 has ended, and will be in the middle of its next episode.
        recorder.collect(choose, 3)
        assert os.path.exists(opened.mark)
        observations, _, _, truncated, infos = envs.step(ACTIONS)
        assert truncated.tolist() == infos["_worker_lost"].tolist() == SECOND.tolist()
        finals = observations if mode is AutoresetMode.NEXT_STEP else list(infos["final_obs"][SECOND])
        assert rows_of(finals)[-3:, STEP].tolist() == [7, 2 if mode is AutoresetMode.NEXT_STEP else 3, 7]


class Held:
    """An agent to which something happens when it first acts on a worker that takes over."""

    def __init__(self, *mishaps: Mishap) -> None:
        self.mishaps = mishaps

    def __call__(self, observations: Any) -> NDArray[np.int64]:
        for mishap in self.mishaps:
            mishap.strike()
        return choose(observations)


def test_a_step_that_begins_while_a_worker_takes_over_is_made_once(remote: Backend, tmp_path: Path) -> None:
    mishaps = answer_and_leave(tmp_path, at=2)
    left, gates = mishaps[5][0].mark, [str(tmp_path / name) for name in ("gate", "adopting", "stepping")]
    for gate in gates[1:]:
        os.mkfifo(gate)
    mishaps[0].append(Mishap("open", str(tmp_path / "opens"), at=3, gate=gates[1]))
    mishaps[1] = [Mishap("wait", str(tmp_path / "steps"), at=3, gate=gates[2])]
    agent = Held(  # The step before is over as soon as it is being adopted, and it is adopted in the next.
        Mishap("open", str(tmp_path / "over"), given=left, gate=gates[0]),
        Mishap("wait", str(tmp_path / "adopts"), given=left, gate=gates[1]),
    )
    with ClusterEnv(make_counted(NUM_ENVS, mishaps), **remote, timeouts=Timeouts(call_s=60, close_s=1)) as envs:
        envs.reset(seed=1)
        envs.rollout(agent, 1)
        seen = rows_of(envs.step(ACTIONS)[0])
        assert not envs.losses
        envs.step_async(ACTIONS)
        while not envs.losses:
            with pytest.raises(CallTimeout):
                envs.step_wait(timeout=0.1)
        open(gates[2], "wb").close()
        assert_lost(envs.step_wait(), seen, SECOND, AutoresetMode.NEXT_STEP)
        assert len(envs.losses) == 1


def test_a_moment_without_descriptors_while_a_worker_is_replaced_costs_one_more_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, failures = os.memfd_create, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def make_memory(name: str, flags: int = 0) -> int:
        if failures:
            raise failures.pop()
        return make(name, flags)

    with ClusterEnv(make_counted(NUM_ENVS), num_workers=2, network=Network(transport="shm")) as envs:
        seen = step_to(envs, 2)
        monkeypatch.setattr(os, "memfd_create", make_memory)
        kill(envs, 1)
        assert_lost(envs.step(ACTIONS), seen, SECOND, AutoresetMode.NEXT_STEP)
        assert not failures
        assert_goes_on(envs, SECOND, AutoresetMode.NEXT_STEP)
