"""The folder of one run, in rl-zoo3's layout, so that rl-zoo3's plotting and enjoy scripts read it."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sb3_td3x.common import files
from sb3_td3x.common.lock import LOCK

ALGORITHM = "td3x"
SCORES = "scores.csv"
"""A line per evaluation, for people and tables."""
SCORE_COLUMNS = ("timesteps", "mean_return", "std_return", "wall_seconds")
ARGUMENTS = "args.yml"
"""The command's arguments, in the folder of the settings."""
EVALUATIONS = "evaluations.npz"
"""What SB3's ``EvalCallback`` writes."""
PRINTED = "output.log"
"""What a run of a study prints, attempt by attempt."""
MOST_BYTES, MOST_VALUES, MOST_DEPTH = 100_000, 10_000, 20
"""Of the settings of a run: a stranger's may hold more."""


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
        parent = out / ALGORITHM
        parent.mkdir(parents=True, exist_ok=True)
        safe = file_name(env_id)
        taken = [
            int(match[1]) for entry in parent.iterdir() if (match := re.fullmatch(rf"{re.escape(safe)}_(\d+)", entry.name))
        ]
        number = max(taken, default=0) + 1
        while True:  # another run may take the number first
            try:
                (parent / f"{safe}_{number}").mkdir()
                break
            except FileExistsError:
                number += 1
        return cls(parent / f"{safe}_{number}", env_id)

    @classmethod
    def at(cls, path: Path, env_id: str) -> "RunDir":
        """A folder of one's own choice, made if needed."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(path, env_id)

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """
        :raises ValueError: if ``path`` is not the folder of a run
        """
        if not path.exists():
            raise ValueError(f"there is no folder {path}")
        found = cls._arguments_in(path)
        if not found:
            raise ValueError(f"{path} is not a run: it holds no settings (<environment>/{ARGUMENTS}){cls._runs_near(path)}")
        env_id = _read(found[0]).get("env")
        if not isinstance(env_id, str):
            raise ValueError(f"{found[0]} names no environment")
        return cls(path, env_id)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a folder is that of a run."""
        return bool(RunDir._arguments_in(path))

    @staticmethod
    def _arguments_in(path: Path) -> list[Path]:
        """
        The files of a run's arguments, whose folder has the environment's name. On the Hub they lie in the run's own folder,
        so that the folder around a copy of that is no run.
        """

        def is_named_so(file: Path) -> bool:
            try:
                env_id = _read(file).get("env")
            except ValueError:
                return True  # `open` says what is wrong with it
            return not isinstance(env_id, str) or file_name(env_id) == file.parent.name

        return [file for file in sorted(path.glob(f"*/{ARGUMENTS}")) if is_named_so(file)]

    @classmethod
    def _runs_near(cls, path: Path) -> str:
        """The end of an error about a file or a folder of a run, or the folder of several."""
        if cls.is_at(path.parent):
            return f"; its run is {path.parent}"
        inside = [one.name for one in sorted(path.glob("*")) if cls.is_at(one)]
        return f"; runs in it: {', '.join(inside)}" if inside else ""

    @classmethod
    def all(cls, out: Path, env_id: str) -> list["RunDir"]:
        """The runs of an environment, by their numbers."""
        parent, name = out / ALGORITHM, re.escape(file_name(env_id))
        numbered = [(int(match[1]), path) for path in parent.glob("*") if (match := re.fullmatch(rf"{name}_(\d+)", path.name))]
        return [run for _, path in sorted(numbered) if (run := cls(path, env_id)).args_file.exists()]

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
        """SB3's log of the training, a line per dump."""
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
    def film(self) -> Path:
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
            if candidate.exists():
                return candidate
        raise ValueError(f"{self.path} holds no model yet")

    def model_normalization(self) -> Path | None:
        """
        The statistics that belong to ``model``, ``None`` for a run without normalisation.

        :raises ValueError: if the run has no model yet
        """
        best = self.model() == self.best_model and self.best_normalization.exists()
        found = self.best_normalization if best else self.normalization
        return found if found.exists() else None

    def leads_out(self, path: Path) -> bool:
        """Whether one of the run's paths is a link to something outside of its folder."""
        return not path.resolve().is_relative_to(self.path.resolve())

    def require_own(self, *paths: Path) -> None:
        """
        :param paths: of this run; none stands for everything in its folder
        :raises ValueError: for a link to something outside of the folder
        """
        found = next(filter(self.leads_out, paths), None) if paths else files.link_out_of(self.path)
        if found is not None:
            raise ValueError(f"{found} leads out of the run's folder: put there what it leads to, or trust the run (--trust)")

    def clear(self) -> None:
        """Remove everything but lock and log; the settings last, which tell that the rest is a run's."""
        for path in sorted(self._content(), key=lambda one: one == self.settings):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def require_no_run(self) -> None:
        """
        :raises ValueError: unless the folder is empty or holds what is left of a run that never made a checkpoint
        """
        if any(self.checkpoints.glob("[!.]*_steps*/")):
            raise ValueError(f"{self.path} holds a run already: resume it, or take another folder")
        if self._content() and not self.settings.exists():
            raise ValueError(f"{self.path} holds other files than a run's: take another folder")

    def _content(self) -> list[Path]:
        return [
            path for path in self.path.iterdir() if path.name not in (LOCK, PRINTED) and not path.name.startswith(f"{LOCK}.")
        ]

    def write_settings(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """:param config: the hyper-parameters as used; :param arguments: the command's arguments."""
        self.settings.mkdir(exist_ok=True)
        for path, content in ((self.config_file, config), (self.args_file, arguments)):
            files.write(path, yaml.safe_dump(dict(content), sort_keys=False).encode())

    def config(self) -> dict[str, Any]:
        return _read(self.config_file)

    def arguments(self) -> dict[str, Any]:
        return _read(self.args_file)

    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """
        :return: timesteps ``(evaluations,)`` and returns ``(evaluations, episodes)``
        :raises ValueError: if the run has not been evaluated yet
        """
        if not self.evaluations.exists():
            every = self.arguments().get("eval_freq")
            first = f": the first comes after {every} steps" if every else ""
            raise ValueError(f"{self.path} has no evaluations yet{first}")
        try:
            found = files.read_arrays(self.evaluations)
            steps, results = found["timesteps"], found["results"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.evaluations} cannot be read: {error}") from error
        are_numbers = all(values.dtype.kind in "fiu" for values in (steps, results)) and np.isfinite(steps).all()
        if results.ndim != 2 or results.size == 0 or steps.shape != results.shape[:1] or not are_numbers:
            raise ValueError(f"{self.evaluations} holds no evaluations")
        return steps, results


class _Loader(yaml.SafeLoader):
    """Plain YAML, and the ordered mappings that rl-zoo3 writes; no other class is built."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Keys are texts and numbers. Mappings that are merged, and hashes of tuples in tuples, cost without end."""
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "settings have no such key", key.start_mark)
        super().flatten_mapping(node)


