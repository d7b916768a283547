"""
One gradient update, the plain way: loss from ``rule.py``, gradient, optimiser, target networks.

This is the reference that every faster path has to equal.
"""

from typing import NamedTuple

import torch as th
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x import rule
from sb3_td3x.errors import NonFiniteError


class UpdateSettings(NamedTuple):
    """The numbers of the rule that may change between two updates."""

    gamma: float
    tau: float
    target_policy_noise: float
    target_noise_clip: float


def critic_step(
    policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, when: str
) -> th.Tensor:
    """
    Move all critics one optimiser step towards the target of the target networks.

    :param policy: its critics are changed in place
    :param batch: transitions with ``dones`` that exclude time limits, actions scaled to [-1, 1]
    :param noise: standard normal numbers, ``(batch, action_dim)``
    :param settings: the numbers of the rule
    :param when: the update's name in an error
    :return: the loss, detached, before the step
    :raises NonFiniteError: if the loss or a gradient is not finite; nothing has been changed then
    """
    discounts = settings.gamma if batch.discounts is None else batch.discounts
    with th.no_grad():
        next_actions = rule.smoothed_actions(
            policy.actor_target(batch.next_observations), noise, settings.target_policy_noise, settings.target_noise_clip
        )
        next_values = policy.critic_target(batch.next_observations, next_actions)
        target = rule.scalar_target(next_values, batch.rewards, batch.dones, discounts)
    loss = rule.scalar_critic_loss(policy.critic(batch.observations, batch.actions), target)
    _descend(loss, policy.critic, policy.critic.optimizer, "critic loss or its gradient", when)
    return loss.detach()


def actor_step(policy: TD3Policy, batch: ReplayBufferSamples, settings: UpdateSettings, when: str) -> th.Tensor:
    """
    Move the actor one optimiser step up the first critic, then all targets towards their networks.

    Parameters, return value and errors as in ``critic_step``.
    """
    loss = rule.actor_loss(policy.critic.q1_forward(batch.observations, policy.actor(batch.observations)))
    _descend(loss, policy.actor, policy.actor.optimizer, "actor loss or its gradient", when)
    with th.no_grad():
        for target, source in ((policy.critic_target, policy.critic), (policy.actor_target, policy.actor)):
            rule.polyak_(target.parameters(), source.parameters(), settings.tau)
            # Batch norm's running statistics are averages already: copied, also with tau 0 (SB3 issue #996)
            rule.polyak_(_running_statistics(target), _running_statistics(source), 1.0)
    return loss.detach()


def _descend(loss: th.Tensor, network: nn.Module, optimizer: th.optim.Optimizer, name: str, when: str) -> None:
    """One optimiser step of ``network`` down ``loss``, or an error and no step if a number is not finite."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if not parameters:
        return  # the user has frozen the whole network
    optimizer.zero_grad()
    # Only this network's gradients: through the actor's loss flows also the critic's, which nobody needs
    loss.backward(inputs=parameters)
    # A sum is the cheapest thing that every NaN and infinity survives
    sums = [parameter.grad.sum() for parameter in parameters if parameter.grad is not None]
    if not th.isfinite(th.stack([loss, *sums]).sum()):
        raise NonFiniteError(name, when)
    optimizer.step()


def _running_statistics(network: nn.Module) -> list[th.Tensor]:
    return [buffer for name, buffer in network.named_buffers() if "running_" in name]
