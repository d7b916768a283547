"""
TD3's rule as pure tensor functions, one per equation of the paper (Fujimoto et al. 2018,
https://arxiv.org/abs/1802.09477, Algorithm 1). No random numbers, no state, no optimiser.

Shapes: ``batch`` transitions; a critic's values are ``(batch, 1)``; actions are scaled to [-1, 1].
"""

from collections.abc import Iterable, Sequence

import torch as th
from torch.nn import functional as F


def smoothed_actions(
    actions: th.Tensor, noise: th.Tensor, noise_std: float | th.Tensor, noise_clip: float | th.Tensor
) -> th.Tensor:
    """
    Target policy smoothing (eq. 14): the target actor's action with clipped Gaussian noise, kept in the action range.

    :param actions: actions of the target actor, ``(batch, action_dim)``, in [-1, 1]
    :param noise: standard normal numbers of the same shape: one draw per transition and dimension
    :param noise_std: scale of the noise, in units of the scaled action
    :param noise_clip: largest absolute value of the scaled noise
    """
    return (actions + (noise * noise_std).clamp(-noise_clip, noise_clip)).clamp(-1, 1)  # type: ignore[arg-type]


def scalar_target(
    next_values: Sequence[th.Tensor], rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float
) -> th.Tensor:
    """
    Clipped double-Q target (eq. 10): reward plus the discounted smaller value of the target critics.

    :param next_values: one ``(batch, 1)`` tensor per target critic, at the smoothed next actions
    :param rewards: ``(batch, 1)``; the n-step sum where n-step returns are used
    :param dones: ``(batch, 1)``, 1 where the episode terminated. A time limit is not a termination
    :param discounts: gamma, or ``(batch, 1)`` of gamma to the power of the steps summed in ``rewards``
    """
    smallest = th.cat(list(next_values), dim=1).amin(dim=1, keepdim=True)
    return rewards + (1 - dones) * discounts * smallest


def scalar_critic_loss(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """Sum over the critics of the mean squared error against one common target (Algorithm 1)."""
    return th.stack([F.mse_loss(value, target) for value in values]).sum()


def actor_loss(values: th.Tensor) -> th.Tensor:
    """
    Deterministic policy gradient: descending this ascends the first critic's value.

    :param values: Q1(s, actor(s)), ``(batch, 1)``
    """
    return -values.mean()


def polyak_(targets: Iterable[th.Tensor], sources: Iterable[th.Tensor], tau: float | th.Tensor) -> None:
    """
    In place: target <- target + tau (source - target), that is (1 - tau) target + tau source.

    :param targets: tensors to move
    :param sources: tensors of the same shapes to move towards
    :param tau: 0 leaves the targets, 1 copies the sources
    """
    for target, source in zip(targets, sources, strict=True):
        target.lerp_(source, tau)
