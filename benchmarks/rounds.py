"""Measuring a cell: everybody is set up once, then plays many short rounds, one at a time."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.arena import ContenderFailed, RunningContender
from benchmarks.cells import Cell, Entry, Settings

Player = tuple["Standing", RunningContender]

# Rounds that choose among a contender's settings, before the rounds that count.
TRIALS = 5


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long everything takes.

    Args:
        rounds: How many rounds count.
        seconds: How long one contender runs in one round.
        warmup_s: How long it runs before that, unmeasured, to thaw its caches.
    """

    rounds: int
    seconds: float
    warmup_s: float


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
        for standing in standings:
            name = standing.entry.contender.name
            say(f"setting up {name}")
            try:
                player = set_up_fastest(standing.entry, cell.task, schedule, cache)
                stack.callback(player.close)
                if name not in idle_known:
                    # PufferLib's workers, for one, spin for half a second before they turn to sleeping.
                    standing.idle_cores = player.measure_idle_cpu(settle_s=0.8, seconds=1.0)
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


def set_up_fastest(entry: Entry, task: str, schedule: Schedule, cache: Path) -> RunningContender:
    """Set up a contender with the fastest of its settings, found in a few interleaved trials.

    Raises:
        ContenderFailed: None of the settings worked.
    """
    players: list[RunningContender] = []
    problem: ContenderFailed | None = None
    try:
        for settings in entry.contender.settings:
            try:
                players.append(RunningContender(entry, task, settings, cache))
            except ContenderFailed as error:
                problem = error
        if not players:
            raise problem or ContenderFailed("failed: it has no settings")
        if len(players) == 1:
            return players.pop()
        rates = [[player.run(schedule.seconds, schedule.warmup_s).rate for player in players] for _ in range(TRIALS)]
        return players.pop(int(np.median(rates, axis=0).argmax()))
    finally:
        for player in players:
            player.close()


def spread(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Spread:
    """Take the median and quartiles; not-a-number where there is nothing to take them of."""
    if not values.size:
        return Spread(math.nan, math.nan, math.nan)
    low, median, high = np.percentile(values, (25, 50, 75))
    return Spread(float(low), float(median), float(high))
