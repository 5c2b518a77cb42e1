"""The report: every comparison of PREREGISTRATION.md, computed from the records alone, so that nobody chooses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.plan import NEVER, ONE_FOR_ALL, PILOT_SEEDS, PLAIN, Block, Run
from experiments.results import OUTCOMES, PRIMARY, Results, write_csv
from experiments.rules import ADAPTIVE, EVERY, Rule
from experiments.runner import Folder
from experiments.statistics import Interval, interval_of, judge_gap, judge_loss
from experiments.tasks import PpoSettings

MARGIN = 0.05  # Of the range.
FEWER_BYTES = {True: 5.0, False: 20.0}  # The goal for PPO tasks, and for the others.
TRAPPED_BELOW = 0.5  # Of what plain PPO gained with the same seed when it pulled every update.
COMPARED = {"own_final": "learner's own", "workers_final": "workers', final", "workers_whole": "workers', whole run"}


def write_report(path: Path, results: Results, blocks: Sequence[Block], folder: Folder) -> None:
    """Write the report as Markdown, and all its comparisons as CSV beside it."""
    sections = [
        "# What the runs show",
        "Made by `python -m experiments.aps --report` from the records in this folder; the definitions are in "
        "[PREREGISTRATION.md](../../PREREGISTRATION.md). Every ± is half a 95 % interval (Student's t) over seeds, "
        "paired by seed wherever two rules are compared. Returns are those of the learner's own final policy, "
        "evaluated apart, unless a column says otherwise. Bytes are weights and checks, to and from all workers.",
        "## The goals",
        write_goals(results),
        "## Against every update",
        f"The margin is {MARGIN:.0%} of the range: what every update gained over the untrained policy.",
        *(part for task in results.tasks for part in (f"### {task}", write_task(results, task))),
        "### All tasks",
        "Differences from every update in per cent of the range, each task weighing the same.",
        write_pooled(results),
        "## At equal bytes",
        "AdaptiveSync(0.05) less the rule named, whose period or budget the pilots set to as many bytes; rounding "
        "gives the periodic rules more, never fewer, with the pilot seeds.",
        write_equal_bytes(results),
        "## One setting for all tasks",
        "Losses against every update, in per cent of the range, of one and the same setting on every task.",
        write_one_for_all(results),
        "## The trap: plain PPO",
        f"Trapped: less than {TRAPPED_BELOW:.0%} of what plain PPO gained with the same seed pulling every update.",
        write_trap(results),
        "## What the pilots set",
        f"From AdaptiveSync(0.05) with seeds {' and '.join(map(str, PILOT_SEEDS))}.",
        to_table(
            ["task", "period", "budget, pulls per update of all workers"],
            [[task, str(match.period), f"{match.pulls_per_update:g}"] for task, match in results.matches.items()],
        ),
        "## What was run, and what was skipped",
        write_done(blocks, folder),
    ]
    path.write_text("\n\n".join(sections) + "\n")
    write_comparisons(path.with_name("comparisons.csv"), results)


def write_goals(results: Results) -> str:
    """Say of each goal whether it was reached."""
    rows = []
    for task, settings in results.tasks.items():
        wanted = FEWER_BYTES[isinstance(settings, PpoSettings)]
        difference = against_every(results, task, ADAPTIVE)
        fewer = 1 / results.bytes_share(task, ADAPTIVE)
        verdict = judge_loss(difference, MARGIN) if not math.isnan(difference.mean) else "not run, or nothing learned"
        is_reached = verdict == "non-inferior" and fewer >= wanted
        rows.append([f"{task}: as good as every update, {wanted:g} times fewer bytes",
                     f"{write_share(difference)} of the range, {verdict}; {fewer:.1f} times fewer",
                     "reached" if is_reached else "not reached"])  # fmt: skip
    gap, counted = results.pooled(matched_pairs(results, "periodic"), PRIMARY)
    rows.append(["ahead of periodic at equal bytes, all tasks together",
                 f"{write_share(gap)} of the range, {judge_gap(gap)}; {len(counted)} of {len(results.tasks)} tasks",
                 "reached" if judge_gap(gap) == "ahead" else "not reached"])  # fmt: skip
    trapped, num_runs = count_trapped(results, PLAIN[1])
    rows.append(["no trap anywhere, plain PPO as shipped", f"{trapped} of {num_runs} runs trapped",
                 "reached" if num_runs and not trapped else "not reached"])  # fmt: skip
    return to_table(["goal", "found", ""], rows)


def write_task(results: Results, task: str) -> str:
    """Compare every rule of a task with every update."""
    scale = results.range_of(task)
    gained = f"{interval_of(results.gains(task)).mean:.1f}" if len(results.gains(task)) else "not known"
    learned = "" if scale > 0 else ", **not learned**: its interval does not exclude 0, so the task is not pooled"
    rows = []
    for rule in results.rules(task):
        if rule.is_plain:
            continue
        difference = against_every(results, task, rule)
        is_every = rule == EVERY or math.isnan(difference.mean)
        others = [interval_of(results.differences(task, rule, EVERY, name)) for name in OUTCOMES[1:]]
        rows.append([
            rule.label,
            str(len(results.seeds(task, rule))),
            write_interval(interval_of(results.values(task, rule, PRIMARY))),
            *(["", "", "", ""] if is_every else [write_share(difference), judge_loss(difference, MARGIN),
                                                 *map(write_interval, others)]),
            f"{results.values(task, rule, 'pulls').mean():.1f} of {results.values(task, rule, 'updates').mean():.0f}",
            f"{results.values(task, rule, 'bytes').mean() / 1e6:.3f}",
            f"{1 / results.bytes_share(task, rule):.1f}",
        ])  # fmt: skip
    header = ["rule", "seeds", "final return", "against every update, % of range", "verdict",
              "workers' final, against every update", "workers' whole run, against every update",
              "pulls per worker", "MB", "times fewer bytes"]  # fmt: skip
    return f"Range: {gained}{learned}.\n\n" + to_table(header, rows)


def write_pooled(results: Results) -> str:
    """Compare the rules with every update over all tasks."""
    rules: dict[str, Mapping[str, Rule]] = {
        ADAPTIVE.label: dict.fromkeys(results.tasks, ADAPTIVE),
        **{f"{kind}, as many bytes": matched(results, kind) for kind in ("periodic", "staggered", "budget")},
        **{rule.label: dict.fromkeys(results.tasks, rule) for rule in (*ONE_FOR_ALL, NEVER)},
    }
    rows = []
    for label, by_task in rules.items():
        pairs = {task: (rule, EVERY) for task, rule in by_task.items()}
        pooled = [results.pooled(pairs, name) for name in OUTCOMES]
        verdict = judge_loss(pooled[0][0], MARGIN) if pooled[0][1] else "not run"
        rows.append([label, str(len(pooled[0][1])), *(write_share(difference) for difference, _ in pooled), verdict])
    return to_table(["rule", "tasks", *COMPARED.values(), "verdict on the learner's own"], rows)


def write_equal_bytes(results: Results) -> str:
    """Compare the adaptive rule with the others at as many bytes, task by task and pooled."""
    rows = []
    for kind in ("periodic", "staggered", "budget"):
        pairs = matched_pairs(results, kind)
        for task, pair in pairs.items():
            differences = [interval_of(results.differences(task, *pair, name)) for name in OUTCOMES]
            if math.isnan(differences[0].mean):
                continue
            ratio = results.bytes_share(task, pair[0]) / results.bytes_share(task, pair[1])
            rows.append([task, pair[1].label, *map(write_interval, differences), judge_gap(differences[0]),
                         f"{ratio:.2f}"])  # fmt: skip
        pooled = [results.pooled(pairs, name) for name in OUTCOMES]
        if pooled[0][1]:
            shares = [write_share(difference) for difference, _ in pooled]
            rows.append([f"**{len(pooled[0][1])} tasks**, % of range", kind, *shares, judge_gap(pooled[0][0]), ""])
    return to_table(
        ["task", "rule", *COMPARED.values(), "verdict on the learner's own", "bytes, adaptive / rule"], rows
    )


def write_one_for_all(results: Results) -> str:
    """Compare one threshold for all tasks with one period for all tasks, by their worst task."""
    rows = []
    for rule in (ADAPTIVE, *ONE_FOR_ALL):
        tasks = [task for task in results.tasks if not math.isnan(against_every(results, task, rule).mean)]
        if not tasks:
            continue
        worst, loss, share = find_worst(results, rule, tasks)
        rows.append([rule.label, f"{len(tasks)} of {len(results.tasks)}", f"{share:.1%}", worst, write_share(loss),
                     "" if rule == ADAPTIVE else judge_setting(results, rule, tasks)])  # fmt: skip
    header = ["setting", "tasks", "bytes, mean share of every update's", "worst task", "loss there, % of range",
              "against the threshold"]  # fmt: skip
    return to_table(header, rows)


def find_worst(results: Results, rule: Rule, tasks: Sequence[str]) -> tuple[str, Interval, float]:
    """Return a setting's worst task, its difference from every update there, and its mean share of the bytes."""
    losses = {task: against_every(results, task, rule) for task in tasks}
    worst = min(losses, key=lambda task: losses[task].mean)
    return worst, losses[worst], sum(results.bytes_share(task, rule) for task in tasks) / len(tasks)


