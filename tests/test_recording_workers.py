"""Recording on workers' machines: the very dataset that recording on the head gives, and no frame travels."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from clusterenv import AdaptiveSync, ClusterEnv, NativeVector, Network, Recorder
from clusterenv.cli import main
from clusterenv.errors import ConfigError, RecordingError
from clusterenv.launchers.processes import ProcessFleet
from clusterenv.wire.ticket import Ticket
from tests.conftest import Backend, descendants, wait_until_gone
from tests.launchers import OwnLauncher, start_module
from tests.policies import Hashing, Linear
from tests.script import ROOT
from tests.test_recording import assert_equal, by_environment, load, play
from tests.worlds import make_factories

HASHING = Hashing(spaces.Discrete(4))


def collect(envs: ClusterEnv, recorder: Recorder, policy: Any, lengths: Sequence[int], seeds: Sequence[int]) -> None:
    """Record rollouts of these lengths; without autoreset, reset all before each."""
    envs.reset(seed=seeds[0])
    for index, num_steps in enumerate(lengths):
        if index and envs.autoreset_mode is AutoresetMode.DISABLED:
            envs.reset(seed=seeds[index])
        recorder.collect(policy, num_steps)


def assert_same_dataset(ours: Path, theirs: Path) -> None:
    our_set, their_set = load(ours), load(theirs)
    assert our_set.total_steps == their_set.total_steps > 0
    for our, their in zip(our_set.iterate_episodes(), their_set.iterate_episodes(), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations", "infos"):
            assert_equal(getattr(our, name), getattr(their, name))
    count = range(our_set.total_episodes)
    assert list(our_set.storage.get_episode_metadata(count)) == list(their_set.storage.get_episode_metadata(count))


def merge(path: Path, *pieces: Path) -> None:
    assert main(["merge", *map(str, pieces or [path]), "--out", str(path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_dataset_is_that_of_a_recorder_on_the_head(tmp_path: Path, mode: AutoresetMode, remote: Backend) -> None:
    factories = make_factories(5, infos="sparse", longest_episode=6)
    lengths, seeds = [4, 1, 7, 3, 9], [11, 200, 300, 400, 500]
    here, there = tmp_path / "here-v0", tmp_path / "there-v0"
    with ClusterEnv(factories, num_workers=0, autoreset_mode=mode) as envs, Recorder(envs, here) as recorder:
        collect(envs, recorder, HASHING, lengths, seeds)
    with (
        ClusterEnv(factories, autoreset_mode=mode, **{**remote, "num_workers": 3}) as envs,
        Recorder(envs, there, where="worker") as recorder,
    ):
        collect(envs, recorder, HASHING, lengths, seeds)
    assert len(recorder.pieces) == 3
    assert recorder.close() is None
    # As if each worker had a machine of its own, whose files were brought here.
    places = [tmp_path / name for name in ("one", "two", "three")]
    for place, piece in zip(places, recorder.pieces, strict=True):
        place.mkdir()
        path = Path(piece.partition(":")[2])
        path.rename(place / path.name)
    merge(there, *places)
    assert_same_dataset(there, here)


def test_steps_say_which_policy_has_made_them_and_it_is_always_the_newest(tmp_path: Path, remote: Backend) -> None:
    paths = {"head": tmp_path / "head-v0", "worker": tmp_path / "worker-v0"}
    for where, path in paths.items():
        agent = Linear()
        rule = None if where == "head" else AdaptiveSync(10.0)  # Which would never send anything.
        with ClusterEnv("CartPole-v1", num_envs=2, sync=rule, **remote) as envs:
            envs.reset(seed=1)
            with Recorder(envs, path, where=where) as recorder:  # type: ignore[arg-type]  # mypy has it as a str
                for _ in range(4):
                    recorder.collect(agent, 8)
                    agent.nudge()
    merge(paths["worker"])
    assert_same_dataset(paths["worker"], paths["head"])
    recorded = [episode for episodes in by_environment(paths["worker"], 2) for episode, _ in episodes]
    versions = np.concatenate([episode.infos["policy_version"] for episode in recorded])
    assert len(np.unique(versions)) == 4
    for episode in recorded:
        assert set(episode.infos) == {"logprob", "value", "policy_version", "policy_age", "policy_divergence"}
        assert not episode.infos["policy_age"].any()
        assert not episode.infos["policy_divergence"].any()


def test_frames_do_not_travel_and_the_run_goes_on_from_where_they_led(tmp_path: Path, remote: Backend) -> None:
    camera = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    factories = make_factories(2, observation_space=camera, infos="none", longest_episode=7)
    with ClusterEnv(factories, **remote) as envs:
        envs.reset(seed=3)
        before = envs.stats["bytes_rollouts"]
        with Recorder(envs, tmp_path / "camera-v0", where="worker") as recorder:
            episodes = recorder.collect(HASHING, 40)
        assert 0 < envs.stats["bytes_rollouts"] - before < 40 * 64 * 64 * 3
        assert envs.stats["env_steps"] == 80
        after = envs.rollout(HASHING, 5)
    with ClusterEnv(factories, num_workers=0) as envs:
        envs.reset(seed=3)
        expected = envs.rollout(HASHING, 40)
        assert_equal(after.obs, envs.rollout(HASHING, 5).obs)
    assert episodes.lengths.tolist() == expected.episodes.lengths.tolist()
    assert episodes.env_indices.tolist() == expected.episodes.env_indices.tolist()


def test_a_worker_that_takes_over_records_to_a_file_of_its_own_and_nothing_is_lost(
    tmp_path: Path, remote: Backend
) -> None:
    path = tmp_path / "lost-v0"
    factories = make_factories(2, infos="none", longest_episode=10**6)
    with ClusterEnv(factories, **remote) as envs, Recorder(envs, path, where="worker") as recorder:
        envs.reset(seed=5)
        recorder.collect(HASHING, 7)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        recorder.collect(HASHING, 4)
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        recorder.collect(HASHING, 3)
        first, second = envs.losses
    assert len(recorder.pieces) == 4
    merge(path)
    kept, lost = by_environment(path, 2)
    assert [(len(episode), about.get("cut")) for episode, about in kept] == [(14, "recording ended")]
    assert [(len(episode), about.get("seed"), about.get("cut")) for episode, about in lost] == [
        (7, 6, "worker lost"),
        (4, first.seeds[0], "worker lost"),
        (3, second.seeds[0], "recording ended"),
    ]


class Unreplaced(OwnLauncher):
    """A launcher on whose workers nothing is done when they are lost: they come back by themselves."""

    def launch(self, ticket: Ticket, num_workers: int) -> ProcessFleet:
        class Fleet(ProcessFleet):
            def restart(self, worker_index: int) -> None:
                pass

        return Fleet(lambda index, log: start_module("clusterenv.worker", ticket, index, log), num_workers)


def lose_connection(_: Any) -> None:
    """Cut this worker off from its head, unless it was before."""
    if "WAS_CUT_OFF" not in os.environ:
        os.environ["WAS_CUT_OFF"] = "1"
        for link in Path("/proc/self/fd").iterdir():
            if link.is_socket():
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_comes_back_has_closed_what_it_recorded_before(tmp_path: Path) -> None:
    factories = make_factories(1, infos="none", longest_episode=10**6)
    network = Network(transport="zmq")
    with (
        ClusterEnv(factories, num_workers=1, launcher=Unreplaced(), network=network) as envs,
        Recorder(envs, tmp_path / "back-v0", where="worker") as recorder,
    ):
        envs.reset(seed=5)
        recorder.collect(HASHING, 7)
        pids = envs.worker_pids
        envs.apply(lose_connection, [0])
        recorder.collect(HASHING, 4)
        assert envs.worker_pids == pids
        assert len(envs.losses) == 1
        _, newest = recorder.pieces
        files = {os.path.realpath(link) for link in Path(f"/proc/{pids[0]}/fd").iterdir()}
    assert {file for file in files if file.endswith(".piece")} == {newest.partition(":")[2]}


def test_what_a_lost_worker_wrote_last_comes_before_what_its_successor_made_of_the_same_rollout(
    tmp_path: Path,
) -> None:
    path = tmp_path / "late-v0"
    factories = make_factories(1, infos="none", longest_episode=10**6)
    with ClusterEnv(factories, num_workers=1) as envs, Recorder(envs, path, where="worker") as recorder:
        envs.reset(seed=5)
        recorder.collect(HASHING, 7)
        os.kill(envs.worker_pids[0], signal.SIGKILL)
        recorder.collect(HASHING, 4)
    first, second = sorted((path / "pieces").iterdir(), key=lambda piece: piece.name)
    # The later one is found first, and the earlier one has recorded the second rollout, too, before it was lost.
    places = [tmp_path / "a", tmp_path / "b"]
    for place, piece in zip(places, (second, first), strict=True):
        place.mkdir()
        piece.rename(place / piece.name)
    merge(path, *places)
    assert [(len(episode), about["cut"]) for episode, about in by_environment(path, 1)[0]] == [
        (7, "worker lost"),
        (4, "recording ended"),
    ]


def test_a_full_disk_on_one_machine_costs_only_what_did_not_fit_there(tmp_path: Path, remote: Backend) -> None:
    path = tmp_path / "full-v0"
    factories = make_factories(2, infos="none", longest_episode=10**6)
    with ClusterEnv(factories, **remote) as envs, Recorder(envs, path, where="worker") as recorder:
        envs.reset(seed=0)
        recorder.collect(HASHING, 40)
        unlimited = resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE)
        size_bytes = max(piece.stat().st_size for piece in (path / "pieces").iterdir())
        resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE, (size_bytes + 300, unlimited[1]))
        with pytest.raises(RecordingError, match=r"by worker 1 .*full-v0.*File too large.*the run can continue"):
            recorder.collect(HASHING, 40)
        resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE, unlimited)
        recorder.collect(HASHING, 40)  # There is room again.
        envs.reset(seed=9)
        recorder.collect(HASHING, 10)
        assert not envs.losses
    merge(path)
    kept, missed = by_environment(path, 2)
    assert [(len(episode), about["cut"]) for episode, about in kept] == [(120, "interrupted"), (10, "recording ended")]
    assert [(len(episode), about["cut"]) for episode, about in missed] == [
        (40, "interrupted"),
        (10, "recording ended"),
    ]
    (expected,) = play(factories[1](), HASHING, AutoresetMode.NEXT_STEP, [40], [1])
    assert missed[0][0].rewards.tolist() == expected.rewards


def test_the_files_of_those_who_could_record_are_named_though_others_could_not(tmp_path: Path, remote: Backend) -> None:
    path = tmp_path / "partial-v0"
    with (
        ClusterEnv(make_factories(2, infos="none"), **remote) as envs,
        Recorder(envs, path, where="worker") as recorder,
    ):
        envs.reset(seed=0)
        unlimited = resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE)
        size_bytes = max(piece.stat().st_size for piece in (path / "pieces").iterdir())
        resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE, (size_bytes + 10, unlimited[1]))
        with pytest.raises(RecordingError, match="by worker 1 "):
            recorder.collect(HASHING, 40)
        resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE, unlimited)
        assert [Path(piece.partition(":")[2]).stem.split("-")[1] for piece in recorder.pieces] == ["0"]
        recorder.collect(HASHING, 40)
        assert {Path(piece.partition(":")[2]) for piece in recorder.pieces} == set((path / "pieces").iterdir())


def test_a_worker_that_cannot_record_is_named_before_anything_runs(tmp_path: Path, remote: Backend) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "done-v0" / "data").mkdir(parents=True)
    (tmp_path / "left-v0" / "pieces").mkdir(parents=True)
    (tmp_path / "left-v0" / "pieces" / "other.piece").touch()
    with ClusterEnv("CartPole-v1", num_envs=2, **remote) as envs:
        for name, text in (
            ("file/below-v0", r"Nothing can be recorded to .*Not a directory.*\(On worker 0 "),
            ("done-v0", r"There is a dataset at .*done-v0 already.*\(On worker 0 "),
            ("left-v0", r"holds the pieces of a recording.*clusterenv merge"),
        ):
            with pytest.raises(ConfigError, match=text):
                Recorder(envs, tmp_path / name, where="worker")
        # And nothing of that is in the way of another try.
        (tmp_path / "left-v0" / "pieces" / "other.piece").unlink()
        with Recorder(envs, tmp_path / "left-v0", where="worker") as recorder:
            recorder.collect(Linear(), 5)
    merge(tmp_path / "left-v0")
    assert load(tmp_path / "left-v0").total_steps == 10


def test_a_recording_that_failed_on_one_machine_leaves_nothing_on_the_others(tmp_path: Path) -> None:
    with ClusterEnv("CartPole-v1", num_envs=2, num_workers=2) as envs:
        resource.prlimit(envs.worker_pids[1], resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        with pytest.raises(ConfigError, match=r"File too large.*\(On worker 1 "):
            Recorder(envs, tmp_path / "full-v0", where="worker")
        assert not list(tmp_path.rglob("*.piece"))


def test_what_makes_no_sense_on_workers_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "own-v0"
    with ClusterEnv("CartPole-v1", num_workers=0) as envs:
        with pytest.raises(ConfigError, match="num_workers=0 has none: leave where= out"):
            Recorder(envs, path, where="worker")
        with pytest.raises(ConfigError, match="where must be 'head' or 'worker', got 'workers'"):
            Recorder(envs, path, where="workers")  # type: ignore[arg-type]  # that is the mistake
    with ClusterEnv("CartPole-v1", num_workers=1) as envs:
        envs.reset(seed=0)
        with Recorder(envs, path, where="worker") as recorder:
            with pytest.raises(ConfigError, match=r"recorder.collect\(agent, num_steps\).* leave where= out"):
                recorder.add(envs.rollout(Linear(), 3))
            with pytest.raises(ConfigError, match="another Recorder already"):
                Recorder(envs, tmp_path / "second-v0", where="worker")
        with pytest.raises(ConfigError, match="This recorder is closed"):
            recorder.collect(Linear(), 3)
        assert not list(tmp_path.rglob("*.piece"))
        envs.reset(seed=0)
        Recorder(envs, tmp_path / "forgotten-v0", where="worker").collect(Linear(), 3)
        envs.reset(seed=0)
        with Recorder(envs, tmp_path / "next-v0", where="worker") as recorder:
            recorder.collect(Linear(), 4)
    assert recorder.close() is None
    for name, num_steps in (("forgotten-v0", 3), ("next-v0", 4)):
        merge(tmp_path / name)
        assert load(tmp_path / name).total_steps == num_steps


def test_what_cannot_be_recorded_by_its_name_is_said_with_the_first_rollout(tmp_path: Path) -> None:
    class Odd(Linear):
        def act(self, *arguments: Any, **named: Any) -> Any:
            decision = super().act(*arguments, **named)
            return decision._replace(extras={"policy_age": np.zeros(len(decision.action))})

    with ClusterEnv("CartPole-v1", num_workers=1) as envs:
        envs.reset(seed=0)
        with (
            Recorder(envs, tmp_path / "odd-v0", where="worker") as recorder,
            pytest.raises(RecordingError, match=r"The policy's 'policy_age' cannot be recorded by that name"),
        ):
            recorder.collect(Odd(), 3)


def test_a_native_vector_environment_is_recorded_where_it_is_too(tmp_path: Path) -> None:
    paths = {"head": tmp_path / "head-v0", "worker": tmp_path / "worker-v0"}
    for where, path in paths.items():
        with ClusterEnv(NativeVector("CartPole-v1"), num_envs=4, num_workers=2) as envs:
            envs.reset(seed=3)
            with Recorder(envs, path, where=where) as recorder:  # type: ignore[arg-type]  # mypy has it as a str
                for _ in range(3):
                    recorder.collect(Linear(), 40)
    merge(paths["worker"])
    assert_same_dataset(paths["worker"], paths["head"])


def test_more_pieces_than_a_process_may_have_files_open_are_merged(tmp_path: Path) -> None:
    with ClusterEnv("CartPole-v1", num_workers=1) as envs:
        envs.reset(seed=0)
        with Recorder(envs, tmp_path / "many-v0", where="worker") as recorder:
            recorder.collect(Linear(), 5)
    piece = Path(recorder.pieces[0].partition(":")[2])
    for number in range(80):  # What was recorded once counts once.
        shutil.copy(piece, piece.with_stem(f"{piece.stem}-{number}"))
    command = [sys.executable, "-m", "clusterenv", "merge", str(tmp_path), "--out", str(tmp_path / "many-v0")]
    limited = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "_", *command]
    subprocess.run(limited, cwd=ROOT, timeout=120, check=True)
    assert load(tmp_path / "many-v0").total_steps == 5


KILLED = """
import json, os, signal, sys
from clusterenv import ClusterEnv, Recorder
from tests.policies import Linear

with ClusterEnv("CartPole-v1", num_envs=4, num_workers=2) as envs:
    envs.reset(seed=0)
    recorder = Recorder(envs, sys.argv[1], where="worker")
    for _ in range(3):
        recorder.collect(Linear(), 50)
    print(json.dumps(envs.worker_pids), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_the_head_was_killed_what_workers_have_recorded_can_be_merged(tmp_path: Path) -> None:
    path = tmp_path / "killed-v0"
    command = [sys.executable, "-c", KILLED, str(path)]
    ended = subprocess.run(command, cwd=ROOT, timeout=120, check=False, stdout=subprocess.PIPE)
    assert ended.returncode == -signal.SIGKILL
    assert wait_until_gone(descendants()) == []
    assert len(json.loads(ended.stdout)) == len(list(path.rglob("*.piece"))) == 2
    merge(path)
    dataset = load(path)
    about = list(dataset.storage.get_episode_metadata(range(len(dataset))))
    assert {entry["env_index"] for entry in about} == {0, 1, 2, 3}
    assert dataset.total_steps == sum(len(episode) for episode in dataset.iterate_episodes()) > 4 * 3 * 40
