"""The evaluation scores of runs, from wherever they are kept: run folders, study folders, tables."""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.common.validation import check_int
from sb3_td3x.results.run_dir import ALGORITHM, EVALUATIONS, SCORE_COLUMNS, SCORES, RunDir

TABLE_COLUMNS = ("algo", "setting", "env", "seed", *SCORE_COLUMNS)
"""Columns of a study's tables; the table of a single run has only the numbers."""


@dataclass(frozen=True)
class Scores:
    """
    The evaluations of one run; arrays are ``(evaluations,)``, one evaluation at least.

    :param label: algorithm and setting: runs that differ in their seed alone share it
    :param env_id: the environment
    :param seed: seed of the run; ``None`` where it is not known
    :param source: where the scores were read
    :param steps: environment steps
    :param mean: mean return of the evaluation's episodes
    :param spread: their standard deviation
    :param seconds: seconds of training up to the evaluation; NaN where they are not known
    """

    label: str
    env_id: str
    seed: int | None
    source: Path
    steps: np.ndarray
    mean: np.ndarray
    spread: np.ndarray
    seconds: np.ndarray


def read(paths: Iterable[Path]) -> list[Scores]:
    """
    The scores of all runs in some places. A place that is named twice counts once.

    :param paths: run folders, folders of runs or of ``td3x study``, tables of scores as a study writes them, or their folders
    :raises ValueError: for any other place, one without evaluations, or a table that cannot be read
    """
    sources = {source.resolve(): source for path in paths for source in _sources(path)}
    tables_and_runs = (of_table(path) if path.is_file() else [of_run(RunDir.open(path))] for path in sources.values())
    return _told_apart([run for runs in tables_and_runs for run in runs])


def score_text(score: float) -> str:
    """A return for display: rounded to an integer, or to three digits where it is small."""
    return f"{score:.0f}" if abs(score) >= 100 else f"{score:.3g}"


def duration_text(seconds: float) -> str:
    """A duration for display, such as 40 s, 3.5 min or 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def _told_apart(runs: list[Scores]) -> list[Scores]:
    """Append to the labels of runs of one label and environment the settings in which they differ."""
    settings = [_settings(run) for run in runs]
    labeled = []
    for run, values in zip(runs, settings, strict=True):
        key = (run.label, run.env_id)
        group = [other for same, other in zip(runs, settings, strict=True) if other and (same.label, same.env_id) == key]
        differing = [f"{name}={value}" for name, value in values.items() if any(other.get(name) != value for other in group)]
        labeled.append(replace(run, label=" ".join([run.label, *differing])))
    return labeled


def _settings(scores: Scores) -> dict[str, Any]:
    """A run's hyperparameters under the names that ``--set`` has for them; none for a table's."""
    folder = RunDir(scores.source, scores.env_id)
    settings: dict[str, Any] = {}
    for name, value in (folder.config() if folder.config_file.is_file() else {}).items():
        settings |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return settings


def _sources(path: Path) -> list[Path]:
    """Run folders and tables that a path stands for."""
    if path.name == SCORES and RunDir.is_at(path.parent):
        return [path.parent]
    if path.is_file() or RunDir.is_at(path) or (path / EVALUATIONS).exists():
        return [path]
    runs = [run for run in sorted([*path.glob(f"{ALGORITHM}/*"), *path.glob("runs/*"), *path.glob("*")]) if RunDir.is_at(run)]
    if evaluated := [run for run in runs if (run / EVALUATIONS).exists()]:
        return evaluated
    if runs:
        raise ValueError(f"no run in {path} has evaluations yet")
    if tables := sorted(path.glob("*.csv")):
        return tables
    raise ValueError(
        f"{path} is not a run, a study or a table of scores" if path.exists() else f"there is no folder or file {path}"
    )


def of_run(run: RunDir) -> Scores:
    """The scores of a run; ``ValueError`` if it has no evaluations yet."""
    steps, results = run.scores()
    arguments = run.arguments()
    setting = arguments.get("setting") or arguments.get("preset")  # rl-zoo3's own runs have none
    label = _label(str(arguments.get("algo", "")), str(setting or ""))
    seconds = _seconds(run.path / SCORES, steps)
    seed = arguments.get("seed")
    mean, spread = results.mean(axis=1), results.std(axis=1)
    return Scores(label, run.env_id, seed if isinstance(seed, int) else None, run.path, steps, mean, spread, seconds)


def _label(algo: str, setting: str) -> str:
    return " ".join(part for part in (algo.upper(), setting) if part)


def _seconds(path: Path, steps: np.ndarray) -> np.ndarray:
    """In the order of ``steps``. A run writes its table after the evaluation, so the last line may be missing."""
    rows = _rows(path, ("timesteps", "wall_seconds")) if path.exists() else []
    known = {row["timesteps"]: row["wall_seconds"] for row in rows}
    return np.array([known.get(float(step), np.nan) for step in steps])


def of_table(path: Path) -> list[Scores]:
    """The runs in a table with the columns ``TABLE_COLUMNS``; ``ValueError`` for another file."""
    rows = _rows(path, TABLE_COLUMNS)
    if not rows:
        raise ValueError(f"{path} has no scores yet")
    runs = defaultdict(list)
    for row in rows:
        runs[tuple(row[name] for name in TABLE_COLUMNS[:4])].append([row[name] for name in SCORE_COLUMNS])
    return [
        Scores(_label(algo, setting), env_id, seed, path, *np.array(sorted(values, key=lambda row: row[0])).T)
        for (algo, setting, env_id, seed), values in runs.items()
    ]


def csv_lines(path: Path) -> list[dict[str, Any]]:
    """A file's lines, by the names of its columns; ``ValueError`` for something else than a CSV file."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open(newline="", errors="replace") as file:
        try:
            return list(csv.DictReader(file))
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _rows(path: Path, columns: Iterable[str]) -> list[dict[str, Any]]:
    """A table's lines, with numbers as numbers; it must have the columns."""
    try:
        rows = csv_lines(path)
        if missing := [name for name in columns if rows and name not in rows[0]]:
            raise ValueError(f"it has no column {missing[0]}")
        rows = [{**row, **{name: float(row[name]) for name in SCORE_COLUMNS if name in row}} for row in rows]
        return [{**row, "seed": check_int("seed", float(row["seed"]), minimum=0)} if "seed" in row else row for row in rows]
    except (ValueError, TypeError) as error:  # a line that is cut off has fewer columns
        raise ValueError(f"{path} is no table of scores: {error}") from error
