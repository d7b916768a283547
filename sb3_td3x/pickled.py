"""SB3's pickled files (replay buffer, ``VecNormalize``, policy), read without running their author's code."""

import io
import pathlib
import types
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_pkl, open_path
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x import modelfile, plain
from sb3_td3x.errors import ModelFileError, UntrustedModelError
from sb3_td3x.modelfile import PathOrFile
from sb3_td3x.pickle_rules import Forbidden
from sb3_td3x.unpickling import Unpickler, unpickle

_PER_STEP = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "infos", "ep_start", "ep_length")
_COUNTS = ("buffer_size", "n_envs", "pos")


def load_vecnormalize(path: str | pathlib.Path, venv: VecEnv, trust: bool = False) -> VecNormalize:
    """
    ``VecNormalize.load`` for a file of somebody else.

    :param path: written by ``VecNormalize.save``
    :param venv: the environments to normalise
    :param trust: read it as SB3 does, which runs whatever code the file holds
    :raises UntrustedModelError: without ``trust``, for a file that holds more than statistics, spaces and arrays
    :raises ModelFileError: for a damaged file or one of something else
    """
    if trust:
        return VecNormalize.load(str(path), venv)
    name = str(path)
    with pathlib.Path(path).open("rb") as file, _told("VecNormalize", name):
        loaded = unpickle(file)
        _require_statistics(loaded)
    loaded.set_venv(venv)
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
            raise ModelFileError(f"{modelfile.name_of(path)} holds no replay buffer")
        return loaded
    file = open_path(path, "r", suffix="pkl")
    try:
        with _told("the replay buffer", modelfile.name_of(path)):
            loaded = unpickle(file)
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
    name = modelfile.name_of(path)
    content = path.read() if hasattr(path, "read") else pathlib.Path(path).read_bytes()
    with _told("the policy", name):
        modelfile.require_tensors(content, name)
        # torch reads the tensors; what else there is goes through our reader
        reader = types.SimpleNamespace(__name__="sb3_td3x.pickled", Unpickler=Unpickler)
        saved = th.load(io.BytesIO(content), map_location=device, weights_only=False, pickle_module=reader)
        arguments, tensors = saved["data"], saved["state_dict"]
        schedule = arguments.pop("lr_schedule", None)
        return {"data": {**plain.decode(plain.encode(arguments)), "lr_schedule": schedule}, "state_dict": tensors}


class _told:
    """Turn what reading raises into the two documented errors."""

    def __init__(self, what: str, file: str):
        self.what, self.file = what, file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (Forbidden, plain.NotPlain)):
            raise UntrustedModelError(self.what, str(error), self.file) from error
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise ModelFileError(f"{self.file} cannot be loaded: {error}") from error


def _require_whole(buffer: Any) -> None:
    """Arrays of the sizes that the buffer says it has: it is used long after it is loaded."""
    if not isinstance(buffer, ReplayBuffer):
        raise ModelFileError(f"it holds {plain.described(buffer)}, no replay buffer")
    counts = [getattr(buffer, name, None) for name in _COUNTS]
    if not all(isinstance(count, (int, np.integer)) for count in counts):
        raise ModelFileError("its counts are no numbers")
    plain.encode([buffer.observation_space, buffer.action_space])
    size, n_envs, position = map(int, counts)  # type: ignore[arg-type]
    if not 0 <= position < size or not isinstance(buffer.full, bool):
        raise ModelFileError(f"its position is {position} of {size}")
    for name in _PER_STEP:
        memory = buffer.__dict__.get(name)
        for array in memory.values() if isinstance(memory, dict) else [memory]:
            if array is not None and tuple(getattr(array, "shape", ()))[:2] != (size, n_envs):
                raise ModelFileError(f"its {name} are not for {size} steps of {n_envs} environments")


def _require_statistics(loaded: Any) -> None:
    if not isinstance(loaded, VecNormalize):
        raise ModelFileError(f"it holds {plain.described(loaded)}, no VecNormalize")
    observed = loaded.__dict__.get("obs_rms", {})
    for one in [*(observed.values() if isinstance(observed, dict) else [observed]), loaded.ret_rms]:
        values = vars(one) if isinstance(one, RunningMeanStd) else {}
        if not all(isinstance(values.get(name), (np.ndarray, np.generic, float)) for name in ("mean", "var", "count")):
            raise ModelFileError("its statistics are no numbers")
    plain.encode([loaded.observation_space, loaded.action_space])
