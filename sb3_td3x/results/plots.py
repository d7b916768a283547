"""Learning curves as pictures."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no global state, no display

from sb3_td3x.common import files
from sb3_td3x.results.scores import Scores

COLORS = ("#2a6fbb", "#d0561f", "#2f8f4e", "#8a58b5", "#a07a14", "#c23b6e", "#17909c", "#7a7a7a")
STROKES = ("solid", "dashed", "dotted", "dashdot")
"""One for each round of the colors."""
Look = dict[str, Any]
"""A line's color and style, as matplotlib takes them."""
AXES = {"steps": "environment steps", "time": "wall-clock time"}
UNITS = ((7200, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))
MOST_POINTS = 50
"""Points of the interquartile mean, which is bootstrapped anew at each."""
RESAMPLES = 1000
LEGEND_LETTERS_PER_INCH, LEGEND_GAP = 11, 6
"""Space for a legend: letters of its size, and how many of them the line and the space of an entry take."""
ONE_RUN = "one run: its evaluation's mean ± one standard deviation over the episodes"
SEVERAL_RUNS = "several runs: mean over seeds with its 95 % bootstrap interval"


@dataclass(frozen=True)
class Theme:
    """Colors."""

    ink: str = "#22262b"
    muted: str = "#6b7178"
    background: str = "#ffffff"
    lines: tuple[str, ...] = COLORS

    def settings(self) -> Any:
        """Matplotlib's rcParams."""
        return {
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "text.color": self.ink,
            "axes.labelcolor": self.muted,
            "axes.edgecolor": self.muted,
            "axes.facecolor": "none",
            "axes.linewidth": 0.7,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.5,
            "axes.titlepad": 9,
            "axes.labelsize": 9.5,
            "grid.color": self.muted,
            "grid.alpha": 0.22,
            "grid.linewidth": 0.6,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "xtick.major.size": 3,
            "ytick.major.size": 0,
            "figure.facecolor": self.background,
            "text.parse_math": False,  # names are text, whoever gave them
            "legend.frameon": False,
            "legend.fontsize": 9.5,
        }


def looks(labels: Sequence[str], theme: Theme) -> dict[str, Look]:
    """A look for each label; they differ for as many labels as there are pairs of a color and a stroke."""
    pairs = cycle({"color": color, "linestyle": stroke} for stroke in STROKES for color in theme.lines)
    return dict(zip(labels, pairs, strict=False))


LIGHT, DARK = Theme(), Theme("#e7e9ea", "#98a0a8", "#1b1f23", ("#6fb1f2", "#f59a63", "#6ccf8e", "#c39be8"))


@dataclass(frozen=True)
class Curve:
    """A line and the band around it, each ``(points,)``."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def draw(
    scores: Sequence[Scores], out: Path, x: Sequence[str] = ("steps",), with_iqm: bool = False, normalize: bool = True
) -> None:
    """
    A panel per environment and axis; in it a line per algorithm and setting, with a band around it.

    For one run the band is the spread over its evaluation episodes (one standard deviation); for several
    runs it is the 95 % bootstrap interval of the mean over runs.

    :param scores: of one run or more
    :param out: picture to write; replaced in one step, so that a viewer never sees half of it
    :param x: ``"steps"``, ``"time"`` or both
    :param with_iqm: add a panel with the interquartile mean over the environments, if a setting has been run in all of them
    :param normalize: for that panel, put each environment's scores on a scale from their lowest (0) to their highest (1)
    :raises ValueError: for another file format, times that are not known, or no run
    """
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture is a .png, .svg or .pdf, not {out.name!r}")
    picture = figure(scores, x, with_iqm, normalize)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, picture.savefig)


def figure(scores: Sequence[Scores], x: Sequence[str] = ("steps",), with_iqm: bool = False, normalize: bool = True) -> Figure:
    """The picture that ``draw`` writes; parameters as there."""
    if not scores:
        raise ValueError("there is no run to draw")
    labels = list(dict.fromkeys(run.label for run in scores))
    environments = list(dict.fromkeys(run.env_id for run in scores))
    pairs = {(run.label, run.env_id) for run in scores}
    in_all = any(all((label, env_id) in pairs for env_id in environments) for label in labels)
    with_iqm = with_iqm and len(environments) > 1 and in_all
    n_panels = len(environments) + with_iqm
    rows = -(-n_panels // 3)
    columns = len(x) if n_panels == 1 else -(-n_panels // rows)
    blocks = 1 if n_panels == 1 else len(x)  # of rows, one below the other
    width = {1: 7.2, 2: 5.0}.get(columns, 4.2)
    with matplotlib.rc_context(LIGHT.settings()):
        picture = Figure(
            figsize=(width * columns, (4.1 if columns < 2 else 3.4) * rows * blocks), dpi=120, layout="constrained"
        )
        picture.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # type: ignore[union-attr, call-arg]
        styles = looks(labels, LIGHT)
        notes: list[str] = []
        for block, axis in enumerate(x):
            first = block * (rows * columns if n_panels > 1 else 1) + 1
            for place, environment in enumerate(environments):
                axes = picture.add_subplot(rows * blocks, columns, first + place)
                _draw_environment(axes, [run for run in scores if run.env_id == environment], axis, styles)
            if with_iqm:
                axes = picture.add_subplot(rows * blocks, columns, first + len(environments))
                notes = _draw_iqm(axes, scores, axis, styles, normalize)
        _explain(picture, scores, styles, notes)
    return picture


def plain(scores: Scores, axis: str, theme: Theme) -> Figure:
    """One run's learning curve without title and caption, for a page that has its own."""
    with matplotlib.rc_context(theme.settings()):
        picture = Figure(figsize=(5.4, 3.0), layout="constrained")
        axes = picture.add_subplot()
        _draw_environment(axes, [scores], axis, looks([scores.label], theme))
        axes.set_title("")
    return picture


