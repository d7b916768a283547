"""A model's attributes in its zip: written as plain values where they are, and read back without running code."""

import base64
import numbers
from collections import deque
from pathlib import PurePath
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x.common import validation
from sb3_td3x.common.resumable import TRANSIENT
from sb3_td3x.errors import ModelFileError, UntrustedModelError
from sb3_td3x.saving import plain, safe_pickle
from sb3_td3x.saving.model_zip import ModelFile
from sb3_td3x.saving.safe_pickle import NotAllowed

REBUILT = ("lr_schedule",)
"""Attributes that SB3 saves and makes anew from others: they need no trust."""

DERIVED = (
    "_loading",
    "_is_refilling",
    "_maker",
    *TRANSIENT,
    "_pace",
    "_statistics",
)
"""Attributes of TD3X that are made anew when needed."""

NEVER_SAVED = (
    "policy", "device", "env", "replay_buffer", "rollout_buffer", "_vec_normalize_env", "_logger", "_custom_logger", *DERIVED,
)  # fmt: skip
"""A zip that sets these is not a model's: as ``env`` a text would import the module that it names."""

LARGEST = {"buffer_size": 10**8, "n_envs": 10_000}
"""That are taken from a file: memory is asked for in proportion."""

_WHOLE = (numbers.Integral,)
_NUMBER = (numbers.Real,)
_RATE = (numbers.Real, ConstantSchedule, FloatSchedule, LinearSchedule)
TYPES: dict[str, tuple[type, ...]] = {
    "policy_kwargs": (dict,),
    "replay_buffer_kwargs": (dict,),
    "observation_space": (spaces.Space,),
    "action_space": (spaces.Box,),
    "action_noise": (ActionNoise, numbers.Real, type(None)),
    "noise_generator": (th.Generator,),
    "ep_info_buffer": (deque, type(None)),
    "ep_success_buffer": (deque, type(None)),
    "learning_rate": _RATE,
    "qf_learning_rate": (*_RATE, type(None)),
    "max_grad_norm": (numbers.Real, type(None)),
    "prioritization": (str, type(None)),
    "tensorboard_log": (str, PurePath, type(None)),
    "seed": (numbers.Integral, type(None)),
    "start_time": _NUMBER,
    "_current_progress_remaining": _NUMBER,
    "_learning_starts_request": (numbers.Real, str),
    "update_path": (str, type(None)),
    "resumptions": (list,),
    **dict.fromkeys(
        (
            "n_envs", "verbose", "num_timesteps", "_n_updates", "_episode_num", "_num_timesteps_at_start",
            "_stats_window_size", "sde_sample_freq",
        ),
        _WHOLE,
    ),
    **dict.fromkeys(("_total_timesteps", "learning_starts"), _NUMBER),
    **dict.fromkeys(("use_sde", "optimize_memory_usage", "_replay_buffer_is_automatic"), (bool,)),
}  # fmt: skip
"""What attributes must be; any other is what the settings' own checks and SB3 accept."""

NEEDED = ("policy_class", "policy_kwargs", "observation_space", "action_space", "n_envs")


def encoded(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Attributes for a zip.

    :return: those that are plain, encoded; and what the others hold, by name
    """
    fields, untrusted = {}, {}
    for name, value in attributes.items():
        try:
            fields[name] = plain.encode(value)
        except plain.NotPlain as error:
            untrusted[name] = str(error)
    return fields, untrusted


def decoded(file: ModelFile, cls: type, given: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """
    All attributes in a zip, without running any code of its author.

    :param file: TD3X's zip or SB3's
    :param cls: the algorithm
    :param given: attributes that the caller gives instead (``custom_objects``)
    :param changed: attributes that are changed after loading: limits on what the file says of them do not matter, nor whether
        it can be read
    :return: by name, those of ``given`` that the file has among them
    :raises UntrustedModelError: naming an attribute that cannot be read that way and what it holds
    :raises ModelFileError: for attributes that a model does not have or of another type
    """
    for name in file.data:
        if name in NEVER_SAVED or callable(getattr(cls, name, None)):
            raise ModelFileError(
                f"{file.name} sets {name}, which is no saved attribute of a model: if it is yours, saved with include=, "
                "load it with trust=True"
            )
    found: dict[str, Any] = {}
    for name in file.data:
        if name in given:
            found[name] = given[name]
        elif name in REBUILT:
            found[name] = None
        elif name in changed and file.plain is not None and name in file.plain["untrusted"]:
            found[name] = changed[name]  # nothing of what the file holds is wanted
        else:
            found[name] = _one(file, name)
            if name in changed:
                continue
            _require_type(name, found[name], file.name)
            if name in LARGEST and not 1 <= found[name] <= LARGEST[name]:
                raise ModelFileError(f"{file.name} asks for {name}={found[name]}: load it with {name}=...")
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise ModelFileError(f"{file.name} lacks the model's {', '.join(missing)}")
    return found


def _one(file: ModelFile, name: str) -> Any:
    try:
        if file.plain is None:
            return _from_sb3(file.data[name])
        if name in file.plain["untrusted"]:
            raise NotAllowed(str(file.plain["untrusted"][name]))
        if name not in file.plain["fields"]:
            raise ModelFileError("it is missing among the plain ones")
        if _count(file.plain["fields"][name]) > plain.MAX_VALUES:
            raise ModelFileError("it is too large")
        return plain.decode(file.plain["fields"][name])
    except (NotAllowed, plain.NotPlain) as error:
        raise UntrustedModelError(name, str(error), file.name) from error
    except ModelFileError as error:
        raise ModelFileError(f"{file.name} cannot be loaded: attribute {name}: {error}") from error


def _count(value: Any) -> int:
    """Values in all; 256 characters of a text count as one."""
    left, count = [value], 0
    while left:
        one = left.pop()
        count += 1 + (len(one) // 256 if isinstance(one, str) else 0)
        if isinstance(one, (list, dict)):
            left.extend(one.values() if isinstance(one, dict) else one)
    return count


def _from_sb3(value: Any) -> Any:
    """SB3 writes JSON where it can and a pickle elsewhere. What comes of a pickle is put to the test of being plain."""
    if not isinstance(value, dict) or ":serialized:" not in value:
        return value
    try:
        content = base64.b64decode(value[":serialized:"], validate=True)
    except (ValueError, TypeError) as error:
        raise ModelFileError(f"no base64: {error}") from error
    return safe_pickle.loads(content)


def _require_type(name: str, value: Any, file: str) -> None:
    fits = True
    if name in TYPES:
        fits = isinstance(value, TYPES[name])
    elif name == "policy_class":
        fits = isinstance(value, str) or (isinstance(value, type) and issubclass(value, TD3Policy))
    elif name == "replay_buffer_class":
        fits = value is None or (isinstance(value, type) and issubclass(value, ReplayBuffer))
    elif name in validation.CHECKS:
        try:
            validation.CHECKS[name](name, value)
        except ValueError as error:
            raise ModelFileError(f"{file} cannot be loaded: {error}") from error
    if not fits:
        raise ModelFileError(f"{file} cannot be loaded: {name} is {plain.described(value)}")
