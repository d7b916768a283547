"""
TD3's rule as pure tensor functions, one per equation of the paper (Fujimoto et al. 2018,
https://arxiv.org/abs/1802.09477, Algorithm 1). No random numbers, no state, no optimiser.

There are two kinds of critics, scalar and quantile (Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269); each is a
target and a loss, and a loss per transition for prioritised replay (Fujimoto et al. 2020,
https://arxiv.org/abs/2007.06049). Shapes: ``batch`` transitions; a critic's values are ``(batch, 1)``, or ``(batch, n)``
for n quantiles; actions are scaled to [-1, 1].
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
    next_values: Sequence[th.Tensor], rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float, drop: int = 0
) -> th.Tensor:
    """
    Clipped double-Q target (eq. 10): reward plus the discounted smaller value of the target critics.

    :param next_values: one ``(batch, 1)`` tensor per target critic, at the smoothed next actions
    :param rewards: ``(batch, 1)``; the n-step sum where n-step returns are used
    :param dones: ``(batch, 1)``, 1 where the episode terminated. A time limit is not a termination
    :param discounts: gamma, or ``(batch, 1)`` of gamma to the power of the steps summed in ``rewards``
    :param drop: not used: taking the smallest has the place of dropping the largest
    """
    smallest = th.cat(list(next_values), dim=1).amin(dim=1, keepdim=True)
    return rewards + (1 - dones) * discounts * smallest


def scalar_critic_loss(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """Sum over the critics of the mean squared error against one common target (Algorithm 1)."""
    return th.stack([F.mse_loss(value, target) for value in values]).sum()


def scalar_huber_losses(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """Huber loss with threshold 1 of each transition, ``(batch,)``: the sum over the critics, as in LAP."""
    return th.cat([F.huber_loss(value, target, reduction="none") for value in values], dim=1).sum(dim=1)


def quantile_target(
    next_quantiles: Sequence[th.Tensor], rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float, drop: int
) -> th.Tensor:
    """
    Truncated mixture of the target critics (Kuznetsov et al. 2020): their quantiles in one pool without its largest,
    each discounted and added to the reward.

    :param next_quantiles: one ``(batch, n)`` tensor per target critic, at the smoothed next actions
    :param rewards: ``(batch, 1)``; the n-step sum where n-step returns are used
    :param dones: ``(batch, 1)``, 1 where the episode terminated. A time limit is not a termination
    :param discounts: gamma, or ``(batch, 1)`` of gamma to the power of the steps summed in ``rewards``
    :param drop: quantiles to leave out per critic, 0 to n - 1
    :return: ``(batch, critics * (n - drop))``, in no particular order
    """
    pool = th.cat(list(next_quantiles), dim=1)
    # Half of a sort's time; the loss does not depend on the order
    kept = pool.topk(pool.shape[1] - drop * len(next_quantiles), dim=1, largest=False, sorted=False).values
    return rewards + (1 - dones) * discounts * kept


def quantile_critic_loss(quantiles: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """
    Quantile Huber loss with threshold 1 (Kuznetsov et al. 2020): quantile i of n, counted from 0, stands for the share
    (i + 0.5) / n, so a target above it weighs that share and a target below it the rest.

    A mean over transitions, critics and pairs of a quantile and a target, as in sb3-contrib's TQC, where the scalar
    loss is a sum over the critics.

    :param quantiles: one ``(batch, n)`` tensor per critic
    :param target: ``(batch, m)``, without gradient
    """
    return th.stack([_quantile_huber(one, target).mean() for one in quantiles]).mean()


def quantile_huber_losses(quantiles: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """The same of each transition, ``(batch,)``."""
    return th.stack([_quantile_huber(one, target).mean(dim=(1, 2)) for one in quantiles]).mean(dim=0)


def _quantile_huber(quantiles: th.Tensor, target: th.Tensor) -> th.Tensor:
    """Of each pair of a quantile and a target, ``(batch, n, m)``."""
    n, pairs = quantiles.shape[1], (*quantiles.shape, target.shape[1])
    current, wanted = quantiles[:, :, None].expand(pairs), target[:, None, :].expand(pairs)
    share = (th.arange(n, device=quantiles.device, dtype=quantiles.dtype)[:, None] + 0.5) / n
    weight = th.where(wanted < current, 1 - share, share)
    return weight * F.huber_loss(current, wanted, reduction="none")


def errors(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """
    How far the critics are from the target, ``(batch,)``: the largest over the critics, as in LAP.

    Of quantiles the mean counts, which is the value that the actor ascends.
    """
    wanted = target.mean(dim=1)
    return th.stack([(value.mean(dim=1) - wanted).abs() for value in values]).amax(dim=0)


def average_l1_normalized(values: th.Tensor) -> th.Tensor:
    """
    Each row scaled so that the mean of its absolute values is 1: AvgL1Norm (Fujimoto et al. 2023,
    https://arxiv.org/abs/2306.02451), which keeps embeddings from collapsing to 0 and from growing without bound.
    """
    return values / values.abs().mean(dim=-1, keepdim=True).clamp(min=1e-8)


def encoder_loss(predicted: th.Tensor, wanted: th.Tensor) -> th.Tensor:
    """
    SALE's loss, the mean squared error of predicted embeddings of next states.

    :param predicted: of states and actions, ``(batch, dim)``
    :param wanted: embeddings of the next states, ``(batch, dim)``, without gradient
    """
    return F.mse_loss(predicted, wanted)


def actor_loss(values: th.Tensor) -> th.Tensor:
    """
    Deterministic policy gradient: descending this ascends the critics' mean value.

    :param values: at (s, actor(s)): the first critic's, ``(batch, 1)``, or all quantiles of all critics
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
