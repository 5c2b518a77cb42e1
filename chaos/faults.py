"""The kinds of fault, and how each is done to a worker; those of networks and clusters are in `places`."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.provoked import Board, Deed

PAUSE = 0.4  # of the silence: long enough to be felt, too short to be taken for dead
POLL_S = 0.02
REPLACED_WITHIN_S = 60.0


class Effect(enum.Enum):
    """What a fault leads to."""

    LOSS = "workers are lost, and replaced"
    NONE = "nobody is lost"
    ERROR = "the learner gets WorkerFailed, and resets"
    INTERRUPT = "the learner gets KeyboardInterrupt, and resets"


@dataclass(frozen=True)
class Target:
    """A worker to be harmed, at the moment it is.

    Attributes:
        pids: The processes of all workers, this one's among them.
        env_indices: What it hosts.
        current_pids: Asks for `pids` once more.
        interrupt: Interrupts the head's call, the next one if there is none now.
    """

    worker_index: int
    pids: Sequence[int]
    env_indices: Sequence[int]
    silence_s: float
    current_pids: Callable[[], Sequence[int]]
    interrupt: Callable[[], None]

    @property
    def pid(self) -> int:
        """Its process."""
        return self.pids[self.worker_index]

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal; one that is gone already needs none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def await_successor(self) -> int | None:
        """Wait until another process has its place; returns it, or None if none comes."""
        ends_at = time.monotonic() + REPLACED_WITHIN_S
        while time.monotonic() < ends_at:
            pid = self.current_pids()[self.worker_index]
            if pid != self.pid:
                return pid
            time.sleep(POLL_S)
        return None


def only_itself(target: Target) -> Collection[int]:
    """Say that nobody else is harmed."""
    return [target.worker_index]


def everybody(target: Target) -> Collection[int]:
    """Say that all workers are."""
    return range(len(target.pids))


@dataclass(frozen=True)
class Fault:
    """Something that can befall a worker.

    Attributes:
        kind: One of the ten, or one of a cluster's own.
        variant: Which form of it.
        strike: Does it; returns when it is over, which for a cut link is when it is mended.
        reach: Which workers it harms.
        is_rare: Whether it takes so long that once in a while must do.
    """

    kind: str
    variant: str
    effect: Effect
    strike: Callable[[Target], None]
    reach: Callable[[Target], Collection[int]] = only_itself
    is_rare: bool = False


def kill(target: Target) -> None:
    """End it at once, as the kernel does when memory runs out."""
    target.signal(signal.SIGKILL)


def kill_twice(target: Target) -> None:
    """End it, and its successor as soon as it has come."""
    kill(target)
    if (successor := target.await_successor()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(successor, signal.SIGKILL)


def terminate(target: Target) -> None:
    """Ask it to end, as a cluster does before a preemption."""
    target.signal(signal.SIGTERM)


def stop(target: Target) -> None:
    """Freeze it for good."""
    target.signal(signal.SIGSTOP)


def pause(target: Target) -> None:
    """Freeze it for a while that is shorter than the silence."""
    _freeze_for(target, PAUSE * target.silence_s)


def freeze_and_thaw(target: Target) -> None:
    """Freeze it for so long that it is replaced, and let it come back."""
    _freeze_for(target, too_long(target))


def _freeze_for(target: Target, seconds: float) -> None:
    target.signal(signal.SIGSTOP)
    time.sleep(seconds)
    target.signal(signal.SIGCONT)


def too_long(target: Target) -> float:
    """Return for how many seconds a worker must be silent to be replaced."""
    return 2 * target.silence_s + 2


def list_faults(board: Board, scratch: Scratch | None) -> list[Fault]:
    """List the faults that need nothing but processes and, for a full disk, a small one of its own."""

    def tell(*, deed: Deed) -> Callable[[Target], None]:
        return lambda target: board.tell(target.env_indices[-1:], deed)

    faults = [
        Fault("kill", "once", Effect.LOSS, kill),
        Fault("kill", "its successor too", Effect.LOSS, kill_twice),
        Fault("freeze", "for a moment", Effect.NONE, pause),
        Fault("freeze", "and thaw", Effect.LOSS, freeze_and_thaw),
        Fault("freeze", "for good", Effect.LOSS, stop),
        Fault("SIGTERM", "", Effect.LOSS, terminate),
        Fault("segfault", "in a step", Effect.LOSS, tell(deed=Deed.SEGFAULT)),
        Fault("interrupted head", "", Effect.INTERRUPT, lambda target: target.interrupt()),
        Fault("hung environment", "asleep", Effect.LOSS, tell(deed=Deed.HANG)),
        Fault("hung environment", "holding the GIL", Effect.LOSS, tell(deed=Deed.HANG_HOLDING_GIL)),
        Fault("odd exception", "unprintable", Effect.ERROR, tell(deed=Deed.RAISE_UNPRINTABLE)),
        Fault("odd exception", "unencodable", Effect.ERROR, tell(deed=Deed.RAISE_UNENCODABLE)),
        Fault("odd exception", "without a module", Effect.ERROR, tell(deed=Deed.RAISE_HOMELESS)),
    ]
    if scratch is not None:
        faults += [
            Fault("full disk", "while it prints", Effect.NONE, fill_while_printing(scratch, board)),
            Fault("full disk", "while it is killed", Effect.LOSS, fill_while_killed(scratch)),
        ]
    return faults


def fill_while_printing(scratch: Scratch, board: Board) -> Callable[[Target], None]:
    """Return what fills the disk under the logs while a worker's environments print."""

    def strike(target: Target) -> None:
        with scratch.filled():
            board.tell(target.env_indices, Deed.TALK)
            time.sleep(target.silence_s / 2)
            board.tell(target.env_indices, Deed.NOTHING)
            time.sleep(target.silence_s / 4)  # Until the last step that was told to print is over.

    return strike


def fill_while_killed(scratch: Scratch) -> Callable[[Target], None]:
    """Return what fills the disk, kills a worker, and makes room when its successor has come."""

    def strike(target: Target) -> None:
        with scratch.filled():
            kill(target)
            target.await_successor()

    return strike


class Scratch:
    """A small disk of its own, for temporary files and logs.

    Args:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """Fill it to the last byte for a while."""
        filler = self.path / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            yield
        finally:
            filler.unlink()
