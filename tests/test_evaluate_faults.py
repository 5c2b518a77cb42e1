"""Evaluations through losses, interruptions and the end of the head: no episode is missing, none counts twice."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clusterenv import ClusterEnv, Faults
from clusterenv.adapters.torch import TorchPolicy
from clusterenv.errors import ConfigError, JournalError, WireError, WorkerLost
from clusterenv.head.dealer import Dealer
from clusterenv.head.evaluating import read_finished
from clusterenv.wire import values
from tests.conftest import Backend, descendants, wait_until_gone
from tests.script import ROOT
from tests.uneven import KillsItsWorker, SignalsTheHead, Uneven, act, play_plainly, rows_of

COUNT = 150
KILLERS = (20, 60, 100, 140)


def test_the_table_is_that_of_a_plain_loop_though_workers_are_killed(remote: Backend, tmp_path: Path) -> None:
    mishap = KillsItsWorker(tmp_path, KILLERS)
    with ClusterEnv(lambda: Uneven(mishap), 5, **remote) as envs:
        evaluation = envs.evaluate(act, COUNT)
        num_losses = len(envs.losses)
        assert rows_of(evaluation) == play_plainly(Uneven(), act, range(COUNT))
        # The last one may have been killed too late for its successor to be needed.
        assert len(KILLERS) - 1 <= num_losses <= len(KILLERS)
        envs.reset(seed=0)
        envs.step(np.zeros(5, np.int64))


def test_a_loss_is_raised_where_that_was_asked_for(remote: Backend, tmp_path: Path) -> None:
    mishap = KillsItsWorker(tmp_path, [3])
    envs = ClusterEnv(lambda: Uneven(mishap), 2, faults=Faults(on_loss="raise"), **remote)
    with envs, pytest.raises(WorkerLost):
        envs.evaluate(act, 20)


class AlwaysKills:
    """Ends its worker whenever an episode with a certain seed has begun."""

    def __call__(self, env: Uneven) -> None:
        if env.seed == 12:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_an_episode_that_ends_every_worker_does_not_do_so_for_ever() -> None:
    mishap = AlwaysKills()
    with ClusterEnv(lambda: Uneven(mishap), 2, num_workers=1) as envs, pytest.raises(WorkerLost):
        envs.evaluate(act, 20)


def test_an_evaluation_may_be_interrupted_and_the_next_one_works(backend: Backend, tmp_path: Path) -> None:
    mishap = SignalsTheHead(tmp_path, os.getpid(), signal.SIGINT, 7)
    with ClusterEnv(lambda: Uneven(mishap), 3, **backend) as envs:
        envs.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            envs.evaluate(act, 40)
        assert rows_of(envs.evaluate(act, 40)) == play_plainly(Uneven(), act, range(40))
        envs.step(np.zeros(3, np.int64))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_a_file_holds_is_not_played_again(backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with ClusterEnv(Uneven, 3, **backend) as envs:
        envs.evaluate(act, 10, resume=path)
        assert Counter(line["episode"] for line in lines_of(path)[1:]) == Counter(range(10))
        evaluation = envs.evaluate(act, 25, resume=str(path))
        assert rows_of(evaluation) == play_plainly(Uneven(), act, range(25))
        assert evaluation.manifest["resumed_episodes"] == 10
        assert Counter(line["episode"] for line in lines_of(path)[1:]) == Counter(range(25))
        again = envs.evaluate(act, 25, resume=path)
        assert rows_of(again) == rows_of(evaluation)
        for first, second in zip(evaluation.final_infos, again.final_infos, strict=True):
            assert first["success"] is second["success"]
            np.testing.assert_array_equal(first["state"], second["state"])


HEAD = """
import json, os, signal, sys
from pathlib import Path
from clusterenv import ClusterEnv
from tests.uneven import SignalsTheHead, Uneven, act, rows_of
scratch, num_workers = Path(sys.argv[1]), int(sys.argv[2])

def make():
    return Uneven(SignalsTheHead(scratch, int(os.environ["HEAD_PID"]), signal.SIGKILL, 33, scratch / "eval.jsonl"))