def _ordered_mapping(loader: _Loader, node: yaml.SequenceNode) -> dict[str, Any]:
    (pairs,) = loader.construct_sequence(node, deep=True)
    if not all(isinstance(key, str) for key, _ in pairs):
        raise yaml.constructor.ConstructorError(None, None, "settings have no such key", node.start_mark)
    return dict(pairs)


_Loader.add_constructor("tag:yaml.org,2002:python/object/apply:collections.OrderedDict", _ordered_mapping)
_Loader.add_constructor("tag:yaml.org,2002:python/tuple", lambda loader, node: tuple(loader.construct_sequence(node)))  # type: ignore[arg-type]


def _read(path: Path) -> dict[str, Any]:
    """
    :raises ValueError: for no file, or one that is no mapping, names a class that is not on the list, or is too large
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ValueError(f"a part of the run is missing: {path}") from error
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path} holds more than settings: more than {MOST_BYTES} bytes")
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader
    # PyYAML lets through whatever python raises for values such as the date 2020-13-01, !!bool x and !!timestamp x
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no settings")
    if not _is_small(content):
        raise ValueError(f"{path} holds more than settings: more than {MOST_VALUES} values, or too large ones")
    return content


def _is_small(content: Any) -> bool:
    """Written out: YAML's references make a text of a few lines one of gigabytes, or one without an end."""
    parts, count = [(content, 0)], 0
    while parts:
        part, depth = parts.pop()
        count += 1
        if count > MOST_VALUES or depth > MOST_DEPTH or (isinstance(part, int) and part.bit_length() > 64):
            return False
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple, set)) else ()
        parts += [(one, depth + 1) for one in inner]
    return True


def file_name(env_id: str) -> str:
    """A namespaced id such as ``ale/Pong`` or ``module:Env`` as one name."""
    return re.sub(r"[/:]", "-", env_id)
