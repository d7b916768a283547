"""Learning curves as pictures."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: no global state, no display

from sb3_td3x.rundir import RunDir

COLOURS = ("#1f5fa8", "#c8501e", "#3a8a4d", "#7a4fa3", "#8a6d1f", "#b03060")


def draw(runs: Sequence[RunDir], out: Path, title: str | None = None) -> None:
    """
    One line per environment: the mean score over its runs, and a band around it.

    For one run the band is the spread over its evaluation episodes (one standard deviation); for several
    runs it is the 95 % bootstrap interval of the mean over runs.

    :param runs: runs with at least one evaluation
    :param out: picture to write; replaced in one step, so that a viewer never sees half of it
    :raises ValueError: if a run has no evaluations
    """
    groups: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for run in runs:
        groups[run.env_id].append(run.scores())

    figure = Figure(figsize=(7, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for colour, (env_id, scores) in zip(COLOURS * (1 + len(groups) // len(COLOURS)), groups.items(), strict=False):
        steps, mean, low, high = _summary(scores)
        label = env_id if len(scores) == 1 else f"{env_id}, mean of {len(scores)} runs"
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=label)
        axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return per episode")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if title is not None or len(groups) == 1:
        axes.set_title(title or axes.get_lines()[0].get_label(), fontsize=11, loc="left")
    if len(groups) > 1:
        axes.legend(frameon=False)

    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.stem}.partial{out.suffix}")
    figure.savefig(beside)
    beside.replace(out)


def _summary(scores: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean, and the band's lower and upper edge, each ``(evaluations,)``; runs are cut to the shortest."""
    length = min(len(steps) for steps, _ in scores)
    steps = scores[0][0][:length]
    if len(scores) == 1:
        mean, spread = scores[0][1].mean(axis=1), scores[0][1].std(axis=1)
        return steps, mean, mean - spread, mean + spread
    means = np.stack([results[:length].mean(axis=1) for _, results in scores])
    picks = np.random.default_rng(0).integers(len(means), size=(1000, len(means)))
    low, high = np.percentile(means[picks].mean(axis=1), [2.5, 97.5], axis=0)
    return steps, means.mean(axis=0), low, high
