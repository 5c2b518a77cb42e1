"""The end: `close`, and what is left after it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from clusterenv.testing.processes import command_of, wait_for_end
from clusterenv.testing.subject import Broken, NotApplicable, Subject

_END_S = 5.0
_CYCLES = 3
# Python's own processes: started by the first use of multiprocessing, and living as long as the process.
_PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def close_twice(subject: Subject) -> None:
    """`close` may be called twice, and sets `closed`."""
    play = subject.ended().play
    if getattr(play.envs.unwrapped, "closed", None) is not True:
        raise Broken(f"After close(), `closed` is {getattr(play.envs.unwrapped, 'closed', 'not there')}, not True.")
    play.note("envs.close()")
    play.envs.close()


def use_after_close(subject: Subject) -> None:
    """After `close`, `reset` and `step` raise."""
    play = subject.ended().play
    actions = play.sample()
    uses: dict[str, Callable[[], object]] = {"step": lambda: play.step(actions), "reset": play.reset}
    for name, use in uses.items():
        try:
            use()
        except Exception:  # noqa: BLE001 - any kind will do
            continue
        raise Broken(f"`{name}` works on after close().")


def processes(subject: Subject) -> None:
    """After `close`, no process that it has started is left."""
    _demand_linux()
    started = subject.ended().started
    commands = {process: " ".join(command_of(process.pid)) for process in started}
    started = {process for process in started if not any(own in commands[process] for own in _PYTHONS_OWN)}
    if left := wait_for_end(started, _END_S):
        names = ", ".join(f"{process.pid} ({commands[process]})" for process in left)
        raise Broken(f"Of {len(started)} processes, these run on {_END_S:g} s after close(): {names}.")


def descriptors(subject: Subject) -> None:
    """Made and closed again and again, it does not use up file descriptors."""
    _demand_linux()
    while len(subject.open_files) < _CYCLES:  # Other laws have usually made and closed this many already.
        subject.fresh().begin()
        subject.forget(is_all=False)
    counts = subject.open_files[-_CYCLES:]
    if all(later > earlier for earlier, later in itertools.pairwise(counts)):
        raise Broken(
            f"Of {_CYCLES} that were made and closed, each left more open files and sockets: {counts} in this process.",
            ["envs = make()", "envs.action_space.seed(0)", "envs.reset(seed=0)", "envs.close()", "# and so on"],
        )


def _demand_linux() -> None:
    if sys.platform != "linux":
        raise NotApplicable("This can only be seen on Linux.")
