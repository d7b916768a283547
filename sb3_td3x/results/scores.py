"""The evaluation scores of runs, from wherever they are kept: run folders, study folders, tables."""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.common.validation import whole
from sb3_td3x.results.run_dir import ARGUMENTS, EVALUATIONS, SCORE_COLUMNS, SCORES, RunDir

TABLE_COLUMNS = ("algo", "setting", "env", "seed", *SCORE_COLUMNS)
"""Of a study's tables; a run's own has the numbers alone."""
MOST_BYTES, MOST_COLUMNS, MOST_CELLS = 100_000_000, 200, 2_000_000
"""Of a table or a log: every line gets all columns of the header, so that a small file could fill the memory."""


@dataclass(frozen=True)
class Scores:
    """
    The evaluations of one run; arrays are ``(evaluations,)``, one evaluation at least.

    :param label: algorithm and setting: runs that differ in their seed alone share it
    :param env_id: the environment
    :param seed: of the run; ``None`` where it is not known
    :param source: where they were read, for errors
    :param steps: environment steps
    :param mean: mean return of the evaluation's episodes
    :param spread: their standard deviation
    :param seconds: of training up to the evaluation; NaN where it is not known
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
    The scores of all runs in some places; a place that is named twice counts once, and a copy of a run not at all.

    :param paths: run folders, folders of runs or of ``td3x study``, tables of scores as a study writes them, or their folders
    :raises ValueError: for any other place, one without evaluations, or a table that cannot be read
    """
    found: dict[Path, list[Scores]] = {}
    for path in paths:
        for source in _sources(path):
            if source.resolve() not in found:
                found[source.resolve()] = of_table(source) if source.is_file() else [of_run(RunDir.open(source))]
    return _told_apart(_without_copies(scores for group in found.values() for scores in group))


def score_text(score: float) -> str:
    """A return for people: whole, and with three digits where it is small."""
    return f"{score:.0f}" if abs(score) >= 100 else f"{score:.3g}"


def _without_copies(runs: Iterable[Scores]) -> list[Scores]:
    """A copied folder, or a run beside its lines in a study's table, is not another seed."""
    kept: list[Scores] = []
    for one in runs:
        copied = next((place for place, other in enumerate(kept) if _is_copy(one, other)), None)
        if copied is None:
            kept.append(one)
        elif len(one.steps) > len(kept[copied].steps):
            kept[copied] = one
    return kept


def _is_copy(one: Scores, other: Scores) -> bool:
    """Of the same run, now or before it went on."""
    if (one.label, one.env_id, one.seed) != (other.label, other.env_id, other.seed):
        return False
    settings, others = _settings(one), _settings(other)
    if settings and others and _without_length(settings) != _without_length(others):
        return False
    both = slice(min(len(one.steps), len(other.steps)))
    same_steps = np.array_equal(one.steps[both], other.steps[both])
    return same_steps and np.allclose(one.mean[both], other.mean[both], rtol=1e-6, atol=0)


def _without_length(settings: dict[str, Any]) -> dict[str, Any]:
    """A run that is extended is still the same."""
    return {name: value for name, value in settings.items() if name != "n_timesteps"}


def _told_apart(runs: list[Scores]) -> list[Scores]:
    """Runs of one label and environment that differ in more than their seed, with what differs in their labels."""
    settings = [_settings(one) for one in runs]
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one, own in zip(runs, settings, strict=True):
        alike.setdefault((one.label, one.env_id), []).append(own)
    result = []
    for one, own in zip(runs, settings, strict=True):
        others = alike[one.label, one.env_id]
        differing = [f"{name}={value}" for name, value in own.items() if any(b and b.get(name) != value for b in others)]
        result.append(replace(one, label=" ".join([one.label, *differing])))
    return result


def _settings(scores: Scores) -> dict[str, Any]:
    """A run's hyper-parameters under the names that ``--set`` has for them; none for a table's."""
    file = RunDir(scores.source, scores.env_id).config_file
    config = RunDir(scores.source, scores.env_id).config() if file.exists() else {}
    inner = {f"{name}.{key}": one for name, value in config.items() if isinstance(value, dict) for key, one in value.items()}
    return {name: value for name, value in config.items() if not isinstance(value, dict)} | inner


def _sources(path: Path) -> list[Path]:
    """Run folders and tables that a path stands for."""
    if path.name == SCORES and RunDir.is_at(path.parent):
        return [path.parent]
    if path.is_file() or RunDir.is_at(path):
        return [path]
    if (path / EVALUATIONS).exists():
        raise ValueError(f"the settings of {path} are missing: <environment>/{ARGUMENTS}, which say what its scores are of")
    runs = [run for run in sorted([*path.glob("runs/*"), *path.glob("*")]) if RunDir.is_at(run)]
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
    """
    :raises ValueError: if the run has no evaluations yet
    """
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
    rows = _rows(path) if path.exists() else []
    if missing := [name for name in ("timesteps", "wall_seconds") if rows and name not in rows[0]]:
        raise ValueError(f"{path} is no table of scores: it has no column {missing[0]}")
    known = {row["timesteps"]: row["wall_seconds"] for row in rows}
    return np.array([known.get(float(step), np.nan) for step in steps])


def of_table(path: Path) -> list[Scores]:
    """
    The runs in a table with the columns ``TABLE_COLUMNS``.

    :raises ValueError: for another file
    """
    rows = _rows(path)
    if not rows:
        raise ValueError(f"{path} has no scores yet")
    if missing := [name for name in TABLE_COLUMNS if name not in rows[0]]:
        raise ValueError(f"{path} is no table of scores: it has no column {missing[0]}")
    runs: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        runs[tuple(row[name] for name in TABLE_COLUMNS[:4])].append(row)
    return [_of_rows(run, path) for run in runs.values()]


def _of_rows(rows: list[dict[str, Any]], path: Path) -> Scores:
    first = rows[0]
    in_order = sorted(rows, key=lambda row: row["timesteps"])
    steps, mean, spread, seconds = (np.array([row[name] for row in in_order]) for name in SCORE_COLUMNS)
    return Scores(_label(first["algo"], first["setting"]), first["env"], first["seed"], path, steps, mean, spread, seconds)


def csv_lines(path: Path) -> list[dict[str, Any]]:
    """
    A CSV file's lines, by the names of its columns.

    :raises ValueError: for a file that is not CSV, or holds more than tables and logs do
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES / 1e6:.0f} MB")
    found = []
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            if (columns := len(reader.fieldnames or ())) > MOST_COLUMNS:
                raise ValueError(f"it has {columns} columns, more than {MOST_COLUMNS}")
            for line in reader:
                found.append(line)
                if len(found) * columns > MOST_CELLS:
                    raise ValueError(f"it has more than {MOST_CELLS:,} values")
        except csv.Error as error:
            raise ValueError(str(error)) from error
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """A table's lines, what is a number as a number."""
    try:
        rows = [{**row, **{name: float(row[name]) for name in SCORE_COLUMNS if name in row}} for row in csv_lines(path)]
        return [{**row, "seed": whole("seed", float(row["seed"]), minimum=0)} if "seed" in row else row for row in rows]
    except (ValueError, TypeError) as error:  # a line that is cut off has a column less
        raise ValueError(f"{path} is no table of scores: {error}") from error
