"""Learning curves as pictures."""

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no global state, no display
from matplotlib.ticker import EngFormatter, FuncFormatter

from sb3_td3x.common import files
from sb3_td3x.results.scores import Scores

COLORS = ("#2a6fbb", "#d0561f", "#0f9f8f", "#8a58b5", "#a07a14", "#c23b6e", "#2f8f4e", "#7a7a7a")
Look = dict[str, Any]  # a line's color and style, as matplotlib takes them
LOOKS = [{"color": color, "linestyle": stroke} for stroke in ("solid", "dashed", "dotted", "dashdot") for color in COLORS]
INK, MUTED = "#22262b", "#6b7178"
STYLE: Any = {
    "text.color": INK, "text.parse_math": False,  # a name with a $ is no formula
    "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.facecolor": "none",
    "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titlepad": 9, "axes.labelsize": 9.5,
    "axes.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": MUTED, "grid.alpha": 0.22, "grid.linewidth": 0.6,
    "xtick.labelsize": 9, "ytick.labelsize": 9, "xtick.major.size": 3, "ytick.major.size": 0,
    "legend.frameon": False, "legend.fontsize": 9.5,
}  # fmt: skip
AXES = {"steps": "environment steps", "time": "wall-clock time"}
RESAMPLES = 1000
LEGEND_INCHES, LINE_INCHES, LEGEND_LETTERS = 3.6, 0.22, 32  # of the legend: width of a column, height and letters of a line
ONE_RUN = "one run: its evaluation's mean ± one standard deviation over the episodes"
SEVERAL_RUNS = (
    "several runs: mean over seeds, up to the shortest run, with its 95 % bootstrap interval (of two or three: their range)"
)


def draw(scores: Sequence[Scores], out: Path, x: Sequence[str] = ("steps",)) -> None:
    """Write a picture: a panel per environment and axis (``"steps"``, ``"time"``), in it a line with a band per setting."""
    if not out.suffix:
        raise ValueError(f"a picture needs a suffix such as .png, .svg or .pdf, not {out.name!r}")
    files.write(out, figure(scores, x).savefig)


def figure(scores: Sequence[Scores], x: Sequence[str] = ("steps",)) -> Figure:
    env_ids = dict.fromkeys(run.env_id for run in scores)
    columns = math.ceil(len(env_ids) / math.ceil(len(env_ids) / 3))
    rows = len(x) * math.ceil(len(env_ids) / columns)  # the panels of the second axis are below those of the first
    looks = dict(zip(dict.fromkeys(run.label for run in scores), cycle(LOOKS), strict=False))
    with matplotlib.rc_context(STYLE):
        width, height = {1: (7.2, 4.1), 2: (5.0, 3.4)}.get(columns, (4.2, 3.4))
        picture = Figure(figsize=(width * columns, height * rows), dpi=120, layout="constrained")
        picture.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        for block, axis in enumerate(x):
            first = 1 + block * columns * rows // len(x)
            for place, env_id in enumerate(env_ids, first):
                panel = picture.add_subplot(rows, columns, place, title=env_id)
                _draw_environment(panel, [run for run in scores if run.env_id == env_id], axis, looks)
        _explain(picture, scores, looks)
    return picture


def run_curve(scores: Scores, axis: str) -> Figure:
    """One run's learning curve without title and caption, for a page that has its own."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(4.8, 2.8), layout="constrained")
        _draw_environment(picture.add_subplot(), [scores], axis, {scores.label: LOOKS[0]})
    return picture


def chart(lines: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """A small picture of logged values: by name the environment steps and the values, each ``(lines of the log,)``."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(4.2, 2.5), layout="constrained")
        axes = picture.add_subplot()
        for color, (name, (steps, values)) in zip(cycle(COLORS), lines.items(), strict=False):
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=color, linewidth=1.5, marker=marker, markersize=4, label=name)
        _format_x(axes, "steps")
        if len(lines) > 1:
            axes.legend(handlelength=1.2, loc="best")
    return picture


