"""Learning curves as pictures."""

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: no global state, no display

from sb3_td3x.rundir import RunDir

COLOURS = ("#1f5fa8", "#c8501e", "#3a8a4d", "#7a4fa3", "#8a6d1f", "#b03060")


def draw(runs: Sequence[RunDir], out: Path) -> None:
    """
    One line per algorithm, setting and environment: the mean score over its runs, and a band around it.

    For one run the band is the spread over its evaluation episodes (one standard deviation); for several
    runs it is the 95 % bootstrap interval of the mean over runs.

    :param runs: runs with at least one evaluation
    :param out: picture to write; replaced in one step, so that a viewer never sees half of it
    :raises ValueError: if a run has no evaluations
    """
    groups: dict[str, list[RunDir]] = defaultdict(list)
    for run in runs:
        groups[_label(run)].append(run)

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for colour, (label, members) in zip(cycle(COLOURS), groups.items(), strict=False):
        steps, mean, low, high = _summary([run.scores() for run in members])
        legend = label if len(members) == 1 else f"{label}, mean of {len(members)} runs"
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=legend)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return per episode")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(groups) == 1:
        axes.set_title(legend, fontsize=11, loc="left")
    else:
        axes.legend(frameon=False)

    if out.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a picture is a .png, .svg or .pdf, not {out.name!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(beside)
    beside.replace(out)


def _label(run: RunDir) -> str:
    arguments = run.arguments()
    setting = arguments.get("setting") or arguments.get("preset")  # rl-zoo3's own runs have none
    return f"{arguments['algo'].upper()}{f' {setting}' if setting else ''}, {run.env_id}"


def _summary(scores: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean, and the band's lower and upper edge, each ``(evaluations,)``, where all runs were evaluated."""
    if len(scores) == 1:
        steps, results = scores[0]
        mean, spread = results.mean(axis=1), results.std(axis=1)
        return steps, mean, mean - spread, mean + spread
    common = reduce(np.intersect1d, [steps for steps, _ in scores])
    means = np.stack([results[np.isin(steps, common)].mean(axis=1) for steps, results in scores])
    picks = np.random.default_rng(0).integers(len(means), size=(1000, len(means)))
    low, high = np.percentile(means[picks].mean(axis=1), [2.5, 97.5], axis=0)
    return common, means.mean(axis=0), low, high
