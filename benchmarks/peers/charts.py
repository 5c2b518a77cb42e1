"""Bars of what was measured: `python -m benchmarks.peers.charts` redraws them from the CSV files, without measuring.

One panel a task: how fast each contender is, relative to the limit of the same rounds. Of a task that was measured at
several sizes the middle one is shown; the tables have them all.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.peers.cells import SCALING, middle
from benchmarks.processes import ROOT
from benchmarks.tasks import describe_task

RESULTS = ROOT / "benchmarks" / "results"
STEMS = ("step", "step-quick", "rollout", "rollout-quick")
TITLES: Mapping[str, str] = {
    "step": "Stepping environments with given actions",
    "rollout": "Collecting rollouts with a policy",
}

LIMIT, OURS, PEER = "limits: plain loops", "ClusterEnv", "others"
COLOURS: Mapping[str, str] = {LIMIT: "#9aa0a6", OURS: "#1f6fb4", PEER: "#e39b4b"}
INK = "#30343a"
FAINT = "#7a7f87"
STYLE: Any = {  # Matplotlib's names of settings are a type of their own.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 8,
    "text.color": INK,
    "svg.fonttype": "none",  # Text stays text: it can be searched and read aloud, and is smaller than its outlines.
}

WIDTH_IN = 9.0  # 900 pixels, the width of a page, at 100 an inch.
COLUMNS = 2
PANEL_WIDTH_IN = WIDTH_IN / COLUMNS
MARGIN_IN = 0.07
BAR_IN = 0.165
HEAD_IN = 0.6
TITLE_IN = 0.24
PANEL_IN = 0.58  # A panel's title, axis and gap.
LETTER_IN = 0.05  # Of the figures beside the bars.
LABEL_LETTER_IN = 0.056


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One contender in one panel.

    Args:
        label: Its name.
        kind: `LIMIT`, `OURS` or `PEER`.
        ratio: Its speed relative to the limit; None if it did not compete.
        low: The lower quartile.
        high: The upper quartile.
        remark: The settings it competed with, or why it did not.
    """

    label: str
    kind: str
    ratio: float | None
    low: float
    high: float
    remark: str


@dataclass(frozen=True)
class Panel:
    """A task with its bars, from top to bottom."""

    title: str
    bars: Sequence[Bar]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the charts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.charts", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "summaries", nargs="*", type=Path, help="summaries as the benchmarks write them (default: those in results/)"
    )
    arguments = parser.parse_args(argv)
    found = arguments.summaries or [path for stem in STEMS if (path := RESULTS / f"{stem}.csv").exists()]
    for path in found:
        print(f"wrote {os.path.relpath(draw_chart(path))}")
    return 0


def draw_chart(summary: Path) -> Path:
    """Draw the chart of one summary beside it, as SVG; returns the file."""
    panels = list(read_panels(summary))
    figure = draw(TITLES.get(summary.stem.split("-")[0], summary.stem), panels)
    path = summary.with_suffix(".svg")
    # The same numbers give the same file: no date, and names of parts that do not change.
    with mpl.rc_context({**STYLE, "svg.hashsalt": summary.stem}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
    return path


def read_panels(summary: Path) -> Iterator[Panel]:
    """Read one panel a task, in the order of the file; the scaling cell has its own base, and no place here."""
    with summary.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] != SCALING]
    for task in dict.fromkeys(row["task"] for row in rows):
        sizes = sorted({int(row["num_envs"]) for row in rows if row["task"] == task})
        size = middle(sizes)
        bars = [read_bar(row) for row in rows if row["task"] == task and int(row["num_envs"]) == size]
        yield Panel(f"{describe_task(task)}, {size} environments", sorted(bars, key=rank))


def read_bar(row: Mapping[str, str]) -> Bar:
    """Read one line of a summary."""
    label = row.get("label") or row["contender"]
    kind = PEER
    if label.startswith(("bare", "lockstep")):
        kind = LIMIT
    elif "clusterenv" in label.lower():
        kind = OURS
    if not row["ratio_to_base"]:
        return Bar(label=label, kind=kind, ratio=None, low=0, high=0, remark=row["problem"].split(":")[0])
    ratio, low, high = (float(row[name]) for name in ("ratio_to_base", "ratio_q1", "ratio_q3"))
    return Bar(label=label, kind=kind, ratio=ratio, low=low, high=high, remark=row.get("chosen") or "")


