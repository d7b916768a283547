"""SB3's replay buffer for subclasses with a rule of their own of what to draw, by step and environment."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize


class IndexedReplayBuffer(ReplayBuffer, ABC):
    """
    SB3's ``ReplayBuffer`` without its rule of what to draw, which ``_draw`` is in a subclass.

    For flat and image observations. Parameters are ``ReplayBuffer``'s.

    :cvar instead_for_dict: what an error for Dict observations adds
    :raises ValueError: for Dict observations, or ``optimize_memory_usage=True``
    """

    instead_for_dict: ClassVar[str] = ""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ):
        name = type(self).__name__
        if isinstance(observation_space, spaces.Dict):
            raise ValueError(f"{name} is for flat and image observations, not for Dict{self.instead_for_dict}")
        if optimize_memory_usage:
            raise ValueError(f"{name} stores every observation twice: leave optimize_memory_usage off")
        super().__init__(
            buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination=handle_timeout_termination
        )

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

    @abstractmethod
    def _draw(self, count: int) -> tuple[Any, Any]:
        """
        :return: step and environment of each transition to sample, ``(count,)`` each, as the memory is indexed
        """
