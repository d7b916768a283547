"""
One gradient update: loss from ``rule.py``, gradient, optimiser, target networks.

``PlainUpdate`` makes it operation by operation and is the reference that every faster path has to equal; those
(``accelerate.py``) run the same functions with another ``descend``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch as th
from stable_baselines3.common.policies import BaseModel, ContinuousCritic
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x.errors import NonFiniteError
from sb3_td3x.td3x import losses, precision
from sb3_td3x.td3x.critics import kind_of
from sb3_td3x.td3x.sale import EmbeddedCritic

# Moves a network one optimiser step down a loss; the text names the network in an error, the last bounds its gradient
Descend = Callable[[BaseModel, th.Tensor, str, "float | th.Tensor | None"], None]


CONSTANTS = ("top_quantiles_to_drop_per_net", "prioritization")
"""Settings that are part of a program and never a tensor."""


class UpdateSettings(NamedTuple):
    """What may change between two updates: the rule's numbers, floats or tensors of no dimension, and ``CONSTANTS``."""

    gamma: float | th.Tensor
    tau: float | th.Tensor
    target_policy_noise: float | th.Tensor
    target_noise_clip: float | th.Tensor
    max_grad_norm: float | th.Tensor | None = None
    """``None`` bounds no gradient."""
    top_quantiles_to_drop_per_net: int = 0
    """0 for scalar critics."""
    prioritization: str | None = None
    """``"lap"`` or none."""

    def inputs(self) -> tuple[float | th.Tensor, ...]:
        """The numbers: what a program reads anew at every update."""
        return tuple(getattr(self, name) for name in self._numbers())

    def with_inputs(self, inputs: Iterable[th.Tensor]) -> "UpdateSettings":
        """The same with other numbers, in the order of ``inputs``."""
        numbers: dict[str, Any] = dict(zip(self._numbers(), inputs, strict=True))
        return self._replace(**numbers)

    def constants(self) -> tuple[Any, ...]:
        """What is part of a program: ``CONSTANTS``, and which numbers there are."""
        return (*[getattr(self, name) for name in CONSTANTS], *self._numbers())

    def _numbers(self) -> list[str]:
        return [name for name in self._fields if name not in CONSTANTS and getattr(self, name) is not None]


class Losses(NamedTuple):
    """What an update reports: detached tensors of no dimension, taken before each step."""

    critic: th.Tensor
    actor: th.Tensor | None
    errors: th.Tensor | None = None
    """With ``"lap"``: of each transition, ``(batch,)``, what its priority follows."""
    encoder: th.Tensor | None = None
    """With embeddings: the encoder's loss, which is not part of ``critic``."""


def reported(policy: TD3Policy, settings: UpdateSettings, with_actor: bool) -> tuple[bool, ...]:
    """Which of ``Losses``, in their order, an update has."""
    return True, with_actor, settings.prioritization == "lap", isinstance(policy.critic, EmbeddedCritic)


