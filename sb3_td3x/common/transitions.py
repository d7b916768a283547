"""What SB3's replay buffers do not check: whether they fit the model, and whether a transition can be learned from."""

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import BaseBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY

from sb3_td3x.errors import NonFiniteError

MAX_REWARD = 1e15
"""Values grow to reward / (1 - gamma), and the square of a critic's error has to stay within float32."""


def sample(
    buffer: ReplayBuffer, batch_size: int, normalization: VecNormalize | None, when: str = "sampling"
) -> ReplayBufferSamples:
    """``buffer.sample`` without SB3's second copy (indexing makes one), with a check of the rewards of hindsight goals."""
    copies_twice = type(buffer).to_torch is BaseBuffer.to_torch and "to_torch" not in vars(buffer)
    if copies_twice:
        buffer.to_torch = partial(_as_tensor, device=buffer.device)  # type: ignore[method-assign]
    try:
        batch = buffer.sample(batch_size, env=normalization)
    finally:
        if copies_twice:
            del buffer.to_torch
    if isinstance(buffer, HerReplayBuffer):  # which has just computed them; all others were checked when they were stored
        check_rewards(batch.rewards.numpy(force=True), "reward of a hindsight goal (compute_reward)", when)
    return batch


def _as_tensor(array: np.ndarray, copy: bool = True, *, device: th.device) -> th.Tensor:
    return th.as_tensor(array, device=device)


def can_sample(buffer: ReplayBuffer) -> bool:
    """Whether there is a transition to sample. Hindsight replay samples from finished episodes only."""
    return buffer.size() > 0 and (not isinstance(buffer, HerReplayBuffer) or bool((buffer.ep_length > 0).any()))


def truncate_episodes(buffer: ReplayBuffer, envs: np.ndarray | None = None) -> None:
    """
    End unfinished episodes that will not continue, as a time limit does.

    Otherwise n-step returns, hindsight goals and (with ``optimize_memory_usage``) next observations would reach into the
    episode that follows.

    :param envs: ``(n_envs,)``, true where the episode will not continue; ``None`` for all
    """
    if buffer.size() == 0:
        return
    if isinstance(buffer, HerReplayBuffer):  # it keeps track of unfinished episodes itself
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the episode might continue
            buffer.truncate_last_trajectory()
    elif buffer.optimize_memory_usage or isinstance(buffer, NStepReplayBuffer):
        is_truncated = (buffer.dones[buffer.pos - 1] == 0) & (True if envs is None else envs)
        # A buffer that does not handle time limits stores them as `dones`, and its `timeouts` are never written again. With
        # `optimize_memory_usage` the next observation will belong to another episode (SB3 issue #46)
        ends = buffer.timeouts if buffer.handle_timeout_termination else buffer.dones
        ends[buffer.pos - 1, is_truncated] = 1


def require_known_goals(buffer_kwargs: dict[str, Any]) -> None:
    """Refuse an unknown strategy of hindsight goals with a ``ValueError``; SB3 raises a bare ``KeyError``."""
    strategy = buffer_kwargs.get("goal_selection_strategy")
    if isinstance(strategy, str) and strategy.lower() not in KEY_TO_GOAL_STRATEGY:
        raise ValueError(f"goal_selection_strategy can be {', '.join(KEY_TO_GOAL_STRATEGY)}, not {strategy!r}")


def check_fits(buffer: ReplayBuffer, present: Any) -> None:
    """Refuse a loaded buffer whose transitions mean something else than those of the present buffer or model."""
    for name in ("n_steps", "n_envs", "observation_space", "action_space"):
        loaded, expected = getattr(buffer, name, 1), getattr(present, name, 1)  # most buffers have no `n_steps`
        if loaded != expected:
            raise ValueError(f"the replay buffer has {name}={loaded}, but the model has {name}={expected}")


def require_as_built(name: str, value: Any, built_with: Any) -> None:
    """Refuse a change of a setting that the replay buffer was built with: ``ValueError``."""
    if value != built_with:
        raise ValueError(f"{name} cannot be changed from {built_with!r} to {value!r}: give it to the constructor or to load")


