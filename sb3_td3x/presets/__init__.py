"""
Hyper-parameters by name: one YAML file per preset, in rl-zoo3's keys, one entry per environment.

Values are plain YAML. Classes are named, and only those listed here are known: reading a preset runs no code.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.resources import files
from typing import Any

import numpy as np
import yaml
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import LinearSchedule
from torch import nn, optim

from sb3_td3x.common.validation import did_you_mean, meant, real
from sb3_td3x.td3x.td3x import TD3X, check_arguments

RUN_KEYS = ("n_timesteps", "n_envs", "policy", "normalize", "env_wrapper", "noise_type", "noise_std")
"""Keys of rl-zoo3 that are not keyword arguments of the algorithm."""

OPTIONS = (
    "env", "steps", "seed", "preset", "n_envs", "eval_freq", "eval_episodes", "save_freq", "device", "threads", "out"
)  # fmt: skip
"""Of the command and of study files: they are not changed by ``--set``; ``--n-envs`` also keeps one update per step."""

MODEL_KEYS = tuple(
    name for name in inspect.signature(TD3X.__init__).parameters
    if name not in ("self", "policy", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model")
)  # fmt: skip

MAPPINGS = ("policy_kwargs", "replay_buffer_kwargs")
"""Keys whose values are settings by name."""

_CLASSES: dict[str, dict[str, Any]] = {
    "activation_fn": {c.__name__: c for c in (nn.ReLU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.SiLU, nn.Tanh)},
    "optimizer_class": {c.__name__: c for c in (optim.Adam, optim.AdamW, optim.RMSprop, optim.SGD)},
    "features_extractor_class": {c.__name__: c for c in (FlattenExtractor, NatureCNN, CombinedExtractor)},
    "replay_buffer_class": {
        name: f"stable_baselines3.common.buffers:{name}" for name in ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer")
    }
    | {
        "HerReplayBuffer": "stable_baselines3:HerReplayBuffer",
    },
    "env_wrapper": {
        "sb3_contrib.common.wrappers.TimeFeatureWrapper": "sb3_contrib.common.wrappers:TimeFeatureWrapper",
        "gymnasium.wrappers.FlattenObservation": "gymnasium.wrappers:FlattenObservation",
        "gymnasium.wrappers.RescaleAction": "gymnasium.wrappers:RescaleAction",
    },
}


def names() -> list[str]:
    """The presets there are."""
    return sorted(path.name.removesuffix(".yml") for path in files(__package__).iterdir() if path.name.endswith(".yml"))


def load(name: str, env_id: str) -> dict[str, Any]:
    """
    The entry of ``env_id`` in preset ``name``, also if that is ``module:name``, or the preset's ``default`` entry.

    :raises ValueError: for an unknown preset
    """
    if name not in names():
        raise ValueError(f"there is no preset {name!r}: choose from {', '.join(names())}")
    entries = table(name)
    return dict(entries.get(env_id) or entries.get(env_id.rpartition(":")[2]) or entries["default"])


def table(name: str) -> dict[str, dict[str, Any]]:
    """Every entry of a preset, by environment."""
    return yaml.safe_load((files(__package__) / f"{name}.yml").read_text())


def override(entry: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """
    ``entry`` with ``key=value`` assignments applied; values are YAML, ``policy_kwargs.net_arch=[64,64]`` sets one inside.

    :raises ValueError: for an unknown key (with the nearest ones) or a text that is no assignment
    """
    result = dict(entry)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        outer, dot, inner = key.strip().partition(".")
        if not equals:
            raise ValueError(f"--set needs key=value, not {assignment!r}")
        _require_known(outer)
        value = _parsed(text)
        if dot and outer not in (*MAPPINGS, "normalize"):
            raise ValueError(f"{outer} is a single value: {outer}={text}")
        around = result.get(outer)
        if dot:  # `normalize: true` stands for the defaults
            value = {**_mapping(outer, None if isinstance(around, bool) else around), inner: value}
        result[outer] = value
        if outer == "action_noise":  # replaces the preset's noise, which is given in rl-zoo3's keys
            result = {k: v for k, v in result.items() if k not in ("noise_type", "noise_std")}
    return result


def _require_known(name: str) -> None:
    option = "steps" if name == "n_timesteps" else name
    if option in OPTIONS:
        raise ValueError(
            f"{name} is not changed by --set: the option is --{option.replace('_', '-')}, in a study file the key {option}"
        )
    known = [*RUN_KEYS, *MODEL_KEYS]
    if name == "env_kwargs":
        raise ValueError(
            "env_kwargs are for a module of your own, which registers the environment with them: --env module:Name"
        )
    if name not in known:
        raise ValueError(f"there is no setting {name!r}{did_you_mean(name, known)}")


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """Settings by name; nothing is none of them."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} must be a mapping of names to values, not {value!r}")
    return value


