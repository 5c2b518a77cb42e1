"""The two figures, with a plot for each task: learning curves, and bytes against the final return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.plan import Run
from experiments.record import Curve, Values
from experiments.results import PRIMARY, Results
from experiments.rules import Rule
from experiments.statistics import interval_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Of Okabe and Ito's palette, which colour-blind readers can tell apart; rules of a kind look alike in all plots.
COLORS = {
    "every": "#000000",
    "adaptive": "#0072B2",
    "periodic": "#D55E00",
    "staggered": "#E69F00",
    "budget": "#009E73",
    "never": "#999999",
}
MARKERS = {"every": "s", "adaptive": "o", "periodic": "^", "staggered": "v", "budget": "D", "never": "x"}
SMOOTHED_SHARE = 0.07  # Of a run: episodes are few in a stretch, and their returns scatter.
COLUMNS = 3


def draw_figures(path: Path, curves: Mapping[Run, Curve], results: Results) -> list[Path]:
    """Draw both into a folder; returns the files."""
    import matplotlib as mpl

    mpl.use("agg")  # No window.
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#e4e4e4", "axes.axisbelow": True}):  # fmt: skip
        return [draw_curves(path / "curves.png", curves, results), draw_traffic(path / "traffic.png", results)]


def draw_curves(path: Path, curves: Mapping[Run, Curve], results: Results) -> Path:
    """Draw the workers' returns over environment steps for the rules that every task must have."""
    figure, plots = make_figure(list(results.tasks), "Returns of the workers' episodes while learning")
    for task, axes in plots.items():
        shown = [rule for rule in results.rules(task) if rule in shown_rules(results, task)]
        for rule in shown:
            runs = [curves[Run(task, rule, seed)] for seed in results.seeds(task, rule)]
            values = np.array([smooth(run) for run in runs])
            steps = runs[0]["env_steps"] / 1000
            middle = values.mean(axis=0)
            half = np.array([interval_of(column).half for column in values.T])
            axes.plot(steps, middle, color=COLORS[rule.kind], linewidth=1.5, label=rule.kind)
            axes.fill_between(steps, middle - half, middle + half, color=COLORS[rule.kind], alpha=0.13, linewidth=0)
        axes.set_xlabel("environment steps, thousands")
        axes.set_xlim(left=0)
    return save(figure, path, plots)


def shown_rules(results: Results, task: str) -> list[Rule]:
    """Return the rules whose learning curves are drawn; more would hide each other."""
    every_and_adaptive = [rule for rule in results.rules(task) if rule.kind in ("every", "adaptive")]
    return [rule for rule in every_and_adaptive if not rule.is_plain] + [results.matches[task].rules["periodic"]]


def draw_traffic(path: Path, results: Results) -> Path:
    """Draw the final return over what a run sent: a dot for each run, a mark with its interval for each rule."""
    figure, plots = make_figure(list(results.tasks), "What was sent, and what the learner's own policy returned")
    for task, axes in plots.items():
        for rule in results.rules(task):
            if rule.is_plain:
                continue
            color = COLORS[rule.kind]
            sent, returns = results.values(task, rule, "bytes") / 1e6, results.values(task, rule, PRIMARY)
            axes.scatter(sent, returns, color=color, s=9, alpha=0.4, linewidths=0, zorder=2)
            half = interval_of(returns).half
            axes.errorbar(sent.mean(), returns.mean(), yerr=None if math.isnan(half) else half, color=color,
                          marker=MARKERS[rule.kind], markersize=6, capsize=2, linewidth=1.2, label=rule.kind,
                          zorder=3)  # fmt: skip
        axes.set_xscale("log")
        label_plainly(axes.xaxis)
        axes.set_xlabel("weights and checks, MB (logarithmic)")
    return save(figure, path, plots)


def make_figure(tasks: Sequence[str], title: str) -> tuple[Figure, dict[str, Axes]]:
    """Make a figure with a plot for each task."""
    from matplotlib import pyplot

    rows = -(-len(tasks) // COLUMNS)
    figure, grid = pyplot.subplots(rows, COLUMNS, figsize=(10.5, 3.2 * rows + 0.8), layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=11)
    plots = list(grid.flat)
    for axes, task in zip(plots, tasks, strict=False):
        axes.set_title(task, fontsize=10, loc="left")
    for axes in plots[len(tasks) :]:
        axes.set_visible(False)
    return figure, dict(zip(tasks, plots, strict=False))


def label_plainly(axis: Axis) -> None:
    """Write 1, 2, 5, 10, 20, ... along a logarithmic axis."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


def save(figure: Figure, path: Path, plots: Mapping[str, Axes]) -> Path:
    """Put one legend for all plots below, and write the file."""
    from matplotlib import pyplot

    handles: dict[str, Artist] = {}
    for axes in plots.values():
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(COLORS), frameon=False,
                  title="mean and its 95 % interval over seeds", title_fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def smooth(curve: Curve) -> Values:
    """Average the returns of the episodes around each point of a curve; where none finished, go straight across."""
    half = round(SMOOTHED_SHARE * len(curve["return"]) / 2)
    window = np.ones(2 * half + 1)
    episodes = np.nan_to_num(curve["episodes"])
    sums = np.convolve(np.nan_to_num(curve["return"]) * episodes, window, "same")
    nearby = np.convolve(episodes, window, "same")
    has_any = nearby > 0
    if not has_any.any():
        return np.full(len(nearby), math.nan)
    return np.interp(curve["env_steps"], curve["env_steps"][has_any], sums[has_any] / nearby[has_any])
