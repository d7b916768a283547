"""The tables and the picture of docs/strength.md, from the runs in ``results/returns``."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from results import ACTORS, TUNING_SEEDS, Runs, last, runs, score

from sb3_td3x.results.iqm import interquartile_mean


class SideBySide(NamedTuple):
    """Runs that were begun together, each on a core of one machine: method and seed, SB3's TD3 first."""

    env: str
    runs: tuple[tuple[tuple[str, str], int], ...]


DEFAULT, EMBEDDED = ("td3x", "default"), ("td3x", "embeddings")
SB3_TD3, SB3_TQC = ("sb3_td3", "zoo"), ("sb3_tqc", "zoo")
METHODS = {
    DEFAULT: ("TD3X", "#1f5fa8"),
    EMBEDDED: ("the same with embeddings", "#a06cc0"),
    ("td3x", "nstep3"): ("the same, returns of three steps", "#e0a030"),
    ("td3x", "q25-tau0.02"): ("the same, constant learning rate", "#5fb0d0"),
    ("td3x", "scalar-compiled"): ("the same, TD3's critics, tau 0.005, constant rate", "#8fb3dd"),
    ("td3x", "t3d"): ("TD3X, preset t3d", "#c8501e"),
    SB3_TD3: ("SB3 TD3, rl-zoo3's settings", "#777777"),
    SB3_TQC: ("sb3-contrib TQC, rl-zoo3's settings", "#3a8a4d"),
}
ENVIRONMENTS = ("HalfCheetahBulletEnv-v0", "AntBulletEnv-v0", "HopperBulletEnv-v0", "Walker2DBulletEnv-v0")
# Means of the last 100,000 of 500,000 steps, one seed each, from the evaluations in DLR-RM/rl-trained-agents
ZOO_AGENTS = {"SB3 TD3": (2156, 2847, 2289, 1564), "TQC": (3330, 3008, 2587, 2041)}
ZOO_STYLES, GREY = {"SB3 TD3": ":", "TQC": "--"}, "#444444"
# Of SB3's TD3 after a million steps, three seeds each, from SB3's documentation (docs/modules/td3.md)
SB3_PUBLISHES = (2774, 3305, 2429, 2063)
WANTED = (3330, 3400, 2600, 2250)
OTHERS = {
    "Pendulum-v1": "above -180 by 10k",
    "MountainCarContinuous-v0": "solved (above 90)",
    "LunarLanderContinuous-v3": "above 250 by 300k",
    "BipedalWalker-v3": "above 250 by 300k",
    # mean of 10 seeds at 300,000 steps in sfujim/TD3's learning_curves/, on v1 of the tasks
    "HalfCheetah-v5": "7697 at 300k, as the authors' TD3 on v1",
    "Hopper-v5": "2410 at 300k, as the authors' TD3 on v1",
}
"""Tasks beside PyBullet's, and what was aimed at."""
BESIDE = SideBySide("HalfCheetahBulletEnv-v0", ((SB3_TD3, 0), (DEFAULT, 2)))
LAST = 100_000
SMOOTH = 5  # evaluations in the curves' running mean


def reported(found: Runs, method: tuple[str, str], environment: str) -> list[dict[str, np.ndarray]]:
    """The runs of 500,000 steps on the seeds that results are told on."""
    members = found.get((*method, environment), [])
    return [run for run in members if int(run["seed"][0]) < TUNING_SEEDS and run["timesteps"].max() >= 500_000]


def _methods(found: Runs) -> dict[tuple[str, str], tuple[str, str]]:
    """Label and colour of each method that has a run to report."""
    return {method: look for method, look in METHODS.items() if any(reported(found, method, env) for env in ENVIRONMENTS)}


def results_table(found: Runs) -> str:
    """The mean of the last 100,000 steps per method that has run and environment, over the seeds, as Markdown."""
    lines = [
        "| 500,000 steps | " + " | ".join(_short(env) for env in ENVIRONMENTS) + " |",
        "|---" * 5 + "|",
    ]
    for method, (label, _) in _methods(found).items():
        cells = [_cell([last(run, LAST) for run in reported(found, method, env)]) for env in ENVIRONMENTS]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for label, values in ZOO_AGENTS.items():
        lines.append(f"| {label}, rl-zoo's published agents | " + " | ".join(f"{value} (1)" for value in values) + " |")
    return "\n".join(lines)


