"""What runs on macOS and Windows runs without whatever only Linux has; those systems themselves are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Imported by every Python process of the test before anything else, the workers included.
PRETENCE = """
import builtins, ctypes, io, os, sys

import gymnasium, multiprocessing.synchronize, numpy, signal, subprocess, zmq  # others' code may use what goes now
import _multiprocessing

GONE = {
    os: "memfd_create pidfd_open eventfd sched_getaffinity sched_setaffinity prlimit MFD_CLOEXEC",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    _multiprocessing: "SemLock",
}
if os.environ["PRETEND"] == "win32":
    GONE[os] += " fork forkpty killpg getpgid setpgid setsid getuid geteuid sched_yield waitid writev mkfifo O_CLOEXEC"
    GONE[signal] += " SIGKILL SIGQUIT SIGHUP SIGCHLD SIGTTOU SIGALRM pthread_sigmask setitimer sigwait valid_signals"
    for name in ("fcntl", "resource", "termios", "pwd", "grp"):
        sys.modules[name] = None
    zmq.has = lambda feature: feature != "ipc"
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def without_proc(function):
    def call(path, *arguments, **options):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return function(path, *arguments, **options)

    return call


for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "stat"), (os, "readlink")):
    setattr(module, name, without_proc(getattr(module, name)))


class NoLibrary(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None:
            raise OSError("the C library is asked for")
        super().__init__(name, *arguments, **options)


ctypes.CDLL = NoLibrary
sys.platform = os.environ["PRETEND"]
"""

IMPORTS = """
import importlib, pkgutil, sys
import clusterenv

assert sys.platform == sys.argv[1]
ELSEWHERE = tuple("clusterenv." + name for name in "adapters recording launchers.kubernetes. launchers.ray".split())
for module in pkgutil.walk_packages(clusterenv.__path__, "clusterenv."):
    if not module.name.startswith(ELSEWHERE) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""

SMOKE = (Path(__file__).parent.parent / "scripts" / "smoke.py").read_text()


@pytest.fixture(params=["darwin", "win32"])
def pretend(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """Return the system's name, and the environment of a process that takes itself to be there."""
    (tmp_path / "sitecustomize.py").write_text(PRETENCE)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return request.param, os.environ | {"PRETEND": request.param, "PYTHONPATH": path}


@pytest.mark.slow
@pytest.mark.parametrize("script", [IMPORTS, SMOKE], ids=["import", "run"])
def test_without_what_only_linux_has(script: str, pretend: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    name, environment = pretend
    command = [sys.executable, "-c", script, name]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() in ("", f"All is well on {name}.")