def require_n_steps(buffer: ReplayBuffer, n_steps: int) -> None:
    """Refuse a buffer that sums another number of steps: ``ValueError``."""
    if (buffer_steps := getattr(buffer, "n_steps", 1)) != n_steps:
        raise ValueError(
            f"{type(buffer).__name__} gives {buffer_steps}-step returns, n_steps={n_steps} is not for it: "
            "give n_steps to the constructor without replay_buffer_class, which chooses NStepReplayBuffer"
        )


def require_stored_as_seen(env: VecEnv) -> None:
    """
    Refuse wrappers around ``VecNormalize`` that change the observations with a ``ValueError``: SB3 stores those before the
    change (its issues #693 and #819).
    """
    normalization = unwrap_vec_normalize(env)
    if normalization is None or normalization.observation_space == env.observation_space:
        return
    raise ValueError(
        f"{type(env).__name__} around VecNormalize changes observations, but the replay buffer stores those before the "
        "change, which the actor does not see: put VecNormalize outermost, for images VecNormalize(VecTransposeImage(env))"
    )


def running_statistics(env: VecNormalize) -> list[RunningMeanStd]:
    """The running statistics of returns, and of observations if they are normalized."""
    if not env.norm_obs:
        return [env.ret_rms]
    return [*(env.obs_rms.values() if isinstance(env.obs_rms, dict) else [env.obs_rms]), env.ret_rms]


class KeptStatistics:
    """The statistics of ``VecNormalize`` after the last good step, because a NaN that is counted stays in them."""

    def __init__(self, env: VecNormalize | None):
        self._env = env
        self.keep()

    def keep(self) -> None:
        """Keep the present ones. ``VecNormalize`` replaces their arrays and does not write into them."""
        statistics = [] if self._env is None else running_statistics(self._env)
        self._kept = [(moments, moments.mean, moments.var, moments.count) for moments in statistics]

    def restore(self) -> None:
        """Set the statistics to the kept ones."""
        for moments, mean, var, count in self._kept:
            moments.mean, moments.var, moments.count = mean, var, count


def require_finite(observation: np.ndarray | dict[str, np.ndarray], name: str, when: str) -> None:
    """Raise ``NonFiniteError``, which names the array, for a NaN or an infinity in one of the arrays."""
    if isinstance(observation, dict):
        for key, array in observation.items():
            require_finite(array, f"{name}[{key!r}]", when)
    # On small arrays faster than `np.isfinite(array).all()`
    elif (array := np.asarray(observation)).dtype.kind == "f" and not np.logical_and.reduce(np.isfinite(array), axis=None):
        raise NonFiniteError(name, when)


def check_rewards(rewards: np.ndarray, name: str, when: str) -> None:
    """Raise ``NonFiniteError`` for a NaN, an infinity, or an absolute value above ``MAX_REWARD``."""
    if not np.maximum.reduce(np.abs(rewards), axis=None) <= MAX_REWARD:  # also for a NaN
        is_finite = np.isfinite(rewards).all()
        raise NonFiniteError(name, when, f"is beyond {MAX_REWARD:.0e}" if is_finite else "is not finite")


def check_transition(
    actions: np.ndarray,
    observations: np.ndarray | dict[str, np.ndarray],
    rewards: np.ndarray,
    dones: np.ndarray,
    infos: list[dict[str, Any]],
    normalization: VecNormalize | None,
    when: str,
) -> None:
    """
    Check what one step of the environments adds to the replay buffer.

    :param observations: after the step; the terminal ones are in ``infos``
    :param normalization: if there is one, the observations and rewards before it are stored
    :raises NonFiniteError: naming what is not finite, or a reward that is too large
    :raises ValueError: for an end or a time limit that is neither true nor false, ``None`` for example
    """
    require_finite(actions, "action (the exploration noise is part of it)", when)
    check_rewards(rewards, "reward", when)
    if normalization is not None:
        observations = normalization.get_original_obs()
        require_finite(normalization.get_original_reward().astype(np.float32), "reward", when)
    require_finite(observations, "observation", when)
    for index, (done, info) in enumerate(zip(dones, infos, strict=True)):
        if done and "terminal_observation" in info:
            require_finite(info["terminal_observation"], "terminal observation", when)
        is_truncated = info.get("TimeLimit.truncated", False)
        if done not in (0, 1) or is_truncated not in (0, 1):
            raise ValueError(
                f"environment {index} ended its episode with {done!r} and its time limit with {is_truncated!r} at {when}: "
                'terminated, truncated and info["TimeLimit.truncated"] must be True or False'
            )
