"""Studies: the runs that a file stands for, the folder that they share, and one attempt at a run, on whichever machine."""

import csv
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from sb3_td3x import presets
from sb3_td3x.checkpoint import Store
from sb3_td3x.common import files
from sb3_td3x.common.lock import LEASE_SECONDS, RunLock, is_touched
from sb3_td3x.common.validation import check_choice, check_int, did_you_mean
from sb3_td3x.results.run_dir import PRINTED, SCORES, RunDir, file_name
from sb3_td3x.results.scores import TABLE_COLUMNS
from sb3_td3x.runs import experiment
from sb3_td3x.runs.environments import require_registered
from sb3_td3x.runs.experiment import Experiment

GRID_KEYS = ("algo", "setting", "envs", "seeds")
OPTIONS = tuple(
    option.name for option in fields(Experiment) if option.name not in ("env_id", "seed", "setting", "out", "video")
)
"""Keys of a run of ``td3x study``, besides those of the grid."""


@dataclass(frozen=True)
class StudyRun:
    algo: str  # td3x, or another that the study's train function knows
    setting: str  # name of what is tried
    env: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # all other keys of the file

    @property
    def name(self) -> str:
        """Name of its folder and its table; no two runs of a study share one."""
        return f"{self.algo}_{self.setting}_{file_name(self.env)}_s{self.seed}"

    def experiment(self) -> Experiment:
        """The experiment that ``td3x study`` makes. On the CPU unless the file says otherwise: runs share a machine."""
        options = {"device": "cpu", **self.options}
        overrides = options.pop("overrides", {})
        if not isinstance(overrides, dict):
            raise ValueError(f"overrides must be a mapping such as {{batch_size: 128}}, not {overrides!r}")
        whole_first = sorted(overrides.items(), key=lambda item: "." in str(item[0]))  # then parts, as policy_kwargs.n_critics
        assignments = tuple(f"{key}={presets.written(value)}" for key, value in whole_first)
        return Experiment(self.env, seed=self.seed, setting=self.setting, overrides=assignments, **options)


def read(path: Path, options: Collection[str] = OPTIONS, algorithms: Sequence[str] = ("td3x",)) -> list[StudyRun]:
    """The runs of a file as in docs/experiments.md with these keys besides ``GRID_KEYS``; ``algorithms[0]`` is the default."""
    try:
        content = presets.from_yaml(path.read_bytes())
        settings = content.pop("runs", None) if isinstance(content, dict) else None
        if not isinstance(settings, list) or not settings or not all(isinstance(keys, dict) for keys in settings):
            raise ValueError("runs must be a list of settings, such as [{setting: default}]")
        runs: dict[str, StudyRun] = {}
        for keys in settings:
            for run in _runs(content, keys, (*GRID_KEYS, *options), algorithms):
                if (name := run.name.casefold()) in runs:  # some file systems see no difference
                    raise ValueError(f"two runs are named {run.name}")
                runs[name] = run
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    return list(runs.values())


def _runs(common: dict[str, Any], keys: dict[str, Any], known: Collection[str], algorithms: Sequence[str]) -> list[StudyRun]:
    """The runs of one setting, whose own keys win; mappings such as ``overrides`` are merged key by key, parts with wholes."""
    if unknown := [key for key in (*common, *keys) if key not in known]:
        hint = did_you_mean(str(unknown[0]), known) or f": known are runs, {', '.join(sorted(known))}"
        raise ValueError(f"there is no key {unknown[0]!r}{hint}")
    both = {key for key in common.keys() & keys.keys() if isinstance(common[key], dict) and isinstance(keys[key], dict)}
    kept = {key: {name: common[key][name] for name in common[key] if str(name).split(".")[0] not in keys[key]} for key in both}
    entry = {**common, **keys, **{key: {**kept[key], **keys[key]} for key in both}}
    algo, setting = entry.pop("algo", algorithms[0]), entry.pop("setting", Path(str(entry.get("preset", "default"))).stem)
    check_choice("algo", algo, algorithms)
    setting = str(setting) if type(setting) in (int, float) else setting
    if not isinstance(setting, str) or not re.fullmatch(r"[\w.+-]{1,50}", setting):
        raise ValueError(f"setting must be a name of at most 50 letters, digits and . + - _, not {setting!r}")
    envs, seeds = entry.pop("envs", None), entry.pop("seeds", None)
    if not isinstance(envs, list) or not envs or not all(isinstance(env, str) for env in envs):
        raise ValueError(f"{setting}: envs must be a list of names, for example envs: [Pendulum-v1]")
    if not isinstance(seeds, list) or not seeds:
        raise ValueError(f"{setting}: seeds must be a list, for example seeds: [0, 1]")
    numbers = [check_int(f"{setting}: seeds", seed, minimum=0) for seed in seeds]
    return [StudyRun(algo, setting, env, seed, entry) for env, seed in product(envs, numbers)]