def chart(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], theme: Theme) -> Figure:
    """
    A small picture of logged values over environment steps.

    :param lines: by name, which is shown if there are several: steps and values, each ``(lines of the log,)``
    :param theme: colors
    """
    with matplotlib.rc_context(theme.settings()):
        picture = Figure(figsize=(3.7, 2.2), layout="constrained")
        axes = picture.add_subplot()
        for color, (name, (steps, values)) in zip(cycle(theme.lines), lines.items(), strict=False):
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=color, linewidth=1.5, marker=marker, markersize=4, label=name)
        _label_x(axes, "steps", "")
        axes.set_xlabel("")
        axes.yaxis.set_major_formatter(lambda value, _: number_text(value))
        if len(lines) > 1:
            axes.legend(handlelength=1.2, loc="best")
    return picture


def number_text(value: float) -> str:
    """Short, whatever its size: 0.0007, 25, 300k, 1e12."""
    return steps_text(value) if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _draw_environment(axes: Axes, scores: Sequence[Scores], axis: str, styles: dict[str, Look]) -> None:
    unit = _unit(scores, axis)
    for label, look in styles.items():
        if runs := [run for run in scores if run.label == label]:
            _draw_curve(axes, summary(runs, axis), look, unit[0])
    axes.set_title(scores[0].env_id)
    axes.set_ylabel("return per episode")
    _label_x(axes, axis, unit[1])


def _draw_curve(axes: Axes, curve: Curve, look: Look, unit: float) -> None:
    marker = "o" if len(curve.x) == 1 else None
    x = curve.x / unit
    axes.plot(x, curve.mean, **look, linewidth=1.7, solid_capstyle="round", marker=marker, markersize=4)
    axes.fill_between(x, curve.low, curve.high, color=look["color"], alpha=0.17, linewidth=0)
    if marker:
        axes.errorbar(x, curve.mean, [curve.mean - curve.low, curve.high - curve.mean], color=look["color"], alpha=0.5)


def _label_x(axes: Axes, axis: str, unit: str) -> None:
    axes.set_xlim(left=0)
    axes.set_xlabel(AXES[axis] + (f" ({unit})" if axis == "time" else ""))
    if axis == "steps":
        axes.xaxis.set_major_formatter(lambda value, _: steps_text(value))
    axes.locator_params(axis="both", nbins=6)


def steps_text(steps: float) -> str:
    """Such as 500k or 1.5M."""
    return f"{steps / 1e6:g}M" if abs(steps) >= 1e6 else f"{steps / 1000:g}k" if abs(steps) >= 1000 else f"{steps:g}"


def _unit(scores: Sequence[Scores], axis: str) -> tuple[float, str]:
    if axis == "steps":
        return 1, ""
    longest = max(float(_points(run, axis)[0].max()) for run in scores)
    return next((size, name) for least, size, name in UNITS if longest >= least)


