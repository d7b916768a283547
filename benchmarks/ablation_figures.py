"""The tables of docs/ablations.md: what each change was worth, from the short runs on tuning seeds."""

import csv
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml
from results import TUNING_SEEDS, VALUES, Runs, fill, last, score, table
from results_figures import ENVIRONMENTS, LAST, short

RESULTS = Path(__file__).parent / "results"
WINDOW = 50_000  # the steps at the end of two runs whose scores are compared


class Change(NamedTuple):
    """Two settings that differ in one thing, and what was decided."""

    what: str
    setting: str
    beside: str
    now: str


QUANTILES, EMBEDDED = "q25-tau0.02", "q25-tau0.02-sale64-targetnoise0.1"
CHANGES = (
    Change("embeddings of 64 and 256-256", "q25-tau0.02-sale64", QUANTILES, "dropped"),
    Change("the same and target noise of 0.1 clipped at 0.25", EMBEDDED, QUANTILES, "dropped"),
    Change("TD3's critics, not quantiles", "scalar-tau0.02", QUANTILES, "an option"),
    Change("TD3's critics, not quantiles, 256-256", "scalar-tau0.02-net256", "q25-tau0.02-net256", "an option"),
    Change("256-256, not 400-300", "q25-tau0.02-net256", QUANTILES, "an option"),
    Change("tau 0.005, not 0.02", "q25-tau0.005", QUANTILES, "the constructor's"),
    Change("no quantile dropped per critic, not 2", "q25-tau0.02-drop0", QUANTILES, "an option"),
    Change("5 quantiles dropped per critic, not 2", "q25-tau0.02-drop5", QUANTILES, "an option"),
    Change("actor and targets at every update", "q25-tau0.02-delay1", QUANTILES, "an option"),
    Change("returns of three steps", "q25-tau0.02-nstep3", QUANTILES, "an option"),
    Change("two updates per step", "q25-tau0.02-steps2", QUANTILES, "an option"),
    Change("two updates per step, batches of 64", "q25-tau0.02-batch64-steps2", QUANTILES, "an option"),
    Change("learning rate 3e-4, not 7e-4", "q25-tau0.02-lr3e-4", QUANTILES, "an option"),
    Change("prioritized replay (LAP)", "q25-tau0.02-lap", QUANTILES, "an option"),
    Change("LayerNorm in the critics", "q25-tau0.02-layernorm", QUANTILES, "dropped"),
    Change("bfloat16 products", "q25-tau0.02-bf16", QUANTILES, "an option"),
)


def ablation_table(found: Runs) -> str:
    """What each change was worth on each task, seed by seed."""
    rows = []
    for change in CHANGES:
        for env in sorted(env for algo, setting, env in found if (algo, setting) == ("td3x", change.setting)):
            pairs = _pairs(found["td3x", change.setting, env], found.get(("td3x", change.beside, env), []))
            if pairs:
                rows.append([change.what, short(env), *_compared(pairs), change.now])
    return table(["change", "task", "steps", "seeds", "with", "without", "difference of each seed", "now"], rows)


Pair = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def _pairs(changed: list[dict[str, np.ndarray]], beside: list[dict[str, np.ndarray]]) -> list[Pair]:
    """The runs of two settings on the same tuning seed."""
    others = {int(run["seed"][0]): run for run in beside}
    seeds = ((int(run["seed"][0]), run) for run in changed)
    return [(run, others[seed]) for seed, run in seeds if seed >= TUNING_SEEDS and seed in others]


def _compared(pairs: list[Pair]) -> list[str]:
    """Steps, seeds, both means and the differences over the last steps that both runs of each pair have."""
    end = min(run["timesteps"].max() for pair in pairs for run in pair)
    scores = np.array([[last(_until(run, end), WINDOW) for run in pair] for pair in pairs])
    differences = ", ".join(f"{difference:+.0f}" for difference in scores[:, 0] - scores[:, 1])
    seeds = ", ".join(f"{int(run['seed'][0])}" for run, _ in pairs)
    changed, beside = scores.mean(axis=0)
    return [f"{end / 1000:.0f}k", seeds, f"{changed:.0f}", f"{beside:.0f}", differences]


def _until(run: dict[str, np.ndarray], step: float) -> dict[str, np.ndarray]:
    return {name: column[run["timesteps"] <= step] for name, column in run.items()}


COMPARED = (
    ("none, seeds 0 to 4", "default", range(5)),
    ("none, seeds 10 to 14", "default", range(10, 15)),
    ("a rate that falls from the start, a buffer of a million (A), seeds 0 to 4", "lin-buffer1m", range(5)),
)
ARMS = {
    "buffer200k": "a rate that falls from the start (B)",
    "buffer200k-tau0.005": "B and tau 0.005",
    "batch256-gamma0.99-tau0.005": "A and the constructor's gamma, batch size and tau",
    "constructor": "the constructor's values",
    "constructor-scalar": "the constructor's values with one quantile",
    "hold-starts3000": "3,000 random steps, a buffer of a million (C)",
    "hold-starts3000-bf16": "C and bfloat16",
    "hold-starts3000-elu": "C and ELU",
}
TASKS = tuple(map(short, ENVIRONMENTS))


