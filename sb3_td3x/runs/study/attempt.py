"""One attempt at one run, on whichever machine: begin it, or go on where the last attempt left it."""

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from sb3_td3x import presets
from sb3_td3x.runs import environments, experiment
from sb3_td3x.checkpoint import Store
from sb3_td3x.runs.experiment import Experiment
from sb3_td3x.common.lock import LEASE_SECONDS, RunLock
from sb3_td3x.errors import RunLockedError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.study.folder import StudyFolder
from sb3_td3x.runs.study.grid import StudyRun

Train = Callable[[StudyRun, Path], bool]
"""Begins the run in this folder or goes on with it; returns whether it reached its end."""

OPTIONS = tuple(one.name for one in fields(Experiment) if one.name not in ("env_id", "seed", "setting", "out"))


def attempt(train: Train, folder: StudyFolder, run: StudyRun) -> bool:
    """
    Make a run, or what is left of it; does nothing if it is finished.

    An attempt that was lost with its machine left a lock there, see ``RunLock``: this one waits until its lease has ended.

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


def train_td3x(run: StudyRun, path: Path) -> bool:
    """The train function of ``td3x study``: what ``td3x train`` does, in a folder that is the same at every attempt."""
    store = Store(RunDir(path, run.env).checkpoints)
    if store.is_finished():
        return True
    if store.holds_any():  # a damaged checkpoint is an error, not a reason to begin anew
        environments.require_registered(run.env)  # the study's file names it, not the run's folder
        if difference := _difference(run, path):
            raise ValueError(difference)
    prepared = experiment.resume(RunDir.open(path)) if store.holds_any() else experiment.prepare(experiment_of(run), path)
    print(f"at step {prepared.model.num_timesteps:,} of {prepared.total:,}")  # noqa: T201  # to the run's log
    return experiment.train(prepared)


def experiment_of(run: StudyRun) -> Experiment:
    """
    A run of a study as an experiment. On the CPU unless the file says otherwise: its runs share a machine, a core each.

    :raises ValueError: if ``overrides`` is no mapping
    """
    options = {"device": "cpu", **run.options}
    overrides = options.pop("overrides", {})
    if not isinstance(overrides, dict):
        raise ValueError(f"overrides must be a mapping such as {{batch_size: 128}}, not {overrides!r}")
    whole_first = sorted(overrides.items(), key=lambda one: "." in str(one[0]))  # then parts, such as policy_kwargs.n_critics
    assignments = tuple(f"{key}={presets.written(value)}" for key, value in whole_first)
    return Experiment(run.env, seed=run.seed, setting=run.setting, overrides=assignments, **options)


def check(runs: list[StudyRun], folder: StudyFolder) -> None:
    """
    Find what is wrong with any run before the first one starts.

    :raises ValueError: naming the run, for a setting that cannot be, or one that differs from what the run was begun with
    """
    for run in runs:
        try:
            experiment.check(experiment_of(run))
            _require_same(run, folder)
        except ValueError as error:
            raise ValueError(f"{run.setting}, {run.env}: {error}") from error


def _require_same(run: StudyRun, folder: StudyFolder) -> None:
    path, table = folder.run(run), folder.table(run)
    if Store(RunDir(path, run.env).checkpoints).holds_any():
        if difference := _difference(run, path):
            also = f" and its table {table}" if folder.is_finished(run) else ""
            raise ValueError(f"{difference}: take another --out, or remove that folder{also}")
    elif folder.is_finished(run):  # its folder was removed
        wanted, made = experiment_of(run), int(folder.scores(run)[-1]["timesteps"])
        asked = wanted.hyperparameters()["n_timesteps"]
        if not asked <= made <= asked + wanted.eval_freq:  # the last episode, or the environments side by side, make more
            raise ValueError(f"{table} has {made} steps, not {asked}: take another --out, or remove that table")


def _difference(run: StudyRun, path: Path) -> str | None:
    """What a run was begun with that is another now; overrides are compared by what they make of the preset."""
    begun, wanted = _made_from(Experiment.of_arguments(RunDir.open(path))), _made_from(experiment_of(run))
    for name in {**begun, **wanted}:
        if begun.get(name) != wanted.get(name):
            return f"{path} was begun with {name} {begun.get(name)}, not {wanted.get(name)}"
    return None


def _made_from(experiment: Experiment) -> dict[str, Any]:
    own = {one.name: getattr(experiment, one.name) for one in fields(experiment) if one.name not in ("out", "overrides")}
    return own | experiment.hyperparameters()


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


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What is printed goes to a file, a traceback too: the terminal belongs to the table of runs."""
    with path.open("a", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} on {socket.gethostname()}")  # noqa: T201
        try:
            yield
        except Exception:
            traceback.print_exc()
            raise