def _points(run: Scores, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    :return: positions on the axis, mean returns and their spread, where the position is known
    :raises ValueError: if the run's times are not known
    """
    if axis == "steps":
        return run.steps, run.mean, run.spread
    known = np.isfinite(run.seconds)
    if not known.any():
        raise ValueError(f"{run.source} has no times (its scores.csv is missing): draw it over steps, --x steps")
    return run.seconds[known], run.mean[known], run.spread[known]


def _interpolated(grid: np.ndarray, runs: Sequence[Scores], axis: str) -> np.ndarray:
    """:return: the runs' scores at the positions of ``grid``: ``(runs, points)``"""
    return np.stack([np.interp(grid, *_points(run, axis)[:2]) for run in runs])


def summary(runs: Sequence[Scores], axis: str = "steps") -> Curve:
    """
    The mean over runs of one setting and environment, where all of them have scores.

    Between two evaluations a run's score is the straight line: over time no two runs are evaluated at the same moments.

    :raises ValueError: for several runs without a common range
    """
    if len(runs) == 1:
        x, mean, spread = _points(runs[0], axis)
        return Curve(x, mean, mean - spread, mean + spread)
    if not len(grid := _common(runs, axis)):
        raise ValueError(f"the runs of {runs[0].label} in {runs[0].env_id} have no {axis} in common: draw them apart")
    means = _interpolated(grid, runs, axis)
    picks = np.random.default_rng(0).integers(len(means), size=(RESAMPLES, len(means)))
    counts = np.stack([np.bincount(pick, minlength=len(means)) for pick in picks])
    low, high = np.percentile(counts @ means / len(means), [2.5, 97.5], axis=0)
    return Curve(grid, means.mean(axis=0), low, high)


def _common(runs: Sequence[Scores], axis: str) -> np.ndarray:
    """Every position at which any run was evaluated and all have scores before and after."""
    positions = [_points(run, axis)[0] for run in runs]
    start, end = max(points.min() for points in positions), min(points.max() for points in positions)
    grid = np.unique(np.concatenate(positions))
    return grid[(grid >= start) & (grid <= end)]


def interquartile_mean(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    The mean of the middle half of all runs' scores (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264).

    Its 95 % interval comes from a bootstrap over seeds, stratified by environment.

    :param scores: ``(seeds, environments, points)``
    :return: interquartile mean, and lower and upper edge of its interval, each ``(points,)``
    """
    seeds, environments, points = scores.shape

    def middle(values: np.ndarray) -> np.ndarray:
        ordered = np.sort(values.reshape(-1, seeds * environments, points), axis=1)
        cut = seeds * environments // 4
        return ordered[:, cut : seeds * environments - cut].mean(axis=1)

    picks = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds, environments))
    low, high = np.percentile(middle(scores[picks, np.arange(environments)]), [2.5, 97.5], axis=0)
    return middle(scores)[0], low, high


def _draw_iqm(axes: Axes, scores: Sequence[Scores], axis: str, styles: dict[str, Look], normalize: bool) -> list[str]:
    """:return: the lines of the caption about it"""
    environments = list(dict.fromkeys(run.env_id for run in scores))
    ranges = {env_id: np.concatenate([run.mean for run in scores if run.env_id == env_id]) for env_id in environments}
    unit, left_out, apart, alone = _unit(scores, axis), [], [], []
    for label, look in styles.items():
        runs = [[run for run in scores if (run.label, run.env_id) == (label, env_id)] for env_id in environments]
        if not all(runs):
            left_out.append(label)
            continue
        seeds = min(map(len, runs))  # as many in every environment
        chosen = [sorted(group, key=lambda run: -1 if run.seed is None else run.seed)[:seeds] for group in runs]
        if not len(grid := _common([run for group in chosen for run in group], axis)):
            apart.append(label)
            continue
        alone += [label] if seeds == 1 else []
        grid = grid[np.unique(np.linspace(0, len(grid) - 1, MOST_POINTS).astype(int))]
        values = np.stack([_interpolated(grid, group, axis) for group in chosen])
        if normalize:
            lowest, size = (np.array([f(ranges[env_id]) for env_id in environments]) for f in (np.min, np.ptp))
            values = (values - lowest[:, None, None]) / np.maximum(size, 1e-12)[:, None, None]
        _draw_curve(axes, Curve(grid, *interquartile_mean(values.swapaxes(0, 1))), look, unit[0])
    axes.set_title(f"all {len(environments)} environments")
    axes.set_ylabel(f"IQM of {'normalized' if normalize else 'plain'} scores")
    _label_x(axes, axis, unit[1])
    scale = "0 and 1 are the lowest and highest score drawn in each environment" if normalize else "scores as they are"
    notes = [f"IQM: interquartile mean over environments and seeds with its 95 % bootstrap interval, {scale}"]
    remarks = {
        "in the IQM without an interval, as there is one run": alone,
        "not in the IQM: only in some environments": left_out,
        f"not in the IQM, as the environments have no {axis} in common": apart,
    }
    return notes + [f"{remark}: {', '.join(labels)}" for remark, labels in remarks.items() if labels]


def _explain(picture: Figure, scores: Sequence[Scores], styles: dict[str, Look], notes: Sequence[str]) -> None:
    """A legend for all panels and, below them, what is drawn."""
    groups = Counter((run.label, run.env_id) for run in scores)
    handles = []
    room = int(picture.get_figwidth() * LEGEND_LETTERS_PER_INCH) - LEGEND_GAP
    for label, look in styles.items():
        counts = sorted({count for (other, _), count in groups.items() if other == label})
        number = "" if counts == [1] else f", {' to '.join(map(str, sorted({counts[0], counts[-1]})))} runs"
        label = textwrap.fill(label + number, room)
        handles.append(matplotlib.lines.Line2D([], [], **look, linewidth=2.4, label=label))
    longest = max(len(line) for handle in handles for line in str(handle.get_label()).splitlines())
    columns = min(len(handles), 4, (room + LEGEND_GAP) // (longest + LEGEND_GAP))
    picture.legend(handles=handles, loc="outside upper left", ncols=columns, handlelength=1.4, borderpad=0.1)
    bands = [ONE_RUN] * (1 in groups.values()) + [SEVERAL_RUNS] * any(count > 1 for count in groups.values())
    caption = "\n".join([*bands, *notes])
    picture.supxlabel(caption, fontsize=7.5, color=matplotlib.rcParams["axes.labelcolor"], x=0.012, ha="left", linespacing=1.4)