def judge_setting(results: Results, rule: Rule, tasks: Sequence[str]) -> str:
    """Say whether a period's worst loss is smaller than the threshold's with no more bytes, or the converse."""
    common = [task for task in tasks if not math.isnan(against_every(results, task, ADAPTIVE).mean)]
    if not common:
        return ""
    _, ours, our_bytes = find_worst(results, ADAPTIVE, common)
    _, theirs, their_bytes = find_worst(results, rule, common)
    if ours.mean > theirs.mean and our_bytes <= their_bytes:
        return "worse: a larger loss with as many bytes or more"
    if theirs.mean > ours.mean and their_bytes <= our_bytes:
        return "better: a smaller loss with as many bytes or fewer"
    return "neither"


def write_trap(results: Results) -> str:
    """Say what plain PPO does with each rule."""
    rows = []
    for task in results.tasks:
        for rule in PLAIN:
            if not results.seeds(task, rule):
                continue
            difference = interval_of(results.differences(task, rule, PLAIN[0], PRIMARY))
            trapped, num_runs = count_trapped(results, rule, [task])
            rows.append([task, rule.label, str(len(results.seeds(task, rule))),
                         write_interval(interval_of(results.values(task, rule, PRIMARY))),
                         "" if rule == PLAIN[0] else write_interval(difference),
                         "" if rule == PLAIN[0] else f"{trapped} of {num_runs}",
                         f"{results.values(task, rule, 'pulls').mean():.1f}"])  # fmt: skip
    header = ["task", "rule", "seeds", "final return", "against plain PPO, every update", "trapped", "pulls per worker"]
    return to_table(header, rows)


