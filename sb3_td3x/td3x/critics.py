"""Quantile critics under the names of SB3's, and the functions that an update needs for each kind of critic."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.policies import ContinuousCritic
from torch import nn

from sb3_td3x.td3x import losses


class CriticKind(NamedTuple):
    """
    The functions of a kind of critic. A critic class names it as its attribute ``kind``; its ``forward`` returns one tensor
    per critic, here ``values``.
    """

    target: Callable[..., th.Tensor]  # (values, rewards, dones, discounts, top_quantiles_to_drop_per_net)
    loss: Callable[..., th.Tensor]  # (values, target)
    huber_loss: Callable[..., th.Tensor]  # (values, target), for prioritized replay
    actor_objective: Callable[..., th.Tensor]  # (critic, batch, actions): what the actor maximizes the mean of


SCALAR = CriticKind(
    lambda values, rewards, dones, discounts, drop: losses.clipped_double_q_target(values, rewards, dones, discounts),
    losses.scalar_critic_loss, losses.scalar_huber_loss,
    lambda critic, batch, actions: critic.q1_forward(batch.observations, actions),
)  # fmt: skip
QUANTILES = CriticKind(
    losses.quantile_target, losses.quantile_critic_loss, losses.quantile_critic_loss,
    lambda critic, batch, actions: th.cat(critic(batch.observations, actions), dim=1),
)  # fmt: skip


def kind_of(critic: ContinuousCritic) -> CriticKind:
    """The kind that a critic class names. SB3's critics, and custom ones that name no kind, have scalar values."""
    return getattr(critic, "kind", SCALAR)


class QuantileCritic(ContinuousCritic):
    """SB3's critics with ``n_quantiles`` outputs each instead of one, under the same parameter names (``qf0.*``)."""

    kind = QUANTILES

    def __init__(self, *args: Any, n_quantiles: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.n_quantiles = n_quantiles
        for network in self.q_networks:
            network[-1] = nn.Linear(network[-1].in_features, n_quantiles)  # type: ignore[index, operator]

    def q1_forward(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """The first critic's value, ``(batch, 1)``: the mean of its quantiles."""
        return super().q1_forward(obs, actions).mean(dim=1, keepdim=True)
