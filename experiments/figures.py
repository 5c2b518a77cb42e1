"""The three figures: learning curves, cumulative pulls, traffic against return; mean and 95 % interval over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.record import Curve
from experiments.rules import EVERY, Rule
from experiments.runner import Run
from experiments.summary import Summary, Values, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette, which colour-blind readers can tell apart: cold colours for thresholds, warm ones (and
# dashes) for periods.
EVERY_COLOR = "#000000"
PALETTES = {
    "every": (EVERY_COLOR,),
    "adaptive": ("#0072B2", "#56B4E9", "#009E73", "#8C6BB1"),
    "periodic": ("#D55E00", "#E69F00", "#A6761D"),
    "plain": ("#CC79A7",),
    "unprotected": ("#999999",),
}
LINES = {"periodic": "--", "plain": "-.", "unprotected": ":"}
MARKERS = {"every": "s", "adaptive": "o", "periodic": "^", "plain": "D", "unprotected": "x"}
SMOOTHED_SHARE = 0.07  # Of a run: episodes are few in a stretch, and their returns scatter.


class Look:
    """How a rule looks, in every figure of an experiment.

    Args:
        rule: Which.
        rules: All that are shown.
    """

    def __init__(self, rule: Rule, rules: Sequence[Rule]) -> None:
        same = sorted((each for each in rules if each.kind == rule.kind), key=order)
        palette = PALETTES[rule.kind]
        self.color = palette[same.index(rule) % len(palette)]
        self.line = LINES.get(rule.kind, "-")
        self.marker = MARKERS[rule.kind]


def order(rule: Rule) -> float:
    """Return what orders the rules of a kind."""
    return rule.threshold or rule.period or 0.0


def draw_figures(path: Path, curves: Mapping[Run, Curve], summaries: Sequence[Summary], title: str) -> list[Path]:
    """Draw all three into a folder; returns the files."""
    import matplotlib as mpl

    mpl.use("agg")  # No window.
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#e4e4e4", "axes.axisbelow": True}):  # fmt: skip
        return [
            draw_over_steps(path / "curves.png", curves, summaries, "return", f"{title}: return while learning"),
            draw_over_steps(path / "pulls.png", curves, summaries, "pulls", f"{title}: weights pulled so far"),
            draw_traffic(path / "traffic.png", summaries, title),
        ]


def draw_over_steps(
    path: Path, curves: Mapping[Run, Curve], summaries: Sequence[Summary], name: str, title: str
) -> Path:
    """Draw a number over environment steps, a line for each rule and a band for its spread."""
    figure, axes = make_figure(title)
    rules = [summary.rule for summary in summaries]
    for summary in summaries:
        look = Look(summary.rule, rules)
        runs = [curves[Run(summary.rule, seed)] for seed in summary.seeds]
        values = np.array([smooth(run) if name == "return" else run[name] for run in runs])
        steps = runs[0]["env_steps"] / 1000
        middle, half = values.mean(axis=0), np.array([spread(column) for column in values.T])
        axes.plot(steps, middle, color=look.color, linestyle=look.line, linewidth=1.8, label=summary.rule.label)
        axes.fill_between(steps, middle - half, middle + half, color=look.color, alpha=0.13, linewidth=0)
    axes.set_xlabel("environment steps, thousands")
    if name == "return":
        axes.set_ylabel(f"return of finished episodes\n(moving mean over {SMOOTHED_SHARE:.0%} of the run)")
    else:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8)
        label_plainly(axes.yaxis)
        axes.set_ylabel("pulls per worker (logarithmic)")
    axes.set_xlim(left=0)
    return save(figure, path, num_seeds(summaries))


def draw_traffic(path: Path, summaries: Sequence[Summary], title: str) -> Path:
    """Draw the final return over what a run sent, a mark for each rule with its spread, and a dot for each run."""
    figure, axes = make_figure(f"{title}: what was sent, and what came of it")
    rules = [summary.rule for summary in summaries]
    for summary in summaries:
        look = Look(summary.rule, rules)
        sent = (summary.numbers["bytes_weights"] + summary.numbers["bytes_checks"]) / 1e6
        returns = summary.numbers["final_return"]
        axes.scatter(sent, returns, color=look.color, s=14, alpha=0.45, linewidths=0, zorder=2)
        half = [None if math.isnan(spread(values)) else spread(values) for values in (sent, returns)]
        axes.errorbar(sent.mean(), returns.mean(), xerr=half[0], yerr=half[1], color=look.color, marker=look.marker,
                      markersize=8, capsize=3, linewidth=1.5, label=summary.rule.label, zorder=3)  # fmt: skip
    axes.set_xscale("log")
    label_plainly(axes.xaxis)
    axes.set_xlabel("weights and checks sent to all workers in a run, MB (logarithmic)")
    axes.set_ylabel("final return")
    every = next((summary for summary in summaries if summary.rule == EVERY), None)
    if every is not None and not math.isnan(half_width := spread(every.numbers["final_return"])):
        middle = every.mean("final_return")
        axes.axhspan(middle - half_width, middle + half_width, color=EVERY_COLOR, alpha=0.07, linewidth=0, zorder=1,
                     label="interval of every update")  # fmt: skip
    return save(figure, path, num_seeds(summaries))


def make_figure(title: str) -> tuple[Figure, Axes]:
    """Make a figure with one plot."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    axes.set_title(title, fontsize=11, loc="left")
    return figure, axes


def label_plainly(axis: Axis) -> None:
    """Write 1, 2, 5, 10, 20, ... along a logarithmic axis."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def save(figure: Figure, path: Path, seeds: str) -> Path:
    """Put the legend below, and write the file."""
    from matplotlib import pyplot

    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9,
                  title=f"mean and its 95 % interval over {seeds}", title_fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def smooth(curve: Curve) -> Values:
    """Average the returns of the episodes around each point of a curve; where none finished, go straight across."""
    half = round(SMOOTHED_SHARE * len(curve["return"]) / 2)
    window = np.ones(2 * half + 1)
    sums = np.convolve(np.nan_to_num(curve["return"]) * curve["episodes"], window, "same")
    episodes = np.convolve(curve["episodes"], window, "same")
    has_any = episodes > 0
    return np.interp(curve["env_steps"], curve["env_steps"][has_any], sums[has_any] / episodes[has_any])


def num_seeds(summaries: Sequence[Summary]) -> str:
    """Say over how many seeds the means are."""
    counts = sorted({len(summary.seeds) for summary in summaries})
    if counts == [1]:
        return "1 seed"
    return f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
