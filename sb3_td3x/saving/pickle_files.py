"""SB3's pickled files (replay buffer, ``VecNormalize``), read without running code of whoever made them."""

import pathlib
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.save_util import load_from_pkl
from stable_baselines3.common.utils import check_shape_equal
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import safe_pickle
from sb3_td3x.saving.model_zip import PathOrFile, explained_errors, opened

_PER_STEP = {
    "observations", "next_observations", "actions", "rewards", "dones", "timeouts", "infos", "ep_start", "ep_length",
    "priorities",
}  # fmt: skip


def load_vecnormalize(path: str | pathlib.Path, venv: VecEnv, *, trust: bool = False) -> VecNormalize:
    """
    ``VecNormalize.load`` for a file that is not trusted.

    :param path: written by ``VecNormalize.save``
    :param venv: the environments to normalize
    :param trust: read it as SB3 does, which runs whatever code the file holds
    :raises UntrustedModelError: without ``trust``, for a file that holds more than statistics, spaces and arrays
    :raises ModelFileError: for a damaged file or one of something else
    :raises ValueError: for statistics of other observations than the environments give, or what is no ``VecEnv``
    """
    if not isinstance(venv, VecEnv):
        raise ValueError("statistics are for an SB3 VecEnv, such as make_vec_env gives, not for a single environment")
    with explained_errors(path, "the VecNormalize"), opened(path, suffix="pkl") as file:
        loaded = load_from_pkl(file) if trust else safe_pickle.load(file)
        if not isinstance(loaded, VecNormalize):
            raise ModelFileError(f"it holds {safe_pickle.described(loaded)}, no VecNormalize")
        if not trust:
            _check_statistics(loaded)
    try:
        try:
            check_shape_equal(loaded.observation_space, venv.observation_space)
        except AssertionError:  # of images that were transposed, as SB3's models do?
            venv = BaseAlgorithm._wrap_env(venv, monitor_wrapper=False)
        loaded.set_venv(venv)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"{path} does not fit the environments: {error}") from error
    return loaded


def read_buffer(path: PathOrFile, trust: bool) -> ReplayBuffer:
    """The replay buffer that ``save_replay_buffer`` wrote; ``trust`` reads it as SB3 does."""
    with explained_errors(path, "the replay buffer"), opened(path, suffix="pkl") as file:
        loaded = load_from_pkl(file) if trust else safe_pickle.load(file)
        if not isinstance(loaded, ReplayBuffer):
            raise ModelFileError(f"it holds {safe_pickle.described(loaded)}, no replay buffer")
        if not trust:
            _check_buffer(loaded)
    return loaded


def _check_buffer(buffer: ReplayBuffer) -> None:
    """Check that a buffer's arrays have the sizes that it states: it is used long after it is loaded."""
    size, n_envs, action_dim = buffer.buffer_size, buffer.n_envs, buffer.action_dim
    obs_shape: Any = get_obs_shape(buffer.observation_space)
    if not isinstance(buffer.pos, (int, np.integer)) or not 0 <= buffer.pos < size:
        raise ModelFileError(f"its position is {buffer.pos} of {size}")
    if action_dim != get_action_dim(buffer.action_space) or buffer.obs_shape != obs_shape:
        raise ModelFileError("its arrays are for other spaces than it names")
    for name in _PER_STEP & vars(buffer).keys():
        memory = vars(buffer)[name]
        shape: Any = obs_shape if name.endswith("observations") else (action_dim,) if name == "actions" else ()
        parts = [(memory[key], part) for key, part in shape.items()] if isinstance(shape, dict) else [(memory, shape)]
        for array, part in parts:
            kinds = "O" if name == "infos" else "biuf" if name.endswith("observations") or name.startswith("ep_") else "f"
            is_numeric = isinstance(array, np.ndarray) and array.dtype.kind in kinds
            if not is_numeric or array.shape != (size, n_envs, *part):
                raise ModelFileError(f"its {name} are not the numbers of {size} steps of {n_envs} environments")
    if not np.all((priorities := getattr(buffer, "priorities", np.ones(1))) >= 1) or np.isinf(priorities).any():
        raise ModelFileError("its priorities are not numbers of at least 1")
    for name in {"ep_start", "ep_length", "_current_ep_start"} & vars(buffer).keys():
        if not np.all((vars(buffer)[name] >= 0) & (vars(buffer)[name] <= size)):
            raise ModelFileError(f"its {name} is not within its {size} steps")


def _check_statistics(loaded: VecNormalize) -> None:
    """Check that statistics have the shape of the observations: they are used at every step."""
    moments: list[tuple[Any, Any]] = [(loaded.ret_rms, ())]
    if loaded.norm_obs and isinstance(loaded.observation_space, spaces.Dict):
        moments += [(loaded.obs_rms[key], loaded.observation_space[key].shape) for key in loaded.norm_obs_keys or ()]
    elif loaded.norm_obs:
        moments.append((loaded.obs_rms, loaded.observation_space.shape))
    for statistics, shape in moments:
        if np.shape(statistics.mean) != shape or np.shape(statistics.var) != shape:
            raise ModelFileError("its statistics are not in the shape of the observations")
