"""The folder of one run, in rl-zoo3's layout, so that rl-zoo3's plotting and enjoy scripts read it."""

import os
import re
import shlex
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sb3_td3x.common import files
from sb3_td3x.common.lock import LOCK

ALGORITHM = "td3x"
ARGUMENTS = "args.yml"  # the command's arguments, in the folder of the settings
EVALUATIONS = "evaluations.npz"  # what SB3's EvalCallback writes
LOG = "progress.csv"  # of SB3's logger
SCORES = "scores.csv"  # one line per evaluation, for people and tables
SCORE_COLUMNS = ("timesteps", "mean_return", "std_return", "wall_seconds")
PRINTED = "output.log"  # what a run of a study prints, attempt by attempt


class RunDir:
    """Paths inside ``<out>/td3x/<env id>_<n>``; parts of the layout carry the environment's name."""

    def __init__(self, path: Path, env_id: str):
        self.path, self.env_id = path, env_id
        self.settings = path / file_name(env_id)
        self.config_file = self.settings / "config.yml"
        self.args_file = self.settings / ARGUMENTS
        self.normalization = self.settings / "vecnormalize.pkl"  # the last statistics, where rl-zoo3 looks for them
        self.best_normalization = self.settings / "vecnormalize_best.pkl"  # those when the best model was saved
        self.checkpoints = path / "checkpoint"
        self.log = path / LOG
        self.evaluations = path / EVALUATIONS
        self.best_model = path / "best_model.zip"
        self.last_model = path / f"{file_name(env_id)}.zip"
        self.curve = path / "curve.png"
        self.video = path / "video" / "best_model.mp4"
        self.report = path / "report.html"

    @classmethod
    def create(cls, out: Path, env_id: str) -> "RunDir":
        """Make a new folder with the next free number; an existing one is never reused."""
        parent = files.make_folder(out / ALGORITHM)
        matches = [re.fullmatch(rf"{re.escape(file_name(env_id))}_(\d+)", path.name) for path in parent.glob("*")]
        number = 1 + max((int(match[1]) for match in matches if match), default=0)
        while True:  # another run may take the number first
            path = parent / f"{file_name(env_id)}_{number}"
            try:
                path.mkdir()
                files.flush(parent)
                return cls(path, env_id)
            except FileExistsError:
                number += 1

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """The run in this folder; ``ValueError`` if it is not that of a run."""
        if not path.exists():
            raise ValueError(f"there is no folder {path}")
        for arguments in sorted(path.glob(f"*/{ARGUMENTS}")):
            env_id = read_settings(arguments).get("env")
            if not isinstance(env_id, str):
                raise ValueError(f"{arguments} names no environment")
            if file_name(env_id) == arguments.parent.name:  # not the arguments of a download from the Hub, at its top
                return cls(path, env_id)
        runs = [str(run.relative_to(path)) for run in cls.inside(path)]
        hint = f"; runs in it: {', '.join(runs)}" if runs else f"; its run is {path.parent}" if cls.is_at(path.parent) else ""
        raise ValueError(f"{path} is not a run: it holds no settings (<environment>/{ARGUMENTS}){hint}")

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder holds settings as that of a run does; ``open`` reads them."""
        return any(path.glob(f"*/{ARGUMENTS}"))

    @classmethod
    def inside(cls, path: Path) -> list[Path]:
        """The folders of runs in this folder, or in that of ``--out`` or a study."""
        folders = [run for parent in (path, path / ALGORITHM, path / "runs") for run in parent.glob("*") if run.is_dir()]
        for run in folders:
            if not os.access(run, os.R_OK | os.X_OK):  # a colleague's; `glob` passes over it
                warnings.warn(f"{run} cannot be read and is left out", stacklevel=2)
        return sorted(filter(cls.is_at, folders))

    def model(self) -> Path:
        """The model to show: the best of the evaluations, else the last; ``ValueError`` if the run has none yet."""
        for path in (self.best_model, self.last_model):
            if path.is_file():
                return path
        raise ValueError(f"{self.path} holds no model yet")

    def model_normalization(self) -> Path | None:
        """The statistics that belong to ``model``; ``None`` without normalization, ``ValueError`` if they are missing."""
        paths = [self.best_normalization, self.normalization] if self.model() == self.best_model else [self.normalization]
        statistics = next(filter(Path.is_file, paths), None)
        if statistics is None and self.config().get("normalize"):
            raise ValueError(f"{self.path} lacks the statistics of VecNormalize ({paths[-1].name}) that its model needs")
        return statistics

    def require_no_links(self, trust: bool = False) -> None:
        """``ValueError`` for a link out of the folder of an untrusted run, which is to be written to or shown to others."""
        if not trust and (link := files.link_out_of(self.path)):
            advice = "put there what it leads to, or, where that is offered, trust the run (trust=True, --trust)"
            raise ValueError(f"{link} leads out of the run's folder: {advice}")

    def require_no_run(self) -> None:
        """``ValueError`` unless the folder is empty or holds what is left of a run that never made a step."""
        if any(self.checkpoints.glob("[!.]*_steps*")) or self.evaluations.exists():
            raise ValueError(f"{self.path} holds a run already: resume it, or take another folder")
        names = {path.name for path in self.path.iterdir() if not path.name.startswith((".", f"{LOCK}."))}
        if not any(self.settings.glob("[!.]*")):  # killed before the first file was in it
            names.discard(self.settings.name)
        # The arguments are the first file that a run writes
        has_begun = self.args_file.exists() and self.arguments().get("algo") == ALGORITHM
        if names - {LOCK, PRINTED} and not has_begun:
            raise ValueError(f"{self.path} holds other files than a run's: take another folder")

    def write_settings(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Write the hyperparameters as used, and the command's arguments."""
        for path, content in ((self.args_file, arguments), (self.config_file, config)):
            files.write(path, yaml.safe_dump(dict(content), sort_keys=False).encode())

    def config(self) -> dict[str, Any]:
        return read_settings(self.config_file)

    def arguments(self) -> dict[str, Any]:
        return read_settings(self.args_file)

    def env_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the environment; rl-zoo3 also takes them from the hyperparameters."""
        return self.arguments().get("env_kwargs") or self.config().get("env_kwargs")

    def command(self) -> str | None:
        """The ``td3x train`` command that made the run, quoted as one; ``None`` for none or one that may run other code."""
        try:
            words = shlex.split(str(self.arguments().get("command") or ""))
        except ValueError:
            return None
        # A forged one could resume with --trust, or take an environment from a module that lies in the run's folder
        names_module = any(
            ":" in word and (before == "--env" or word.startswith("--env=")) for before, word in pairwise(["", *words])
        )
        is_plain = all(word.isprintable() and not word.startswith("--resume") for word in words)
        return shlex.join(words) if words[:2] == ["td3x", "train"] and is_plain and not names_module else None

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Timesteps ``(evaluations,)`` and returns ``(evaluations, episodes)``; ``ValueError`` for none, or damaged ones."""
        if not self.evaluations.is_file():
            frequency = self.arguments().get("eval_freq", "eval_freq")
            raise ValueError(f"{self.path} has no evaluations yet: the first comes after {frequency} steps")
        try:
            arrays = files.read_arrays(self.evaluations)
            steps, results = arrays["timesteps"], arrays["results"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.evaluations} cannot be read: {error}") from error
        are_numbers = steps.dtype.kind in "fiu" and results.dtype.kind in "fiu" and np.isfinite(steps).all()
        if not are_numbers or results.ndim != 2 or not results.size or steps.shape != results.shape[:1]:
            raise ValueError(f"{self.evaluations} holds no evaluations")
        return steps, results


class _Loader(yaml.SafeLoader):
    """Plain YAML, and the ordered mappings and tuples that rl-zoo3 writes; no other class is built."""


for _name, _construct in {
    "object/apply:collections.OrderedDict": lambda loader, node: dict(*loader.construct_sequence(node, deep=True)),
    "tuple": lambda loader, node: tuple(loader.construct_sequence(node)),
}.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:python/{_name}", _construct)


def read_settings(path: Path) -> dict[str, Any]:
    """A file of settings, which may be untrusted; ``ValueError`` unless it is a mapping of plain values."""
    if not path.is_file():
        raise ValueError(f"a part of the run is missing: {path}")
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506  # a SafeLoader
    # PyYAML lets through whatever Python raises for values such as the date 2020-13-01, !!bool x and !!timestamp x
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings")
    return content


def file_name(env_id: str) -> str:
    """An id such as ``ale/Pong`` or ``module:Env`` as the name of a file."""
    return re.sub(r"[/:\\]|^\.+$", "-", env_id)  # a backslash leads to other folders on Windows, `..` everywhere
