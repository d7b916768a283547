"""
An update as a function of tensors alone: what is recorded and compiled.

The functions of ``update.py`` run in it unchanged, on a policy whose parameters are exchanged for the function's inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch as th
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn
from torch.optim.adam import adam

from sb3_td3x.td3x import gradient_step, precision
from sb3_td3x.td3x.gradient_step import Losses, UpdateSettings

NETWORKS = ("critic", "actor")  # in the order in which an update moves them
# In place of 0, by which torch's form of Adam for tensors divides (0 / 0 where a moment is 0); it moves no weight above 1e-22
LEAST_RATE = 1e-30

Trained = dict[str, list[tuple[th.Tensor, dict[str, th.Tensor]]]]
"""By network: the parameters that its optimiser moves, each with its state."""


class State:
    """What an update changes: all parameters and buffers of the policy, and the states of its optimisers."""

    def __init__(self, policy: TD3Policy):
        self.networks = [getattr(policy, name) for name in NETWORKS]
        self.parameters = dict(policy.named_parameters())
        self.named = {**self.parameters, **dict(policy.named_buffers())}
        self.trained = {name: gradient_step.trainable(network) for name, network in zip(NETWORKS, self.networks, strict=True)}
        self.moments = {
            (name, parameter): _adam_state(network.optimizer, parameter)
            for name, network in zip(NETWORKS, self.networks, strict=True)
            for parameter in self.trained[name]
        }
        self.tensors = [tensor.detach() for tensor in self.named.values()]
        self.tensors += [tensor for state in self.moments.values() for tensor in state.values()]
        # The same memory, read in a quarter of the time
        self._counts = [state["step"].numpy() for state in self.moments.values()]
        self._left_at = self._steps()
        self.shares_steps = self._shares_steps()
        self.modules = list(policy.modules())
        self.layout = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in self.tensors]
        self._holders = [part for module in self.modules for part in (module._parameters, module._buffers, module._modules)]
        self._contents = self._identities()

    def is_current(self) -> bool:
        """Whether these are still the tensors that the policy and its optimisers use."""
        return self._contents == self._identities()

    def _identities(self) -> list[int]:
        """Of every parameter, buffer, module and moment: a look at them costs a tenth of collecting them anew."""
        found = [id(value) for holder in self._holders for value in holder.values()]
        # `policy.to(...)` keeps a parameter and exchanges its memory
        found += [parameter.data_ptr() for parameter in self.parameters.values()]
        found += [parameter.requires_grad for parameter in self.parameters.values()]
        # `load_state_dict` makes a new dict of new moments, and a user may set a new optimiser
        states = [(network.optimizer, network.optimizer.state) for network in self.networks]
        found += [id(part) for pair in states for part in pair]
        found += [id(value) for _, state in states for moments in state.values() for value in moments.values()]
        return found

    def leave(self) -> None:
        """Between two series of updates anything may be edited, Adam's counts too."""
        self._left_at = self._steps()

    def _steps(self) -> list[float]:
        """How often Adam has moved each parameter."""
        return [count.item() for count in self._counts]

    def _shares_steps(self) -> bool:
        """Whether Adam has moved all parameters of a network equally often."""
        moved: dict[str, set[float]] = {name: set() for name in self.trained}
        for (name, _), steps in zip(self.moments, self._left_at, strict=True):
            moved[name].add(steps)
        return all(len(one) <= 1 for one in moved.values())

    def constants(self) -> tuple[Any, ...]:
        """What a program made from this state contains and does not read anew at every update."""
        if (steps := self._steps()) != self._left_at:
            self._left_at = steps
            self.shares_steps = self._shares_steps()
        held = [set(map(id, parameters)) for parameters in self.trained.values()]
        trained = [id(parameter) in one for one in held for parameter in self.parameters.values()]
        modes = [module.training for module in self.modules]
        options = [tuple(_options(network.optimizer).items()) for network in self.networks]
        return (self.shares_steps, th.get_num_threads(), *trained, *modes, *options, *self.layout)

    def is_of_the_same_modules(self, other: "State") -> bool:
        """Whether a program made from one of them fits the other."""
        return [*map(id, self.modules)] == [*map(id, other.modules)]