@dataclass(frozen=True)
class Progress:
    state: str  # done, running, stopped (it has a checkpoint) or waiting
    steps: int
    rate: float | None = None  # in steps per second
    score: float | None = None  # mean return of the last evaluation


@dataclass(frozen=True)
class StudyFolder:
    """Where a study keeps its runs. A run is finished when its table is there."""

    runs: Path  # holds a folder per run
    tables: Path  # holds a CSV per finished run

    @classmethod
    def at(cls, path: Path) -> "StudyFolder":
        return cls(path / "runs", path / "returns")

    def run(self, run: StudyRun) -> Path:
        """The run's folder: the same on every node and at every attempt."""
        return self.runs / run.name

    def printed(self, run: StudyRun) -> Path:
        """What the run's attempts print."""
        return self.run(run) / PRINTED

    def table(self, run: StudyRun) -> Path:
        return self.tables / f"{run.name}.csv"

    def is_finished(self, run: StudyRun) -> bool:
        return self.table(run).exists()

    def lines(self, run: StudyRun) -> list[str]:
        """A line per evaluation so far, as in its table; those of a finished run stay when its folder is removed."""
        path, start = self.run(run) / SCORES, f"{run.algo},{run.setting},{run.env},{run.seed},"
        if self.is_finished(run):
            path, start = self.table(run), ""
        lines = path.read_text("utf-8").splitlines()[1:] if path.exists() else []
        whole = filter(re.compile(r"(.+,)?\d+(,[^,]+){3}").fullmatch, lines)  # one may be cut off
        return [f"{start}{line}" for line in whole]

    def write_summary(self, runs: Iterable[StudyRun], path: Path) -> None:
        """The last score of every run that has one, finished or not: one line per run."""
        _write_table(path, [line for run in runs for line in self.lines(run)[-1:]])

    def progress(self, run: StudyRun) -> Progress:
        """How far a run is, read from the files that it writes, whichever machine makes it."""
        place, state, steps, rate, score = RunDir(self.run(run), run.env), "waiting", 0, None, None
        for line in self.lines(run)[-1:]:
            *_, timesteps, mean_return, _, _ = line.split(",")
            steps, score = int(timesteps), float(mean_return)
        if self.is_finished(run):
            state = "done"
        elif is_touched(place.path):
            state = "running"
            log = place.log.read_text(errors="replace").splitlines() if place.log.is_file() else []
            for row in csv.DictReader(log[:1] + log[1:][-20:]):  # lines of evaluations have no rate
                if row.get("time/fps") and row.get("time/total_timesteps"):  # the last line may be cut off
                    steps, rate = max(steps, int(float(row["time/total_timesteps"]))), float(row["time/fps"])
        elif saved := Store(place.checkpoints).checkpoints():
            state, steps = "stopped", saved[-1].steps
        return Progress(state, steps, rate, score)


def _write_table(path: Path, lines: list[str]) -> None:
    files.write(path, "\n".join([",".join(TABLE_COLUMNS), *lines, ""]).encode())


Train = Callable[[StudyRun, Path], bool]  # begins or resumes the run in this folder; whether it reached its end


