"""Showing what the rollout benchmark measured: a table a task, the targets, and CSV files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.report import SUMMARY_FIELDS, describe, describe_ratio, scrub, summary_row, write_csv
from benchmarks.peers.roller import NUM_STEPS
from benchmarks.peers.rollout_cells import HEAD_AT_MOST, ON_WORKERS, READING_ORDER, busy_log_of, list_targets
from benchmarks.peers.rounds import CellResult, Standing
from benchmarks.peers.targets import Verdict
from benchmarks.tasks import TASKS

LEGEND = (
    "Each entry: environment steps per second (median over the rounds), then the ratio to the bare loops of the same "
    "round (median over the rounds); ± is half the interquartile range. Head: the cores that the learner's process "
    "takes while it collects (`time.process_time` by the clock on the wall, median over the rounds)."
)
METHOD = (
    "Everybody has the same 64-64 tanh policy and critic, samples with torch's Categorical and one thread a process, "
    'and hands what a learner needs to the main process; only the bare loops keep it. "Policy in main": the loop that '
    'users write, in the learner\'s process. "New weights": they change a little before every rollout is taken. Every '
    "contender has its own processes, plays short rounds in changing order, and is frozen while another plays. A reset "
    "in the place of a step counts as a step; SB3 and EnvPool count as they do it, TorchRL's frames and RLlib's steps "
    "have no resets among them. RLlib leaves the critic to the learner. C++ environments are EnvPool's own."
)


@dataclass(frozen=True)
class RolloutReport:
    """Everything a run has to say.

    Args:
        results: One cell a task.
        head_cores: For each of them, what `read_head_cores` found.
        notes: Lines about where and how it ran.
    """

    results: Sequence[CellResult]
    head_cores: Sequence[dict[str, list[float]]]
    notes: Sequence[str]

    def to_markdown(self) -> str:
        """Lay out the tables, and hold the results against the targets."""
        lines = ["# Rollout speed: everything with a policy", "", LEGEND, "", METHOD, ""]
        lines.append(f"Rollouts of {NUM_STEPS} steps, made by `python -m benchmarks.peers.rollout`.")
        for result, head in zip(self.results, self.head_cores, strict=True):
            lines += ["", f"| {result.cell.name} | env steps/s, ratio to bare | head |", "|---|---:|---:|"]
            lines += [
                f"| {each.entry.contender.label} | {describe(each, result.base)} | {describe_head(each, head)} |"
                for each in in_reading_order(result)
            ]
        lines += ["", "| target | measured | |", "|---|---|---|", *self._verdicts(), ""]
        lines += [f"- {note}" for note in self.notes]
        lines += self._choices()
        lines += [
            f"- {each.entry.contender.label} ({TASKS[result.cell.task]}): {scrub(each.problem)}"
            for result in self.results
            for each in in_reading_order(result)
            if each.problem
        ]
        return "\n".join(lines) + "\n"

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Write the markdown, the summary and every single round; returns the files."""
        directory.mkdir(parents=True, exist_ok=True)
        markdown, summary, rounds = (directory / f"{stem}{end}" for end in (".md", ".csv", "-rounds.csv"))
        markdown.write_text(self.to_markdown())
        pairs = [(r, h, s) for r, h in zip(self.results, self.head_cores, strict=True) for s in in_reading_order(r)]
        write_csv(
            summary,
            (*SUMMARY_FIELDS, "head_cores"),
            ((*without_paths(summary_row(r, s)), head_median(s, h)) for r, h, s in pairs),
        )
        write_csv(
            rounds,
            ("task", "contender", "round", "env_steps_per_s", "cores_of_others", "head_cores"),
            (
                (r.cell.task, s.entry.contender.name, number, f"{rate:.1f}", f"{others:.2f}", cores)
                for r, h, s in pairs
                for number, (rate, others, cores) in enumerate(
                    zip(s.rates, s.cores_of_others, h.get(s.entry.contender.name, [""] * len(s.rates)), strict=True), 1
                )
            ),
        )
        return [markdown, summary, rounds]

    def _verdicts(self) -> Iterator[str]:
        for result, head in zip(self.results, self.head_cores, strict=True):
            task = TASKS[result.cell.task]
            for target in list_targets(result.cell.task):
                own, rival = result.find(target.name, target.envs), result.find(target.rival, target.rival_envs)
                if own is None or rival is None or (ratio := own.compare(rival)) is None:
                    continue
                word = Verdict(cell=result.cell.name, target=target, ratio=ratio).word
                claim = f"{own.entry.contender.label} >= {target.at_least:g} x {rival.entry.contender.label}"
                yield f"| {task}: {claim} | {describe_ratio(ratio)} | {word} |"
            for standing in in_reading_order(result):
                name, label = standing.entry.contender.name, standing.entry.contender.label
                if name in ON_WORKERS and not standing.problem:
                    cores = float(np.median(head[name]))
                    word = "met" if cores < HEAD_AT_MOST else "MISSED"
                    yield f"| {task}: {label}: head under {HEAD_AT_MOST:.0%} of a core | {cores:.1%} | {word} |"

    def _choices(self) -> Iterator[str]:
        for result in self.results:
            for each in in_reading_order(result):
                if len(each.entry.contender.settings) > 1 and not each.problem:
                    chosen = ", ".join(f"{key}={value}" for key, value in each.settings.items() if key != "busy_log")
                    yield f"- {each.entry.contender.label} ({TASKS[result.cell.task]}): competed with {chosen}"


def in_reading_order(result: CellResult) -> list[Standing]:
    """Sort a cell's standings as the table has them; they come in playing order."""
    return sorted(result.standings, key=lambda standing: READING_ORDER.index(standing.entry.contender.name))


def read_head_cores(result: CellResult, cache: Path) -> dict[str, list[float]]:
    """Read the cores each contender's head took in the rounds that count, by the contender's name."""
    found: dict[str, list[float]] = {}
    for standing in result.standings:
        path = busy_log_of(cache, standing.entry.contender.name, result.cell.task)
        if path.exists():
            # The log has the warm-ups too; a round is recognised by its rate, which came to us in the same digits.
            noted = dict(line.split() for line in path.read_text().splitlines())
            found[standing.entry.contender.name] = [float(noted[f"{rate:.3f}"]) for rate in standing.rates]
    return found


def describe_head(standing: Standing, head: dict[str, list[float]]) -> str:
    """Put into words how busy the head was; nothing where that was not measured."""
    cores = head.get(standing.entry.contender.name)
    return f"{np.median(cores):.1%}" if cores else ""


def head_median(standing: Standing, head: dict[str, list[float]]) -> str:
    """Write how busy the head was as a number."""
    cores = head.get(standing.entry.contender.name)
    return f"{np.median(cores):.5f}" if cores else ""


def without_paths(row: tuple[object, ...]) -> tuple[object, ...]:
    """Take the paths out of a row: results are published."""
    return tuple(scrub(field) if isinstance(field, str) else field for field in row)
