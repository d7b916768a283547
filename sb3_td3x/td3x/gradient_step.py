"""One gradient update: losses, gradients by autograd (``compiled.py`` replaces only these), optimizers' steps, targets."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sb3_td3x.errors import NonFiniteError
from sb3_td3x.td3x import losses, precision
from sb3_td3x.td3x.critics import kind_of


class UpdateSettings(NamedTuple):
    """The settings of ``TD3X``, by name, that may change between two updates: numbers, or tensors without dimensions."""

    gamma: float | th.Tensor
    tau: float
    target_policy_noise: float | th.Tensor
    target_noise_clip: float | th.Tensor
    max_grad_norm: float | None = None  # None does not clip gradients
    top_quantiles_to_drop_per_net: int = 0  # without effect on scalar critics
    prioritization: str | None = None  # None or "lap"


class Losses(NamedTuple):
    """What an update reports: detached tensors, computed before each step; the losses have no dimensions."""

    critic: th.Tensor | None = None
    actor: th.Tensor | None = None
    errors: th.Tensor | None = None  # with "lap" the TD error of each transition, (batch,), which its priority follows


Gradients = Sequence[th.Tensor | None]
"""One per trained parameter of a network; ``None`` where the loss does not depend on it."""


def critic_losses(
    policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings
) -> tuple[th.Tensor, Losses]:
    """
    The loss that the critics' optimizer minimizes, and what is reported of it.

    :param batch: transitions with ``dones`` that exclude time limits, actions scaled to [-1, 1]
    :param noise: standard normal numbers for the target actions, ``(batch, action_dim)``
    """
    kind = kind_of(policy.critic)
    target = critic_target(policy, batch, noise, settings)
    values = policy.critic(batch.observations, batch.actions)
    is_prioritized = settings.prioritization is not None
    loss = (kind.huber_loss if is_prioritized else kind.loss)(values, target)
    errors = losses.td_errors([value.detach() for value in values], target) if is_prioritized else None
    return loss, Losses(loss.detach(), errors=errors)


def critic_target(policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> th.Tensor:
    """The target of all critics, without gradient: ``(batch, 1)``, or a column per kept quantile."""
    discounts = settings.gamma if batch.discounts is None else batch.discounts
    with th.no_grad():
        next_actions = losses.target_policy_smoothing(
            policy.actor_target(batch.next_observations), noise, settings.target_policy_noise, settings.target_noise_clip
        )
        next_values = policy.critic_target(batch.next_observations, next_actions)
        drop = settings.top_quantiles_to_drop_per_net
        return kind_of(policy.critic).target(next_values, batch.rewards, batch.dones, discounts, drop)


def actor_losses(
    policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings
) -> tuple[th.Tensor, Losses]:
    """As ``critic_losses``, of the actor: minus the value of its actions, by the first critic or all quantiles."""
    actions = policy.actor(batch.observations)
    loss = losses.actor_loss(kind_of(policy.critic).actor_objective(policy.critic, batch, actions))
    return loss, Losses(actor=loss.detach())


def losses_of(name: str, *args: Any) -> tuple[th.Tensor, Losses]:
    """``critic_losses`` or ``actor_losses``, of which a program is made by name."""
    return critic_losses(*args) if name == "critic" else actor_losses(*args)


def trainable(network: BaseModel) -> list[nn.Parameter]:
    """The parameters that are in the network's optimizer and not frozen."""
    return [parameter for group in network.optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


class PolicyTensors:
    """The tensors of a policy, looked up once: checking that they are still the same takes a tenth of the time."""

    def __init__(self, policy: TD3Policy):
        self.networks: dict[str, BaseModel] = {"critic": policy.critic, "actor": policy.actor}
        self.modules = [module for _, module in policy.named_modules(remove_duplicate=False)]  # one may be called twice
        self.named = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
        self.trained = {name: trainable(network) for name, network in self.networks.items()}
        pairs = [(policy.critic_target, policy.critic), (policy.actor_target, policy.actor)]
        self.targets = [([*target.parameters()], [*source.parameters()]) for target, source in pairs]
        self.with_buffers = [pair for pair in pairs if [*pair[0].buffers()]]
        self._parameters = list(policy.parameters())
        self._holders = [part for module in self.modules for part in (module._parameters, module._buffers, module._modules)]
        self._identities = self._current_identities()

    def is_current(self) -> bool:
        """Whether the policy and its optimizers still use the same tensors and modules."""
        return self._identities == self._current_identities()

    def _current_identities(self) -> list[Any]:
        identities: list[Any] = [id(value) for holder in self._holders for value in holder.values()]
        for parameter in self._parameters:
            identities += (parameter.requires_grad, parameter.data_ptr())  # `policy.to` keeps a parameter and moves its memory
        for network in self.networks.values():
            groups = network.optimizer.param_groups
            identities += (network.optimizer, *[id(parameter) for group in groups for parameter in group["params"]])
        return identities


class GradientStep:
    """Makes the updates of one policy with autograd, in place, with the policy's own optimizers of any class."""

    def __init__(self, policy: TD3Policy, products: str):
        self.policy, self.products = policy, products
        self.tensors = PolicyTensors(policy)

    def prepare(self) -> None:
        """To be called before a series of updates. Between two series anything may be edited."""
        if not self.tensors.is_current():
            self.tensors = PolicyTensors(self.policy)
        precision.require_supported(self.products, self.policy.device)
        self._rounded = precision.hidden_layers(self.policy) if self.products == "bf16" else []

    def __call__(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        """
        Make update ``number``, counted from 1: one step of all critics and, ``with_actor``, one of the actor and the targets.

        :raises NonFiniteError: for a loss or gradient that is not finite; then this update has changed nothing
        """
        undo = self._save_state(with_actor)
        try:
            with precision.denormals_flushed():
                reported, gradients = self.gradients("critic", batch, noise, settings)
                self._optimizer_step("critic", reported, gradients, settings.max_grad_norm, number)
                if with_actor:
                    of_actor, gradients = self.gradients("actor", batch, noise, settings)
                    self._optimizer_step("actor", of_actor, gradients, settings.max_grad_norm, number)
                    reported = reported._replace(actor=of_actor.actor)
        except BaseException:  # also Ctrl-C; within an optimizer's step a part of that step may stay
            undo()
            raise
        if with_actor:
            self._update_targets(settings.tau)
        return reported

    def gradients(
        self, name: str, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings
    ) -> tuple[Losses, Gradients]:
        """The losses of ``"critic"`` or ``"actor"``, and the gradients of what its optimizer minimizes."""
        with th.enable_grad(), precision.bf16_products(self._rounded):
            loss, reported = losses_of(name, self.policy, batch, noise, settings)
            return reported, gradients_of(loss, self.tensors.trained[name])

    def _optimizer_step(self, name: str, reported: Losses, gradients: Gradients, max_norm: float | None, number: int) -> None:
        optimizer = self.tensors.networks[name].optimizer
        pairs = zip(self.tensors.trained[name], gradients, strict=True)
        reached = {parameter: _laid_out_like(parameter, gradient) for parameter, gradient in pairs if gradient is not None}
        if not reached:
            return  # the whole network is frozen
        # A sum is the cheapest operation that keeps every NaN and infinity
        if not th.isfinite(th.stack([getattr(reported, name), *[gradient.sum() for gradient in reached.values()]]).sum()):
            raise NonFiniteError(f"{name} loss or its gradient", f"update {number}")
        if max_norm is not None:  # as torch's `clip_grad_norm_`, which takes them from `parameter.grad`
            scale = (max_norm / (nn.utils.get_total_norm(reached.values()) + 1e-6)).clamp(max=1.0)
            reached = {parameter: gradient * scale for parameter, gradient in reached.items()}
        if _fused_step(optimizer, reached):
            return
        optimizer.zero_grad()
        for parameter, gradient in reached.items():
            parameter.grad = gradient
        optimizer.step()

    @th.no_grad()
    def _update_targets(self, tau: float) -> None:
        for targets, sources in self.tensors.targets:
            losses.polyak_update(targets, sources, tau)
        # Buffers such as batch norm's statistics are averages already: they are copied, also with tau 0 (SB3 issue #996)
        for target, source in self.tensors.with_buffers:
            th._foreach_copy_([*target.buffers()], [*source.buffers()])

    @th.no_grad()
    def _save_state(self, with_actor: bool) -> Callable[[], None]:
        """
        Copy what an update may have changed before it turns out not to be finite; calling the result restores it.

        Buffers change in forward passes. The critics have moved before the actor's gradient is known to be finite.
        """
        buffers = [(module._buffers, dict(module._buffers)) for module in self.tensors.modules if module._buffers]
        saved = [buffer for _, kept in buffers for buffer in kept.values() if buffer is not None]
        optimizer = self.policy.critic.optimizer
        state = {key: dict(of) if isinstance(of, dict) else of for key, of in optimizer.state.items()} if with_actor else {}
        if with_actor:
            saved += self.tensors.trained["critic"]
            moments = [value for entries in state.values() if isinstance(entries, dict) for value in entries.values()]
            saved += [value for value in moments if isinstance(value, th.Tensor)]
        copies = [tensor.clone() for tensor in saved]

        @th.no_grad()
        def undo() -> None:
            for tensor, copy in zip(saved, copies, strict=True):
                tensor.copy_(copy)
            for holder, kept in buffers:
                holder.update(kept)  # a layer may have set another buffer
            if with_actor:
                optimizer.state.clear()
                optimizer.state.update(state)

        return undo


def _laid_out_like(parameter: nn.Parameter, gradient: th.Tensor) -> th.Tensor:
    """A gradient in its parameter's memory order, which ``backward`` gives it and the fused step of Adam takes for granted."""
    is_laid_out = gradient.is_sparse or gradient.stride() == parameter.stride()
    return gradient if is_laid_out else th.empty_like(parameter).copy_(gradient)


def gradients_of(loss: th.Tensor, parameters: Sequence[th.Tensor]) -> Gradients:
    """Gradients of a loss; through the actor's loss also the critics would have some, which nobody needs."""
    return th.autograd.grad(loss, parameters, allow_unused=True) if parameters else []


@th.no_grad()
def _fused_step(optimizer: th.optim.Optimizer, gradients: Mapping[nn.Parameter, th.Tensor]) -> bool:
    """
    Take Adam's or AdamW's fused step without the bookkeeping of ``Optimizer.step``, which makes it a quarter longer on a CPU,
    and without setting ``fused``, so that optimizers are saved as SB3's. Return whether it was taken: not with hooks, a
    replaced ``step`` or another implementation that the user has chosen, nor for tensors of unequal shapes or strides,
    because it goes through memory as it lies, also beyond its end.
    """
    if type(optimizer) not in (th.optim.Adam, th.optim.AdamW) or "step" in vars(optimizer):
        return False
    of_all = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    if any((optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *of_all)):
        return False
    has_choice = any(
        group["fused"] is False or group["foreach"] is not None or group["capturable"] or group["differentiable"]
        for group in optimizer.param_groups
    )
    kinds = {(parameter.device, parameter.dtype) for parameter in gradients}
    is_scattered = any(
        (tensor.shape, tensor.stride()) != (parameter.shape, parameter.stride())
        for parameter, gradient in gradients.items()
        for tensor in (gradient, optimizer.state.get(parameter, {}).get("exp_avg", parameter))
    )
    if has_choice or is_scattered or len(kinds) > 1 or next(iter(gradients)).device.type not in ("cpu", "cuda"):
        return False
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter in gradients]
        if not parameters:
            continue
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        states = [optimizer.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                moments = {name: th.zeros_like(parameter) for name in names}  # memory may run out here: then there is no state
                state.update(step=th.zeros((), dtype=th.float32, device=parameter.device), **moments)
            elif state["step"].device != parameter.device or state["step"].dtype != th.float32:
                # Other steps have it on the CPU
                state["step"] = state["step"].to(parameter.device, th.float32)
        averages = [[state[name] for state in states] for name in names]
        steps = [state["step"] for state in states]
        th._foreach_add_(steps, 1)
        (th._fused_adamw_ if group["decoupled_weight_decay"] else th._fused_adam_)(  # type: ignore[call-overload]
            parameters, [gradients[parameter] for parameter in parameters],
            *averages, *([] if group["amsgrad"] else [[]]), steps,
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=group["amsgrad"], maximize=group["maximize"],
        )  # fmt: skip
    return True
