"""A study file: the runs it stands for, and what is wrong with it in one line."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x.results.run_dir import file_name
from sb3_td3x.common.validation import did_you_mean, meant, whole

GRID_KEYS = ("algo", "setting", "envs", "seeds")
WHOLE_STUDY = ("threads",)
"""Keys that cannot differ between the runs of a study: a rate beside another one, and rounding, depend on them."""


@dataclass(frozen=True)
class StudyRun:
    """
    One run of a study.

    :param algo: ``"td3x"``, or what else the study's train function knows
    :param setting: name of what is tried
    :param env: registered name of the environment
    :param seed: of the run
    :param options: everything else that the file says of it
    """

    algo: str
    setting: str
    env: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Of its folder and its table; two runs of a study never share one."""
        return f"{self.algo}_{self.setting}_{file_name(self.env)}_s{self.seed}"


def read(path: Path, options: Collection[str], algorithms: Collection[str] = ("td3x",)) -> list[StudyRun]:
    """
    :param path: of a YAML file: keys that hold for every run, and under ``runs`` a list of settings with their own keys
    :param options: the keys that a run may have beside ``algo``, ``setting``, ``envs`` and ``seeds``
    :param algorithms: what ``algo`` can be; the first is meant where it is left out
    :return: one run per setting, environment and seed, in the file's order
    :raises ValueError: in one line that names the file and the key
    """
    try:
        return _expand(_mapping(path), options, algorithms)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not plain YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("holds no keys: see docs/experiments.md for a study file")
    return content


def _expand(content: dict[str, Any], options: Collection[str], algorithms: Collection[str]) -> list[StudyRun]:
    common = dict(content)
    settings = common.pop("runs", None)
    if not isinstance(settings, list) or not settings or not all(isinstance(one, dict) for one in settings):
        raise ValueError("runs must be a list of settings, such as [{setting: default}]")
    _require_known(common, (*GRID_KEYS, *options))
    runs: dict[str, StudyRun] = {}
    for own in settings:
        label = f"runs, {own.get('setting', 'default')}"
        _require_known(own, (*GRID_KEYS, *options), f"{label}: ")
        if not_alone := [key for key in WHOLE_STUDY if key in own]:
            raise ValueError(f"{label}: {not_alone[0]} holds for the whole study: move it out of runs")
        for run in _runs_of(_merged(common, own), algorithms, label):
            if run.name in runs:
                raise ValueError(f"{label}: two runs are named {run.name}: give each setting a name of its own")
            runs[run.name] = run
    return list(runs.values())


def _merged(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The setting's own keys over the common ones; a mapping, such as ``overrides``, is merged key by key."""
    both = {key for key in common.keys() & own.keys() if isinstance(common[key], dict) and isinstance(own[key], dict)}
    return {**common, **own, **{key: {**common[key], **own[key]} for key in both}}


def _runs_of(entry: dict[str, Any], algorithms: Collection[str], label: str) -> list[StudyRun]:
    algo, setting = entry.pop("algo", next(iter(algorithms))), entry.pop("setting", "default")
    if algo not in algorithms:
        raise ValueError(f"{label}: algo can be {', '.join(algorithms)}, not {algo!r}")
    if not isinstance(setting, str) or not re.fullmatch(r"[\w.+-]+", setting):
        raise ValueError(f"{label}: setting must be a name of letters, digits and . + - _, not {setting!r}")
    envs = _list(entry.pop("envs", None), "envs", label)
    seeds = [whole(f"{label}: seeds", meant(seed), minimum=0) for seed in _list(entry.pop("seeds", None), "seeds", label)]
    if not_text := [env for env in envs if not isinstance(env, str)]:
        raise ValueError(f"{label}: envs must be names of environments, not {not_text[0]!r}")
    if repeated := [one for one, times in Counter([*envs, *seeds]).items() if times > 1]:
        raise ValueError(f"{label}: {repeated[0]} is named twice")
    # Overrides stay as they are written, which a run that goes on is compared by; presets read them as meant
    options = {key: value if key == "overrides" else meant(value) for key, value in entry.items()}
    return [StudyRun(algo, setting, env, seed, options) for env, seed in product(envs, seeds)]


def _list(value: Any, key: str, label: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{label}: {key} must be a list, for example {key}: {'[0, 1]' if key == 'seeds' else '[Pendulum-v1]'}"
        )
    return value


def _require_known(entry: dict[str, Any], known: Collection[str], label: str = "") -> None:
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known) or f": known are runs, {', '.join(sorted(known))}"
            raise ValueError(f"{label}there is no key {key!r}{hint}")
