"""The processes that are measured: the environment they start in, and, read from /proc, who belongs to one of them."""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ProcessStat:
    """What /proc says about one process."""

    pid: int
    parent: int
    session: int
    started: int
    cpu_s: float


def read_processes() -> list[ProcessStat]:
    """Read all processes that exist now."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            text = (path / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended while we were looking.
        # The name, in parentheses, may itself hold spaces and parentheses: count from the last one.
        fields = text[text.rindex(")") + 2 :].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / ticks_per_s
        found.append(ProcessStat(int(path.name), int(fields[1]), int(fields[3]), int(fields[19]), cpu_s))
    return found


def read_tree(root: int) -> list[ProcessStat]:
    """Read a process, its descendants, and whatever else is in their sessions, the root first.

    Both are needed: workers may have left the session, and orphans of the session have lost their parent.
    """
    processes = read_processes()
    members = {root}
    sessions = {root}
    grew = True
    while grew:
        grew = False
        for process in processes:
            if process.pid not in members and (process.parent in members or process.session in sessions):
                members.add(process.pid)
                grew = True
            if process.pid in members and process.session == process.pid and process.pid not in sessions:
                sessions.add(process.pid)
                grew = True
    return sorted((process for process in processes if process.pid in members), key=lambda process: process.pid != root)


def signal_tree(root: int, number: signal.Signals) -> None:
    """Send a signal to a whole process tree."""
    for process in read_tree(root):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill_survivors(members: Sequence[ProcessStat]) -> None:
    """Kill those of some processes that still exist; a newer process that got an old number is left alone."""
    then = {(process.pid, process.started) for process in members}
    for process in read_processes():
        if (process.pid, process.started) in then:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def measure_cpu(root: int) -> float:
    """Sum the CPU seconds a process tree has used so far, the ended members excepted."""
    return sum(process.cpu_s for process in read_tree(root))


def measure_machine_cpu() -> float:
    """Sum the CPU seconds that all processes of this machine have used so far."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def child_environment() -> dict[str, str]:
    """Build the environment of a contender: it finds this package, and libraries use one thread unless told."""
    # Absolute, because contenders have another working directory.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(ROOT), *(os.path.abspath(path) for path in inherited if path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "SDL_VIDEODRIVER": "dummy",
        "PYTHONWARNINGS": "ignore",
    }
