"""Measuring a cell: everybody is set up once, then all play many short rounds, one at a time."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.peers.arena import ContenderFailed, RunningContender
from benchmarks.peers.cells import Cell, Entry, Settings

Player = tuple["Standing", RunningContender]

# Starting a contender, two at a time, and ending it, roughly; only used to say how long a run will take.
SET_UP_S = 1.0
# PufferLib's workers, for one, spin for half a second before they turn to sleeping.
IDLE_SETTLE_S = 0.8
IDLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long everything takes.

    Args:
        rounds: How many rounds count.
        seconds: How long one contender runs in one round.
        warmup_s: How long it runs before that, unmeasured, to thaw its caches.
        trials: Rounds that choose among a contender's settings, before the rounds that count. With none, the first of
            its settings is taken, which usually is the fastest.
        measures_idle: Whether to measure, once a contender, what it burns when it has nothing to do.
    """

    rounds: int
    seconds: float
    warmup_s: float
    trials: int = 5
    measures_idle: bool = True

    def list_settings(self, entry: Entry, task: str) -> Sequence[Settings]:
        """List the settings that an entry is set up with."""
        settings = entry.contender.list_settings(task)
        return settings if self.trials else settings[:1]

    def expect_s(self, cell: Cell) -> float:
        """Say how long a cell will take, roughly."""
        turn_s = self.seconds + self.warmup_s
        expected_s = 0.0
        for entry in cell.entries:
            choices = len(self.list_settings(entry, cell.task))
            expected_s += choices * SET_UP_S + self.rounds * turn_s
            if choices > 1:
                expected_s += choices * self.trials * turn_s
        return expected_s


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float


@dataclass(kw_only=True)
class Standing:
    """How one entry fared in a cell.

    Args:
        rates: Environment steps per second, one per round.
        cores_of_others: How many cores other programs took meanwhile, one per round.
        settings: The settings it competed with.
        problem: Why it did not compete, or not to the end; empty if it did.
        idle_cores: How many cores it keeps busy when it has nothing to do; None where that was not measured.
    """

    entry: Entry
    rates: list[float] = field(default_factory=list)
    cores_of_others: list[float] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    problem: str = ""
    idle_cores: float | None = None

    def summarize(self) -> Spread:
        """Summarize its steps per second."""
        return spread(np.array(self.rates))

    def compare(self, other: "Standing") -> Spread | None:
        """Summarize its speed relative to another's, round by round; None if either did not compete."""
        if self.problem or other.problem:
            return None
        return spread(np.array(self.rates) / np.array(other.rates))


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The standings of a cell, in playing order."""

    cell: Cell
    standings: list[Standing]

    def find(self, name: str, num_envs: int) -> Standing | None:
        """Find a contender's standing; None if it was not in this cell."""
        for standing in self.standings:
            if (standing.entry.contender.name, standing.entry.num_envs) == (name, num_envs):
                return standing
        return None

    @property
    def base(self) -> Standing:
        """The standing that ratios are relative to."""
        return next(standing for standing in self.standings if standing.entry == self.cell.base)


def measure_cell(
    cell: Cell, schedule: Schedule, cache: Path, idle_known: set[str], say: Callable[[str], None]
) -> CellResult:
    """Set up a cell's contenders and measure them in interleaved rounds.

    Args:
        cell: Who competes.
        schedule: For how long.
        cache: The benchmark's cache directory.
        idle_known: Names of the contenders whose idleness need not be measured any more; extended.
        say: Called with what is happening.
    """
    standings = [Standing(entry=entry) for entry in cell.entries]
    with contextlib.ExitStack() as stack:
        players: list[Player] = []
        for standing, candidates in zip(standings, set_up(cell, schedule, cache, stack, say), strict=True):
            name = standing.entry.contender.name
            say(f"trying {name}")
            try:
                player = choose_fastest(candidates, schedule)
                if schedule.measures_idle and name not in idle_known:
                    standing.idle_cores = player.measure_idle_cpu(IDLE_SETTLE_S, IDLE_S)
                    idle_known.add(name)
            except ContenderFailed as error:
                standing.problem = str(error)
                continue
            standing.settings = player.settings
            players.append((standing, player))
        for number in range(schedule.rounds):
            say(f"round {number + 1} of {schedule.rounds}")
            for standing, player in order_of_play(players, number):
                play(standing, player, schedule)
    return CellResult(cell=cell, standings=standings)


def set_up(
    cell: Cell, schedule: Schedule, cache: Path, stack: contextlib.ExitStack, say: Callable[[str], None]
) -> "list[list[Future[RunningContender]]]":
    """Start every entry with each of its settings, as many at a time as there are cores.

    Nothing is measured meanwhile, so they may disturb each other. The stack will close those that could be started.
    """

    def start(entry: Entry, settings: Settings) -> RunningContender:
        player = RunningContender(entry, cell.task, settings, cache)
        stack.callback(player.close)
        return player

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        started = [
            [pool.submit(start, entry, settings) for settings in schedule.list_settings(entry, cell.task)]
            for entry in cell.entries
        ]
        try:
            for entry, candidates in zip(cell.entries, started, strict=True):
                say(f"setting up {entry.contender.name}")
                for candidate in candidates:
                    candidate.exception()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return started


def play(standing: Standing, player: RunningContender, schedule: Schedule) -> None:
    """Let one contender play one round, unless it has failed before."""
    if standing.problem:
        return
    try:
        measurement = player.run(schedule.seconds, schedule.warmup_s)
    except ContenderFailed as error:
        standing.problem = str(error)
        return
    standing.rates.append(measurement.rate)
    standing.cores_of_others.append(measurement.cores_of_others)


def order_of_play(players: list[Player], number: int) -> Iterator[Player]:
    """Rotate the order by one from round to round, and turn it around every other round, so that none is favoured."""
    if players:
        start = number % len(players)
        rotated = players[start:] + players[:start]
        yield from reversed(rotated) if number % 2 else rotated


def choose_fastest(candidates: "Sequence[Future[RunningContender]]", schedule: Schedule) -> RunningContender:
    """Find the fastest of a contender's settings in a few interleaved trials, and close the others.

    Raises:
        ContenderFailed: None of the settings worked.
    """
    problem = ContenderFailed("failed: it has no settings")
    rates: dict[RunningContender, list[float]] = {}
    for candidate in candidates:
        try:
            rates[candidate.result()] = []
        except ContenderFailed as error:
            problem = error
    players = list(rates)
    for _ in range(schedule.trials if len(players) > 1 else 0):
        for player in list(rates):
            try:
                rates[player].append(player.run(schedule.seconds, schedule.warmup_s).rate)
            except ContenderFailed as error:
                problem = error
                del rates[player]
    if not rates:
        raise problem
    fastest = max(rates, key=lambda player: float(np.median(rates[player] or [0.0])))
    for player in players:
        if player is not fastest:
            player.close()
    return fastest


def spread(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Spread:
    """Take the median and quartiles; not-a-number where there is nothing to take them of."""
    if not values.size:
        return Spread(math.nan, math.nan, math.nan)
    low, median, high = np.percentile(values, (25, 50, 75))
    return Spread(float(low), float(median), float(high))
