"""Exploration: the noise on the actor's actions, and how long actions are random before it."""

import copy
import math
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x.common.validation import checked_auto, real, whole

LearningStarts = int | Literal["auto"]
Annealing = tuple[float, float, int]
"""The first and the last standard deviation, and the environment steps from one to the other."""

AUTO_LEARNING_STARTS_SHARE = 0.02  # 10,000 of 500,000 steps, the ratio of the texts that teach TD3
AUTO_LEARNING_STARTS_RANGE = (100, 10_000)


def resolve_action_noise(
    action_noise: ActionNoise | float | Annealing | None, action_space: spaces.Box, n_envs: int
) -> ActionNoise | None:
    """
    What the user set, as SB3 uses it.

    :param action_noise: a float is the standard deviation of Gaussian noise in the action space scaled to
        [-1, 1], independent per step, dimension and environment; ``(first, last, steps)`` one that goes linearly from first to
        last over so many environment steps; ``None`` or 0 is no noise; an ``ActionNoise`` is kept
    :param action_space: the noise must have its shape
    :param n_envs: several environments have a copy of the noise each
    :raises ValueError: for negative noise or noise of another shape than one action
    """
    if action_noise is None:
        return None
    if not isinstance(action_noise, ActionNoise):
        action_noise = _gaussian(checked_noise(action_noise), action_space.shape)
        if action_noise is None:
            return None
    copies = action_noise if isinstance(action_noise, VectorizedActionNoise) else None
    base = action_noise if copies is None else copies.base_noise
    check_noise_shape(base, action_space)
    if copies is not None and len(copies.noises) == n_envs > 1:
        return copies
    return VectorizedActionNoise(base, n_envs) if n_envs > 1 else base


def checked_noise(value: Any) -> float | Annealing:
    """
    Noise that is given in numbers.

    :raises ValueError: for a negative standard deviation, or a list that is not ``(first, last, steps)``
    """
    if not isinstance(value, (list, tuple)):
        return _checked_std(value)
    if len(value) != 3:
        raise ValueError(f"action_noise must be a number or (first, last, steps), not {value!r}")
    first, last, steps = value
    return _checked_std(first), _checked_std(last), whole("the steps of action_noise", steps, minimum=1)


def _checked_std(value: Any) -> float:
    std = real("action_noise", value)
    if std < 0:
        raise ValueError(f"action_noise must not be negative, not {value!r}")
    return std


def _gaussian(noise: float | Annealing, shape: tuple[int, ...]) -> ActionNoise | None:
    if isinstance(noise, tuple):
        return AnnealedActionNoise(*noise, shape)
    kind = NormalActionNoise if shape else ScalarActionNoise
    return kind(np.zeros(shape), np.full(shape, noise)) if noise else None


def check_noise_shape(noise: ActionNoise, action_space: spaces.Box) -> None:
    """Refuse noise that numpy would silently broadcast to a whole action. No random number is consumed."""
    state = np.random.get_state()
    shape = np.shape(copy.deepcopy(noise)())
    np.random.set_state(state)
    if shape != action_space.shape:
        raise ValueError(f"action_noise gives values of shape {shape}, but an action has shape {action_space.shape}")


def noise_std(action_noise: ActionNoise | None) -> float | None:
    """
    Standard deviation of the noise in the scaled action space, the mean over the actions' dimensions.

    For Ornstein-Uhlenbeck noise that of its stationary distribution; ``None`` for a user's own class.
    """
    if action_noise is None:
        return 0.0
    noise = action_noise.base_noise if isinstance(action_noise, VectorizedActionNoise) else action_noise
    if not isinstance(noise, (NormalActionNoise, OrnsteinUhlenbeckActionNoise)):
        return None
    sigma = float(np.mean(noise._sigma))
    if isinstance(noise, NormalActionNoise):
        return sigma
    kept = 1 - noise._theta * noise._dt  # of the last value, by the next
    return sigma * math.sqrt(noise._dt / (1 - kept**2)) if abs(kept) < 1 else math.inf


class ScalarActionNoise(NormalActionNoise):
    """Gaussian noise for actions of shape ``()``, for which numpy gives SB3's class a bare float."""

    def __call__(self) -> np.ndarray:
        return np.asarray(np.random.normal(self._mu, self._sigma), dtype=self._dtype)