def attempt(train: Train, folder: StudyFolder, run: StudyRun) -> None:
    """Make what is left of a run. ``RunLockedError`` if another attempt stays."""
    path = folder.run(run)
    path.mkdir(exist_ok=True)  # not its parents, which a machine without the shared folder lacks
    if folder.printed(run).is_symlink():
        raise ValueError(f"{folder.printed(run)} is a link, through which an untrusted study would write elsewhere")
    # The terminal belongs to the table of runs
    with folder.printed(run).open("a", 1, "utf-8", "replace") as log, redirect_stdout(log), redirect_stderr(log):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} on {socket.gethostname()}")  # noqa: T201
        try:
            with RunLock(path, patience=2 * LEASE_SECONDS):
                pass  # an attempt that was about to end, such as one that saves while the study is begun again, has ended
            if not folder.is_finished(run) and train(run, path):
                _write_table(folder.table(run), folder.lines(run))
        except Exception:
            traceback.print_exc()
            raise


def train_td3x(run: StudyRun, path: Path) -> bool:
    """The train function of ``td3x study``: what ``td3x train`` does, in a folder that is the same at every attempt."""
    place = RunDir(path, run.env)
    store = Store(place.checkpoints)
    total = run.experiment().hyperparameters()["n_timesteps"]  # not the checkpoint's: the run may have been extended since
    if any(saved.steps >= total and experiment.is_evaluated(place, saved.steps) for saved in store.checkpoints()[-1:]):
        return True
    if store.paths():  # a damaged checkpoint is an error, not a reason to begin anew
        require_registered(run.env)  # the study's file names it, not the run's folder
        prepared = experiment.resume(RunDir.open(path), env_kwargs=run.options.get("env_kwargs"))
    else:
        prepared = experiment.prepare(run.experiment(), path)
    print(f"at step {prepared.model.num_timesteps:,} of {prepared.total:,}")  # noqa: T201  # to the run's log
    return experiment.train(prepared)


def check(runs: list[StudyRun], folder: StudyFolder, here: Collection[StudyRun] | None = None) -> None:
    """
    ``ValueError`` naming the first run with invalid settings, or others than it was begun with; damage is left alone.

    :param here: runs that this machine makes and has to have what they ask for; ``None`` for all
    """
    for run in runs:
        try:
            if here is None or run in here:
                experiment.check(run.experiment())
            _require_same(run, folder)
        except ValueError as error:
            raise ValueError(f"{run.setting}, {run.env}: {error}") from error


def _require_same(run: StudyRun, folder: StudyFolder) -> None:
    place, table, asked = RunDir(folder.run(run), run.env), folder.table(run), run.experiment()
    if not Store(place.checkpoints).paths() and not (folder.is_finished(run) and place.config_file.is_file()):
        if folder.is_finished(run):  # its folder was removed
            total = asked.hyperparameters()["n_timesteps"]
            evaluated = [0, *(int(line.split(",")[-4]) for line in folder.lines(run))]
            if not max(evaluated[:-1], default=0) < total <= evaluated[-1]:  # the last is made where the run ends
                raise ValueError(f"{table} has {evaluated[-1]} steps, not {total}: take another --out, or remove that table")
        return
    by_values = {"preset": "", "overrides": "", "steps": ""}  # what they made counts: a file may have been edited since
    try:
        place = RunDir.open(place.path)  # of an environment that the file may no longer name
        begun = {**vars(Experiment.of_arguments(place)), **by_values, **place.config()}
    except ValueError:
        return
    now = {"policy": begun.get("policy"), **vars(asked), **by_values, **asked.hyperparameters()}  # chosen by the observations
    if changed := [name for name in {**begun, **now} if begun.get(name, "unset") != now.get(name, "unset")]:
        difference = f"{changed[0]} {begun.get(changed[0], 'unset')}, not {now.get(changed[0], 'unset')}"
        also = f" and its table {table}" if folder.is_finished(run) else ""
        ways = f"change it back, take another --out, or remove that folder{also}"
        raise ValueError(f"{place.path} was begun with {difference}: {ways}")
    if folder.is_finished(run) and folder.progress(run).steps < asked.hyperparameters()["n_timesteps"]:
        raise ValueError(f"{place.path} was extended since its table {table}: remove that, and it is written anew")
