"""Showing results: one table for the terminal, the same as markdown, and CSV files for whoever wants to compute."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.cells import CONTENDERS, LOCKSTEP, Contender, Settings
from benchmarks.peers.rounds import CellResult, Spread, Standing
from benchmarks.peers.targets import Verdict
from benchmarks.tasks import TASKS, describe_task

# The limits first, then ClusterEnv, then the peers from fast to slow; playing order serves another purpose.
READING_ORDER = (
    "bare",
    LOCKSTEP,
    "clusterenv-shm",
    "clusterenv-exchange",
    "clusterenv-shm-views",
    "clusterenv-zmq",
    "clusterenv-0",
    "clusterenv-0-views",
    "sync",
    "puffer-serial",
    "puffer-mp",
    "async",
    "sb3",
    "envpool",
    "clusterenv-envpool",
)
# A tenth of a core is more than an idle system's own bookkeeping, and enough to shift a ratio.
NOTICEABLE_CORES = 0.1
LABEL_WIDTH = 2 + max(
    *(len(contender.label) for contender in CONTENDERS.values()), *(len(describe_task(task)) for task in TASKS)
)
LEGEND = (
    "Each entry: environment steps per second (median over the rounds), then the ratio to the lockstep limit of the "
    "same round (median over the rounds); ± is half the interquartile range. In brackets: the fastest of the settings "
    "that were tried, where there were several. In the scaling block the ratio is to the same contender's own speed at "
    "the smallest size."
)
METHOD = (
    "ClusterEnv has two workers and the limits have two processes unless an entry says otherwise. The lockstep limit's "
    "processes meet after every step, in a pair or at a parent, whichever is faster. Actions are "
    "precomputed and random. Every contender has its own processes, plays short rounds in changing order, and is "
    "frozen while another plays. Peers hand out views of their buffers (copy=False) where they can; ClusterEnv is as "
    "users get it (copy=True) unless it says otherwise. A reset in the place of a step counts as a step."
)


@dataclass(frozen=True)
class Block:
    """One part of the table: a task, its sizes as columns, its contenders as rows, each entry a short text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a run has to say.

    Args:
        results: The cells, in order.
        verdicts: How they compare with the targets.
        machine: Lines about where and how it ran.
    """

    results: Sequence[CellResult]
    verdicts: Sequence[Verdict]
    machine: Sequence[str]

    def to_text(self) -> str:
        """Lay the table out for a terminal."""
        lines: list[str] = []
        for block in self._blocks():
            width = max([18, *(len(text) for _, texts in block.rows for text in texts)])
            rule = "-" * (LABEL_WIDTH + len(block.columns) * (width + 3))
            lines += [rule, pad(block.title) + "".join(f"   {column:>{width}}" for column in block.columns), rule]
            lines += [pad(label) + "".join(f"   {text:>{width}}" for text in texts) for label, texts in block.rows]
        lines += ["", LEGEND, "", *(f"- {note}" for note in self._notes())]
        if self.verdicts:
            lines += ["", "Targets:"]
            rows = [describe_verdict(verdict) for verdict in self.verdicts]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += [
                "  " + "   ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
                for row in rows
            ]
        return "\n".join(lines) + "\n"

    def to_markdown(self) -> str:
        """Lay the same table out as markdown."""
        lines = ["# Stepping speed", "", LEGEND, "", METHOD, "", "Made by `python -m benchmarks.peers.step`.", ""]
        for block in self._blocks():
            lines.append(f"| {block.title} | " + " | ".join(block.columns) + " |")
            lines.append("|---|" + "---:|" * len(block.columns))
            lines += [f"| {label} | " + " | ".join(texts) + " |" for label, texts in block.rows]
            lines.append("")
        lines += [f"- {note}" for note in self._notes()]
        if self.verdicts:
            lines += ["", "| cell | target | measured | |", "|---|---|---|---|"]
            lines += ["| " + " | ".join(describe_verdict(verdict)) + " |" for verdict in self.verdicts]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Write the markdown, the summary and every single round; returns the files."""
        directory.mkdir(parents=True, exist_ok=True)
        markdown, summary, rounds = (directory / f"{stem}{end}" for end in (".md", ".csv", "-rounds.csv"))
        markdown.write_text(self.to_markdown())
        write_csv(summary, SUMMARY_FIELDS, (summary_row(result, each) for result, each in self._standings()))
        write_csv(
            rounds,
            ("cell", "task", "num_envs", "contender", "round", "env_steps_per_s", "cores_of_others"),
            (
                (*name_standing(result, each), number, f"{rate:.1f}", f"{cores:.2f}")
                for result, each in self._standings()
                for number, (rate, cores) in enumerate(zip(each.rates, each.cores_of_others, strict=True), start=1)
            ),
        )
        return [markdown, summary, rounds]

    def _standings(self) -> Iterator[tuple[CellResult, Standing]]:
        for result in self.results:
            for standing in result.standings:
                yield result, standing

    def _blocks(self) -> Iterator[Block]:
        for task in TASKS:
            results = [result for result in self.results if result.cell.task == task and not result.cell.is_scaling]
            if results:
                sizes = [result.cell.base.num_envs for result in results]
                yield Block(describe_task(task), [f"{size} envs" for size in sizes], list(task_rows(results)))
        for result in self.results:
            if result.cell.is_scaling:
                sizes = sorted({standing.entry.num_envs for standing in result.standings})
                title = f"Scaling, {TASKS[result.cell.task]}"
                yield Block(title, [f"{size} envs" for size in sizes], list(scaling_rows(result, sizes)))

    def _notes(self) -> Iterator[str]:
        yield from self.machine
        others = [cores for _, each in self._standings() for cores in each.cores_of_others]
        if others:
            share = sum(cores >= NOTICEABLE_CORES for cores in others) / len(others)
            yield (
                f"cores taken by other programs during the measurements: {np.mean(others):.2f} on average, "
                f"{NOTICEABLE_CORES:g} or more in {share:.0%} of them"
            )
        for name in READING_ORDER:
            problems: dict[str, list[str]] = {}
            for result, each in self._standings():
                if each.problem and each.entry.contender.name == name:
                    problems.setdefault(each.problem, []).append(result.cell.name)
            for problem, cells in problems.items():
                yield f"{CONTENDERS[name].label} ({'; '.join(cells)}): {scrub(problem)}"
        idle = [
            f"{CONTENDERS[each.entry.contender.name].label} {each.idle_cores:.2f}"
            for _, each in self._standings()
            if each.idle_cores is not None and each.idle_cores >= 0.01
        ]
        if any(each.idle_cores is not None for _, each in self._standings()):
            yield "Cores kept busy while idle: " + ("; ".join(idle) if idle else "none by anybody (all under 0.01)")


