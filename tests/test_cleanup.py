"""However a run ends, nothing outlives it (the conftest looks for what might), and idle workers are idle."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from clusterenv import ClusterEnv
from clusterenv.errors import CallTimeout
from tests.conftest import Backend, descendants, wait_until_gone
from tests.worlds import TroubledWorld, World, make_factories

ROOT = Path(__file__).parent.parent
IDLE_S = 2.0

START = """
import json, os, signal, sys, time
from clusterenv import ClusterEnv, Network, Timeouts
from tests.worlds import TroubledWorld, World

transport, gate = sys.argv[1:]
hanging = lambda: TroubledWorld("step", "hang", gate=gate)
network, timeouts = Network(transport=transport), Timeouts(call_s=20, close_s=1)
envs = ClusterEnv([World, World, hanging], num_workers=2, network=network, timeouts=timeouts)
envs.reset(seed=1)
print(json.dumps(envs.worker_pids), flush=True)
"""


# Not `signal.pause()`: of a signal that comes just before it begins, Python would learn only after the next.
IDLE = "while True: time.sleep(0.1)"


class Script:
    """A user's script in a process group of its own, as a shell would run it."""

    def __init__(self, source: str, transport: str, gate: Path) -> None:
        self._gate = gate
        os.mkfifo(gate)
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, transport, str(gate)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line

    def open_gate(self) -> BinaryIO:
        """Wait until the third environment is in its step, where it stays at least until what is returned is closed."""
        return open(self._gate, "wb")

    def interrupt(self, to: str) -> None:
        if to == "group":
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            os.kill(self.process.pid, signal.SIGINT)

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end, and for all its processes to be gone; return its status and what it said."""
        out, err = self.process.communicate(timeout=60)
        assert wait_until_gone(descendants()) == [], err
        return self.process.returncode, out, err


Run = Callable[[str], Script]


@pytest.fixture
def run(remote: Backend, tmp_path: Path) -> Iterator[Run]:
    """Starts a script; at the end of the test it is over."""
    scripts = []

    def start(source: str) -> Script:
        scripts.append(Script(source, remote["network"].transport, tmp_path / "gate"))
        return scripts[-1]

    yield start
    for script in scripts:
        if script.process.poll() is None:
            os.killpg(script.process.pid, signal.SIGKILL)
        script.process.communicate()


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("envs.close()", 0),
        ("del envs", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('the user made a mistake')", 1),
        ("envs.step_async([0, 0, 0])", 0),
        ("os._exit(4)", 4),
    ],
)
def test_a_script_that_ends_leaves_nothing_behind(run: Run, ending: str, status: int) -> None:
    script = run(START + ending)
    assert len(json.loads(script.read_line())) == 2
    returncode, _, err = script.finish()
    assert returncode == status, err
    assert err.count("Traceback") == ("ValueError" in ending), "nothing else complains"
    assert "leaked" not in err


@pytest.mark.parametrize("to", ["head", "group"])
@pytest.mark.parametrize("doing", [IDLE, "envs.step([0, 0, 0])"], ids=["idle", "in a step"])
def test_ctrl_c_ends_the_script_and_its_workers(run: Run, doing: str, to: str) -> None:
    script = run(START + doing)
    script.read_line()
    if "step" in doing:
        script.open_gate().close()
    script.interrupt(to)
    returncode, _, err = script.finish()
    assert returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, f"only the head says so:\n{err}"


def test_ctrl_c_in_a_step_can_be_survived(run: Run) -> None:
    survive = """
try:
    envs.step([0, 0, 0])
except KeyboardInterrupt:
    envs.close(timeout=1)
    print("closed", envs.closed)
"""
    script = run(START + survive)
    script.read_line()
    script.open_gate().close()
    script.interrupt("group")
    assert script.finish() == (0, "closed True\n", "[worker 1] the last words of world 0\n")


def test_after_ctrl_c_in_a_step_a_reset_goes_on(run: Run) -> None:
    go_on = """
from gymnasium.vector import SyncVectorEnv
from tests.worlds import assert_same

envs.set_attr("_trouble", "wait")
theirs = SyncVectorEnv([World, World, lambda: TroubledWorld("nowhere")])
try:
    envs.step([0, 0, 0])
except KeyboardInterrupt:
    print("interrupted", flush=True)
for seed in (5, 6):
    assert_same(envs.reset(seed=seed), theirs.reset(seed=seed))
    for _ in range(3):
        assert_same(envs.step([0, 1, 2]), theirs.step([0, 1, 2]))
