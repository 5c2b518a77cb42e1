"""Figure: the learning curve, and below it how far the workers' policies diverged and when they pulled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from examples.demo.course import SOLVED, WINDOW, Course

_DOTS, _LINE, _PULL, _GOAL = "#9db8d9", "#1f5fa8", "#d1495b", "#4c9a5b"


def draw_course(path: Path, course: Course) -> None:
    """Draw the whole course of a training."""
    figure = Figure(figsize=(9.0, 6.4), dpi=120, layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    thousands = np.array([point.env_steps for point in course.points]) / 1000

    top.plot(np.array(course.ended_at) / 1000, course.returns, ".", color=_DOTS, markersize=2.5, label="one flight")
    top.plot(
        thousands,
        [point.mean_return for point in course.points],
        color=_LINE,
        linewidth=2,
        label=f"mean of the last {WINDOW}",
    )
    top.axhline(SOLVED, color=_GOAL, linewidth=1, linestyle="--", label="solved")
    if course.returns:
        top.set_ylim(max(-500.0, min(course.returns) - 20), 330)
    top.set_ylabel("return")
    top.set_title(
        f"PPO on LunarLander-v3: {course.num_envs} environments on {course.num_workers} workers, "
        f"{course.seconds:.0f} s, {course.steps_per_second:,.0f} steps/s"
    )

    divergences = np.array([point.divergence for point in course.points])
    pulled = np.diff([point.pulls for point in course.points], prepend=course.num_workers) > 0
    bottom.plot(thousands, divergences, color=_LINE, linewidth=1.2, label="mean over the workers")
    bottom.plot(thousands[pulled], divergences[pulled], "o", color=_PULL, markersize=4, label="workers pulled weights")
    bottom.axhline(course.threshold, color=_GOAL, linewidth=1, linestyle="--", label="threshold")
    if np.isfinite(divergences).any():
        bottom.set_ylim(0, 1.3 * max(course.threshold, float(np.nanmax(divergences))))
    bottom.set_ylabel("divergence from the\nnewest policy (nats)")
    bottom.set_xlabel("environment steps, in thousands")

    for axes, place, num_columns in ((top, "lower right", 1), (bottom, "upper right", 3)):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(loc=place, ncols=num_columns, frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)
    last = course.points[-1]
    figure.supxlabel(
        f"{last.pulls} pulls; a pull at every update would have been {last.pulls + last.pulls_saved}",
        fontsize=9,
        color="#555555",
    )
    figure.savefig(path)