class AnnealedActionNoise(ScalarActionNoise):
    """
    Gaussian noise whose standard deviation goes linearly from one value to another, then stays, for actions of any shape.

    It knows no time: who acts with it calls ``anneal`` first.

    :param first: standard deviation before the first step, action space scaled to [-1, 1]
    :param last: from ``steps`` on
    :param steps: of all environments together
    :param shape: of an action
    """

    def __init__(self, first: float, last: float, steps: int, shape: tuple[int, ...]):
        super().__init__(np.zeros(shape), np.full(shape, first))
        self._first, self._last, self._steps = first, last, steps

    def anneal(self, timesteps: int) -> None:
        """:param timesteps: that the environments have made"""
        std = np.interp(timesteps, (0, self._steps), (self._first, self._last))
        self._sigma = np.full(np.shape(self._mu), std)


def anneal(noise: ActionNoise | None, timesteps: int) -> None:
    """Tell noise that anneals, each environment's, how many steps there have been."""
    parts = [noise.base_noise, *noise.noises] if isinstance(noise, VectorizedActionNoise) else [noise]
    for part in parts:
        if isinstance(part, AnnealedActionNoise):
            part.anneal(timesteps)


def check_action_bounds(action_space: spaces.Box) -> None:
    """
    Actions are scaled from their bounds to [-1, 1], which needs some width, and to numbers in between.

    :raises ValueError: for whole numbers, or bounds that are equal, reversed, or further apart than their type can hold
    """
    if action_space.dtype.kind != "f":
        raise ValueError(
            f"actions must be real numbers, but the action space is of {action_space.dtype}: wrap the environment with "
            "gymnasium.wrappers.TransformAction, which rounds them"
        )
    with np.errstate(over="ignore"):
        width = action_space.high - action_space.low
    if not (np.isfinite(width).all() and (width > 0).all()):
        raise ValueError(f"every action needs a lower bound below its upper bound, but the action space is {action_space}")


def resolve_learning_starts(request: LearningStarts, total_timesteps: float | None) -> int:
    """
    Number of random environment steps before the actor acts and training starts.

    :param request: a number of steps, or ``"auto"``: 2 % of the planned steps, at least 100 and at most 10,000
    :param total_timesteps: the planned steps; ``None`` while no run has been planned, which gives the least
    """
    if not isinstance(request, str):
        return whole("learning_starts", request, minimum=0)
    checked_auto("learning_starts", request)
    least, most = AUTO_LEARNING_STARTS_RANGE
    share = 0 if total_timesteps is None else AUTO_LEARNING_STARTS_SHARE * total_timesteps
    return int(min(max(share, least), most))


class Exploring(OffPolicyAlgorithm):
    """An off-policy algorithm whose noise may be given in numbers, and whose warm-up may follow the length of the run."""

    _learning_starts_request: LearningStarts

    @property
    def learning_starts(self) -> int:
        """Steps with random actions. Setting it makes a new request; ``"auto"`` is resolved when a run starts."""
        return self.__dict__["learning_starts"]

    @learning_starts.setter
    def learning_starts(self, request: LearningStarts) -> None:
        self._request_learning_starts(request, total_timesteps=None)

    def _request_learning_starts(self, request: LearningStarts, total_timesteps: float | None) -> None:
        # The number keeps SB3's name in the zip, so that SB3's programs read it
        self.__dict__["learning_starts"] = resolve_learning_starts(request, total_timesteps)
        self._learning_starts_request = request

    @property
    def action_noise(self) -> ActionNoise | None:
        """The exploration noise. Setting it, at any time, takes what the constructor takes."""
        return self.__dict__["action_noise"]

    @action_noise.setter
    def action_noise(self, noise: ActionNoise | float | Annealing | None) -> None:
        if hasattr(self, "action_space"):
            noise = resolve_action_noise(noise, self.action_space, self.n_envs)  # type: ignore[arg-type]
        elif not isinstance(noise, ActionNoise | None):  # an algorithm without an environment, as `load` makes it
            checked_noise(noise)
        self.__dict__["action_noise"] = noise

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        anneal(action_noise, self.num_timesteps)
        return super()._sample_action(learning_starts, action_noise, n_envs)

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps or self.num_timesteps == 0:
            self._request_learning_starts(self._learning_starts_request, total_timesteps)
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)