def _adam_state(optimizer: th.optim.Optimizer, parameter: nn.Parameter) -> dict[str, th.Tensor]:
    """The state that torch's Adam keeps for a parameter, made in its format where there was no step yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = th.zeros((), dtype=th.float32)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if optimizer.param_groups[0]["amsgrad"] else 2]:
            state[name] = th.zeros_like(parameter, memory_format=th.preserve_format)
    return state


def _options(optimizer: th.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's options as torch's ``adam`` takes them."""
    group = optimizer.param_groups[0]
    names = ("eps", "weight_decay", "amsgrad", "maximize")
    return {
        **{name: group[name] for name in names},
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "decoupled_weight_decay": group.get("decoupled_weight_decay", type(optimizer) is th.optim.AdamW),
    }


class RecordableUpdate:
    """
    One update as a function of tensors alone (``step``), so that it can be recorded.

    It works on copies and, at the end, keeps them if every loss and gradient was finite in this update and the ones
    before it; so one that is not finite changes nothing, without the host having to look.

    It is for one value of the settings' ``constants``. ``step`` takes the state's tensors, the settings' inputs with both
    learning rates after them in one tensor, the fault so far (0 is none, n the n-th of ``NETWORKS``), the noise and the
    batch's tensors; returns the fault, and of ``Losses`` what ``gradient_step.reported`` says.
    """

    def __init__(
        self,
        policy: TD3Policy,
        products: str,
        state: State,
        batch: ReplayBufferSamples,
        with_actor: bool,
        settings: UpdateSettings,
    ):
        self.policy, self.products, self.state, self.batch = policy, products, state, batch
        self.with_actor, self.settings = with_actor, settings

    def step(self, *inputs: th.Tensor) -> list[th.Tensor]:
        kept, others = inputs[: len(self.state.tensors)], inputs[len(self.state.tensors) :]
        moved = [tensor.clone() for tensor in kept]
        rest = iter(moved)
        stand_ins = {id(tensor): next(rest) for tensor in self.state.named.values()}
        for parameter in self.state.parameters.values():
            stand_ins[id(parameter)].requires_grad_(parameter.requires_grad)
        trained: Trained = {name: [] for name in NETWORKS}
        for (name, parameter), state in self.state.moments.items():
            trained[name].append((stand_ins[id(parameter)], {key: next(rest) for key in state}))
        with th.enable_grad(), precision.hidden_products(self.policy, self.products), exchanged(self.policy, stand_ins):
            losses, fault = self._update(trained, *others)
        with th.no_grad():
            is_kept = fault == 0
            for old, new in zip(kept, moved, strict=True):
                old.copy_(th.where(is_kept, new, old))
        return [fault, *[loss for loss in losses if loss is not None]]

    def _update(
        self,
        trained: Trained,
        numbers: th.Tensor,
        fault: th.Tensor,
        noise: th.Tensor,
        *tensors: th.Tensor,
    ) -> tuple[Losses, th.Tensor]:
        options = {name: _options(network.optimizer) for name, network in zip(NETWORKS, self.state.networks, strict=True)}
        learning_rates = dict(zip(NETWORKS, numbers[-len(NETWORKS) :], strict=True))
        faults = [fault]

        def descend(network: BaseModel, loss: th.Tensor, name: str, max_norm: float | th.Tensor | None) -> None:
            if not trained[name]:
                return  # the user has frozen the whole network
            found = th.autograd.grad(loss, [parameter for parameter, _ in trained[name]], allow_unused=True)
            pairs = zip(trained[name], found, strict=True)
            reached = [(*one, gradient) for one, gradient in pairs if gradient is not None]
            if not reached:
                return
            parameters, states, gradients = map(list, zip(*reached, strict=True))
            good = gradient_step.is_finite(loss, gradients)
            faults[0] = th.where((faults[0] == 0) & ~good, NETWORKS.index(name) + 1, faults[0])
            gradients = gradient_step.clipped(gradients, max_norm)
            _adam_step(parameters, gradients, states, learning_rates[name], options[name], self.state.shares_steps)

        batch = rebuilt(self.batch, tensors)
        settings = self.settings.with_inputs(numbers[: -len(NETWORKS)].to(batch.rewards.dtype))  # actions may be of float16
        return gradient_step.make(self.policy, batch, noise, settings, self.with_actor, descend), faults[0]


