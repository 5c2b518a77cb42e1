"""Chaos: kills and freezes the local workers of a running script, seeded, to see whether the script survives.

Nothing is known about the script but its process. Its workers are found among the processes that descend from it; each
is held by a descriptor (a pidfd) and checked once more before anything is done to it, so that no other process is ever
hit, even if it has meanwhile been given the same id.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterenv.errors import ConfigError
from clusterenv.testing.processes import Process, children_by_parent, command_of, look_at, wait_for_end

KINDS = ("kill", "freeze")

_WORKER_COMMAND = ["-m", "clusterenv.worker"]
_GUARDIAN_NAME, _READY_NAME = "ce-guardian", "ce-worker"  # As `worker.guardian` names them.
_INDEX_VARIABLE = b"CLUSTERENV_WORKER="
_LOOK_S = 0.1
_DEATH_S = 5.0
_SCRIPT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The faults to inject.

    Attributes:
        num_faults: The number of faults.
        every_s: The average number of seconds between two faults; each pause is 0.5 to 1.5 times as long.
        kinds: The kinds of faults, "kill" or "freeze".
        freeze_s: For how many seconds a worker is frozen. If longer than `Timeouts.silence_s`, it is replaced.
        seed: The seed of all random choices: when, which kind, and which worker.
        patience_s: How many seconds to wait for workers, at first and whenever some are missing.
    """

    num_faults: int = 10
    every_s: float = 5.0
    kinds: Sequence[str] = KINDS
    freeze_s: float = 15.0
    seed: int = 0
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        if self.num_faults < 1:
            raise ConfigError(f"The number of faults must be at least 1, got {self.num_faults}.")
        for name, value in (("every", self.every_s), ("freeze", self.freeze_s), ("patience", self.patience_s)):
            if not value > 0:
                raise ConfigError(f"--{name} must be a positive number of seconds, got {value:g}.")
        if not self.kinds or set(self.kinds) - set(KINDS):
            raise ConfigError(f"The kinds of faults are {' and '.join(KINDS)}, got {', '.join(self.kinds)!r}.")


@dataclass(frozen=True)
class Target:
    """A worker's process.

    Attributes:
        index: The worker's index.
        head_pid: The process id of its head.
    """

    process: Process
    index: int
    head_pid: int

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.process.pid})"


def find_workers(script_pid: int) -> list[Target]:
    """Find the workers on this machine whose head is a process or one of its descendants, ordered by index.

    A worker is the child of its guardian, which is a child of the head, and leads a process group; processes that
    environments have started do not, even if they have the same name and command line. A worker that has not made its
    environments yet does not count: losing it would be a failed start.
    """
    children = children_by_parent()
    targets = []
    heads = [script_pid]
    for head_pid in heads:  # Which grows meanwhile.
        for info in children.get(head_pid, ()):
            pid = info.process.pid
            if command_of(pid)[1:3] != _WORKER_COMMAND:
                heads.append(pid)
            elif info.name == _GUARDIAN_NAME:
                own = [child for child in children.get(pid, ()) if child.name == _READY_NAME]
                workers = [child for child in own if child.group_pid == child.process.pid]
                targets += [Target(worker.process, _index_of(pid), head_pid) for worker in workers]
    return sorted(targets, key=lambda target: (target.head_pid, target.index))


def harass_process(pid: int, plan: Plan) -> Generator[str, None, bool]:
    """Harass the workers of a running script; yield lines that say what is done, and return whether it survived.

    Raises:
        ConfigError: The process does not exist, belongs to another user, or is not a head.
    """
    campaign = Campaign(find_head(pid), plan)
    yield from campaign.run()
    faults = campaign.describe()
    if campaign.has_ended:
        yield f"{faults}; then the script ended. Its exit status is known only to who has started it."
        return False
    return (yield from _report_on_one_that_runs(campaign))


