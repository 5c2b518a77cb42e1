"""Every test has a deadline and leaves nothing behind: no process, file, descriptor, thread or shared memory.

The deadline is pytest-timeout's (pyproject.toml): a signal that fails the test, with a traceback. A test that hangs in
C code, where no handler runs, is ended by pytest's faulthandler a while later, with the stacks of all threads.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from clusterenv import Network
from tests.remains import MARK, belongings, command_of, descendants, shared_memory, unused, wait_until_gone, warm_up

__all__ = ["MARK", "Backend", "descendants", "wait_until_gone"]

Backend = dict[str, Any]

# Hypothesis tries the same examples every time: what passes once passes always, and nobody is timed.
settings.register_profile("the same every time", derandomize=True, deadline=None)
settings.load_profile("the same every time")

# What ClusterEnv is asked for beyond its environments: three ways to run the same thing, and each must be right.
BACKENDS: dict[str, Backend] = {
    "in process": {"num_workers": 0},
    "shm": {"num_workers": 2, "network": Network(transport="shm")},
    "zmq": {"num_workers": 2, "network": Network(transport="zmq")},
}
# Their tests share a cluster, a network or environments, so one process runs them all; others go to whoever is free.
TOGETHER = ("test_slurm", "test_doctor_slurm", "test_links", "test_vector_api")
# What the transports themselves do, and so must be seen over each of them whenever something was changed.
OVER_EACH = ("test_exchange", "test_modes")
# None of pytest's own, which end at 5: `.ci/run` tries failed tests again if the status is 1.
SKIPPED_STATUS = 6
REMOTE_BACKENDS = {name: backend for name, backend in BACKENDS.items() if backend["num_workers"]}


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C mean something here and in all that tests start, also in the background, under nohup, or in CI.

    There SIGINT is ignored; Python then installs no handler, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell xdist which tests belong together, and leave half of all pairs of tests for `make slow`.

    Most laws do not depend on the transport, and to start workers takes longer than anything else. So `make test` runs
    each of them over one transport, as many over the one as over the other, and `make slow` over the other.
    """
    pairs: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        transport = transport_of(item)
        if transport and item.path.stem not in OVER_EACH and not item.get_closest_marker("quick"):
            pairs[item.nodeid.replace(transport, "")][transport] = item
    for name, pair in pairs.items():
        if len(pair) == len(REMOTE_BACKENDS):
            pair[sorted(pair)[zlib.crc32(name.encode()) % len(pair)]].add_marker(pytest.mark.slow)


def transport_of(item: pytest.Item) -> str:
    """Return the transport that a test is run over, if it is run over each of them in turn; else ""."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    for name in ("remote", "backend", "transport"):
        value = params.get(name)
        if isinstance(value, dict):
            value = value["network"].transport if "network" in value else None
        if value in REMOTE_BACKENDS:
            return str(value)
    return ""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let libraries make now what they make once and keep for the life of the process: it is not ours.

    Torch makes a cache in the temporary directory of the moment, when `torch.optim` loads `torch._dynamo`; pyzmq makes
    a thread for all zero-copy sends.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "torch"))
    warm_up()
    if (torch := sys.modules.get("torch")) is not None:
        importlib.import_module(
            "torch._dynamo"
        )  # Here and not where agents are: workers import those, and it takes a second.
        torch.set_num_threads(1)  # Networks this small only suffer from more, beside workers and other tests.
    # All test modules are imported by now: what they have made stays, and need not be looked at after every test.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def chance_is_the_same_every_time() -> None:
    """Seed the generators that tests draw from without saying so: what passes once passes always."""
    random.seed(0)
    np.random.seed(0)  # The global generator is the one that others draw from.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS), scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Keyword arguments of ClusterEnv that choose where and how the environments run."""
    return dict(request.param)


@pytest.fixture(params=list(REMOTE_BACKENDS.values()), ids=list(REMOTE_BACKENDS), scope="module")
def remote(request: pytest.FixtureRequest) -> Backend:
    """Like `backend`, but only those with real worker processes."""
    return dict(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves something of its own behind; what others do on this machine is not its fault."""
    tmp_path_factory.getbasetemp()  # Made now, pytest's own directory does not land in the one we watch.
    with tempfile.TemporaryDirectory(prefix="ce") as scratch:
        monkeypatch.setenv(MARK, uuid.uuid4().hex)
        monkeypatch.setenv("TMPDIR", scratch)
        monkeypatch.setattr(tempfile, "tempdir", None)
        before = belongings()
        shared_before = shared_memory()
        yield
        gc.collect()  # Objects in reference cycles are not what we are after.
        left = sorted(belongings() - before)
        for pid in descendants():
            left.append(f"process {pid}: {command_of(pid)}")
            os.kill(pid, signal.SIGKILL)  # It has been seen; the next test shall not suffer from it.
        left += [f"/dev/shm/{name}" for name in unused(shared_memory() - shared_before)]
        left += [str(path) for path in Path(scratch).rglob("*")]
        monkeypatch.undo()
    assert not left, "The test left behind:\n" + "\n".join(left)


def guardian_of(worker_pid: int) -> int:
    """Return the process id of a worker's guardian, which is the process that its launcher has started."""
    return int(Path(f"/proc/{worker_pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def seconds() -> Callable[[], float]:
    """A stopwatch: each call returns the seconds since the test began."""
    start = time.monotonic()
    return lambda: time.monotonic() - start


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where everything is installed (CI), a skipped test is an error, which no second try can mend."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CLUSTERENV_NO_SKIPS") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = SKIPPED_STATUS
