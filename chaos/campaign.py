"""One place's faults, one after another: `python -m chaos.campaign ORDER`, a process of its own for each place.

For each fault a learner works in one mode; a thread strikes at a random moment, while the mode is taken up, under way
or left; and the learner goes on until every environment that was harmed has delivered again. Says what came of each
fault, a line of JSON each, on standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tests.numbered import EPISODE, INSTANCE, STEP, Checker, Inconsistent
from tests.remains import (
    MARK,
    belongings,
    command_of,
    descendants,
    shared_memory,
    unused,
    wait_until_gone,
    warm_up,
)

from chaos.faults import Effect, Fault, Scratch, Target, list_faults
from chaos.footprint import Course
from chaos.modes import MODES, NUM_STEPS, Calls, Learner, Shifted, reset
from chaos.places import PLACES
from chaos.places.place import LOGS, Place, open_scratch
from chaos.provoked import Board, Deed, make_provoked
from clusterenv import EveryUpdate, Faults, Timeouts
from clusterenv.config import split_shards
from clusterenv.errors import ClusterEnvError, WorkerFailed

ENVS_PER_WORKER = 3
MOMENTS = ("begin", "middle", "middle", "end")  # of the mode, when the fault comes
CLOSE_S = 60.0
GONE_S = 30.0
MAX_GROWTH_BYTES = 8e6  # Of memory: interpreters and allocators keep some.
NO_FAULT = Fault("none", "", Effect.NONE, lambda target: None)
RARE = 8  # Of a fault that takes long there is one where others have so many.


@dataclass(frozen=True)
class Order:
    """What to do.

    Attributes:
        ends_at: When to begin no further fault, by the wall clock.
    """

    place: str
    transport: str
    num_faults: int
    num_workers: int
    silence_s: float
    seed: int
    ends_at: float
    kinds: Sequence[str]
    modes: Sequence[str]


@dataclass(frozen=True)
class Case:
    """One fault, and what came of it.

    Attributes:
        seconds: From the fault until all that it harmed had delivered again; None if they did not.
        problem: What should not be so; it begins with "inconsistent" or "wedged".
    """

    kind: str
    variant: str
    mode: str
    moment: str
    worker_index: int
    seconds: float | None
    problem: str = ""


class Wedged(BaseException):
    """The learner cannot go on: a call does not return, or environments deliver no more."""


def main(argv: Sequence[str]) -> int:
    """Carry out an order; returns the exit status."""
    order = Order(**json.loads(argv[0]))
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGALRM, _give_up)
    os.environ[MARK] = uuid.uuid4().hex
    warm_up()
    logging.getLogger("clusterenv").setLevel(logging.ERROR)  # Every loss is a warning.
    with open_scratch() as scratch, PLACES[order.place](order.transport, order.num_workers) as place:
        Campaign(order, place, scratch).run()
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(1)  # Unwinds, so that hosts and clusters are removed.


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    raise Wedged("nothing had come by the deadline")


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `Wedged` in the main thread after a while; where even that does not help, end the process."""
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # Again and again: what is raised in a destructor is lost.
    faulthandler.dump_traceback_later(seconds + 60, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def say(**line: Any) -> None:
    """Write a line for whoever started this process."""
    print(json.dumps(line), flush=True)


def first_line(text: str) -> str:
    """Return the first line of a message; what follows is logs and tracebacks."""
    return text.partition("\n")[0]


class Campaign:
    """Faults in one place.

    Args:
        order: What to do.
        place: Where workers run.
        scratch: A small disk, or None where there is none to fill.
    """

    def __init__(self, order: Order, place: Place, scratch: Scratch | None) -> None:
        self._order = order
        self._place = place
        self._rng = np.random.default_rng([order.seed, *order.place.encode(), *order.transport.encode()])
        self._num_envs = ENVS_PER_WORKER * order.num_workers
        self._shards = split_shards(self._num_envs, order.num_workers)
        self._scratch = Path(os.environ["TMPDIR"])
        self._board_path = self._scratch / "board"
        self._board = Board(self._board_path, self._num_envs)
        self._faults = [
            fault
            for fault in (*list_faults(self._board, scratch), *place.faults)
            if not order.kinds or fault.kind in order.kinds
        ]
        self._calls = Calls()
        self._calls.install()
        self._victims: list[int] = []
        self._close_problems: list[str] = []
        self._course = Course(every_s=1.0)

    def run(self) -> None:
        """Go through the schedule."""
        before, shared_before, processes_before = belongings(), shared_memory(), set(descendants())
        self._files_before = set(self._scratch.rglob("*"))
        self._start()
        num_steps, num_problems = 0, 0
        for fault, mode in self._schedule():
            if time.time() > self._order.ends_at:
                break
            self._course.look(self._envs.worker_pids)
            case = self._carry_out(fault, mode)
            say(case=asdict(case))
            if case.problem:
                num_problems += 1
                num_steps += self._checker.num_steps
                self._stop()
                self._start()
        self._course.note(self._envs.worker_pids)
        num_steps += self._checker.num_steps
        problem = self._finish()
        is_calm = not self._envs.losses
        self._stop()
        left = self._find_left(before, shared_before, processes_before)
        if not num_problems:
            left += self._course.find_growth(MAX_GROWTH_BYTES, of_workers=is_calm)
        say(num_steps=num_steps, problem=problem, left=left)

    def _schedule(self) -> Iterator[tuple[Fault, str]]:
        """Yield faults and modes: all kinds in all modes before any once more, in a random order."""
        if not self._order.num_faults:
            while True:
                yield from ((NO_FAULT, mode) for mode in self._order.modes)
        kinds = list(dict.fromkeys(fault.kind for fault in self._faults))
        pairs = [(kind, mode) for kind in kinds for mode in self._order.modes]
        num_left, num_rare = self._order.num_faults, 0
        while num_left:
            for index in self._rng.permutation(len(pairs)):
                kind, mode = pairs[index]
                variants = [fault for fault in self._faults if fault.kind == kind]
                fault = variants[int(self._rng.integers(len(variants)))]
                if fault.is_rare:
                    num_rare += 1
                    if num_rare % RARE != 1:
                        continue
                yield fault, mode
                num_left -= 1
                if not num_left:
                    return

    def _carry_out(self, fault: Fault, mode: str) -> Case:
        """Let one fault happen while the learner works in a mode, until it has gone on."""
        moment = MOMENTS[int(self._rng.integers(len(MOMENTS)))]
        striker = Striker(self, fault, self._choose_victim())
        num_losses = len(self._envs.losses)
        problem = ""
        try:
            learner = MODES[mode](self._envs, self._agent, self._checker, self._calls, self._rng)
            with deadline(self._place.deadline_s):
                self._work(learner, fault, moment, striker)
        except Inconsistent as error:
            problem = f"inconsistent: {error}"
        except Wedged:
            problem = f"wedged: {striker.describe_wait()}"
        except (KeyboardInterrupt, ClusterEnvError) as error:
            problem = f"wedged: {type(error).__name__}: {first_line(str(error))}"
        self._calls.note_arrival()
        striker.join()
        if striker.error is not None:
            raise striker.error
        for loss in self._envs.losses[num_losses:]:
            if loss.worker_index not in striker.lost_workers and not problem:
                problem = f"wedged: worker {loss.worker_index} was given up though it lived: {first_line(loss.reason)}"
        seconds = None if problem else striker.seconds
        return Case(fault.kind, fault.variant, mode, moment, striker.worker_index, seconds, problem)

    def _work(self, learner: Learner, fault: Fault, moment: str, striker: Striker) -> None:
        """Take a mode up, keep at it, and leave it; the fault comes in between."""

        def perform(action: Callable[[], None]) -> None:
            """Do a part of it; after what the fault justifies, reset, take the mode up again, and then do it."""
            is_broken = False
            while True:
                try:
                    if is_broken:
                        reset(self._envs, self._checker, self._calls)
                        if action != learner.begin:
                            learner.begin()
                        is_broken = False
                    action()
                    return
                except KeyboardInterrupt:
                    if fault.effect is not Effect.INTERRUPT:
                        raise
                except WorkerFailed:
                    if fault.effect is not Effect.ERROR:
                        raise
                is_broken = True
                self._calls.note_arrival()
                striker.note_error()

        if moment == "begin":
            striker.start()
        perform(learner.begin)
        if moment != "begin":
            for _ in range(3):
                perform(learner.advance)
            striker.start()
        if moment == "end":
            perform(learner.end)
            perform(learner.begin)
        while not striker.has_gone_on():
            perform(learner.advance)
        perform(learner.end)

    def _choose_victim(self) -> int:
        """Choose a worker: none is hit again before the others were, which would rightly be taken for a crash loop."""
        if not self._victims:
            self._victims = self._rng.permutation(self._order.num_workers).tolist()
        return self._victims.pop()

    def aim(self, worker_index: int) -> Target:
        """Look at a worker that is about to be harmed."""
        source = np.random.default_rng(int(self._rng.integers(2**32)))
        return Target(
            worker_index,
            self._envs.worker_pids,
            self.hosted_by([worker_index]),
            self._order.silence_s,
            lambda: self._envs.worker_pids,
            lambda: self._calls.interrupt(source),
        )

    def hosted_by(self, worker_indices: Collection[int]) -> list[int]:
        """Return the environments of some workers."""
        return [env_index for index in worker_indices for env_index in range(*self._shards[index])]

    def draw_delay_s(self) -> float:
        """Draw how long a fault waits for its moment: mostly for a few calls, sometimes for a part of one."""
        return float(self._rng.choice([0.0, 0.005, 0.05, 0.3]) * self._rng.random())

    @property
    def rows(self) -> NDArray[np.int64]:
        """What the learner has seen last."""
        return self._checker.rows

    @property
    def delivered(self) -> NDArray[np.int64]:
        """How many transitions the learner has been given, by environment."""
        return self._checker.delivered.copy()

    def _start(self) -> None:
        """Start workers, and reset their environments."""
        self._board.tell(range(self._num_envs), Deed.NOTHING)
        with deadline(self._place.deadline_s + CLOSE_S):
            self._envs = self._place.env_type(
                make_provoked(self._num_envs, self._board_path),
                num_workers=self._order.num_workers,
                sync=EveryUpdate(),
                faults=Faults(on_loss="replace", on_env_error="raise"),
                timeouts=Timeouts(silence_s=self._order.silence_s, call_s=self._place.call_s),
                **self._place.options,
            )
            self._agent = Shifted()
            self._checker = Checker(self._num_envs)
            self._checker.reset(self._envs.reset(seed=self._order.seed)[0])
            self._checker.rollout(self._envs.rollout(self._agent, NUM_STEPS))  # Its memory is made once, and kept.

    def _finish(self) -> str:
        """Compare what was seen with what was reported; returns what does not fit."""
        try:
            self._checker.finish(self._envs.losses)
        except Inconsistent as error:
            return f"inconsistent: {error}"
        return ""

    def _stop(self) -> None:
        """End the workers."""
        try:
            with deadline(CLOSE_S):
                self._envs.close()
        except Wedged:
            self._close_problems.append(f"close() did not return within {CLOSE_S:g} s")

    def _find_left(self, before: set[str], shared_before: set[str], processes_before: set[int]) -> list[str]:
        """Return what is left of all workers: processes, descriptors, threads, shared memory, files."""
        gc.collect()
        # All carry our mark. Process ids alone would not do: in a long run they are given to others.
        pids = set(descendants()) - processes_before
        left = [f"process {pid}: {command_of(pid)}" for pid in wait_until_gone(sorted(pids), GONE_S)]
        left += self._close_problems
        left += sorted(thing for thing in belongings() - before if not _is_daemon(thing))
        left += [f"/dev/shm/{name}" for name in unused(shared_memory() - shared_before)]
        known = {*self._files_before, self._scratch / LOGS, *(self._scratch / LOGS).rglob("*")}
        left += [str(path) for path in self._scratch.rglob("*") if path not in known]
        return left


def _is_daemon(thing: str) -> bool:
    """Whether one of our belongings is a child without our mark: a cluster's own, started again after a fault."""
    kind, _, rest = thing.partition(" ")
    return kind == "child" and int(rest.partition(":")[0]) not in descendants()


class Striker:
    """Lets a fault happen from a thread of its own, and knows when the learner has gone on after it."""

    def __init__(self, campaign: Campaign, fault: Fault, worker_index: int) -> None:
        self.worker_index = worker_index
        self.error: Exception | None = None
        self.seconds: float | None = None
        self.lost_workers: Collection[int] = ()
        self._campaign = campaign
        self._fault = fault
        self._delay_s = campaign.draw_delay_s()
        self._thread = threading.Thread(target=self._run, name="striker")
        self._struck_at: float | None = None
        self._has_come = fault.effect in (Effect.LOSS, Effect.NONE)

    def start(self) -> None:
        """Let it come soon."""
        self._thread.start()

    def join(self) -> None:
        """Wait until nothing is done any more."""
        if self._thread.ident is not None:
            self._thread.join()

    def note_error(self) -> None:
        """Take note that the learner got the error that the fault justifies; it begins anew after it."""
        self._has_come = True
        self._delivered = self._campaign.delivered

    def describe_wait(self) -> str:
        """Say what did not come by the deadline."""
        if self._struck_at is None:
            return "the mode could not be taken up"
        if not self._has_come:
            return f"{self._fault.effect.value}: that did not happen"
        waited = [index for index, has in zip(self._env_indices, self._has_delivered(), strict=True) if not has]
        return f"environments {waited} delivered nothing more" if waited else "a call did not return"

    def has_gone_on(self) -> bool:
        """Whether the fault is over, and every environment that it harmed has delivered again."""
        if self._struck_at is None or not self._has_come:
            return False
        has_delivered = self._has_delivered()
        if has_delivered.all() and self.seconds is None:
            self.seconds = time.monotonic() - self._struck_at
        return bool(has_delivered.all()) and not self._thread.is_alive()

    def _has_delivered(self) -> NDArray[np.bool_]:
        """Return of each environment that was harmed whether it has delivered since."""
        rows, before = self._campaign.rows[self._env_indices], self._rows[self._env_indices]
        if self._fault.effect is Effect.LOSS:
            is_new = rows[:, INSTANCE] != before[:, INSTANCE]
            stepped: NDArray[np.bool_] = is_new & ((rows[:, STEP] > 0) | (rows[:, EPISODE] > 0))
            return stepped
        has_delivered: NDArray[np.bool_] = self._campaign.delivered > self._delivered
        return has_delivered[self._env_indices]

    def _run(self) -> None:
        threading.Event().wait(self._delay_s)
        try:
            target = self._campaign.aim(self.worker_index)
            reached = self._fault.reach(target)
            self._env_indices = self._campaign.hosted_by(reached)
            self._rows, self._delivered = self._campaign.rows, self._campaign.delivered
            if self._fault.effect is Effect.LOSS:
                self.lost_workers = reached
            self._struck_at = time.monotonic()
            self._fault.strike(target)
            if self._fault.effect is Effect.NONE:
                self._delivered = self._campaign.delivered  # It must go on afterwards, too.
        except Exception as error:  # noqa: BLE001 - it is raised by the thread that waits for this one
            self.error = error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