@contextmanager
def exchanged(network: nn.Module, stand_ins: dict[int, th.Tensor]) -> Iterator[None]:
    """
    Inside, other tensors stand in for ``network``'s parameters and buffers.

    Unlike ``torch.func.functional_call`` this holds for a module that is part of two networks, such as a shared extractor.

    :param stand_ins: by the ``id`` of what they stand in for
    """
    holders: list[Any] = [holder for module in network.modules() for holder in (module._parameters, module._buffers)]
    before = [dict(holder) for holder in holders]
    try:
        for holder in holders:
            holder.update({name: stand_ins[id(tensor)] for name, tensor in holder.items() if tensor is not None})
        yield
        for holder, tensors in zip(holders, before, strict=True):
            _take_over(holder, {name: stand_ins.get(id(tensor)) for name, tensor in tensors.items()})
    finally:
        for holder, tensors in zip(holders, before, strict=True):
            holder.clear()
            holder.update(tensors)


def _take_over(holder: dict[str, th.Tensor | None], stand_ins: dict[str, th.Tensor | None]) -> None:
    """
    What a layer has set anew instead of writing into it, as in ``self.mean = 0.9 * self.mean + 0.1 * new``.

    :raises ValueError: for one that there was not before, or of another shape or type
    """
    for name, tensor in holder.items():
        stand_in = stand_ins.get(name)
        if tensor is stand_in:
            continue
        if tensor is None or stand_in is None or (tensor.shape, tensor.dtype) != (stand_in.shape, stand_in.dtype):
            raise ValueError(f"a layer changes what its buffer or parameter {name!r} is")
        with th.no_grad():
            stand_in.copy_(tensor)


@contextmanager
def attributes_kept(network: nn.Module) -> Iterator[None]:
    """
    Undo what recording leaves in modules: tensors without values.

    :raises ValueError: if a module of the user's has set an attribute, which a program would not do. torch's own layers
        keep nothing there that their next call needs
    """
    modules, absent = list(network.modules()), object()
    before = [dict(vars(module)) for module in modules]
    changed = []
    try:
        yield
        for module, attributes in zip(modules, before, strict=True):
            found = [name for name, value in vars(module).items() if value is not attributes.get(name, absent)]
            if found and not type(module).__module__.startswith("torch."):
                changed.append(f"{type(module).__name__}.{found[0]}")
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
    if changed:
        raise ValueError(f"{changed[0]} is set in every call: register_buffer is for tensors that a layer keeps")


def _adam_step(
    parameters: list[th.Tensor],
    gradients: list[th.Tensor],
    states: list[dict[str, th.Tensor]],
    learning_rate: th.Tensor,
    options: dict[str, Any],
    shares_steps: bool,
) -> None:
    """torch's own Adam on tensors alone; ``differentiable`` is its form that reads no number on the host."""
    # In float32 1 - beta**step loses five digits. One count for all parameters: its powers are computed once
    steps = [(states[0] if shares_steps else state)["step"].double() for state in states]
    with th.no_grad():
        adam(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states if "max_exp_avg_sq" in state],
            steps,
            foreach=False,
            fused=False,
            differentiable=True,
            lr=learning_rate.clamp(min=LEAST_RATE),
            **options,
        )
        for state, step in zip(states, steps, strict=True):
            state["step"].copy_(step)


def flat(batch: ReplayBufferSamples) -> list[th.Tensor]:
    """A batch's tensors in a fixed order; a Dict observation counts as its parts."""
    tensors: list[th.Tensor] = []
    for part in batch:
        if isinstance(part, dict):
            tensors.extend(part.values())
        elif part is not None:
            tensors.append(part)
    return tensors


def layout(batch: ReplayBufferSamples) -> tuple[Any, ...]:
    """What a program takes for granted about a batch."""
    keys = [tuple(part) if isinstance(part, dict) else part is None for part in batch]
    return (*keys, *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in flat(batch)])


def rebuilt(template: ReplayBufferSamples, tensors: Sequence[th.Tensor]) -> ReplayBufferSamples:
    """The inverse of ``flat``."""
    rest = iter(tensors)
    parts = [
        {key: next(rest) for key in part} if isinstance(part, dict) else None if part is None else next(rest)
        for part in template
    ]
    return type(template)(*parts)  # type: ignore[arg-type]  # no discounts is None