def model_arguments(entry: Mapping[str, Any], action_shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """
    An entry as keyword arguments of ``TD3X``: names become classes, ``lin_7e-4`` a schedule, lists tuples.

    :param action_shape: shape of one action, for Ornstein-Uhlenbeck noise
    :raises ValueError: for a class that is not on the list, or noise that is not known
    """
    arguments = {key: value for key, value in entry.items() if key not in RUN_KEYS}
    if "noise_type" in entry or "noise_std" in entry:
        arguments["action_noise"] = _action_noise(entry.get("noise_type", "normal"), entry.get("noise_std"), action_shape)
    for rate in ("learning_rate", "qf_learning_rate"):
        if isinstance(text := arguments.get(rate), str):
            arguments[rate] = _linear_schedule(rate, text)
    if isinstance(arguments.get("train_freq"), list):
        arguments["train_freq"] = tuple(arguments["train_freq"])
    if isinstance(name := arguments.get("replay_buffer_class"), str):
        arguments["replay_buffer_class"] = known_class("replay_buffer_class", name)
    for name in (one for one in MAPPINGS if one in arguments):
        found = _mapping(name, arguments[name])
        arguments[name] = {key: known_class(key, value) if key in _CLASSES else value for key, value in found.items()}
    return arguments


def check(entry: Mapping[str, Any]) -> None:
    """
    Check every setting of the algorithm and its policy that does not depend on the environment.

    :raises ValueError: for the first that cannot be
    """
    if not isinstance(entry["policy"], str):
        raise ValueError(f"policy must be a name such as MlpPolicy, not {entry['policy']!r}")
    check_arguments(entry["policy"], **model_arguments(entry))


def _action_noise(kind: str | None, std: Any, shape: tuple[int, ...]) -> Any:
    """rl-zoo3's ``noise_type`` and ``noise_std`` as ``TD3X`` takes them."""
    if kind is None:
        return None
    if kind not in ("normal", "ornstein-uhlenbeck"):
        raise ValueError(f"noise_type can be normal or ornstein-uhlenbeck, not {kind!r}")
    if std is None:
        raise ValueError(f"noise_type {kind} needs noise_std")
    if kind == "normal":
        return std
    return OrnsteinUhlenbeckActionNoise(np.zeros(shape), np.full(shape, real("noise_std", std)))


def known_class(key: str, name: Any) -> Any:
    """The class that ``name`` stands for under ``key``; ``ValueError`` if it is not on the list."""
    known = _CLASSES[key]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{key} can be {', '.join(known)}, not {name!r}")
    found = known[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        return getattr(import_module(module), attribute)
    return found


def replay_buffers() -> dict[str, Any]:
    """The classes that ``replay_buffer_class`` may name."""
    return {name: known_class("replay_buffer_class", name) for name in _CLASSES["replay_buffer_class"]}


def _parsed(text: str) -> Any:
    try:
        return meant(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError) as error:  # the latter for dates that are none
        raise ValueError(f"{text!r} cannot be read as YAML: {error}") from error


def written(value: Any) -> str:
    """A value as YAML on one line, as ``--set`` takes it."""
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]


def _linear_schedule(name: str, text: str) -> Callable[[float], float]:
    """``lin_7e-4``: from 7e-4 to 0 over the run."""
    kind, _, start = text.partition("_")
    try:
        initial = real(name, float(start)) if kind == "lin" else None
    except ValueError:
        initial = None
    if initial is None:
        raise ValueError(f"{name} must be a number or lin_<number>, not {text!r}")
    return LinearSchedule(initial, 0.0, 1.0)
