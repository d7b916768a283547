"""Hyperparameters by name: a YAML file per preset, in rl-zoo3's keys. Reading one runs no code, nor does this import torch."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import yaml

from sb3_td3x.common import validation
from sb3_td3x.common.validation import CHECKS, did_you_mean

if TYPE_CHECKING:
    import gymnasium as gym
    from stable_baselines3.common.vec_env import VecEnv

FOLDER = Path(__file__).parent
NOISE_KEYS = ("noise_type", "noise_std", "noise_dt")
ENV_KEYS = ("n_envs", "policy", "normalize", "env_wrapper", *NOISE_KEYS)
RUN_KEYS = ("n_timesteps", *ENV_KEYS)  # rl-zoo3's, no arguments of TD3X

MODEL_KEYS = (
    *(name for name in CHECKS if name != "seed"),
    "action_noise", "learning_starts", "policy_kwargs", "replay_buffer_class", "replay_buffer_kwargs", "stats_window_size",
)  # fmt: skip
"""The keyword arguments of ``TD3X`` that a preset may set."""

MAPPINGS = ("policy_kwargs", "replay_buffer_kwargs")  # keys whose values are mappings of names to values

NORMALIZE: dict[str, Callable[[str, Any], Any] | None] = {
    **dict.fromkeys(("norm_obs", "norm_reward"), validation.check_bool), "gamma": CHECKS["gamma"],
    **dict.fromkeys(("clip_obs", "clip_reward", "epsilon"), validation.check_positive), "norm_obs_keys": None,
}  # fmt: skip
"""``VecNormalize``'s arguments, which rl-zoo3's key ``normalize`` may hold, and their checks."""

CLASSES = {
    "activation_fn": ("torch.nn.", ("ReLU", "ELU", "GELU", "LeakyReLU", "SiLU", "Tanh")),
    "optimizer_class": ("torch.optim.", ("Adam", "AdamW", "RMSprop", "SGD")),
    "features_extractor_class": ("stable_baselines3.common.torch_layers.",
                                 ("FlattenExtractor", "NatureCNN", "CombinedExtractor")),
    "replay_buffer_class": ("stable_baselines3.common.off_policy_algorithm.",
                            ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer")),
    "env_wrapper": ("", ("sb3_contrib.common.wrappers.TimeFeatureWrapper", "gymnasium.wrappers.FlattenObservation",
                         "gymnasium.wrappers.RescaleAction")),
}  # fmt: skip
"""By key: the module of the classes that a preset may name, and their names in it."""


def names() -> list[str]:
    """The names of the presets in this package."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def load(name: str | Path, env_id: str) -> dict[str, Any]:
    """
    The settings of one environment.

    :param name: name of a preset, or the path of a YAML file of entries by environment
    :param env_id: registered name of the environment, also as ``module:name``
    :return: the environment's entry, else the preset's ``default`` entry; without a policy that the observations choose
    :raises ValueError: for an unknown preset, a file that cannot be read, or a file without an entry for the environment
    """
    entries = table(name)
    entry = entries.get(env_id) or entries.get(env_id.rpartition(":")[2]) or entries.get("default")
    if entry is None:
        raise ValueError(f"{name} has no entry for {env_id or 'an environment without a name'} and none named default")
    # rl-zoo3 needs a policy in every entry; MlpPolicy stands for the one that fits the observations
    return {key: value for key, value in entry.items() if (key, value) != ("policy", "MlpPolicy")}