envs.close()
"""
    script = run(START + go_on)
    script.read_line()
    with script.open_gate():
        script.interrupt("head")
        assert script.read_line() == "interrupted\n"
    returncode, _, err = script.finish()
    assert returncode == 0, err


def test_ctrl_c_while_workers_start_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    source = """
import signal, sys
from clusterenv import ClusterEnv, Network

transport, gate = sys.argv[1:]

def make():
    open(gate, "w").close()
    signal.pause()

ClusterEnv([make] * 3, num_workers=2, network=Network(transport=transport))
"""
    script = run(source)
    open(tmp_path / "gate", "rb").close()  # Until a worker makes an environment.
    script.interrupt("group")
    returncode, _, err = script.finish()
    assert returncode == -signal.SIGINT
    assert err.count("KeyboardInterrupt") == 1, f"only the head says so:\n{err}"


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("doing", ["signal.pause()", "envs.step([0, 0, 0])"])
def test_workers_notice_that_their_head_was_killed(run: Run, doing: str, death: signal.Signals) -> None:
    script = run(START + doing)
    pids = json.loads(script.read_line())
    if "step" in doing:
        script.open_gate().close()
    os.kill(script.process.pid, death)
    returncode, _, err = script.finish()
    assert wait_until_gone(pids) == []
    assert returncode == -death
    assert "Traceback" not in err


def test_a_forked_child_that_ends_does_not_take_the_workers_with_it(run: Run) -> None:
    fork = """
import gc
child = os.fork()
if child == 0:
    del envs
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
envs.set_attr("_place", ["", "", "nowhere"])
envs.step([0, 0, 0])
print("fine")
envs.close()
"""
    script = run(START + fork)
    script.read_line()
    returncode, out, err = script.finish()
    assert (returncode, out) == (0, "fine\n"), err


def test_close_returns_when_the_workers_are_gone(remote: Backend) -> None:
    envs = ClusterEnv(make_factories(3), **remote)
    pids = envs.worker_pids
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    envs.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "neither running nor zombies"


def test_without_a_close_the_last_reference_ends_the_workers(remote: Backend) -> None:
    envs = ClusterEnv(make_factories(3), **remote)
    pids = envs.worker_pids
    del envs
    gc.collect()
    assert wait_until_gone(pids) == []


def test_closing_one_leaves_the_other_alone(remote: Backend) -> None:
    with ClusterEnv(make_factories(2), **remote) as kept:
        with ClusterEnv(make_factories(2), **remote) as closed:
            closed.reset(seed=1)
            kept.reset(seed=1)
        kept.step([0, 1])
        assert kept.get_attr("index") == (0, 1)


def test_environments_are_closed_when_the_vector_is(backend: Backend, tmp_path: Path) -> None:
    class Farewell(World):
        def close(self) -> None:
            (tmp_path / f"closed {self.index}").touch()

    with ClusterEnv([lambda index=index: Farewell(index=index) for index in range(3)], **backend):  # type: ignore[misc]  # mypy cannot infer a lambda's default
        for path in tmp_path.iterdir():
            path.unlink()  # What the head made to look at its spaces has been closed by now.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed 0", "closed 1", "closed 2"]


def test_idle_workers_and_a_waiting_head_burn_no_cpu(remote: Backend) -> None:
    with ClusterEnv([World, lambda: TroubledWorld("step", "hang")], **remote) as envs:
        envs.reset(seed=1)
        envs.step_async(np.zeros(2, np.int64))
        with pytest.raises(CallTimeout):
            envs.step_wait(timeout=0.2)  # Worker 0 has answered by now, and worker 1 hangs.
        workers_before = [cpu_s(pid) for pid in envs.worker_pids]
        head_before = time.process_time()
        with pytest.raises(CallTimeout):
            envs.step_wait(timeout=IDLE_S)
        head_used = time.process_time() - head_before
        workers_used = [cpu_s(pid) - before for pid, before in zip(envs.worker_pids, workers_before, strict=True)]
        envs.close(terminate=True)
    assert max(workers_used) <= 0.04 * IDLE_S
    assert head_used <= 0.05 * IDLE_S


def test_workers_nobody_calls_burn_no_cpu(remote: Backend) -> None:
    with ClusterEnv(make_factories(3), **remote) as envs:
        envs.reset(seed=1)
        before = [cpu_s(pid) for pid in envs.worker_pids]
        assert wait_until_gone([envs.worker_pids[0]], IDLE_S) == [envs.worker_pids[0]]
        used = [cpu_s(pid) - was for pid, was in zip(envs.worker_pids, before, strict=True)]
    assert max(used) <= 0.04 * IDLE_S


def cpu_s(pid: int) -> float:
    """Seconds of CPU a process has used, in all its threads: to the nanosecond, where `stat` guesses in ticks."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
