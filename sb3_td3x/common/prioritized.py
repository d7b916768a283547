"""Prioritised replay (LAP): transitions are drawn in proportion to their priority, which follows their last error."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_td3x.common.indexed_replay import IndexedReplayBuffer
from sb3_td3x.td3x import losses

PRIORITIZATIONS = ("lap", "pal")
INSTEAD = 'prioritization="pal" has the same gradient in expectation and takes any replay buffer'
MOST_ROUNDS = 8
"""Of four candidates per transition that is wanted: enough if one of 32 is kept on average."""
LARGEST_IS_FOUND_EVERY = 250
"""Updates after which the largest priority is looked for anew, as in TD7 (https://arxiv.org/abs/2306.02451)."""


class PrioritizedReplayBuffer(IndexedReplayBuffer):
    """
    SB3's ``ReplayBuffer`` with a priority per transition (Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049).

    ``TD3X(..., prioritization="lap")`` takes it. For flat and image observations and any number of environments; a new
    transition has the largest priority there is. Parameters are ``ReplayBuffer``'s.

    Drawing needs no tree: a candidate is drawn uniformly and kept with the probability of its priority over the largest,
    which costs the same for any size of the buffer. Only where hardly any is kept, one priority being far above the others,
    all are summed up.

    :ivar priorities: ``(buffer_size, n_envs)``, at least 1
    :raises ValueError: for Dict observations, or ``optimize_memory_usage=True``
    """

    instead_for_dict = f": {INSTEAD}"

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.priorities = np.ones((self.buffer_size, self.n_envs), dtype=np.float32)
        self._largest = np.array([1.0, 0.0])  # priority, and updates since it was looked for
        self._sampled: tuple[np.ndarray, np.ndarray] | None = None

    def add(self, *args: Any, **kwargs: Any) -> None:
        step = self.pos
        super().add(*args, **kwargs)
        self.priorities[step] = self._largest[0]

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        self._sampled = np.divmod(self._numbers(count), self.n_envs)
        return self._sampled

    def _numbers(self, count: int) -> np.ndarray:
        """Numbers of transitions, counted over steps and then environments."""
        priorities = self.priorities.reshape(-1)[: self.size() * self.n_envs]
        drawn = np.empty(0, dtype=np.int64)
        for _ in range(MOST_ROUNDS):
            some = np.random.randint(0, len(priorities), 4 * count)
            is_kept = np.random.random(len(some)) * self._largest[0] < priorities[some]
            drawn = np.concatenate([drawn, some[is_kept]])
            if len(drawn) >= count:
                return drawn[:count]
        sums = np.cumsum(priorities, dtype=np.float64)
        rest = np.searchsorted(sums, np.random.random(count - len(drawn)) * sums[-1], side="right")
        return np.concatenate([drawn, rest])

    def update_priorities(self, errors: th.Tensor) -> None:
        """
        :param errors: of the transitions of the last ``sample``, ``(batch,)``
        """
        # Before a loss that is not finite stops the run; a NaN would never be drawn again
        finite = errors.nan_to_num(nan=0.0, posinf=0.0)
        found = losses.priorities(finite).cpu().numpy()
        self.priorities[self._sampled] = found
        largest, updates = self._largest
        self._largest[:] = max(largest, found.max()), updates + 1
        if updates + 1 >= LARGEST_IS_FOUND_EVERY:
            self._largest[:] = self.priorities[: self.size()].max(), 0


def checked(prioritization: str | None, buffer_class: type[ReplayBuffer]) -> str | None:
    """
    :param prioritization: one of ``PRIORITIZATIONS``, or ``None``
    :param buffer_class: of the model's replay buffer
    :raises ValueError: for ``"lap"`` with a buffer that has no priorities, or one that has them without it
    """
    has_priorities = issubclass(buffer_class, PrioritizedReplayBuffer)
    if prioritization == "lap" and not has_priorities:
        raise ValueError(f'prioritization="lap" needs a PrioritizedReplayBuffer, not {buffer_class.__name__}: {INSTEAD}')
    if prioritization != "lap" and has_priorities:
        raise ValueError(f'a PrioritizedReplayBuffer needs prioritization="lap", not {prioritization!r}')
    return prioritization


def buffer_class_for(prioritization: str | None, chosen: type[ReplayBuffer] | None, n_steps: int) -> type[ReplayBuffer] | None:
    """
    The replay buffer's class; ``None`` leaves it to SB3.

    :param chosen: by the user; ``None`` is no choice
    :raises ValueError: for what is no class of replay buffers, or a choice that does not go together
    """
    if chosen is not None and not (isinstance(chosen, type) and issubclass(chosen, ReplayBuffer)):
        raise ValueError(f"replay_buffer_class must be a subclass of SB3's ReplayBuffer or None, not {chosen!r}")
    if prioritization == "lap" and n_steps > 1:
        raise ValueError(f'prioritization="lap" is for n_steps=1, not {n_steps}: {INSTEAD}')
    if prioritization == "lap" and chosen is None:
        return PrioritizedReplayBuffer
    checked(prioritization, chosen or ReplayBuffer)
    return chosen
