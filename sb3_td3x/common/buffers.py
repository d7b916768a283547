"""Prioritized replay (LAP), whose transitions are drawn in proportion to a priority, and the choice of a replay buffer."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

PRIORITY_EXPONENT = 0.4  # between uniform sampling (0) and by the error (1): LAP's authors' value for continuous control
MAX_REJECTION_ROUNDS = 8  # of four candidates per transition asked for: enough if one of 32 is accepted on average
MAX_PRIORITY_INTERVAL = 250  # updates between two searches for the largest, as in TD7 (https://arxiv.org/abs/2306.02451)


class PrioritizedReplayBuffer(ReplayBuffer):
    """
    SB3's ``ReplayBuffer`` with a priority per transition (Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049).

    ``TD3X(..., prioritization="lap")`` uses it, for flat and image observations and any number of environments. A new
    transition gets the largest priority since that was last searched for. Parameters are those of ``ReplayBuffer``.

    A candidate is drawn uniformly and accepted with probability priority / largest priority, which costs the same for any
    buffer size. Where one priority is far above the others, so that few candidates are accepted, the rest of the batch is
    drawn from the cumulative sum of all priorities.

    :ivar priorities: ``(buffer_size, n_envs)``, at least 1
    :raises ValueError: for Dict observations, or ``optimize_memory_usage=True``
    """

    def __init__(
        self, buffer_size: int, observation_space: spaces.Space, *args: Any, optimize_memory_usage: bool = False, **kwargs: Any
    ):
        if isinstance(observation_space, spaces.Dict):
            raise ValueError("PrioritizedReplayBuffer is for flat and image observations, not for Dict")
        if optimize_memory_usage:
            raise ValueError("PrioritizedReplayBuffer stores every observation twice: leave optimize_memory_usage off")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
        self.priorities = np.ones((self.buffer_size, self.n_envs), dtype=np.float32)
        self._largest = np.array([1.0, 0.0])  # the largest priority, and updates since it was searched for
        self._sampled: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, *args: Any, **kwargs: Any) -> None:
        step = self.pos
        super().add(*args, **kwargs)
        self.priorities[step] = self._largest[0]

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        at = self._draw(batch_size)
        parts = (
            self._normalize_obs(self.observations[at], env),
            self.actions[at],
            self._normalize_obs(self.next_observations[at], env),
            (self.dones[at] * (1 - self.timeouts[at])).reshape(-1, 1),
            self._normalize_reward(self.rewards[at].reshape(-1, 1), env),
        )
        return ReplayBufferSamples(*map(self.to_torch, parts))

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The steps and the environments of ``count`` transitions."""
        priorities = self.priorities.reshape(-1)[: self.size() * self.n_envs]
        accepted = np.empty(0, dtype=np.int64)
        for _ in range(MAX_REJECTION_ROUNDS):
            candidates = np.random.randint(0, len(priorities), 4 * count)
            is_accepted = np.random.random(len(candidates)) * self._largest[0] < priorities[candidates]
            accepted = np.concatenate([accepted, candidates[is_accepted]])[:count]
            if len(accepted) == count:
                break
        else:
            cumulative = np.cumsum(priorities, dtype=np.float64)
            rest = np.searchsorted(cumulative, np.random.random(count - len(accepted)) * cumulative[-1], side="right")
            accepted = np.concatenate([accepted, rest])
        self._sampled = np.divmod(accepted, self.n_envs)
        return self._sampled

    def update_priorities(self, errors: th.Tensor) -> None:
        """Set the priorities of the transitions of the last ``sample`` by their ``errors``, ``(batch,)``."""
        # At least 1, wherever the Huber loss is quadratic
        new_priorities = (errors.clamp(min=1) ** PRIORITY_EXPONENT).cpu().numpy()
        self.priorities[self._sampled] = new_priorities
        largest, updates = self._largest
        self._largest[:] = max(largest, new_priorities.max()), updates + 1
        if updates + 1 >= MAX_PRIORITY_INTERVAL:
            self._largest[:] = self.priorities[: self.size()].max(), 0


def check_prioritization(prioritization: str | None, buffer_class: type[ReplayBuffer]) -> None:
    """Refuse ``"lap"`` for a buffer without priorities, and a buffer with priorities without ``"lap"``: ``ValueError``."""
    has_priorities = issubclass(buffer_class, PrioritizedReplayBuffer)
    if prioritization == "lap" and not has_priorities:
        raise ValueError(f'prioritization="lap" needs a PrioritizedReplayBuffer, not {buffer_class.__name__}')
    if prioritization != "lap" and has_priorities:
        raise ValueError(f'a PrioritizedReplayBuffer needs prioritization="lap", not {prioritization!r}')


def buffer_class_for(
    prioritization: str | None, requested: type[ReplayBuffer] | None, n_steps: int
) -> type[ReplayBuffer] | None:
    """The replay buffer's class for the user's ``replay_buffer_class``; ``None`` leaves the choice to SB3."""
    if requested is not None and not (isinstance(requested, type) and issubclass(requested, ReplayBuffer)):
        raise ValueError(f"replay_buffer_class must be a subclass of SB3's ReplayBuffer or None, not {requested!r}")
    if prioritization == "lap" and n_steps > 1:
        raise ValueError(f'prioritization="lap" is for n_steps=1, not {n_steps}')
    if prioritization == "lap" and requested is None:
        return PrioritizedReplayBuffer
    check_prioritization(prioritization, requested or ReplayBuffer)
    return requested