if __name__ == "__main__":
    os.environ["HEAD_PID"] = str(os.getpid())
    with ClusterEnv(make, 4, num_workers=num_workers) as envs:
        evaluation = envs.evaluate(act, 60, resume=scratch / "eval.jsonl")
    print(json.dumps([evaluation.manifest["resumed_episodes"], rows_of(evaluation)]))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_evaluation_whose_head_was_killed_goes_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    arguments = [sys.executable, "-c", HEAD, str(tmp_path), str(num_workers)]
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert wait_until_gone(descendants()) == []
    path = tmp_path / "eval.jsonl"
    with path.open("ab") as file:
        file.write(b'{"episode": 59, "se')  # As if it had been killed in the middle of a line.
    num_kept = path.read_bytes().count(b"\n") - 1
    assert 0 < num_kept < 60
    with ClusterEnv(Uneven, 3, num_workers=0) as envs, pytest.raises(ConfigError, match="another evaluation"):
        envs.evaluate(act, 60, resume=path)  # Made by another factory, as far as that can be known.

    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    num_resumed, table = json.loads(ended.stdout)
    assert num_resumed == num_kept
    assert list(map(tuple, table)) == play_plainly(Uneven(), act, range(60))
    assert Counter(line["episode"] for line in lines_of(path)[1:]) == Counter(range(60))


def other(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"agent": other}, "another policy"),
        ({"seed": 1}, "seed 0, while that of this evaluation has seed 1"),
        ({"options": {"bonus": 1.0}}, "or other options"),
        ({"max_steps": 4}, "max_steps=None, and not 4"),
        ({"values": {"x": 1}}, "values="),
    ],
)
def test_a_file_of_another_evaluation_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "eval.jsonl"
    arguments = {"agent": act, "episodes": 3, "resume": path, **change}
    with ClusterEnv(Uneven, 1, num_workers=0) as envs:
        envs.evaluate(act, 3, resume=path)
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=words):
            envs.evaluate(**arguments)
    assert path.read_bytes() == before


def nested(is_flipped: bool) -> Any:
    if is_flipped:
        return lambda obs: np.array([(lambda row: int(row[0] < 0))(row) for row in obs])
    return lambda obs: np.array([(lambda row: int(row[0] > 0))(row) for row in obs])


def with_default(action: int) -> Any:
    def choose(obs: Any, *, action: int = action) -> Any:
        return np.full(len(obs), action)

    return choose


def with_functions(action: int) -> Any:
    if action:
        return TorchPolicy(nn.Linear(3, 3), act=lambda module, obs: obs.argmax(1))
    return TorchPolicy(nn.Linear(3, 3), act=lambda module, obs: obs.argmin(1))