class Update(Protocol):
    """
    A way to make updates. It belongs to one policy, whose parameters and optimiser states it changes in place.

    ``last_good`` is the number of the last update that was made, valid after a series of at least one.
    """

    last_good: int

    def running(self, batch_size: int) -> AbstractContextManager[None]:
        """Encloses a series of updates of usually this batch size; between two series anything may be edited."""

    def __call__(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        """
        Make update ``number``, counted from 1.

        :param batch: transitions with ``dones`` that exclude time limits, actions scaled to [-1, 1]
        :param noise: standard normal numbers, ``(batch, action_dim)``
        :param settings: the numbers of the rule
        :param with_actor: after the critics move also the actor and the targets
        :raises NonFiniteError: for a loss or gradient that is not finite, here or at the end of the series;
            that update and all later ones of the series change nothing
        """


def make(
    policy: TD3Policy,
    batch: ReplayBufferSamples,
    noise: th.Tensor,
    settings: UpdateSettings,
    with_actor: bool,
    descend: Descend,
) -> Losses:
    """Move all critics one step and, ``with_actor``, the actor and then the targets. Parameters as in ``Update``."""
    losses = critic_step(policy, batch, noise, settings, descend)
    return losses._replace(actor=actor_step(policy, batch, settings, descend)) if with_actor else losses


def critic_step(
    policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, descend: Descend
) -> Losses:
    """Move all critics, and with them an encoder, one optimiser step towards the target of the target networks."""
    kind = kind_of(policy.critic)
    target = target_of(policy, batch, noise, settings)
    values = policy.critic(batch.observations, batch.actions)
    errors = None
    if settings.prioritization is None:
        loss = kind.loss(values, target)
    else:
        loss = kind.huber_losses(values, target).mean()
        errors = losses.errors([value.detach() for value in values], target)
    encoder = _encoder_loss(policy.critic, batch)
    # No parameter has a gradient of both, so one step for the sum is one for each; only a bound on the gradient holds for both
    descend(policy.critic, loss if encoder is None else loss + encoder, "critic", settings.max_grad_norm)
    return Losses(loss.detach(), None, errors, None if encoder is None else encoder.detach())


def _encoder_loss(critic: ContinuousCritic, batch: ReplayBufferSamples) -> th.Tensor | None:
    if not isinstance(critic, EmbeddedCritic):
        return None
    return critic.encoder_loss(batch.observations, batch.actions, batch.next_observations)


def target_of(policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> th.Tensor:
    """What all critics are moved towards, without gradient: ``(batch, 1)``, or a column per kept quantile."""
    discounts = settings.gamma if batch.discounts is None else batch.discounts
    with th.no_grad():
        next_actions = losses.smoothed_actions(
            policy.actor_target(batch.next_observations), noise, settings.target_policy_noise, settings.target_noise_clip
        )
        next_values = policy.critic_target(batch.next_observations, next_actions)
        drop = settings.top_quantiles_to_drop_per_net
        return kind_of(policy.critic).target(next_values, batch.rewards, batch.dones, discounts, drop)


def actor_step(policy: TD3Policy, batch: ReplayBufferSamples, settings: UpdateSettings, descend: Descend) -> th.Tensor:
    """Move the actor one step up the critics' value, then what follows towards what it follows; return the actor's loss."""
    actions = policy.actor(batch.observations)
    loss = losses.actor_loss(kind_of(policy.critic).ascended(policy.critic, batch.observations, actions))
    descend(policy.actor, loss, "actor", settings.max_grad_norm)
    with th.no_grad():
        for target, source in _followers(policy):
            losses.polyak_(target.parameters(), source.parameters(), settings.tau)
            # Batch norm's running statistics are averages already: copied, also with tau 0 (SB3 issue #996)
            losses.polyak_(_running_statistics(target), _running_statistics(source), 1.0)
    return loss.detach()


def _followers(policy: TD3Policy) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Networks that move towards another, targets first."""
    yield policy.critic_target, policy.critic
    yield policy.actor_target, policy.actor
    if isinstance(policy.critic, EmbeddedCritic):
        yield policy.critic.slow_encoder, policy.critic.encoder
        if any(parameter.requires_grad for parameter in policy.actor.parameters()):  # a frozen actor acts as it did
            yield policy.actor.features_extractor.slow_encoder, policy.critic.encoder.state  # type: ignore[misc]


def trainable(network: BaseModel) -> list[nn.Parameter]:
    """The parameters that the network's optimiser holds and the user has not frozen."""
    held = {parameter for group in network.optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in network.parameters() if parameter.requires_grad and parameter in held]


def is_finite(loss: th.Tensor, gradients: list[th.Tensor]) -> th.Tensor:
    """Whether a loss and all gradients are. A sum is the cheapest thing that every NaN and infinity survives."""
    return th.isfinite(th.stack([loss.detach(), *[gradient.sum() for gradient in gradients]]).sum())


def clipped(gradients: list[th.Tensor], max_norm: float | th.Tensor | None) -> list[th.Tensor]:
    """Gradients scaled down together to this 2-norm where theirs is above it, as by torch's ``clip_grad_norm_``."""
    if max_norm is None or not gradients:
        return gradients
    norm = th.linalg.vector_norm(th.stack([th.linalg.vector_norm(gradient) for gradient in gradients]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return [gradient * scale for gradient in gradients]


class PlainUpdate:
    """
    Updates operation by operation, with the policy's own optimisers of whatever class.

    :param policy: changed in place
    :param products: ``"fp32"`` or ``"bf16"``, see ``precision.py``
    """

    def __init__(self, policy: TD3Policy, products: str = "fp32"):
        self.policy, self.products = policy, products
        self.last_good = 0

    @contextmanager
    def running(self, batch_size: int) -> Iterator[None]:
        self._has_buffers = any(True for _ in self.policy.buffers())
        with precision.hidden_products(self.policy, self.products):
            yield

    def __call__(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        # The critics have moved before the actor's gradient is known to be good
        undo = _copy_of(self.policy.critic) if with_actor else None
        statistics = _buffers_of(self.policy) if self._has_buffers else []
        self.last_good = number - 1
        try:
            losses = make(self.policy, batch, noise, settings, with_actor, _descend)
        except _NonFinite as error:
            if undo is not None:
                undo()
            for holder, name, buffer, value in statistics:
                holder[name] = buffer.copy_(value)  # a layer may have set another one
            raise NonFiniteError(f"{error} loss or its gradient", f"update {number}") from None
        self.last_good = number
        return losses


class _NonFinite(ArithmeticError):
    """A network's loss or gradient is not finite; it has not moved."""


def _descend(network: BaseModel, loss: th.Tensor, name: str, max_norm: float | th.Tensor | None) -> None:
    parameters = trainable(network)
    if not parameters:
        return  # the user has frozen the whole network
    network.optimizer.zero_grad()
    # Only this network's gradients: through the actor's loss flows also the critic's, which nobody needs
    loss.backward(inputs=parameters)
    reached = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    gradients = list(reached.values())
    if not is_finite(loss, gradients):
        raise _NonFinite(name)
    for parameter, gradient in zip(reached, clipped(gradients, max_norm), strict=True):
        parameter.grad = gradient
    network.optimizer.step()


def _copy_of(network: BaseModel) -> Callable[[], None]:
    """Copy a network's parameters and its optimiser's state; calling the result puts them back."""
    optimizer = network.optimizer
    parameters = [parameter.detach() for parameter in network.parameters()]
    values = [parameter.clone() for parameter in parameters]
    state = {
        parameter: {key: value.clone() if isinstance(value, th.Tensor) else value for key, value in entries.items()}
        for parameter, entries in optimizer.state.items()
    }

    def undo() -> None:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)

    return undo


def _buffers_of(network: nn.Module) -> list[tuple[dict[str, th.Tensor | None], str, th.Tensor, th.Tensor]]:
    """Every buffer with where it is held, and a copy of what it holds."""
    holders = [module._buffers for module in network.modules() if module._buffers]
    return [
        (holder, name, buffer, buffer.clone()) for holder in holders for name, buffer in holder.items() if buffer is not None
    ]


def _running_statistics(network: nn.Module) -> list[th.Tensor]:
    return [buffer for name, buffer in network.named_buffers() if "running_" in name]