def recipe_table(found: Runs) -> str:
    """Runs of 500,000 steps seed by seed, below means of the preset and the former one."""
    rows = [[change, *(_ends(found, setting, env, seeds) for env in ENVIRONMENTS)] for change, setting, seeds in COMPARED]
    rows += [[change, *(_each_end(found, setting, env) for env in ENVIRONMENTS)] for setting, change in ARMS.items()]
    return table(["change", *TASKS], rows)


def _scores(found: Runs, setting: str, env: str) -> dict[int, float]:
    """Mean of the last 100,000 steps of each whole run, by seed."""
    members = [run for run in found.get(("td3x", setting, env), []) if run["timesteps"].max() >= 500_000]
    return {int(run["seed"][0]): last(run, LAST) for run in members}


def _ends(found: Runs, setting: str, env: str, seeds: range) -> str:
    kept = [score for seed, score in _scores(found, setting, env).items() if seed in seeds]
    return f"{np.mean(kept):.0f} ± {np.std(kept, ddof=1):.0f}"


def _each_end(found: Runs, setting: str, env: str) -> str:
    return ", ".join(f"{score:.0f} ({seed})" for seed, score in sorted(_scores(found, setting, env).items())) or "-"


def effects_table(plan: str) -> str:
    """What each factor of a plan of ``gpu_screen.py`` is worth at the end of the runs, by least squares."""
    factors = list(yaml.safe_load((RESULTS / f"{plan}.yml").read_text())["factors"])
    with (RESULTS / f"{plan}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ends = sorted({int(row["steps"]) for row in rows})[-2:]
    settings = sorted({row["setting"] for row in rows})
    scores = np.array([
        [
            np.mean([float(row["score"]) for row in rows
                     if (row["setting"], row["task"]) == (setting, task) and int(row["steps"]) in ends])
            for task in TASKS
        ] for setting in settings
    ])  # fmt: skip
    scores = np.column_stack([scores, 100 * (scores / scores.mean(axis=0)).mean(axis=1)])
    levels = np.array([[1, *(1 if factor in setting.split(" + ") else -1 for factor in factors)] for setting in settings])
    effects, rest, _, _ = np.linalg.lstsq(levels, scores, rcond=None)
    chance = 2 * np.sqrt(rest / (len(settings) - levels.shape[1]) / len(settings))
    body = [[name, *(f"{value:+.0f}" for value in worth)] for name, worth in zip(factors, 2 * effects[1:], strict=True)]
    body.append(["*standard error*", *(f"{value:.0f}" for value in chance)])
    return table(["change", *TASKS, "mean, %"], body)


def screening_table(found: Runs) -> str:
    """The short runs on tuning seeds."""
    marks = (50_000, 100_000, 150_000, 200_000, 300_000)
    rows = []
    for setting, env in sorted((key[1:] for key in found if key[0] == "td3x"), key=lambda key: key[::-1]):
        for run in found["td3x", setting, env]:
            if int(run["seed"][0]) >= TUNING_SEEDS:
                at = ["-" if (value := score(run, mark)) is None else f"{round(value)}" for mark in marks]
                name = f"{short(env)}, {setting}, {int(run['seed'][0])}"
                rows.append([name, *at, f"{round(last(run, 50_000))}", f"{round(run['mean_return'].max())}"])
    heads = (*(f"{mark // 1000}k" for mark in marks), "mean of the last 50k", "best")
    return table(["environment, setting, seed", *heads], rows)


def values_table() -> str:
    """Values of the critics and discounted returns of their actor, without noise and with that of training."""
    rows = []
    for path in sorted(VALUES.glob("*.json")):
        facts = json.loads(path.read_text())
        calm, noisy = facts["without noise"], facts["with noise of 0.1"]
        cells = [f"{calm['return']:.0f}", f"{calm['value']:.1f}", f"{calm['earned']:.1f}"]
        cells += [f"{one['value'] - one['earned']:+.1f}" for one in (calm, noisy)]
        rows.append([path.stem.removeprefix("td3x_"), f"{facts['steps']:,}", *cells])
    return table(["run", "steps", "return", "value", "discounted return", "difference", "difference with noise"], rows)


def write(page: Path, found: Runs) -> None:
    """Fill the page's tables."""
    fill(page, "ablation table", ablation_table(found))
    fill(page, "recipe table", recipe_table(found))
    fill(page, "effects table", effects_table("gpu_screen"))
    fill(page, "whole effects table", effects_table("gpu_screen_whole"))
    fill(page, "recipes effects table", effects_table("gpu_screen_recipes"))
