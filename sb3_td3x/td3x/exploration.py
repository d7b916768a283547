"""Exploration: noise on the actor's actions, and the number of random actions before the actor acts."""

import math
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise

from sb3_td3x.common.validation import check_int, check_not_negative

LearningStarts = int | Literal["auto"]
KNOWN_NOISE = (NormalActionNoise.__call__, OrnsteinUhlenbeckActionNoise.__call__)
"""How noise is drawn whose ``_mu`` and ``_sigma`` say what it gives; a subclass may draw it in another way."""


def resolve_learning_starts(request: LearningStarts, total_timesteps: float = 0) -> int:
    """Steps with random actions: ``"auto"`` is 2 % of the planned steps, at least 100 and at most 10,000."""
    steps = check_int("learning_starts", request, minimum=0, or_auto=True)
    return steps if isinstance(steps, int) else int(np.clip(0.02 * total_timesteps, 100, 10_000))


def resolve_action_noise(
    action_noise: ActionNoise | float | None, action_space: spaces.Box, n_envs: int
) -> ActionNoise | None:
    """The constructor's ``action_noise`` as SB3 uses it: several environments have a copy each. Noise is not called."""
    if action_noise is None:
        return None
    if not isinstance(action_noise, ActionNoise):
        if (std := check_not_negative("action_noise", action_noise)) == 0:
            return None
        action_noise = NormalActionNoise(np.zeros(action_space.shape), np.full(action_space.shape, std))
    base_noise: Any = action_noise.base_noise if isinstance(action_noise, VectorizedActionNoise) else action_noise
    if type(base_noise).__call__ in KNOWN_NOISE:
        # numpy would silently broadcast a single number to a whole action
        is_correlated = isinstance(base_noise, OrnsteinUhlenbeckActionNoise)  # which draws as many numbers as its mean has
        shape = np.broadcast_shapes(np.shape(base_noise._mu), () if is_correlated else np.shape(base_noise._sigma))
        if shape != action_space.shape:
            raise ValueError(f"action_noise gives values of shape {shape}, but an action has shape {action_space.shape}")
    if isinstance(action_noise, VectorizedActionNoise) and action_noise.n_envs == n_envs:
        return action_noise
    return VectorizedActionNoise(base_noise, n_envs) if n_envs > 1 else base_noise


def noise_std(action_noise: ActionNoise | None) -> float | None:
    """Standard deviation of the (stationary) noise, averaged over environments and dimensions; ``None`` for other classes."""
    if action_noise is None:
        return 0.0
    noises: Any = action_noise.noises if isinstance(action_noise, VectorizedActionNoise) else [action_noise]
    if type(noise := noises[0]).__call__ not in KNOWN_NOISE:
        return None
    sigma = float(np.mean([np.mean(each._sigma) for each in noises]))
    if isinstance(noise, NormalActionNoise):
        return sigma
    kept = 1 - float(np.mean(noise._theta)) * noise._dt  # share of the last value that is kept
    return sigma * math.sqrt(noise._dt / (1 - kept**2)) if abs(kept) < 1 else math.inf


def check_action_bounds(action_space: spaces.Box) -> None:
    """Refuse integers, no axis, and bounds that are equal, reversed or too far apart to be scaled to [-1, 1]."""
    if action_space.dtype.kind != "f":
        advice = "wrap the environment with gymnasium.wrappers.TransformAction and a function that rounds them"
        raise ValueError(f"actions must be real numbers, but the action space is of {action_space.dtype}: {advice}")
    with np.errstate(over="ignore"):
        width = action_space.high - action_space.low
    if not (action_space.shape and np.isfinite(width).all() and (width > 0).all()):
        raise ValueError(f"actions need an axis, and each a finite range above 0, not {action_space}")
