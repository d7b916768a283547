"""
TD3's equations as pure tensor functions (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477, Algorithm 1).

There are no random numbers, no state and no optimizer in here. A critic is scalar, or estimates quantiles of the return
(Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269); each has a target, a loss, and a loss for prioritized replay
(Fujimoto et al. 2020, https://arxiv.org/abs/2007.06049). Shapes: ``batch`` transitions; the values of a critic are
``(batch, 1)``, or ``(batch, n)`` for n quantiles; actions are scaled to [-1, 1].
"""

from collections.abc import Iterable, Sequence

import torch as th
from torch.nn import functional as F


def target_policy_smoothing(
    actions: th.Tensor, noise: th.Tensor, noise_std: float | th.Tensor, noise_clip: float | th.Tensor
) -> th.Tensor:
    """
    Add clipped Gaussian noise to the target actor's actions and keep them in the action range (eq. 14).

    :param actions: actions of the target actor, ``(batch, action_dim)``, in [-1, 1]
    :param noise: standard normal numbers of the same shape
    :param noise_std: scale of the noise, in units of the scaled action
    :param noise_clip: largest absolute value of the scaled noise
    """
    return (actions + (noise * noise_std).clamp(-noise_clip, noise_clip)).clamp(-1, 1)  # type: ignore[arg-type]


def clipped_double_q_target(
    next_values: Sequence[th.Tensor], rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float
) -> th.Tensor:
    """
    Clipped double-Q target (eq. 10): the reward plus the discounted smallest value of the target critics.

    :param next_values: one ``(batch, 1)`` tensor per target critic, at the smoothed next actions
    :param rewards: ``(batch, 1)``; the n-step sum where n-step returns are used
    :param dones: ``(batch, 1)``, 1 where the episode terminated. A time limit is not a termination
    :param discounts: gamma, or ``(batch, 1)`` of gamma to the power of the steps summed in ``rewards``
    """
    smallest = th.cat(list(next_values), dim=1).amin(dim=1, keepdim=True)
    return rewards + (1 - dones) * discounts * smallest


def scalar_critic_loss(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """Sum over the critics of the mean squared error to one common target (Algorithm 1)."""
    return th.stack([F.mse_loss(value, target) for value in values]).sum()


def scalar_huber_loss(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """Sum over the critics of the mean Huber loss with threshold 1, as in LAP."""
    return th.stack([F.huber_loss(value, target) for value in values]).sum()


def quantile_target(
    next_quantiles: Sequence[th.Tensor], rewards: th.Tensor, dones: th.Tensor, discounts: th.Tensor | float, drop: int
) -> th.Tensor:
    """
    Truncated mixture of the target critics (Kuznetsov et al. 2020): their pooled quantiles without the largest ones, each
    discounted and added to the reward.

    Parameters as in ``clipped_double_q_target``, except:

    :param next_quantiles: one ``(batch, n)`` tensor per target critic
    :param drop: quantiles to leave out per critic, 0 to n - 1
    :return: ``(batch, critics * (n - drop))``, in no particular order
    """
    pool = th.cat(list(next_quantiles), dim=1)
    # The loss does not depend on the order, and an unsorted selection takes half the time of a sort
    kept = pool.topk(pool.shape[1] - drop * len(next_quantiles), dim=1, largest=False, sorted=False).values
    return rewards + (1 - dones) * discounts * kept


def quantile_critic_loss(quantiles: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """
    Quantile Huber loss with threshold 1 (Kuznetsov et al. 2020): quantile i of n, counted from 0, estimates the fraction
    (i + 0.5) / n, so a target above it has that weight and a target below it has the rest.

    This is a mean over transitions, critics, and pairs of a quantile and a target, as in sb3-contrib's TQC. The scalar
    loss is a sum over the critics.

    :param quantiles: one ``(batch, n)`` tensor per critic
    :param target: ``(batch, m)``, without gradient
    """
    return th.stack([_QuantileHuber.apply(critic_quantiles, target) for critic_quantiles in quantiles]).mean()


class _QuantileHuber(th.autograd.Function):
    """
    The quantile Huber loss of each transition, ``(batch,)``, with its gradient in closed form.

    With u = target - quantile, c = clamp(u, -1, 1) is the derivative of the Huber loss and c (u - c / 2) its value. Autograd
    would pass several more times over all pairs, which are as many numbers as the weights of both critics. For the same
    reason the batch is the last axis, along which sums over the targets are vectorized, and little memory is allocated.
    """

    @staticmethod
    def forward(ctx: th.autograd.function.FunctionCtx, quantiles: th.Tensor, target: th.Tensor) -> th.Tensor:
        (batch, n), m = quantiles.shape, target.shape[1]
        fractions = (th.arange(n, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / n
        errors = target.t().contiguous() - quantiles.t().contiguous()[:, None]  # (n, m, batch)
        clipped = errors.clamp(-1, 1)
        # Positive errors have weight 1 and negative ones (1 - fraction) / fraction; the fraction follows after the sum
        weighted = F.prelu(clipped.view(1, n, m * batch), (1 - fractions) / fractions).view(n, m, batch)
        scale = (fractions / (n * m))[:, None]
        ctx.save_for_backward(-(scale * weighted.sum(dim=1)).t())
        return (scale * errors.sub_(clipped, alpha=0.5).mul_(weighted).sum(dim=1)).sum(dim=0)

    @staticmethod
    def backward(ctx: th.autograd.function.FunctionCtx, gradient: th.Tensor) -> tuple[th.Tensor, None]:
        (slopes,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient[:, None] * slopes, None


def td_errors(values: Iterable[th.Tensor], target: th.Tensor) -> th.Tensor:
    """The largest distance of a critic's mean value from the mean target, ``(batch,)``, which LAP's priorities follow."""
    mean_target = target.mean(dim=1)
    return th.stack([(value.mean(dim=1) - mean_target).abs() for value in values]).amax(dim=0)


def actor_loss(values: th.Tensor) -> th.Tensor:
    """Deterministic policy gradient: minus the mean of ``values`` at (s, actor(s)), ``(batch, 1)`` or all quantiles."""
    return -values.mean()


def polyak_update(targets: Sequence[th.Tensor], sources: Sequence[th.Tensor], tau: float) -> None:
    """Move ``targets`` in place towards ``sources`` of the same shapes: (1 - tau) target + tau source, with tau in [0, 1]."""
    th._foreach_lerp_(list(targets), list(sources), tau)
