"""The evaluation scores of runs, from wherever they are kept: run folders, study folders, tables."""

import csv
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.common.validation import check_int
from sb3_td3x.results.run_dir import EVALUATIONS, SCORE_COLUMNS, SCORES, RunDir

TABLE_COLUMNS = ("algo", "setting", "env", "seed", *SCORE_COLUMNS)  # of a study's tables; a run's has only the numbers


@dataclass(frozen=True)
class Scores:
    """The evaluations of one run; arrays are ``(evaluations,)``, one evaluation at least."""

    label: str  # algorithm and setting: runs that differ in their seed alone share it
    env_id: str
    seed: int | None
    source: Path  # the run's folder or the table
    steps: np.ndarray
    mean: np.ndarray
    spread: np.ndarray  # standard deviation of the returns of an evaluation's episodes
    seconds: np.ndarray  # of training up to the evaluation; NaN where they are not known


def read(paths: Iterable[Path]) -> list[Scores]:
    """The scores of the runs in these folders of runs or studies, and tables, each once; without runs that have none yet."""
    sources = {source.resolve(): source for path in paths for source in _sources(path)}
    ready = [path for path in sources.values() if path.is_file() or (path / EVALUATIONS).exists()] or [*sources.values()]
    tables_and_runs = (of_table(path) if path.is_file() else [of_run(RunDir.open(path))] for path in ready)
    return _told_apart([run for runs in tables_and_runs for run in runs])


def score_text(score: float) -> str:
    """A return for display: rounded to an integer, or to three digits where it is small."""
    return f"{score:.0f}" if abs(score) >= 100 else f"{score:.3g}"


def _told_apart(runs: list[Scores]) -> list[Scores]:
    """Append to the labels of runs of one label and environment the settings in which they differ."""
    settings = [_settings(run) for run in runs]
    labeled = []
    for run, values in zip(runs, settings, strict=True):
        key = (run.label, run.env_id)
        group = [other for same, other in zip(runs, settings, strict=True) if other and (same.label, same.env_id) == key]
        differing = [
            f"{name}={value}" for name, value in values.items() if any(other.get(name, "unset") != value for other in group)
        ]
        labeled.append(replace(run, label=" ".join([run.label, *differing])))
    for (label, env_id, seed), count in Counter((run.label, run.env_id, run.seed) for run in labeled).items():
        if count > 1 and seed is not None:
            problem = f"{label!r}, {env_id!r}: {count} runs have seed {seed} and count as different seeds"
            warnings.warn(f"{problem}; plot them apart", stacklevel=2)
    return labeled


def _settings(scores: Scores) -> dict[str, Any]:
    """A run's hyperparameters under the names that ``--set`` has for them; none for a table's."""
    folder, settings = RunDir(scores.source, scores.env_id), dict[str, Any]()
    if not folder.config_file.is_file():
        return settings
    for name, value in {**folder.config(), "env_kwargs": folder.env_kwargs() or {}}.items():
        settings |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return settings


def _sources(path: Path) -> list[Path]:
    """Run folders and tables that a path stands for."""
    if path.name == SCORES and RunDir.is_at(path.parent):
        return [path.parent]
    if path.is_file() or RunDir.is_at(path) or (path / EVALUATIONS).exists():
        return [path]
    # Of a study, a run's table stays where its folder was removed
    removed = [table for table in sorted(path.glob("returns/[!.]*.csv")) if not RunDir.is_at(path / "runs" / table.stem)]
    if places := RunDir.inside(path) + removed or sorted(path.glob("[!.]*.csv")):
        return places
    problem = f"{path} is not a run, a study or a table of scores" if path.exists() else f"there is no folder or file {path}"
    raise ValueError(problem)


def of_run(run: RunDir) -> Scores:
    """The scores of a run; ``ValueError`` if it has no evaluations yet."""
    steps, results = run.scores()
    arguments, table = run.arguments(), run.path / SCORES
    # A run writes its table after the evaluation, so the last line may be missing
    seconds = {row["timesteps"]: row["wall_seconds"] for row in _rows(table, SCORE_COLUMNS)} if table.exists() else {}
    seed, preset = arguments.get("seed"), str(arguments.get("preset") or "")  # rl-zoo3's runs have none
    return Scores(
        label=label_of(arguments.get("algo"), arguments.get("setting") or Path(preset).stem),  # as a study names its settings
        env_id=run.env_id,
        seed=seed if isinstance(seed, int) else None,
        source=run.path,
        steps=steps,
        mean=results.mean(axis=1),
        spread=results.std(axis=1),
        seconds=np.array([seconds.get(float(step), np.nan) for step in steps]),
    )


def label_of(algo: Any, setting: Any) -> str:
    return f"{str(algo or '').upper()} {setting or ''}".strip()


def of_table(path: Path) -> list[Scores]:
    """The runs in a table with the columns ``TABLE_COLUMNS``; ``ValueError`` for another file."""
    runs = defaultdict(list)
    for row in _rows(path, TABLE_COLUMNS):
        runs[tuple(row[name] for name in TABLE_COLUMNS[:4])].append([row[name] for name in SCORE_COLUMNS])
    if not runs:
        raise ValueError(f"{path} has no scores yet")
    for run, values in runs.items():
        if len({steps for steps, *_ in values}) < len(values):
            raise ValueError(f"{path} holds more than one run of {', '.join(map(str, run))}")
    return [
        Scores(label_of(algo, setting), env_id, seed, path, *np.array(sorted(values, key=lambda row: row[0])).T)
        for (algo, setting, env_id, seed), values in runs.items()
    ]


def csv_lines(path: Path) -> list[dict[str, Any]]:
    """A file's lines, by the names of its columns; ``ValueError`` for something else than a CSV file."""
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        try:
            return list(csv.DictReader(file))
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """A table's lines, with numbers as numbers; it must have the columns."""
    try:
        rows = csv_lines(path)
        for row in rows:
            if missing := [name for name in columns if name not in row]:
                raise ValueError(f"it has no column {missing[0]}")
            row |= {name: float(row[name]) for name in SCORE_COLUMNS}
            if "seed" in columns:
                row["seed"] = check_int("seed", float(row["seed"]), minimum=0)
        return rows
    except (ValueError, TypeError) as error:  # a line that is cut off has fewer columns
        raise ValueError(f"{path} is no table of scores: {error}") from error