SUMMARY_FIELDS = (
    *("cell", "task", "num_envs", "contender", "settings", "rounds", "env_steps_per_s", "q1", "q3"),
    *("ratio_to_base", "ratio_q1", "ratio_q3", "idle_cores", "problem", "label", "chosen"),
)


def name_standing(result: CellResult, standing: Standing) -> tuple[str, str, int, str]:
    """Name a standing in a CSV file: cell, task, number of environments, contender."""
    return result.cell.name, result.cell.task, standing.entry.num_envs, standing.entry.contender.name


def summary_row(result: CellResult, standing: Standing) -> tuple[object, ...]:
    """List one entry's numbers, in the order of `SUMMARY_FIELDS`."""
    contender = standing.entry.contender
    settings = " ".join(f"{key}={value}" for key, value in standing.settings.items())
    head = (*name_standing(result, standing), settings)
    if standing.problem:
        return (*head, len(standing.rates), "", "", "", "", "", "", "", scrub(standing.problem), contender.label, "")
    rate = standing.summarize()
    ratio = standing.compare(result.base)
    ratios = ("", "", "") if ratio is None else tuple(f"{x:.4f}" for x in (ratio.median, ratio.low, ratio.high))
    rates = tuple(f"{x:.1f}" for x in (rate.median, rate.low, rate.high))
    idle = "" if standing.idle_cores is None else f"{standing.idle_cores:.3f}"
    chosen = describe_choice(contender, result.cell.task, standing.settings)
    return (*head, len(standing.rates), *rates, *ratios, idle, "", contender.label, chosen)