def table(name: str | Path) -> dict[str, dict[str, Any]]:
    """Every entry of a preset, by environment."""
    name = str(name)  # a path
    if name in names():
        return deepcopy(_packaged(name))
    if not name.endswith((".yml", ".yaml")):
        raise ValueError(f"there is no preset {name!r}: choose from {', '.join(names())}, or name a .yml file")
    try:
        content = from_yaml(Path(name).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"the preset {name} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise ValueError(f"the preset {name} must map environments (or default) to their settings")
    for key in (key for entry in content.values() for key in entry):
        _require_known(key, f"{name}: ")
    return {env_id: {**table("default")["default"], **entry} for env_id, entry in content.items()}


@cache  # a study asks many times for each of its runs
def _packaged(name: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text())


def updates_for(entry: Mapping[str, Any], n_envs: int) -> dict[str, Any]:
    """One update per environment step (SB3: per step of all); an entry's own ``gradient_steps`` are for its own number."""
    preset_n_envs = entry.get("n_envs", 1) if "gradient_steps" in entry else 1
    return {} if n_envs == preset_n_envs else {"gradient_steps": -1}


def override(entry: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` texts to an entry. Values are YAML; ``policy_kwargs.net_arch=[64,64]`` sets one inside a mapping."""
    settings = dict(entry)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        name, dot, part = key.strip().partition(".")
        if not equals:
            raise ValueError(f"--set needs key=value, not {assignment!r}")
        if name in ("n_timesteps", "n_envs", "seed", "device", "env_kwargs"):
            raise ValueError(f"{name} is no hyperparameter: it has an option (n_timesteps: --steps), and a key in studies")
        _require_known(name)
        value = parse(text)
        if dot:
            if name not in (*MAPPINGS, "normalize"):
                raise ValueError(f"{name} is a single value: {name}={text}")
            mapping = settings.get(name)
            # `normalize: true` stands for the defaults
            value = {**({} if isinstance(mapping, bool) else _mapping(name, mapping)), part: value}
        settings[name] = value
        if name == "action_noise":  # replaces the preset's noise, which is given in rl-zoo3's keys
            settings = {key: value for key, value in settings.items() if key not in NOISE_KEYS}
    return settings


def _require_known(key: Any, source: str = "") -> None:
    known = (*RUN_KEYS, *MODEL_KEYS)
    if key not in known:
        hint = ": it is the option --env-kwargs of td3x train" if key == "env_kwargs" else did_you_mean(str(key), known)
        raise ValueError(f"{source}there is no setting {key!r}{hint}")


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping of names to values; ``None`` is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} must be a mapping of names to values, not {value!r}")
    return value


def check(entry: Mapping[str, Any]) -> None:
    """Check what neither ``model_arguments`` nor the constructor of ``TD3X`` does; ``ValueError`` for an invalid value."""
    if not isinstance(policy := entry.get("policy", ""), str):
        raise ValueError(f"policy must be a name such as MlpPolicy, not {policy!r}")
    for name, _ in _wrappers(entry.get("env_wrapper")):
        known_class("env_wrapper", name)
    check_normalize(entry.get("normalize"))


def model_arguments(entry: Mapping[str, Any], action_shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """An entry as keyword arguments of ``TD3X``, for actions of this shape: names become classes, texts schedules."""
    arguments = {key: value for key, value in entry.items() if key not in RUN_KEYS}
    if any(key in entry for key in NOISE_KEYS):
        arguments["action_noise"] = _action_noise(entry, action_shape)
    for rate in ("learning_rate", "qf_learning_rate"):
        if isinstance(text := arguments.get(rate), str):
            arguments[rate] = _schedule(rate, text)
    if isinstance(name := arguments.get("replay_buffer_class"), str):
        arguments["replay_buffer_class"] = known_class("replay_buffer_class", name)
    for name in (key for key in MAPPINGS if key in arguments):
        values = _mapping(name, arguments[name])
        arguments[name] = {key: known_class(key, value) if key in CLASSES else value for key, value in values.items()}
    return arguments


def _action_noise(entry: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
    """rl-zoo3's ``noise_type`` and ``noise_std``, and the ``dt`` of Ornstein-Uhlenbeck noise, as ``TD3X`` takes them."""
    name = validation.check_choice("noise_type", entry.get("noise_type", "normal"), ("normal", "ornstein-uhlenbeck", None))
    if name is None:
        return None
    if (std := entry.get("noise_std")) is None:
        raise ValueError(f"noise_type {name} needs noise_std")
    std = validation.check_not_negative("noise_std", std)
    if name == "normal":
        return std
    import numpy as np
    from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise

    sigma, dt = np.full(shape, std), validation.check_positive("noise_dt", entry.get("noise_dt", 0.01))
    return OrnsteinUhlenbeckActionNoise(np.zeros(shape), sigma, dt=dt)


@dataclass(frozen=True)
class HeldSchedule:
    """A learning rate that is held for a share of the run, ``held`` in [0, 1), and then falls linearly to 0."""

    rate: float
    held: float

    def __call__(self, progress_remaining: float) -> float:
        return self.rate * min(1.0, max(0.0, progress_remaining) / (1 - self.held))  # SB3's TD3 lets it fall below 0


def _schedule(name: str, text: str) -> Any:
    """``lin_7e-4`` is a rate that falls from 7e-4 to 0 over the run, ``hold0.6_7e-4`` one that falls after 0.6 of it."""
    from stable_baselines3.common.utils import LinearSchedule

    match = re.fullmatch(r"(?:lin|hold(0\.\d{1,9}))_(.+)", text)
    rate = parse(match[2]) if match else text
    if match is None or not isinstance(rate, (int, float)):
        raise ValueError(f"{name} must be a number, lin_<number> or hold<share of the run>_<number>, not {text!r}")
    rate = validation.check_float(name, rate)
    return LinearSchedule(rate, 0.0, 1.0) if match[1] is None else HeldSchedule(rate, float(match[1]))


def known_class(key: str, name: Any) -> Any:
    """The class that ``name`` stands for under ``key``; ``ValueError`` if it is not listed in ``CLASSES``."""
    module, known = CLASSES[key]
    return resolve_name(module + validation.check_choice(key, name, known))


def _wrappers(wrapper: Any) -> Iterable[tuple[Any, dict[str, Any]]]:
    """Names and arguments of rl-zoo3's ``env_wrapper``: a name, ``{name: arguments}``, or a list of them, innermost first."""
    for item in wrapper if isinstance(wrapper, list) else [wrapper] if wrapper else []:
        ((name, arguments),) = item.items() if isinstance(item, dict) and len(item) == 1 else [(item, {})]
        yield name, arguments or {}


def wrap(env: "gym.Env", wrapper: Any) -> "gym.Env":
    """Wrap one environment as rl-zoo3's ``env_wrapper`` says; ``ValueError`` for a wrapper that is not listed."""
    for name, arguments in _wrappers(wrapper):
        try:
            env = known_class("env_wrapper", name)(env, **arguments)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"the wrapper {name} does not take this environment or {arguments}: {error}") from error
    return env


def check_normalize(setting: Any) -> None:
    """``ValueError`` for a text such as ``"none"``, which would count as on, and for arguments that ``VecNormalize`` lacks."""
    if not isinstance(setting, (bool, dict, type(None))):
        raise ValueError(f"normalize must be true, false or a mapping of VecNormalize's arguments, not {setting!r}")
    for name, value in setting.items() if isinstance(setting, dict) else ():
        if name not in NORMALIZE:
            raise ValueError(f"normalize has no {name!r}{did_you_mean(str(name), NORMALIZE)}")
        if check_value := NORMALIZE[name]:
            check_value(f"normalize.{name}", value)


def normalize(env: "VecEnv", entry: Mapping[str, Any], training: bool = True) -> "VecEnv":
    """Wrap environments in ``VecNormalize`` as an entry says; with ``training`` the statistics follow the data."""
    check_normalize(setting := entry.get("normalize"))
    if not setting:
        return env
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecNormalize

    arguments = {"gamma": entry.get("gamma", 0.99), **(setting if isinstance(setting, dict) else {})}
    if not training:
        arguments["norm_reward"] = False  # evaluations report the environment's own rewards
    # Otherwise SB3 transposes images outside of VecNormalize, and stores them as they were before (its issue #819)
    env = BaseAlgorithm._wrap_env(env, monitor_wrapper=False)
    return VecNormalize(env, training=training, **arguments)


def make_env(env_id: str, entry: Mapping[str, Any]) -> "VecEnv":
    """Make the environments that an entry asks for, in this process: ``n_envs`` of them, wrapped and normalized."""
    from stable_baselines3.common.env_util import make_vec_env

    wrapper = partial(wrap, wrapper=entry.get("env_wrapper"))
    env = make_vec_env(env_id, validation.check_int("n_envs", entry.get("n_envs", 1), minimum=1), wrapper_class=wrapper)
    return normalize(env, entry)


def require_wrapped(env: "VecEnv", entry: Mapping[str, Any]) -> "VecEnv":
    """An environment made elsewhere; ``ValueError`` if it lacks a wrapper or the normalization that an entry asks for."""
    from stable_baselines3.common.vec_env import unwrap_vec_normalize

    for name, _ in _wrappers(entry.get("env_wrapper")):
        if not all(env.env_is_wrapped(known_class("env_wrapper", name))):
            raise ValueError(f"the preset asks for the wrapper {name}: put it around the environment, or set env_wrapper=None")
    if entry.get("normalize") and unwrap_vec_normalize(env) is None:
        raise ValueError("the preset asks for VecNormalize: put it around the environment, or set normalize=False")
    return env


class _Loader(yaml.SafeLoader):
    """Reads ``1e5`` and ``None``, which are texts in YAML 1.1, as what they say, unless they are quoted."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuses a key that is there twice, of which PyYAML would take the last."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in names[:number]:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes such texts."""


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    _either.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("None$"), ["N"])


def from_yaml(content: str | bytes) -> Any:
    """The content of a YAML file; ``ValueError`` if it is none."""
    try:
        return _Loader(content).get_single_data()
    except Exception as error:  # PyYAML lets through whatever Python raises for values such as !!bool x and !!timestamp x
        raise ValueError(str(error)) from error


def parse(text: str) -> Any:
    """A value that a user wrote as YAML; ``ValueError`` if it is none."""
    try:
        return from_yaml(text)
    except ValueError as error:
        raise ValueError(f"{text!r} cannot be read as YAML: {error}") from error


def written(value: Any) -> str:
    """A value as YAML on one line, as ``--set`` takes it."""
    return yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=math.inf).strip()[1:-1]
