"""The tables and the figure of docs/results.md, from the runs in ``results/returns``."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import ACTORS, TUNING_SEEDS, Runs, fill, last, score, table
from speed_figures import measured, update_rows

DEFAULT, SB3_TD3, SB3_TQC = ("td3x", "default"), ("sb3_td3", "zoo"), ("sb3_tqc", "zoo")
METHODS = {
    DEFAULT: ("TD3X", "#1f5fa8"),
    SB3_TD3: ("SB3 TD3", "#d0561f"),
    SB3_TQC: ("sb3-contrib TQC", "#0f9f8f"),
}
ENVIRONMENTS = ("HalfCheetahBulletEnv-v0", "AntBulletEnv-v0", "HopperBulletEnv-v0", "Walker2DBulletEnv-v0")
# Means from 400,000 to 500,000 of a million steps, one seed each, from evaluations in DLR-RM/rl-trained-agents
ZOO_AGENTS = {"SB3 TD3": (2156, 2847, 2289, 1564), "sb3-contrib TQC": (3330, 3008, 2587, 2041)}
# Mean and deviation over 25 seeds between 420,000 and 480,000 steps, from results/ of MushroomRL/mushroom-rl-benchmark
MUSHROOM_RL = ((2037, 356), (1577, 902), (1942, 550), (1277, 548))
OTHERS = {
    "Pendulum-v1": "above -180 by 10k",
    "MountainCarContinuous-v0": "above 90",
    "LunarLanderContinuous-v3": "above 250 by 300k",
    "BipedalWalker-v3": "above 250 by 300k",
}
"""Tasks of other families, and their targets."""
MUJOCO = ("HalfCheetah-v5", "Hopper-v5")
MUJOCO_METHODS = {
    DEFAULT: "TD3X",
    ("td3x", "authors"): "TD3X with the TD3 authors' values",
    SB3_TD3: "SB3 TD3",
}
# Means of 10 seeds at 300,000 steps in learning_curves/ of sfujim/TD3, on v1 of the tasks
AUTHORS_PUBLISH = (7697, 2410)
LAST = 100_000
SMOOTH = 5
"""Evaluations in the running mean of the curves."""


def reported(found: Runs, method: tuple[str, str], environment: str) -> list[dict[str, np.ndarray]]:
    """The runs of 500,000 steps on the seeds that are reported."""
    members = found.get((*method, environment), [])
    return [run for run in members if int(run["seed"][0]) < TUNING_SEEDS and run["timesteps"].max() >= 500_000]


def ends(found: Runs, method: tuple[str, str], environment: str) -> list[float]:
    return [last(run, LAST) for run in reported(found, method, environment)]


def short(environment: str) -> str:
    return environment.removesuffix("BulletEnv-v0")


def results_table(found: Runs) -> str:
    """Mean of the last 100,000 steps, its standard deviation over seeds, and their number."""
    rows = [[label, *(_cell(ends(found, method, env)) for env in ENVIRONMENTS)] for method, (label, _) in METHODS.items()]
    rows += [[f"{label}, published runs", *(f"{value} (1)" for value in values)] for label, values in ZOO_AGENTS.items()]
    rows.append(["TD3, published by MushroomRL", *(f"{mean} ± {deviation} (25)" for mean, deviation in MUSHROOM_RL)])
    return table(["return after 500,000 steps", *map(short, ENVIRONMENTS)], rows)


def readme_table(found: Runs) -> str:
    """The means alone, of the runs made here."""
    rows = [
        [label, *(f"{np.mean(ends(found, method, env)):.0f}" for env in ENVIRONMENTS)]
        for method, (label, _) in METHODS.items()
    ]
    return table(["", *map(short, ENVIRONMENTS)], rows)


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {np.std(values, ddof=1):.0f}" if len(values) > 1 else ""
    return f"{round(np.mean(values))}{spread} ({len(values)})" if values else "-"


def iqm_table(found: Runs) -> str:
    """Interquartile means of TD3X over environments and seeds, as multiples of others' means."""
    here = [
        (f"{METHODS[method][0]}, run here", [ends(found, method, env) for env in ENVIRONMENTS])
        for method in (SB3_TD3, SB3_TQC)
    ]
    published = [(f"{label}, published runs (1 seed)", [[value] for value in values]) for label, values in ZOO_AGENTS.items()]
    ours, rows = [ends(found, DEFAULT, env) for env in ENVIRONMENTS], []
    for label, others in (*published, *here):
        mean, low, high = interquartile_mean(ours, others)
        has_spread = any(len(scores) > 1 for scores in others)
        rows.append([label, f"{mean:.2f}", f"{low:.2f} to {high:.2f}" if has_spread else "-"])
    return table(["TD3X as a multiple of", "interquartile mean", "95 % bootstrap interval"], rows)