def task_rows(results: Sequence[CellResult]) -> Iterator[tuple[str, list[str]]]:
    """List a task's contenders with an entry per size."""
    for name in READING_ORDER:
        standings = [(result, result.find(name, result.cell.base.num_envs)) for result in results]
        if any(standing is not None for _, standing in standings):
            yield CONTENDERS[name].label, [describe_with_choice(result, standing) for result, standing in standings]


def scaling_rows(result: CellResult, sizes: Sequence[int]) -> Iterator[tuple[str, list[str]]]:
    """List the scaling cell's contenders, each relative to itself at the smallest size."""
    for name in READING_ORDER:
        standings = [result.find(name, size) for size in sizes]
        if standings[0] is not None:
            yield CONTENDERS[name].label, [describe(standing, standings[0]) for standing in standings]


def describe(standing: Standing | None, base: Standing) -> str:
    """Put one entry of the table into words."""
    if standing is None:
        return ""
    if standing.problem:
        return standing.problem.split(":")[0]
    rate, ratio = standing.summarize(), standing.compare(base)
    text = f"{shorten(rate.median)} ±{half_range(rate) / rate.median:.0%}"
    return text if ratio is None else f"{text}  {describe_ratio(ratio)}"


def describe_with_choice(result: CellResult, standing: Standing | None) -> str:
    """Put one entry of the table into words, with the settings that were found fastest."""
    text = describe(standing, result.base)
    if standing is None or standing.problem:
        return text
    chosen = describe_choice(standing.entry.contender, result.cell.task, standing.settings)
    return f"{text}  [{chosen}]" if chosen else text


def describe_choice(contender: Contender, task: str, settings: Settings) -> str:
    """Put settings into words, as far as others were tried; nothing where there was no choice."""
    tried = contender.list_settings(task)
    words = []
    for key, value in settings.items():
        if all(other.get(key) == value for other in tried):
            continue
        if key.startswith("num_"):
            noun = key.removeprefix("num_")
            words.append(f"{value} {noun.removesuffix('s') if value == 1 else noun}")
        elif value is True:
            words.append(key.replace("_", " "))
        elif isinstance(value, int):
            words.append(f"{value} {key.replace('_', ' ')}")
        else:
            words.append(str(value))
    return ", ".join(words)


def describe_ratio(ratio: Spread) -> str:
    """Put a ratio into words, with its spread."""
    return f"{ratio.median:.2f} ±{half_range(ratio):.2f}"


def describe_verdict(verdict: Verdict) -> tuple[str, str, str, str]:
    """Put a verdict into words: the cell, the claim, what was measured, and whether it holds."""
    target = verdict.target
    own, rival = CONTENDERS[target.name].label, CONTENDERS[target.rival].label
    if target.envs != target.rival_envs:
        own, rival = f"{own}, {target.envs} envs", f"{target.rival_envs} envs"
    return verdict.cell, f"{own} >= {target.at_least:g} x {rival}", describe_ratio(verdict.ratio), verdict.word


def half_range(spread: Spread) -> float:
    """Half the interquartile range."""
    return (spread.high - spread.low) / 2


def shorten(rate: float) -> str:
    """Write a rate with three digits."""
    return f"{rate / 1e6:.2f}M" if rate >= 999_500 else f"{rate / 1e3:.3g}k" if rate >= 1000 else f"{rate:.0f}"


def scrub(text: str) -> str:
    """Take addresses and paths out of an error's text: results are published, and machines are nobody's business."""
    text = re.sub(r"\b\w+://\S+", "<address>", text)
    return re.sub(r"(?<![\w<])/[\w.+-]+(?:/[\w.+-]*)+", "<path>", text)


def pad(label: str) -> str:
    """Fill the first column."""
    return f"{label:<{LABEL_WIDTH}}"


def write_csv(path: Path, header: Sequence[str], rows: Iterator[tuple[object, ...]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
