"""What SB3's replay buffers do not check: whether they fit the model, and whether a transition can be learned from."""

import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from sb3_td3x.common.vec_envs import vec_layers
from sb3_td3x.errors import NonFiniteError

MAX_REWARD = 1e15  # values grow to reward / (1 - gamma), and the square of a critic's error has to stay within float32


def sample(buffer: ReplayBuffer, batch_size: int, normalization: VecNormalize | None, when: str) -> ReplayBufferSamples:
    """``buffer.sample`` with a check of the rewards of hindsight goals, which are computed only now."""
    batch = buffer.sample(batch_size, env=normalization)
    if isinstance(buffer, HerReplayBuffer):
        if len(batch.rewards) != len(batch.dones):  # of one for all of its goals SB3 makes one row
            raise ValueError("compute_reward has to take arrays of goals, one in each row, and return as many rewards")
        check_rewards(batch.rewards.numpy(force=True), "reward of a hindsight goal (compute_reward)", when)
    return batch


def truncate_episodes(buffer: ReplayBuffer, envs: np.ndarray | None = None) -> None:
    """
    End unfinished episodes, of all environments or where ``envs`` is true, as a time limit does.

    Otherwise n-step returns, hindsight goals and (with ``optimize_memory_usage``) next observations would reach into the
    episode that follows.
    """
    if buffer.size() == 0:
        return
    if isinstance(buffer, HerReplayBuffer):  # it keeps track of unfinished episodes itself
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the episode might continue
            buffer.truncate_last_trajectory()
    elif getattr(buffer, "n_steps", 1) > 1 or getattr(buffer, "optimize_memory_usage", False):  # else rows are whole
        is_truncated = (buffer.dones[buffer.pos - 1] == 0) & (True if envs is None else envs)
        # A buffer that does not handle time limits stores them as `dones`, and its `timeouts` are never written again. With
        # `optimize_memory_usage` the next observation will belong to another episode (SB3 issue #46)
        ends = buffer.timeouts if buffer.handle_timeout_termination else buffer.dones
        ends[buffer.pos - 1, is_truncated] = 1


def check_fits(buffer: ReplayBuffer, present: Any) -> None:
    """Refuse a loaded buffer whose transitions mean something else than those of the present buffer or model."""
    for name in ("n_steps", "n_envs", "observation_space", "action_space"):
        loaded, expected = getattr(buffer, name, 1), getattr(present, name, 1)  # most buffers have no `n_steps`
        if loaded != expected:
            raise ValueError(f"the replay buffer has {name}={loaded}, but the model has {name}={expected}")


def require_stored_as_seen(env: VecEnv) -> None:
    """Refuse wrappers around ``VecNormalize`` that change observations: SB3 stores those before it (its issues #693, #819)."""
    normalization = unwrap_vec_normalize(env)
    if normalization is not None and isinstance(normalization.observation_space, spaces.Discrete):
        advice = "wrap the environment with gymnasium.wrappers.FlattenObservation"
        raise ValueError(f"with VecNormalize around Discrete observations SB3 fails at the end of an episode: {advice}")
    if normalization is not None and normalization.observation_space != env.observation_space:
        problem = "a wrapper around VecNormalize changes observations, but those before the change are stored"
        raise ValueError(f"{problem}: put VecNormalize outermost, for images VecNormalize(VecTransposeImage(env))")


def store_terminal_obs(buffer: ReplayBuffer, dones: np.ndarray, infos: list[dict[str, Any]], env: VecNormalize | None) -> None:
    """Store the last observations, up to ``clip_obs``, where SB3 has cast ``VecNormalize``'s to whole numbers or bools."""
    if env is None or not env.norm_obs or not hasattr(buffer, "next_observations"):
        return
    for index in np.flatnonzero(dones):
        if (last := infos[index].get("terminal_observation")) is not None:
            end: Any = env.unnormalize_obs(last)
            seen, memory = env.old_obs, buffer.next_observations
            parts = [(end[key], seen[key], memory[key]) for key in seen] if isinstance(seen, dict) else [(end, seen, memory)]
            for value, original, stored in parts:
                if original.dtype.kind in "biu":
                    stored[buffer.pos - 1, index] = np.rint(value)


def running_mean_stds(value: Any) -> list[Any]:
    """The ``RunningMeanStd`` in an attribute, SB3's or Gymnasium's: one, or a dict of them."""
    parts = value.values() if isinstance(value, dict) else [value]
    return [part for part in parts if hasattr(part, "update_from_moments")]


def _moments(env: VecNormalize | None) -> list[Any]:
    """The statistics that are in use, also of a ``VecNormalize`` inside it: ``sync_envs_normalization`` replaces them."""
    layers = [] if env is None else [layer for layer in vec_layers(env) if isinstance(layer, VecNormalize)]
    return [rms for layer in layers for rms in (layer.ret_rms, *running_mean_stds(vars(layer).get("obs_rms")))]


def kept_statistics(env: VecNormalize | None) -> list[dict[str, Any]]:
    """Those of ``VecNormalize``: a NaN that is counted stays in them. It replaces their arrays and never writes into them."""
    return [dict(vars(moments)) for moments in _moments(env)]


def restore_statistics(env: VecNormalize | None, kept: list[dict[str, Any]]) -> None:
    """Set what ``kept_statistics`` gave."""
    for moments, values in zip(_moments(env), kept, strict=True):
        vars(moments).update(values)


def require_finite(observation: np.ndarray | dict[str, np.ndarray], name: str, when: str) -> None:
    """Raise ``NonFiniteError``, which names the array, for a NaN or an infinity in one of the arrays."""
    if isinstance(observation, dict):
        for key, array in observation.items():
            require_finite(array, f"{name}[{key!r}]", when)
    elif (array := np.asarray(observation)).dtype.kind == "f" and not np.isfinite(array).all():
        raise NonFiniteError(name, when)


def check_rewards(rewards: np.ndarray, name: str, when: str) -> None:
    """Raise ``NonFiniteError`` for a NaN, an infinity, or an absolute value above ``MAX_REWARD``."""
    if not float(np.abs(rewards).max()) <= MAX_REWARD:  # also for a NaN; 1e15 is infinite among numbers of few bits
        is_finite = np.isfinite(rewards).all()
        raise NonFiniteError(name, when, f"is beyond {MAX_REWARD:.0e}" if is_finite else "is not finite")


def check_transition(
    actions: np.ndarray, observations: Any, rewards: np.ndarray, infos: list[dict], env: VecNormalize | None, when: str
) -> None:
    """Raise ``NonFiniteError`` for what cannot be learned from, ``ValueError`` for a time limit neither true nor false."""
    require_finite(actions, "action (the exploration noise is part of it)", when)
    check_rewards(rewards, "reward", when)
    if env is not None:  # what it was given is stored
        observations = env.get_original_obs()
        require_finite(env.get_original_reward().astype(np.float32), "reward", when)
    require_finite(observations, "observation", when)
    for info in infos:
        if "terminal_observation" in info:
            require_finite(info["terminal_observation"], "terminal observation", when)
        if (truncated := info.get("TimeLimit.truncated", False)) not in (0, 1):  # the buffer would make a NaN of None
            raise ValueError(f'truncated (info["TimeLimit.truncated"]) is {truncated!r}, not True or False, at {when}')