def harass_command(command: Sequence[str], plan: Plan) -> Generator[str, None, bool]:
    """Start a script, harass its workers and wait for its end; yield and return as `harass_process` does.

    Raises:
        ConfigError: The command cannot be started.
    """
    _demand_linux()
    try:
        script = subprocess.Popen(command)
    except OSError as error:
        raise ConfigError(f"Cannot start {command[0]!r}: {error.strerror}.") from error
    try:
        campaign = Campaign(script.pid, plan)
        yield from campaign.run()
        if not campaign.has_ended:
            yield from _report_on_one_that_runs(campaign)
        status = script.wait()
    except BaseException as error:
        # Ctrl-C in a terminal also reaches the script, which then ends in its own way.
        _end(script, has_heard=isinstance(error, KeyboardInterrupt))
        raise
    how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    if not campaign.done.total():
        yield f"the script ended with {how} before the first fault: give it more to do, or --every a lower number."
        return False
    yield f"{campaign.describe()}; the script ended with {how}: it has {'' if status == 0 else 'not '}survived."
    return status == 0


def _report_on_one_that_runs(campaign: Campaign) -> Generator[str, None, bool]:
    workers = f"{campaign.num_workers} worker{'s' if campaign.num_workers != 1 else ''}"
    if not campaign.num_workers:
        yield f"{campaign.describe()}: no worker was seen within {campaign.plan.patience_s:g} s."
    elif campaign.is_complete:
        yield f"{campaign.describe()}; the script goes on, with all {workers}."
    else:
        yield (
            f"{campaign.describe()}; the script is there, but not all {workers} came back within "
            f"{campaign.plan.patience_s:g} s: does it hang, or make no calls?"
        )
    return campaign.is_complete and sum(campaign.done.values()) > 0