@pytest.mark.parametrize("make", [nested, with_default, with_functions])
def test_a_file_of_an_agent_with_other_code_is_refused(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "eval.jsonl"
    with ClusterEnv(Uneven, 1, num_workers=0) as envs:
        torch.manual_seed(0)
        envs.evaluate(make(0), 3, resume=path)
        torch.manual_seed(0)
        assert envs.evaluate(make(0), 4, resume=path).manifest["resumed_episodes"] == 3
        torch.manual_seed(0)
        with pytest.raises(ConfigError, match="another policy, or other weights or code"):
            envs.evaluate(make(1), 5, resume=path)


def closed_over(seed: int) -> Any:
    return lambda: Shifted(seed)


def by_default(seed: int) -> Any:
    return lambda seed=seed: Shifted(seed)


class Shifted(Uneven):
    """Has an argument."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift


@pytest.mark.parametrize("make", [closed_over, by_default])
def test_a_file_of_environments_that_are_made_otherwise_is_refused(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "eval.jsonl"
    for _ in range(2):
        with ClusterEnv(make(1), 1, num_workers=0) as envs:
            envs.evaluate(act, 3, resume=path)
    with (
        ClusterEnv(make(2), 1, num_workers=0) as envs,
        pytest.raises(ConfigError, match="made by other code, or with other arguments"),
    ):
        envs.evaluate(act, 3, resume=path)


SIZE = 1


def by_global() -> Any:
    return Shifted(SIZE)


class Maker:
    """Makes environments in a method, which refers to a global."""

    def make(self) -> Any:
        return Shifted(SIZE)

    def __call__(self) -> Any:
        return self.make()


@pytest.mark.parametrize("make", [by_global, Maker().make, Maker()], ids=["a function", "a method", "an object"])
def test_a_file_of_environments_that_a_global_makes_different_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    path = tmp_path / "eval.jsonl"
    for _ in range(2):
        with ClusterEnv(make, 1, num_workers=0) as envs:
            envs.evaluate(act, 3, resume=path)
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 2)
    with (
        ClusterEnv(make, 1, num_workers=0) as envs,
        pytest.raises(ConfigError, match="made by other code, or with other arguments"),
    ):
        envs.evaluate(act, 3, resume=path)


def test_a_file_of_environments_whose_class_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"

    def make_class(shift: float) -> type[Uneven]:
        class Edited(Uneven):
            def step(self, action: Any) -> Any:
                obs, reward, *others = super().step(action)
                return obs, reward + shift, *others

        return Edited

    with ClusterEnv(make_class(0.0), 1, num_workers=0) as envs:
        envs.evaluate(act, 3, resume=path)
        assert envs.evaluate(act, 4, resume=path).manifest["resumed_episodes"] == 3
    with ClusterEnv(make_class(1.0), 1, num_workers=0) as envs, pytest.raises(ConfigError, match="made by other code"):
        envs.evaluate(act, 3, resume=path)


def test_two_evaluations_do_not_write_to_one_file_at_once(tmp_path: Path) -> None:
    path, refused = tmp_path / "eval.jsonl", tmp_path / "refused"

    def try_too(env: Uneven) -> None:
        if not refused.exists():
            with ClusterEnv(Uneven, 1, num_workers=0) as others, pytest.raises(ConfigError) as caught:
                others.evaluate(act, 3, resume=path)
            refused.write_text(str(caught.value))

    with ClusterEnv(lambda: Uneven(try_too), 2, num_workers=0) as envs:
        envs.evaluate(act, 5, resume=path)
        assert re.match(r"Another evaluation is writing to .*eval.jsonl at this moment", refused.read_text())
        assert envs.evaluate(act, 6, resume=path).manifest["resumed_episodes"] == 5


ANEW = """
import sys
import numpy as np
from clusterenv import ClusterEnv
from tests.uneven import Uneven

class Goal:
    def __init__(self):
        self.place = 3

colours = {"red", "green", "blue", "white"}

def make():
    names = {"north", "south", "east", "west"}
    def agent(obs, mode="lean"):
        return np.full(len(obs), int(mode in {"lean", "left", "right", "tilt"} and "up" not in names))
    return agent

if __name__ == "__main__":
    is_first = sys.argv[2] == "1"
    options = {"colours": colours, "goal": Goal(), "low": 1, "bonus": 2.0}
    if not is_first:
        options = dict(reversed(options.items()))
    with ClusterEnv(lambda: Uneven(colours and None), 2, num_workers=0) as envs:
        table = envs.evaluate(make(), 5, options=options, resume=sys.argv[1])
    assert table.manifest["resumed_episodes"] == (0 if is_first else 5)
"""


def test_an_evaluation_goes_on_in_another_process(tmp_path: Path) -> None:
    for number in ("1", "2"):
        arguments = [sys.executable, "-c", ANEW, str(tmp_path / "eval.jsonl"), number]
        environment = {**os.environ, "PYTHONHASHSEED": number}
        ended = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, timeout=100, check=False)
        assert ended.returncode == 0, ended.stderr.decode()


def test_options_that_cannot_be_compared_are_refused() -> None:
    class Odd:
        def __reduce_ex__(self, protocol: Any) -> Any:
            if protocol == 2:
                raise TypeError("only some ways")
            return super().__reduce_ex__(protocol)

    with ClusterEnv(Uneven, 1, num_workers=0) as envs, pytest.raises(ConfigError, match=r"options hold a .*Odd"):
        envs.evaluate(act, 1, options={"odd": Odd()})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "Line 1 of .* is not JSON"),
        (b"[]\n", "Line 1 of .* is not a line"),
        (b"{}\n", "is not a file of evaluate"),
        (b'{"results": "precious"}', "is not a file of evaluate"),
        (b"one line\nand half a", "Line 1 of .* is not JSON"),
        (None, "Line 3 of .* is not an episode"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "eval.jsonl"
    with ClusterEnv(Uneven, 1, num_workers=0) as envs:
        if content is None:
            envs.evaluate(act, 1, resume=path)
            content = path.read_bytes() + b"{}\n"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            envs.evaluate(act, 3, resume=path)
    assert path.read_bytes() == content


def test_a_file_whose_first_line_was_half_written_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with ClusterEnv(Uneven, 1, num_workers=0) as envs:
        envs.evaluate(act, 3, resume=path)
        whole = path.read_bytes()
        for length in (0, 1, whole.index(b"\n")):
            path.write_bytes(whole[:length])
            assert envs.evaluate(act, 3, resume=path).manifest["resumed_episodes"] == 0
            assert path.read_bytes() == whole


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "eval.jsonl"
    with ClusterEnv(Uneven, 1, num_workers=0) as envs, pytest.raises(JournalError, match=r"nowhere.*No such file"):
        envs.evaluate(act, 3, resume=path)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ClusterEnv(Uneven, 2, num_workers=0) as envs:
        envs.evaluate(act, 5, resume=path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 700, hard))
        try:
            with pytest.raises(JournalError, match=r"could not be written to .*: File too large"):
                envs.evaluate(act, 60, resume=path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        evaluation = envs.evaluate(act, 60, resume=path)
    assert rows_of(evaluation) == play_plainly(Uneven(), act, range(60))
    assert evaluation.manifest["resumed_episodes"] > 5
    assert Counter(line["episode"] for line in lines_of(path)[1:]) == Counter(range(60))


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 2**32))
def test_whatever_happens_to_players_each_episode_is_over_once(count: int, sizes: list[int], seed: int) -> None:
    chance = random.Random(seed)
    dealer = Dealer(range(count), len(sizes), max_steps=10**6)
    queues: list[list[int]] = [[] for _ in sizes]
    over: list[int] = []
    while dealer.num_left:
        player = chance.randrange(len(sizes))
        if chance.random() < 0.1:
            dealer.take_back(player)
            queues[player] = []
            continue
        queues[player] += dealer.deal(player, sizes[player])
        held = queues[player]
        assert len(held) == len(set(held))
        assert not any(set(held) & set(queue) for queue in queues if queue is not held)
        num_finished = chance.randint(0, len(held))
        finished, rest = held[:num_finished], held[num_finished:]
        queues[player], unstarted = rest[: sizes[player]], rest[sizes[player] :]
        dealer.accept(player, finished, unstarted)
        over += finished
    assert sorted(over) == list(range(count))


def test_a_player_that_speaks_of_episodes_it_was_not_dealt_is_refused() -> None:
    dealer = Dealer(range(4), 2, 9)
    dealt = dealer.deal("a", 2)
    for finished, unstarted in (([3], []), ([], [2]), ([dealt[0], dealt[0]], [])):
        with pytest.raises(ValueError, match="is not among those it plays"):
            Dealer(range(4), 2, 9).accept("a", finished, unstarted)


def test_a_player_whose_episodes_get_nowhere_is_refused() -> None:
    dealer = Dealer(range(4), 1, max_steps=3)
    dealer.deal("a", 2)
    dealer.accept("a", [], [])
    dealer.accept("a", [0], [])
    dealer.deal("a", 2)
    with pytest.raises(ValueError, match="episode 1 must be over after 3 answers"):
        dealer.accept("a", [], [])


@pytest.mark.parametrize(
    "lie",
    [[0, 1.0, 0, True, False], [0, 1.0, 8, True, False], [0, 1.0, 2**70, True, False]]
    + [[0, 1.0, 3, False, False], [0, 1, 3, True, False], [0, 1.0, 3, 1, 0]],
)
def test_what_cannot_be_said_of_an_episode_is_refused(lie: list[Any]) -> None:
    info = values.dumps({})
    assert read_finished([[0, 1.0, 7, True, False, False, False, info]], max_steps=7)[0].length == 7
    with pytest.raises(WireError):
        read_finished([[*lie, False, False, info]], max_steps=7)


@pytest.mark.parametrize("change", [{"episode": -1}, {"length": 0}, {"length": 2**70}, {"truncated": "no"}])
def test_a_line_that_no_episode_has_written_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "eval.jsonl"
    with ClusterEnv(Uneven, 1, num_workers=0) as envs:
        envs.evaluate(act, 1, resume=path)
        header, line = lines_of(path)
        path.write_text(f"{json.dumps(header)}\n{json.dumps({**line, **change})}\n")
        with pytest.raises(ConfigError, match=r"Line 2 of .* is not an episode"):
            envs.evaluate(act, 1, resume=path)