def interquartile_mean(scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """
    The mean of the middle half of all seeds' scores, each as a multiple of the others' mean in its environment (Agarwal et al.
    2021, https://arxiv.org/abs/2108.13264), and both ends of its 95 % interval, from a bootstrap over the seeds of both.
    """

    def middle(draw: Callable[[Sequence[float]], np.ndarray]) -> np.ndarray:
        parts = [draw(ours) / draw(theirs).mean(axis=1, keepdims=True) for ours, theirs in zip(scores, others, strict=True)]
        ratios = np.sort(np.concatenate(parts, axis=1), axis=1)
        cut = ratios.shape[1] // 4
        return ratios[:, cut : ratios.shape[1] - cut].mean(axis=1)

    random = np.random.default_rng(0)
    low, high = np.percentile(middle(lambda values: random.choice(values, (4000, len(values)))), [2.5, 97.5])
    return float(middle(lambda values: np.array([values]))[0]), low, high


def others_table(found: Runs) -> str:
    rows = []
    for env, target in OTHERS.items():
        members = found.get((*DEFAULT, env), [])
        lengths = " and ".join(f"{length:,}" for length in sorted({int(run["timesteps"].max()) for run in members})) or "-"
        best = ", ".join(f"{round(run['mean_return'].max())}" for run in members) or "-"
        rows.append([env, target, lengths, _cell([float(run["mean_return"][-1]) for run in members]), best])
    return table(["task", "target", "steps", "last evaluation (seeds)", "best evaluation of each seed"], rows)


def mujoco_table(found: Runs) -> str:
    """Mean of the last 100,000 of 300,000 steps, its standard deviation over seeds, and their number."""
    rows = []
    for method, label in MUJOCO_METHODS.items():
        members = ([run for run in found.get((*method, env), []) if int(run["seed"][0]) < TUNING_SEEDS] for env in MUJOCO)
        rows.append([label, *(_cell([last(run, LAST) for run in runs_of_env]) for runs_of_env in members)])
    rows.append(["TD3, published by its authors (v1, at 300,000 steps)", *(f"{mean} (10)" for mean in AUTHORS_PUBLISH)])
    return table(["return after 300,000 steps", *MUJOCO], rows)


def runs_table(found: Runs) -> str:
    """A line per whole run on the seeds that are reported."""
    marks = (100_000, 200_000, 300_000, 400_000, 500_000)
    rows = []
    for algo, setting, env in sorted(found):
        for run in reported(found, (algo, setting), env):
            at = ["-" if (value := score(run, mark)) is None else f"{value:.0f}" for mark in marks]
            end = [f"{last(run, LAST):.0f}", f"{run['mean_return'].max():.0f}", f"{run['wall_seconds'][-1] / 60:.0f}"]
            rows.append([f"{algo} {setting}", env, f"{int(run['seed'][0])}", *at, *end])
    heads = (*(f"{mark // 1000}k" for mark in marks), "mean of the last 100k", "best", "minutes")
    return table(["run", "task", "seed", *heads], rows)


def actors_table() -> str:
    """What the last and the best actor of a run score on 100 fresh episodes, mean and standard deviation over them."""
    rows = []
    for path in sorted(ACTORS.glob("*.json")):
        returns = json.loads(path.read_text())["returns"]
        actors = (returns["live"], returns["best by evaluations"])
        rows.append([path.stem.removeprefix("td3x_"), *(f"{np.mean(one):.0f} ± {np.std(one):.0f}" for one in actors)])
    return table(["run", "last actor", "best by evaluations"], rows)


def draw(found: Runs, out: Path) -> None:
    """Mean and 95 % interval over all seeds, above over steps and below over minutes, a column per task."""
    figure = Figure(figsize=(9.6, 5.2), dpi=110, layout="constrained")
    panels = figure.subplots(2, len(ENVIRONMENTS), sharey="col")
    for column, env in enumerate(ENVIRONMENTS):
        for method, (label, color) in METHODS.items():
            if members := reported(found, method, env):
                steps = members[0]["timesteps"][SMOOTH - 1 :]
                scores = np.array([_smoothed(run) for run in members])
                for axes, places in zip(panels[:, column], (steps / 1000, steps * _minutes_per_step(label)), strict=True):
                    _draw_curve(axes, places, scores, label, color)
        panels[0, column].set_title(short(env), fontsize=12, loc="left")
        for axes, unit in zip(panels[:, column], ("thousand steps", "minutes"), strict=True):
            axes.set(xlim=(0, None), ylim=(0, None), xlabel=unit)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("return per episode")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(out)


def _draw_curve(axes: Axes, places: np.ndarray, scores: np.ndarray, label: str, color: str) -> None:
    """:param scores: ``(seeds, evaluations)``"""
    axes.plot(places, scores.mean(axis=0), color=color, linewidth=1.8, label=label)
    if len(scores) > 1:
        drawn = np.random.default_rng(0).integers(len(scores), size=(2_000, len(scores)))
        low, high = np.quantile(scores[drawn].mean(axis=1), (0.025, 0.975), axis=0)
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _minutes_per_step(label: str) -> float:
    """On a quiet Zen 4 with the walker, without evaluations; for TQC its update and what SB3's TD3 takes outside of that."""
    learn, updates = measured("zen4", "recipe_env-Walker2DBulletEnv-v0"), update_rows("zen4", 256)
    outside = learn["SB3 TD3"]["ms"] - updates["SB3 TD3"]["ms"]
    return (learn[label]["ms"] if label in learn else updates[label]["ms"] + outside) / 60_000


def _smoothed(run: dict[str, np.ndarray]) -> np.ndarray:
    return np.convolve(run["mean_return"], np.full(SMOOTH, 1 / SMOOTH), "valid")


def write(page: Path, picture: Path, found: Runs) -> None:
    """Draw the figure and fill the page's tables."""
    draw(found, picture)
    fill(page, "results table", results_table(found))
    fill(page, "iqm table", iqm_table(found))
    fill(page, "others table", others_table(found))
    fill(page, "mujoco table", mujoco_table(found))
