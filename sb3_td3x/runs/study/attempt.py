"""One attempt at one run of a study, on whichever machine: begin or resume it, and write its table when it is finished."""

import csv
import io
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from sb3_td3x.checkpoint import Store
from sb3_td3x.common import files
from sb3_td3x.common.lock import LEASE_SECONDS, RunLock, is_touched
from sb3_td3x.errors import RunLockedError
from sb3_td3x.results.run_dir import PRINTED, SCORES, RunDir
from sb3_td3x.results.scores import TABLE_COLUMNS
from sb3_td3x.runs import experiment
from sb3_td3x.runs.environments import require_registered
from sb3_td3x.runs.experiment import Experiment
from sb3_td3x.runs.study.grid import StudyRun

Train = Callable[[StudyRun, Path], bool]
"""Begins or resumes the run in this folder; returns whether it reached its end."""


@dataclass(frozen=True)
class StudyFolder:
    """
    :param runs: holds the runs' folders
    :param tables: holds one CSV per finished run; a run is finished when its CSV is there
    """

    runs: Path
    tables: Path

    @classmethod
    def at(cls, path: Path) -> "StudyFolder":
        return cls(path / "runs", path / "returns")

    def run(self, run: StudyRun) -> Path:
        """The run's folder: the same on every node and at every attempt."""
        return self.runs / run.name

    def printed(self, run: StudyRun) -> Path:
        """What the run's attempts print."""
        return self.run(run) / PRINTED

    def last_line(self, run: StudyRun) -> str:
        """The last line that the run has printed: of a run that failed, the error."""
        text = self.printed(run).read_text(errors="replace") if self.printed(run).is_file() else ""
        return (text.splitlines() or [""])[-1][:2_000]

    def table(self, run: StudyRun) -> Path:
        return self.tables / f"{run.name}.csv"

    def is_finished(self, run: StudyRun) -> bool:
        return self.table(run).exists()

    def finish(self, run: StudyRun) -> None:
        """Write the run's table from its scores."""
        self.tables.mkdir(parents=True, exist_ok=True)
        files.write(self.table(run), _csv({**_keys(run), **row} for row in _rows(self.run(run) / SCORES)))

    def scores(self, run: StudyRun) -> list[dict[str, str]]:
        """One row per evaluation so far; those of a finished run stay when its folder is removed."""
        return _rows(self.table(run) if self.is_finished(run) else self.run(run) / SCORES)

    def write_summary(self, runs: Iterable[StudyRun], path: Path) -> None:
        """The last score of every run that has one, finished or not: one line per run."""
        files.write(path, _csv({**_keys(run), **row} for run in runs for row in self.scores(run)[-1:]))


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def _keys(run: StudyRun) -> dict[str, str]:
    return {"algo": run.algo, "setting": run.setting, "env": run.env, "seed": str(run.seed)}


def _csv(rows: Iterator[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, TABLE_COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


@dataclass(frozen=True)
class Progress:
    """
    :param state: ``"done"``, ``"running"``, ``"stopped"`` (it has a checkpoint) or ``"waiting"``
    :param steps: environment steps so far
    :param rate: steps per second of the process that makes the run
    :param score: mean return of the last evaluation
    """

    state: str
    steps: int = 0
    rate: float | None = None
    score: float | None = None


def progress(run: StudyRun, folder: StudyFolder) -> Progress:
    """How far a run is, read from the files that it writes, whichever machine makes it."""
    place = RunDir(folder.run(run), run.env)
    last = folder.scores(run)[-1:]
    evaluated = int(last[0]["timesteps"]) if last else 0
    score = float(last[0]["mean_return"]) if last else None
    if folder.is_finished(run):
        return Progress("done", evaluated, score=score)
    if is_touched(place.path):
        rows = [row for row in _rows(place.log) if row.get("time/total_timesteps")]  # the last line may be half written
        rates = [row["time/fps"] for row in rows if row.get("time/fps")]
        logged = int(float(rows[-1]["time/total_timesteps"])) if rows else 0
        return Progress("running", max(evaluated, logged), float(rates[-1]) if rates else None, score)
    saved = Store(place.checkpoints).checkpoints()
    return Progress("stopped", saved[-1].steps, score=score) if saved else Progress("waiting")


def attempt(train: Train, folder: StudyFolder, run: StudyRun) -> bool:
    """
    Make a run, or what is left of it; does nothing if it is finished.

    An attempt that was lost with its machine may have left a lock there, see ``RunLock``: this one waits until its lease has
    ended.

    :return: whether the run is finished now; not if it was told to stop
    :raises RunLockedError: if another attempt is at work
    """
    path = folder.run(run)
    path.mkdir(parents=True, exist_ok=True)
    with _logged(folder.printed(run)):
        _wait_for(path)
        if not folder.is_finished(run) and train(run, path):
            folder.finish(run)
    return folder.is_finished(run)


def _wait_for(folder: Path) -> None:
    """Wait for an attempt that is about to end, such as one that saves while the study is begun again."""
    deadline = time.monotonic() + LEASE_SECONDS
    while True:
        try:
            with RunLock(folder):
                return
        except RunLockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def train_td3x(run: StudyRun, path: Path) -> bool:
    """The train function of ``td3x study``: what ``td3x train`` does, in a folder that is the same at every attempt."""
    store = Store(RunDir(path, run.env).checkpoints)
    if store.is_finished():
        return True
    if store.holds_any():  # a damaged checkpoint is an error, not a reason to begin anew
        require_registered(run.env)  # the study's file names it, not the run's folder
        prepared = experiment.resume(RunDir.open(path), env_kwargs=run.options.get("env_kwargs"))
    else:
        prepared = experiment.prepare(run.experiment(), path)
    print(f"at step {prepared.model.num_timesteps:,} of {prepared.total:,}")  # noqa: T201  # to the run's log
    return experiment.train(prepared)


def check(runs: list[StudyRun], folder: StudyFolder) -> None:
    """
    Find what is wrong with any run before the first one starts. A damaged run is left to its own attempt.

    :raises ValueError: naming the run, for an invalid setting, or one that differs from what the run was begun with
    """
    for run in runs:
        try:
            experiment.check(run.experiment())
            _require_same(run, folder)
        except ValueError as error:
            raise ValueError(f"{run.setting}, {run.env}: {error}") from error


def _require_same(run: StudyRun, folder: StudyFolder) -> None:
    path, table = folder.run(run), folder.table(run)
    if Store(RunDir(path, run.env).checkpoints).holds_any():
        try:  # overrides are compared by what they make of the preset
            experiments = Experiment.of_arguments(RunDir.open(path)), run.experiment()
            begun, now = ({**vars(each), "out": "", "overrides": "", **each.hyperparameters()} for each in experiments)
        except ValueError:
            return
        changed = [name for name in {**begun, **now} if begun.get(name) != now.get(name)]
        if changed:
            difference = f"{changed[0]} {begun.get(changed[0])}, not {now.get(changed[0])}"
            also = f" and its table {table}" if folder.is_finished(run) else ""
            raise ValueError(f"{path} was begun with {difference}: take another --out, or remove that folder{also}")
    elif folder.is_finished(run):  # its folder was removed
        planned, trained = run.experiment(), int(folder.scores(run)[-1]["timesteps"])
        total = planned.hyperparameters()["n_timesteps"]
        if not total <= trained <= total + planned.eval_freq:  # the last episode, or parallel environments, make more
            raise ValueError(f"{table} has {trained} steps, not {total}: take another --out, or remove that table")


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Print to a file, tracebacks too: the terminal belongs to the table of runs."""
    with path.open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} on {socket.gethostname()}")  # noqa: T201
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