def _draw_environment(axes: Axes, runs: Sequence[Scores], axis: str, looks: Mapping[str, Look]) -> None:
    for label, look in looks.items():
        if group := [run for run in runs if run.label == label]:
            x, mean, low, high = summary(group, axis)
            marker = "o" if len(x) == 1 or not np.isfinite(mean).all() else None  # a score between gaps has no line
            axes.plot(x, mean, **look, linewidth=1.7, solid_capstyle="round", marker=marker, markersize=4)
            axes.fill_between(x, low, high, color=look["color"], alpha=0.17, linewidth=0 if marker is None else 1)
    axes.set(xlabel=AXES[axis], ylabel="return per episode")
    _format_x(axes, axis)


def _format_x(axes: Axes, axis: str) -> None:
    axes.set_xlim(left=0)
    unit, minutes = ("s", 1 / 60) if axes.get_xlim()[1] < 2 else ("min", 1)
    times = FuncFormatter(lambda at, _: f"{at / minutes:g} {unit}")
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if axis == "steps" else times)
    axes.locator_params(axis="both", nbins=6)


def _points(run: Scores, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions on the axis, mean returns and their spread, where the position is known."""
    if axis == "steps":
        return run.steps, run.mean, run.spread
    known = np.isfinite(run.seconds)
    if not known.any():
        raise ValueError(f"{run.source} has no wall_seconds: draw it over steps, --x steps")
    return run.seconds[known] / 60, run.mean[known], run.spread[known]


def summary(runs: Sequence[Scores], axis: str = "steps") -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, mean, lower and upper bound, each ``(points,)``, wherever all runs have scores before and after."""
    if len(runs) == 1:
        x, mean, spread = _points(runs[0], axis)
        return x, mean, mean - spread, mean + spread
    points = [_points(run, axis)[:2] for run in runs]
    grid = np.unique(np.concatenate([x for x, _ in points]))
    grid = grid[(grid >= max(x.min() for x, _ in points)) & (grid <= min(x.max() for x, _ in points))]
    if not len(grid):
        raise ValueError(f"the runs of {runs[0].label} in {runs[0].env_id} have no {axis} in common: draw them apart")
    scores = np.stack([np.interp(grid, x, mean) for x, mean in points])
    counts = np.random.default_rng(0).multinomial(len(runs), np.full(len(runs), 1 / len(runs)), RESAMPLES)  # of each run
    low, high = np.percentile(counts @ scores / len(runs), [2.5, 97.5], axis=0)
    return grid, scores.mean(axis=0), low, high


def _explain(picture: Figure, scores: Sequence[Scores], looks: Mapping[str, Look]) -> None:
    """A legend for all panels and, below them, what is drawn."""
    groups = Counter((run.label, run.env_id) for run in scores)
    handles = []
    for label, look in looks.items():
        counts = sorted({count for (other, _), count in groups.items() if other == label})
        number = "" if counts == [1] else f", {' to '.join(map(str, sorted({counts[0], counts[-1]})))} runs"
        text = textwrap.fill(label + number, LEGEND_LETTERS)
        handles.append(matplotlib.lines.Line2D([], [], **look, linewidth=2.4, label=text))
    columns = int(picture.get_figwidth() // LEGEND_INCHES)
    lines = sum(str(handle.get_label()).count("\n") + 1 for handle in handles) / columns
    picture.set_figheight(picture.get_figheight() + max(lines - 4, 0) * LINE_INCHES)  # not taken from the panels
    picture.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.4, borderpad=0.1)
    bands = [ONE_RUN] * (1 in groups.values()) + [SEVERAL_RUNS] * any(count > 1 for count in groups.values())
    picture.supxlabel("\n".join(bands), fontsize=7.5, color=MUTED, x=0.012, ha="left", linespacing=1.4, wrap=True)