def count_trapped(results: Results, rule: Rule, tasks: Iterable[str] | None = None) -> tuple[int, int]:
    """Return how many runs of plain PPO are trapped, and of how many this could be said."""
    num_trapped, num_runs = 0, 0
    for task in results.tasks if tasks is None else tasks:
        for seed in results.seeds(task, rule):
            every = results.totals.get(Run(task, PLAIN[0], seed))
            if every is None or (gained := every[PRIMARY] - every["own_initial"]) <= 0:
                continue
            ours = results.totals[Run(task, rule, seed)]
            num_runs += 1
            num_trapped += ours[PRIMARY] - ours["own_initial"] < TRAPPED_BELOW * gained
    return num_trapped, num_runs


def write_done(blocks: Sequence[Block], folder: Folder) -> str:
    """Say of each block how many runs are on record, and name those that are not."""
    rows = []
    for block in blocks:
        missing = [run.name for run in block.runs if not folder.record(run).exists()]
        names = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        rows.append([block.name, str(len(block.runs)), str(len(block.runs) - len(missing)), str(len(missing)), names])
    return to_table(["block", "planned", "run", "skipped", "which"], rows)


def write_comparisons(path: Path, results: Results) -> None:
    """Write every rule of every task against every update, and against the adaptive rule, for all outcomes."""
    rows = []
    for task in results.tasks:
        for against in (EVERY, ADAPTIVE):
            for rule in results.rules(task):
                for name in OUTCOMES:
                    differences = results.differences(task, rule, against, name)
                    if rule != against and len(differences):
                        found = interval_of(differences)
                        share = found.divided_by(results.range_of(task) / 100)
                        rows.append([task, rule.name, against.name, name, str(len(differences)),
                                     *(f"{value:.6g}" for value in (*found, *share))])  # fmt: skip
    header = ["task", "rule", "against", "outcome", "seeds", "difference", "half_interval", "percent_of_range",
              "half_interval_percent"]  # fmt: skip
    write_csv(path, header, rows)


def against_every(results: Results, task: str, rule: Rule) -> Interval:
    """Return the primary difference from every update, in ranges; not-a-number without runs or a range."""
    differences = results.differences(task, rule, EVERY, PRIMARY)
    scale = results.range_of(task)
    if not len(differences) or not scale > 0:
        return Interval(math.nan, math.nan)
    return interval_of(differences).divided_by(scale)


def matched(results: Results, kind: str) -> dict[str, Rule]:
    """Return the rule of a kind that sends as many bytes as the adaptive one, for each task."""
    return {task: match.rules[kind] for task, match in results.matches.items()}


def matched_pairs(results: Results, kind: str) -> dict[str, tuple[Rule, Rule]]:
    """Return the adaptive rule and the one of a kind that sends as many bytes, for each task."""
    return {task: (ADAPTIVE, rule) for task, rule in matched(results, kind).items()}


def write_interval(interval: Interval) -> str:
    """Write a mean and half its interval, as far as they are known."""
    if math.isnan(interval.mean):
        return ""
    return f"{interval.mean:.1f}" + ("" if math.isnan(interval.half) else f" ± {interval.half:.1f}")


def write_share(interval: Interval) -> str:
    """Write an interval that is in ranges, in per cent and with its sign."""
    if math.isnan(interval.mean):
        return ""
    half = "" if math.isnan(interval.half) else f" ± {100 * interval.half:.1f}"
    return f"{100 * interval.mean:+.1f}{half} %"


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else "Nothing is on record."