def aims_row() -> str:
    """What the project aims at, as a last row of the table."""
    return "| aimed at with 5 seeds (no result) | " + " | ".join(f"{value}" for value in WANTED) + " |"


def rivals_table(found: Runs) -> str:
    """How many seeds of TD3X end above each other method, and above the best of its runs where it has several, as Markdown."""
    rivals = {f"{label}, rl-zoo's published agent": [[value] for value in values] for label, values in ZOO_AGENTS.items()}
    for method in (SB3_TD3, SB3_TQC):
        if method in _methods(found):
            rivals[METHODS[method][0]] = [[last(run, LAST) for run in reported(found, method, env)] for env in ENVIRONMENTS]
    lines = ["| seeds of TD3X above | " + " | ".join(_short(env) for env in ENVIRONMENTS) + " |", "|---" * 5 + "|"]
    for label, scores in rivals.items():
        cells = [_seeds_above(found, env, own) for env, own in zip(ENVIRONMENTS, scores, strict=True)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seeds_above(found: Runs, environment: str, scores: Sequence[float]) -> str:
    if not scores:
        return "not run"
    members = reported(found, DEFAULT, environment)
    best = f" (best of {len(scores)})" if len(scores) > 1 else ""
    return f"{sum(last(run, LAST) > max(scores) for run in members)} of {len(members)}{best}"


def milestones_table(found: Runs) -> str:
    """When each run of TD3X, with and without embeddings, of SB3's TD3 and of TQC passed two scores of SB3's, as Markdown."""
    lines = [
        "| thousand steps of each seed | to SB3's published agent after 500,000 steps | to what SB3 publishes for 1,000,000 |",
        "|---" * 3 + "|",
    ]
    for method in (DEFAULT, EMBEDDED, SB3_TD3, SB3_TQC):
        for env, agent, published in zip(ENVIRONMENTS, ZOO_AGENTS["SB3 TD3"], SB3_PUBLISHES, strict=True):
            if members := reported(found, method, env):
                cells = [f"{level}: {', '.join(_passed(run, level) for run in members)}" for level in (agent, published)]
                lines.append(f"| {METHODS[method][0]}, {_short(env)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _passed(run: dict[str, np.ndarray], level: float) -> str:
    """Thousand steps until the mean of ``SMOOTH`` evaluations passed a level."""
    above = run["timesteps"][SMOOTH - 1 :][_smoothed(run) > level]
    return f"{above[0] / 1000:.0f}" if len(above) else "never"


def beside_table(found: Runs) -> str:
    """
    Steps and minutes to the score that SB3's TD3 has at its end (the mean of its last 100,000 steps), of SB3's run and of one
    of TD3X that ran at the same time on the machine's other core, as Markdown.
    """
    members = _side_by_side(found)
    level = last(members[0][1], LAST)
    lines = [f"| {_short(BESIDE.env)} | thousand steps to {level:.0f} | minutes to {level:.0f} "
             "| minutes for 500,000 steps | mean of the last 100,000 |", "|---" * 5 + "|"]  # fmt: skip
    for method, run in members:
        first = SMOOTH - 1 + int(np.argmax(_smoothed(run) > level))
        steps, minutes = run["timesteps"][first] / 1000, run["wall_seconds"][first] / 60
        end = f"{run['wall_seconds'][-1] / 60:.0f} | {last(run, LAST):.0f}"
        lines.append(f"| {METHODS[method][0]}, seed {int(run['seed'][0])} | {steps:.0f} | {minutes:.0f} | {end} |")
    return "\n".join(lines)


def _side_by_side(found: Runs) -> list[tuple[tuple[str, str], dict[str, np.ndarray]]]:
    """Method and run of those in ``BESIDE``."""
    return [
        (method, next(run for run in reported(found, method, BESIDE.env) if run["seed"][0] == seed))
        for method, seed in BESIDE.runs
    ]


def _short(environment: str) -> str:
    return environment.removesuffix("BulletEnv-v0")


def iqm_table(found: Runs) -> str:
    """
    The interquartile mean over environments and seeds with rliable's interval, as Markdown: as a multiple of published agents,
    with and without embeddings where all environments have been run, and of the mean of SB3's TD3 where it has been run more
    than once, which has an interval too.
    """
    lines = ["| as a multiple of | method, seeds of each task | interquartile mean | 95 % interval |", "|---" * 4 + "|"]
    for method in (DEFAULT, EMBEDDED):
        if all(reported(found, method, env) for env in ENVIRONMENTS):
            for label, values in ZOO_AGENTS.items():
                lines.append(_iqm_row(found, method, f"{label}, rl-zoo's published agents (1 seed)", ENVIRONMENTS, values))
    ours = {env: [last(run, LAST) for run in reported(found, SB3_TD3, env)] for env in ENVIRONMENTS}
    means = {env: float(np.mean(scores)) for env, scores in ours.items() if len(scores) > 1}
    for method in (DEFAULT, SB3_TD3) if means else ():
        where = f"{METHODS[SB3_TD3][0]}, run here ({' and '.join(map(_short, means))})"
        lines.append(_iqm_row(found, method, where, tuple(means), tuple(means.values())))
    return "\n".join(lines)


def _iqm_row(found: Runs, method: tuple[str, str], label: str, environments: Sequence[str], units: Sequence[float]) -> str:
    """Of as many seeds as each environment has, with a score of ``units`` as 1."""
    members = [reported(found, method, env) for env in environments]
    seeds = min(map(len, members))
    scores = np.array([[last(run, LAST) for run in runs[:seeds]] for runs in members]).T / units
    mean, low, high = (float(one[0]) for one in interquartile_mean(scores[..., None]))
    return f"| {label} | {METHODS[method][0].partition(',')[0]}, {seeds} | {mean:.2f} | {low:.2f} to {high:.2f} |"


def _cell(values: list[float]) -> str:
    if not values:
        return "not run"
    spread = f" ± {np.std(values, ddof=1):.0f}" if len(values) > 1 else ""
    return f"{round(np.mean(values))}{spread} ({len(values)})"


def runs_table(found: Runs) -> str:
    """A line per run on the seeds that results are told on, as Markdown."""
    marks = (100_000, 200_000, 300_000, 400_000, 500_000)
    heads = (*(f"{mark // 1000}k" for mark in marks), "mean of the last 100k", "best", "minutes")
    lines = [f"| run | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for algo, setting, env in sorted(found):
        for run in reported(found, (algo, setting), env):
            at = ["-" if (value := score(run, mark)) is None else f"{value:.0f}" for mark in marks]
            end = [f"{last(run, LAST):.0f}", f"{run['mean_return'].max():.0f}", f"{run['wall_seconds'][-1] / 60:.0f}"]
            lines.append(f"| {algo} {setting}, {env}, seed {int(run['seed'][0])} | {' | '.join([*at, *end])} |")
    return "\n".join(lines)


def others_table(found: Runs) -> str:
    """The last and the best evaluations on tasks beside PyBullet's with the preset ``default``, as Markdown."""
    heads = (
        "task",
        "aimed at",
        "steps",
        "last evaluation, mean over seeds (seeds)",
        "worst seed",
        "best evaluation of each seed",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for env, aim in OTHERS.items():
        members = found.get(("td3x", "default", env), [])
        ends = [float(run["mean_return"][-1]) for run in members]
        lengths = sorted({int(run["timesteps"].max()) for run in members})
        steps = " and ".join(f"{length:,}" for length in lengths) or "-"
        best = ", ".join(f"{round(run['mean_return'].max())}" for run in members) or "-"
        lines.append(f"| {env} | {aim} | {steps} | {_cell(ends)} | {round(min(ends)) if ends else '-'} | {best} |")
    return "\n".join(lines)


def actors_table() -> str:
    """What each actor of a run scores on fresh episodes, as Markdown."""
    names = ("live", "best by evaluations")
    lines = [f"| run | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for path in sorted(ACTORS.glob("*.json")):
        facts = json.loads(path.read_text())
        cells = [_mean_and_spread(facts["returns"].get(name)) for name in names]
        lines.append(f"| {path.stem.removeprefix('td3x_')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_and_spread(returns: list[float] | None) -> str:
    return "-" if returns is None else f"{np.mean(returns):.0f} ± {np.std(returns):.0f}"


def draw(found: Runs, out: Path) -> None:
    """
    Learning curves over steps, one panel per environment, and over minutes of the runs made side by side; those of TQC, which
    have no such partner, come from a faster machine.
    """
    figure = Figure(figsize=(9, 10), dpi=110, layout="constrained")
    panels = figure.subplot_mosaic([list(ENVIRONMENTS[:2]), list(ENVIRONMENTS[2:]), ["minutes", "minutes"]])
    for env, agents in zip(ENVIRONMENTS, zip(*ZOO_AGENTS.values(), strict=True), strict=True):
        _draw_steps(panels[env], found, env)
        _frame(panels[env], env, agents, "thousand environment steps")
    tqc = [(SB3_TQC, run) for run in reported(found, SB3_TQC, BESIDE.env)]
    for method, run in [*_side_by_side(found), *tqc]:
        panels["minutes"].plot(run["wall_seconds"][SMOOTH - 1 :] / 60, _smoothed(run), color=METHODS[method][1], linewidth=1.8)
    at = ENVIRONMENTS.index(BESIDE.env)
    agents = [values[at] for values in ZOO_AGENTS.values()]
    title = f"{BESIDE.env}: TD3X and SB3's TD3 begun together on one machine, TQC on a faster one"
    _frame(panels["minutes"], title, agents, "minutes")
    curves = [Line2D([], [], color=colour, label=label) for label, colour in _methods(found).values()]
    levels = [Line2D([], [], color=GREY, linestyle=style, label=f"{label}, rl-zoo's published agent: mean of 400k to 500k")
              for label, style in ZOO_STYLES.items()]  # fmt: skip
    figure.legend(handles=[*curves, *levels], loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(out)


def _draw_steps(axes: Axes, found: Runs, environment: str) -> None:
    """Of each method each seed (pale) and the mean over seeds, of the mean of the last ``SMOOTH`` evaluations."""
    for method, (_, colour) in _methods(found).items():
        if members := reported(found, method, environment):
            scores = [_smoothed(run) for run in members]
            steps = members[0]["timesteps"][SMOOTH - 1 :] / 1000
            if len(members) > 1:
                axes.plot(steps, np.transpose(scores), color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(steps, np.mean(scores, axis=0), color=colour, linewidth=1.8)


def _frame(axes: Axes, title: str, agents: Sequence[float], over: str) -> None:
    """Title, labels and the levels of rl-zoo's agents, in the order of ``ZOO_AGENTS``."""
    for value, style in zip(agents, ZOO_STYLES.values(), strict=True):
        axes.axhline(value, color=GREY, linewidth=1, linestyle=style)
    axes.set_title(title, fontsize=11, loc="left")
    axes.set(xlim=(0, None), ylim=(0, None), xlabel=over, ylabel="return per episode")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _smoothed(run: dict[str, np.ndarray]) -> np.ndarray:
    """The mean of each evaluation and the ``SMOOTH`` - 1 before it."""
    return np.convolve(run["mean_return"], np.full(SMOOTH, 1 / SMOOTH), "valid")


def write(page: Path, picture: Path, fill: Callable[[Path, str, str], None]) -> None:
    """Draw the picture and fill the page's tables."""
    found = runs()
    draw(found, picture)
    fill(page, "results table", f"{results_table(found)}\n{aims_row()}")
    fill(page, "iqm table", iqm_table(found))
    fill(page, "milestones table", milestones_table(found))
    fill(page, "beside table", beside_table(found))
    fill(page, "runs table", runs_table(found))
    fill(page, "actors table", actors_table())
    fill(page, "others table", others_table(found))