def _end(script: subprocess.Popen[bytes], *, has_heard: bool) -> None:
    """End the script that was started; wait for it first, if it has already been signalled."""
    for number in (*([None] if has_heard else []), signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            script.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            script.wait(_SCRIPT_S)
            return


def find_head(pid: int) -> int:
    """Check that a process may be harassed; return its id if it is a head, or that of the head it has started.

    Raises:
        ConfigError: The process does not exist, belongs to another user, or has no head or several below it.
    """
    _demand_linux()
    info = look_at(pid)
    if info is None or info.is_zombie:
        raise ConfigError(f"There is no process {pid}.")
    owner = os.stat(f"/proc/{pid}").st_uid
    if owner != os.geteuid():
        raise ConfigError(f"Process {pid} belongs to another user ({owner}, and you are {os.geteuid()}): left alone.")
    heads = sorted({target.head_pid for target in find_workers(pid)})
    if not heads:
        raise ConfigError(
            f"Process {pid} ({' '.join(command_of(pid)) or info.name}) is not the head of a ClusterEnv with workers on "
            "this machine: none of the processes that descend from it is a worker. Give the id of the training "
            "script's process, once its ClusterEnv is made. Workers on other machines are out of reach: try the same "
            "script with workers on this one."
        )
    if pid in heads:
        return pid
    if len(heads) > 1:  # For a shell or process 1, these may be anybody's.
        listed = "; ".join(f"{head} ({' '.join(command_of(head))[:80]})" for head in heads[:10])
        raise ConfigError(f"{len(heads)} scripts with workers descend from process {pid}: give one's id. {listed}.")
    return heads[0]


def _demand_linux() -> None:
    if sys.platform != "linux":
        raise ConfigError("Chaos needs Linux, to be sure whom it hits.")


class _Held:
    """A worker's process, held by a descriptor: a signal reaches this process or none."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.thaw_at = 0.0
        self._handle = os.pidfd_open(target.process.pid)
        info = look_at(target.process.pid)
        if info is None or info.process != target.process:
            os.close(self._handle)
            raise ProcessLookupError(f"{target} has ended")

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        os.close(self._handle)


@dataclass
class Campaign:
    """Faults injected into the workers of one script, one after another.

    Attributes:
        script_pid: The script's process, or one that has started it.
        num_workers: The largest number of workers seen at once.
        done: How many faults of each kind were injected.
        has_ended: Whether the script has ended.
        is_complete: Whether all of these workers were there when last checked.
    """

    script_pid: int
    plan: Plan
    num_workers: int = 0
    done: Counter[str] = field(default_factory=Counter)
    has_ended: bool = False
    is_complete: bool = False
    _seen: list[Target] = field(default_factory=list)
    _frozen: list[_Held] = field(default_factory=list)
    _began_at: float = field(default_factory=time.monotonic)

    def run(self) -> Generator[str, None, None]:
        """Inject all faults, then wait until all workers are back; yield lines that say what is done.

        Close the iterator in any case: that thaws frozen workers.
        """
        self._script = os.pidfd_open(self.script_pid)
        try:
            yield from self._await_workers()
            draw = random.Random(self.plan.seed)
            for _ in range(self.plan.num_faults):
                # The same number of draws for every fault, so that the same seed gives the same plan.
                pause_s, kind, place = draw.uniform(0.5, 1.5), draw.choice(list(self.plan.kinds)), draw.random()
                yield from self._wait(pause_s * self.plan.every_s)
                yield from self._await_workers()
                if self.has_ended or not self.is_complete:
                    break
                yield from self._strike(kind, self._seen[int(place * len(self._seen))])
            while self._frozen and not self.has_ended:
                yield from self._wait(_LOOK_S)
            yield from self._await_workers()
        finally:
            with contextlib.ExitStack() as ends:  # All of them, even if one raises.
                ends.callback(os.close, self._script)
                for held in reversed(self._frozen):
                    ends.callback(self._thaw, held)

    def describe(self) -> str:
        """Say how many faults were injected."""
        total = sum(self.done.values())
        kinds = ", ".join(f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in sorted(self.done.items()))
        return f"{total} fault{'s' if total != 1 else ''}" + (f" ({kinds})" if total else "")

    def _strike(self, kind: str, target: Target) -> Iterator[str]:
        try:
            if kind == "freeze":
                self._freeze(target)
            else:
                with contextlib.closing(_Held(target)) as held:
                    held.signal(signal.SIGKILL)
                wait_for_end([target.process], _DEATH_S)  # Otherwise it could be mistaken for its successor.
        except ProcessLookupError:
            yield self._line(f"{target} has just ended by itself")
            return
        self.done[kind] += 1
        yield self._line(f"{kind} {target}" + (f" for {self.plan.freeze_s:g} s" if kind == "freeze" else ""))

    def _freeze(self, target: Target) -> None:
        held = next((each for each in self._frozen if each.target == target), None)
        if held is not None:  # It is already frozen; extend that.
            held.thaw_at = time.monotonic() + self.plan.freeze_s
            return
        held = _Held(target)
        held.thaw_at = time.monotonic() + self.plan.freeze_s
        self._frozen.append(held)  # Before freezing it: after an interrupt in between, it is thawed.
        try:
            held.signal(signal.SIGSTOP)
        except ProcessLookupError:
            self._frozen.remove(held)
            held.close()
            raise

    def _thaw(self, held: _Held) -> str:
        try:
            held.signal(signal.SIGCONT)
            said = f"thaw {held.target}"
        except ProcessLookupError:
            said = f"{held.target} was given up while it was frozen"
        self._frozen.remove(held)
        held.close()
        return self._line(said)

    def _wait(self, seconds: float) -> Iterator[str]:
        """Wait this long, or for the end of the script; thaw workers that are due."""
        ends_at = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._script, select.POLLIN)
        while not self.has_ended and (left_s := ends_at - time.monotonic()) > 0:
            due_s = min((held.thaw_at - time.monotonic() for held in self._frozen), default=left_s)
            self.has_ended = bool(poll.poll(max(0.0, min(left_s, due_s)) * 1000))
            for held in [each for each in self._frozen if each.thaw_at <= time.monotonic()]:
                yield self._thaw(held)

    def _await_workers(self) -> Iterator[str]:
        """Wait until all workers are back, so that the same seed means the same workers every time."""
        ends_at = time.monotonic() + self.plan.patience_s
        while not self.has_ended:
            self._seen = find_workers(self.script_pid)
            count = len(self._seen)
            self.num_workers = max(self.num_workers, count)
            self.is_complete = count == self.num_workers > 0
            if self.is_complete or time.monotonic() >= ends_at:
                return
            yield from self._wait(_LOOK_S)

    def _line(self, text: str) -> str:
        return f"{time.monotonic() - self._began_at:7.1f} s  {text}"


def _index_of(guardian_pid: int) -> int:
    try:
        variables = Path(f"/proc/{guardian_pid}/environ").read_bytes().split(b"\0")
        return next(int(each.removeprefix(_INDEX_VARIABLE)) for each in variables if each.startswith(_INDEX_VARIABLE))
    except (OSError, ValueError, StopIteration):
        return -1  # It has just ended.
