"""SB3's pickled files (replay buffer, ``VecNormalize``, policy), read without running their author's code."""

import pathlib
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_pkl, open_path
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.errors import ModelFileError, UntrustedModelError
from sb3_td3x.saving import model_zip, safe_pickle
from sb3_td3x.saving.model_zip import PathOrFile
from sb3_td3x.saving.safe_pickle import NotAllowed

_PER_STEP = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "infos", "ep_start", "ep_length")
_COUNTS = ("buffer_size", "n_envs", "pos", "action_dim")
_NUMBERS = ("clip_obs", "clip_reward", "gamma", "epsilon")
_SWITCHES = ("norm_obs", "norm_reward", "training")


def load_vecnormalize(path: str | pathlib.Path, venv: VecEnv, trust: bool = False) -> VecNormalize:
    """
    ``VecNormalize.load`` for a file of somebody else.

    :param path: written by ``VecNormalize.save``
    :param venv: the environments to normalise
    :param trust: read it as SB3 does, which runs whatever code the file holds
    :raises UntrustedModelError: without ``trust``, for a file that holds more than statistics, spaces and arrays
    :raises ModelFileError: for a damaged file or one of something else
    :raises ValueError: for statistics of other observations than the environments give, or what is no ``VecEnv``
    """
    if not isinstance(venv, VecEnv):
        raise ValueError("statistics are for an SB3 VecEnv, such as make_vec_env gives, not for a single environment")
    if trust:
        return VecNormalize.load(str(path), venv)
    name = str(path)
    with pathlib.Path(path).open("rb") as file, _told("the VecNormalize", name):
        loaded = safe_pickle.load(file)
        _require_statistics(loaded)
    try:
        loaded.set_venv(venv)
    except AssertionError as error:
        raise ValueError(f"{name} does not fit the environments: {error}") from error
    return loaded


def read_buffer(path: PathOrFile, trust: bool) -> ReplayBuffer:
    """
    The replay buffer that ``save_replay_buffer`` wrote.

    :param trust: read it as SB3 does, which runs whatever code the file holds
    :raises UntrustedModelError: without ``trust``, for a buffer of a class that is not known or with foreign objects
    :raises ModelFileError: for a damaged file or one of something else
    """
    if trust:
        loaded = load_from_pkl(path)
        if not isinstance(loaded, ReplayBuffer):
            raise ModelFileError(f"{model_zip.name_of(path)} holds no replay buffer")
        return loaded
    file = open_path(path, "r", suffix="pkl")
    try:
        with _told("the replay buffer", model_zip.name_of(path)):
            loaded = safe_pickle.load(file)
            _require_whole(loaded)
    finally:
        if file is not path:
            file.close()
    return loaded


def read_policy(path: Any, device: th.device) -> dict[str, Any]:
    """
    What ``policy.save`` wrote: the constructor's arguments under ``data`` and the tensors under ``state_dict``.

    :raises UntrustedModelError: for arguments that are more than spaces, numbers and known classes
    :raises ModelFileError: for a damaged file or one of something else
    """
    name = model_zip.name_of(path)
    content = path.read() if hasattr(path, "read") else pathlib.Path(path).read_bytes()
    with _told("the policy", name):
        saved = safe_pickle.load_tensors(content)
        return {"data": {**saved["data"]}, "state_dict": saved["state_dict"]}


class _told:
    """Turn what reading raises into the two documented errors."""

    def __init__(self, what: str, file: str):
        self.what, self.file = what, file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, NotAllowed):
            raise UntrustedModelError(self.what, str(error), self.file) from error
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise ModelFileError(f"{self.file} cannot be loaded: {error}") from error


def _require_whole(buffer: Any) -> None:
    """Arrays of the sizes that the buffer says it has: it is used long after it is loaded."""
    if not isinstance(buffer, ReplayBuffer):
        raise ModelFileError(f"it holds {safe_pickle.described(buffer)}, no replay buffer")
    counts = [getattr(buffer, name, None) for name in _COUNTS]
    if not all(isinstance(count, (int, np.integer)) for count in counts):
        raise ModelFileError("its counts are no numbers")
    size, n_envs, position, action_dim = map(int, counts)  # type: ignore[arg-type]
    observed: Any = get_obs_shape(buffer.observation_space)
    if not 0 <= position < size or not isinstance(buffer.full, bool):
        raise ModelFileError(f"its position is {position} of {size}")
    if action_dim != get_action_dim(buffer.action_space) or buffer.obs_shape != observed:
        raise ModelFileError("its arrays are for other spaces than it names")
    for name in _PER_STEP:
        inner = observed if "observations" in name else (action_dim,) if name == "actions" else ()
        memory = buffer.__dict__.get(name)
        if isinstance(memory, dict) and isinstance(inner, dict) and memory.keys() == inner.keys():
            for key, array in memory.items():
                _require_array(f"{name}[{key!r}]", array, (size, n_envs, *inner[key]))
        elif memory is not None:
            _require_array(name, memory, (size, n_envs, *inner))


def _require_array(name: str, array: Any, shape: tuple[int, ...]) -> None:
    objects = isinstance(array, np.ndarray) and array.dtype.kind == "O" and name != "infos"
    if not isinstance(array, (np.ndarray, th.Tensor)) or tuple(array.shape) != shape or objects:
        raise ModelFileError(f"its {name} are not the numbers of {shape[0]} steps of {shape[1]} environments")


def _require_statistics(loaded: Any) -> None:
    """Statistics in the shape of the observations: they are used at every step."""
    if not isinstance(loaded, VecNormalize):
        raise ModelFileError(f"it holds {safe_pickle.described(loaded)}, no VecNormalize")
    for names, kinds in ((_NUMBERS, (int, float, np.number)), (_SWITCHES, (bool,))):
        for name in names:
            if not isinstance(getattr(loaded, name, None), kinds):
                raise ModelFileError(f"its {name} is {safe_pickle.described(getattr(loaded, name, None))}")
    _require_moments("ret_rms", loaded.ret_rms, ())
    if loaded.norm_obs:
        space = loaded.observation_space
        inner = space.spaces if isinstance(space, spaces.Dict) else None
        if (inner is None) == isinstance(loaded.obs_rms, dict):
            raise ModelFileError("its statistics are for other observations than it names")
        for key, one in loaded.obs_rms.items() if isinstance(loaded.obs_rms, dict) else [(None, loaded.obs_rms)]:
            _require_moments("obs_rms", one, (space if inner is None else inner[key]).shape)


def _require_moments(name: str, statistics: Any, shape: Any) -> None:
    values = vars(statistics) if isinstance(statistics, RunningMeanStd) else {}
    for moment, expected in (("mean", shape), ("var", shape), ("count", ())):
        value = values.get(moment)
        if not isinstance(value, (np.ndarray, np.number, float, int)) or np.shape(value) != expected:
            raise ModelFileError(f"its {name} has no {moment} in the shape of the observations")
        if np.asarray(value).dtype.kind not in "iuf":
            raise ModelFileError(f"its {name} has a {moment} that is no number")