def rank(bar: Bar) -> tuple[int, float]:
    """Order bars: limits, ClusterEnv, the others, each from fast to slow."""
    return (LIMIT, OURS, PEER).index(bar.kind), -(bar.ratio or 0.0)


def draw(title: str, panels: Sequence[Panel]) -> Figure:
    """Lay the panels out in two columns, each row as high as its longest panel needs."""
    rows = [panels[start : start + COLUMNS] for start in range(0, len(panels), COLUMNS)]
    heights = [PANEL_IN + BAR_IN * max(len(panel.bars) for panel in row) for row in rows]
    height_in = HEAD_IN + sum(heights)
    longest = max([len(bar.label) for panel in panels for bar in panel.bars], default=0)
    labels_in = 2 * MARGIN_IN + longest * LABEL_LETTER_IN
    axis_in = PANEL_WIDTH_IN - labels_in - MARGIN_IN
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in))
        figure.text(0.012, 1 - 0.2 / height_in, title, fontsize=12, fontweight="bold", va="center")
        figure.text(
            0.012,
            1 - 0.42 / height_in,
            "Environment steps per second relative to the limit (1.0) in the same rounds: medians and quartiles",
            color=FAINT,
            va="center",
        )
        figure.legend(
            handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()],
            loc="upper right",
            bbox_to_anchor=(0.995, 1 - 0.08 / height_in),
            ncols=3,
            frameon=False,
            handlelength=1.0,
            columnspacing=1.2,
        )
        top_in = height_in - HEAD_IN
        for row, row_in in zip(rows, heights, strict=True):
            for column, panel in enumerate(row):
                left_in = PANEL_WIDTH_IN * column
                bars_in = BAR_IN * len(panel.bars)
                box_in = (left_in + labels_in, top_in - TITLE_IN - bars_in, axis_in, bars_in)
                x, y, width, height = (
                    size / (height_in if place % 2 else WIDTH_IN) for place, size in enumerate(box_in)
                )
                figure.text(left_in / WIDTH_IN + 0.012, (top_in - 0.12) / height_in, panel.title, fontweight="bold")
                draw_bars(figure.add_axes((x, y, width, height)), panel.bars, axis_in)
            top_in -= row_in
    return figure


def draw_bars(axes: Axes, bars: Sequence[Bar], width_in: float) -> None:
    """Draw a bar a contender, its quartiles, and in figures what it shows, on axes so wide."""
    figures = ["" if bar.ratio is None else f"{bar.ratio:.2f}  {bar.remark}".rstrip() for bar in bars]
    # Wide enough that every bar has room for its figures.
    room = [1 - (len(text) + 2) * LETTER_IN / width_in for text in figures]
    limit = max([1.05, *(bar.high / share for bar, share in zip(bars, room, strict=True))])
    axes.set_xlim(0, limit)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
    on_top: dict[str, Any] = {
        "va": "center",
        "zorder": 3,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    }
    for place, (bar, text) in enumerate(zip(bars, figures, strict=True)):
        if bar.ratio is None:
            axes.text(limit * 0.01, place, bar.remark, color=FAINT, style="italic", fontsize=7, **on_top)
            continue
        axes.barh(place, bar.ratio, height=0.74, color=COLOURS[bar.kind], zorder=2)
        axes.hlines(place, bar.low, bar.high, color=INK, linewidth=0.9, zorder=4)
        axes.text(max(bar.ratio, bar.high) + limit * 0.015, place, text, fontsize=7, **on_top)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0, pad=3, labelsize=7.5, labelcolor=INK)
    axes.tick_params(axis="x", length=2, pad=2, labelsize=7, colors=FAINT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c8ccd1")


if __name__ == "__main__":
    sys.exit(main())
