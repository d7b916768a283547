"""The folder of one run, in rl-zoo3's layout, so that rl-zoo3's plotting and enjoy scripts read it."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sb3_td3x.common import files
from sb3_td3x.common.lock import LOCK

ALGORITHM = "td3x"
SCORES = "scores.csv"
"""One line per evaluation, for people and tables."""
SCORE_COLUMNS = ("timesteps", "mean_return", "std_return", "wall_seconds")
ARGUMENTS = "args.yml"
"""The command's arguments, in the folder of the settings."""
EVALUATIONS = "evaluations.npz"
"""What SB3's ``EvalCallback`` writes."""
PRINTED = "output.log"
"""What a run of a study prints, attempt by attempt."""


@dataclass(frozen=True)
class RunDir:
    """
    Paths inside ``<out>/td3x/<env id>_<n>``.

    :param path: the run's folder
    :param env_id: the environment's registered name; parts of the layout carry it
    """

    path: Path
    env_id: str

    @classmethod
    def create(cls, out: Path, env_id: str) -> "RunDir":
        """
        Make a new folder with the next free number; an existing one is never reused.

        :raises OSError: if it cannot be written
        """
        parent = files.make_folder(out / ALGORITHM)
        number = max((number for number, _ in _numbered(parent, env_id)), default=0) + 1
        while True:  # another run may take the number first
            try:
                (parent / f"{file_name(env_id)}_{number}").mkdir()
                files.flush(parent)
                return cls(parent / f"{file_name(env_id)}_{number}", env_id)
            except FileExistsError:
                number += 1

    @classmethod
    def at(cls, path: Path, env_id: str) -> "RunDir":
        """A folder of the caller's choice, made if needed."""
        return cls(files.make_folder(path), env_id)

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """
        :raises ValueError: if ``path`` is not the folder of a run
        """
        if not path.exists():
            raise ValueError(f"there is no folder {path}")
        candidates = _argument_files(path)
        if not candidates:
            inside = [child.name for child in sorted(path.glob("*")) if cls.is_at(child)]
            near = (
                f"; its run is {path.parent}"
                if cls.is_at(path.parent)
                else f"; runs in it: {', '.join(inside)}" * bool(inside)
            )
            raise ValueError(f"{path} is not a run: it holds no settings (<environment>/{ARGUMENTS}){near}")
        env_id = read_settings(candidates[0]).get("env")
        if not isinstance(env_id, str):
            raise ValueError(f"{candidates[0]} names no environment")
        return cls(path, env_id)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder is that of a run."""
        return bool(_argument_files(path))

    @classmethod
    def all(cls, out: Path, env_id: str) -> list["RunDir"]:
        """The runs of an environment, by their numbers."""
        runs = [cls(path, env_id) for _, path in sorted(_numbered(out / ALGORITHM, env_id))]
        return [run for run in runs if run.args_file.is_file()]

    @property
    def checkpoints(self) -> Path:
        """What ``td3x train --resume`` reads."""
        return self.path / "checkpoint"

    @property
    def settings(self) -> Path:
        return self.path / file_name(self.env_id)

    @property
    def config_file(self) -> Path:
        return self.settings / "config.yml"

    @property
    def args_file(self) -> Path:
        return self.settings / ARGUMENTS

    @property
    def normalization(self) -> Path:
        return self.settings / "vecnormalize.pkl"

    @property
    def best_normalization(self) -> Path:
        """The statistics when the best model was saved; ``normalization`` has the last, where rl-zoo3 looks for them."""
        return self.settings / "vecnormalize_best.pkl"

    @property
    def log(self) -> Path:
        """SB3's log of the training, one line per dump."""
        return self.path / "progress.csv"

    @property
    def evaluations(self) -> Path:
        return self.path / EVALUATIONS

    @property
    def best_model(self) -> Path:
        return self.path / "best_model.zip"

    @property
    def last_model(self) -> Path:
        return self.path / f"{self.settings.name}.zip"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def video(self) -> Path:
        return self.path / "video" / "best_model.mp4"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def model(self) -> Path:
        """
        The model to show: the best of the evaluations, else the last.

        :raises ValueError: if the run has none yet
        """
        for candidate in (self.best_model, self.last_model):
            if candidate.is_file():
                return candidate
        raise ValueError(f"{self.path} holds no model yet")

    def model_normalization(self) -> Path | None:
        """
        The statistics that belong to ``model``, ``None`` for a run without normalization.

        :raises ValueError: if the run has no model yet
        """
        best = self.model() == self.best_model and self.best_normalization.is_file()
        path = self.best_normalization if best else self.normalization
        return path if path.is_file() else None

    def require_no_links(self) -> None:
        """
        For runs that are not trusted and about to be written to.

        :raises ValueError: for a link to something outside of the folder
        """
        for path in self.path.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(self.path.resolve()):
                raise ValueError(
                    f"{path} leads out of the run's folder: if you trust the run, say so with trust=True (--trust)"
                )

    def require_no_run(self) -> None:
        """
        :raises ValueError: unless the folder is empty or holds what is left of a run that never made a checkpoint
        """
        if any(self.checkpoints.glob("[!.]*_steps*")):
            raise ValueError(f"{self.path} holds a run already: resume it, or take another folder")
        ours = (LOCK, PRINTED)
        others = [
            path for path in self.path.iterdir() if path.name not in ours and not path.name.startswith((".", f"{LOCK}."))
        ]
        if others and not self._is_ours():
            raise ValueError(f"{self.path} holds other files than a run's: take another folder")

    def _is_ours(self) -> bool:
        """Whether ``td3x`` began a run here: the arguments are the first file that it writes."""
        try:
            return self.arguments().get("algo") == ALGORITHM
        except ValueError:
            return False

    def clear(self) -> None:
        """Remove the files that a run writes, if there is one; the arguments last, which tell that the rest is a run's."""
        if not self._is_ours():
            return
        patterns = ("*.monitor.csv", "events.out.tfevents.*")
        chunks = self.checkpoints / "replay"
        for partial in self.checkpoints.glob(".*_steps*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        written = [
            *chunks.glob("transitions_*"), *chunks.glob(".transitions_*"),
            self.normalization, self.best_normalization, self.log, self.evaluations, self.path / SCORES, self.best_model,
            self.last_model, self.curve, self.video, *(path for pattern in patterns for path in self.path.glob(pattern)),
            self.config_file, self.args_file,
        ]  # fmt: skip
        for path in written:
            path.unlink(missing_ok=True)
        for folder in (chunks, self.checkpoints, self.video.parent, self.settings):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def write_settings(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """:param config: the hyperparameters as used; :param arguments: the command's arguments."""
        files.make_folder(self.settings)
        for path, content in ((self.args_file, arguments), (self.config_file, config)):
            files.write(path, yaml.safe_dump(dict(content), sort_keys=False).encode())

    def config(self) -> dict[str, Any]:
        return read_settings(self.config_file)

    def arguments(self) -> dict[str, Any]:
        return read_settings(self.args_file)

    def command(self) -> str | None:
        """The ``td3x train`` command that made the run, quoted so that it is safe to paste; ``None`` if none is known."""
        try:
            words = shlex.split(str(self.arguments().get("command") or ""))
        except ValueError:
            return None
        return shlex.join(words) if words[:2] == ["td3x", "train"] else None

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """
        :return: timesteps ``(evaluations,)`` and returns ``(evaluations, episodes)``
        :raises ValueError: if the run has not been evaluated yet
        """
        if not self.evaluations.is_file():
            every = self.arguments().get("eval_freq")
            first = f": the first comes after {every} steps" if every else ""
            raise ValueError(f"{self.path} has no evaluations yet{first}")
        try:
            arrays = files.read_arrays(self.evaluations)
            steps, results = arrays["timesteps"], arrays["results"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.evaluations} cannot be read: {error}") from error
        are_numbers = all(values.dtype.kind in "fiu" for values in (steps, results)) and np.isfinite(steps).all()
        if results.ndim != 2 or results.size == 0 or steps.shape != results.shape[:1] or not are_numbers:
            raise ValueError(f"{self.evaluations} holds no evaluations")
        return steps, results


def _numbered(parent: Path, env_id: str) -> Iterator[tuple[int, Path]]:
    for path in parent.glob("*"):
        if match := re.fullmatch(rf"{re.escape(file_name(env_id))}_(\d+)", path.name):
            yield int(match[1]), path


def _argument_files(path: Path) -> list[Path]:
    """In a folder named after the environment. A run from the Hub has them at its top: the folder around it is no run."""

    def is_named_so(file: Path) -> bool:
        try:
            env_id = read_settings(file).get("env")
        except ValueError:
            return True  # `open` says what is wrong with it
        return not isinstance(env_id, str) or file_name(env_id) == file.parent.name

    return [file for file in sorted(path.glob(f"*/{ARGUMENTS}")) if is_named_so(file)]


class _Loader(yaml.SafeLoader):
    """Plain YAML, and the ordered mappings and tuples that rl-zoo3 writes; no other class is built."""


def _ordered_mapping(loader: _Loader, node: yaml.SequenceNode) -> dict[str, Any]:
    (pairs,) = loader.construct_sequence(node, deep=True)
    return dict(pairs)


_Loader.add_constructor("tag:yaml.org,2002:python/object/apply:collections.OrderedDict", _ordered_mapping)
_Loader.add_constructor("tag:yaml.org,2002:python/tuple", lambda loader, node: tuple(loader.construct_sequence(node)))  # type: ignore[arg-type]


def read_settings(path: Path) -> dict[str, Any]:
    """
    A file of settings, which anybody may have written: only plain values are built.

    :raises ValueError: for a missing file, or one that is no mapping or names a class that is not listed
    """
    if not path.is_file():
        raise ValueError(f"a part of the run is missing: {path}")
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506  # a SafeLoader
    # PyYAML lets through whatever Python raises for values such as the date 2020-13-01, !!bool x and !!timestamp x
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings")
    return content


def file_name(env_id: str) -> str:
    """A namespaced id such as ``ale/Pong`` or ``module:Env`` as one name."""
    return re.sub(r"[/:]", "-", env_id)
