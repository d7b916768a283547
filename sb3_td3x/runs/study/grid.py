"""A study file: the runs it stands for, and what is wrong with it in one line."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from sb3_td3x import presets
from sb3_td3x.common.validation import check_int, did_you_mean, parse_yaml_scalar
from sb3_td3x.results.run_dir import file_name
from sb3_td3x.runs.experiment import Experiment

GRID_KEYS = ("algo", "setting", "envs", "seeds")
WHOLE_STUDY = ("threads",)
"""Keys that cannot differ between the runs of a study: speed and rounding depend on them."""
OPTIONS = tuple(
    option.name for option in fields(Experiment) if option.name not in ("env_id", "seed", "setting", "out", "video")
)
"""Keys of a run of ``td3x study``, besides those of the grid."""


@dataclass(frozen=True)
class StudyRun:
    """
    One run of a study.

    :param algo: ``"td3x"``, or another algorithm that the study's train function knows
    :param setting: name of what is tried
    :param env: registered name of the environment
    :param seed: seed of the run
    :param options: all other keys of the file
    """

    algo: str
    setting: str
    env: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """Name of its folder and its table; no two runs of a study share one."""
        return f"{self.algo}_{self.setting}_{file_name(self.env)}_s{self.seed}"

    def experiment(self) -> Experiment:
        """
        The experiment that ``td3x study`` makes. On the CPU unless the file says otherwise: runs share a machine.

        :raises ValueError: if ``overrides`` is no mapping
        """
        options = {"device": "cpu", **self.options}
        overrides = options.pop("overrides", {})
        if not isinstance(overrides, dict):
            raise ValueError(f"overrides must be a mapping such as {{batch_size: 128}}, not {overrides!r}")
        whole_first = sorted(overrides.items(), key=lambda item: "." in str(item[0]))  # then parts, as policy_kwargs.n_critics
        assignments = tuple(f"{key}={presets.written(value)}" for key, value in whole_first)
        return Experiment(self.env, seed=self.seed, setting=self.setting, overrides=assignments, **options)


def read(path: Path, options: Collection[str] = OPTIONS, algorithms: Collection[str] = ("td3x",)) -> list[StudyRun]:
    """
    :param path: YAML file: keys that hold for every run, and under ``runs`` a list of settings with their own keys
    :param options: the keys that a run may have besides ``algo``, ``setting``, ``envs`` and ``seeds``
    :param algorithms: values of ``algo``; the first is the default
    :return: one run per setting, environment and seed, in the file's order
    :raises ValueError: in one line that names the file and the key
    """
    try:
        return _expand(yaml.safe_load(path.read_text()), options, algorithms)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def _expand(content: Any, options: Collection[str], algorithms: Collection[str]) -> list[StudyRun]:
    if not isinstance(content, dict):
        raise ValueError("holds no keys: see docs/experiments.md for a study file")
    common = dict(content)
    listed = common.pop("runs", None)
    if not isinstance(listed, list) or not listed or not all(isinstance(keys, dict) for keys in listed):
        raise ValueError("runs must be a list of settings, such as [{setting: default}]")
    known = (*GRID_KEYS, *options)
    _require_known(common, known)
    runs: dict[str, StudyRun] = {}
    for keys in listed:
        label = f"runs, {keys.get('setting', 'default')}"
        _require_known(keys, known, f"{label}: ")
        if not_alone := [key for key in WHOLE_STUDY if key in keys]:
            raise ValueError(f"{label}: {not_alone[0]} holds for the whole study: move it out of runs")
        # A setting's own keys win; mappings such as `overrides` are merged key by key
        both = {key for key in common.keys() & keys.keys() if isinstance(common[key], dict) and isinstance(keys[key], dict)}
        merged = {**common, **keys, **{key: {**common[key], **keys[key]} for key in both}}
        for run in _runs_of(merged, algorithms, label):
            if run.name in runs:
                raise ValueError(f"{label}: two runs are named {run.name}")
            runs[run.name] = run
    return list(runs.values())


def _runs_of(entry: dict[str, Any], algorithms: Collection[str], label: str) -> list[StudyRun]:
    algo, setting = entry.pop("algo", next(iter(algorithms))), entry.pop("setting", "default")
    if algo not in algorithms:
        raise ValueError(f"{label}: algo can be {', '.join(algorithms)}, not {algo!r}")
    if not isinstance(setting, str) or not re.fullmatch(r"[\w.+-]+", setting):
        raise ValueError(f"{label}: setting must be a name of letters, digits and . + - _, not {setting!r}")
    envs, listed = _list(entry, "envs", "[Pendulum-v1]", label), _list(entry, "seeds", "[0, 1]", label)
    seeds = [check_int(f"{label}: seeds", parse_yaml_scalar(seed), minimum=0) for seed in listed]
    if not_text := [env for env in envs if not isinstance(env, str)]:
        raise ValueError(f"{label}: envs must be names of environments, not {not_text[0]!r}")
    # Overrides stay as they are written, because a resumed run is compared by them; presets parse them
    options = {key: value if key == "overrides" else parse_yaml_scalar(value) for key, value in entry.items()}
    return [StudyRun(algo, setting, env, seed, options) for env, seed in product(envs, seeds)]


def _list(entry: dict[str, Any], key: str, example: str, label: str) -> list[Any]:
    value = entry.pop(key, None)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{label}: {key} must be a list, for example {key}: {example}")
    return value


def _require_known(entry: dict[str, Any], known: Collection[str], label: str = "") -> None:
    if unknown := [key for key in entry if key not in known]:
        hint = did_you_mean(str(unknown[0]), known) or f": known are runs, {', '.join(sorted(known))}"
        raise ValueError(f"{label}there is no key {unknown[0]!r}{hint}")
