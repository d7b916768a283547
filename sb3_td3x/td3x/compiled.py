"""Compiled updates: ``gradient_step.py``'s losses and gradients, recorded once and compiled with Inductor; no mathematics."""

import functools
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves, tree_map

from sb3_td3x.common.random_state import generators_kept, numpy_and_python_states
from sb3_td3x.common.signals import stop_signals
from sb3_td3x.td3x import gradient_step, precision
from sb3_td3x.td3x.critics import QUANTILES, SCALAR, kind_of
from sb3_td3x.td3x.gradient_step import Gradients, GradientStep, Losses, PolicyTensors, UpdateSettings
from sb3_td3x.td3x.policies import copy_of, depends_on_mode

SWITCH_AFTER = 5_000  # plain updates that "auto" makes, since a model was constructed or loaded, before it compiles
MOST_PROGRAMS = 20  # that "auto" makes before it stays plain

_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,  # the calls between the kernels are compiled too
    "compile_threads": 1,  # no pool of processes
    "cpp.vec_isa_ok": True,  # the processor says what it has; each test program takes seconds
    "cpp_cache_precompile_headers": False,  # takes longer than two programs gain by it
    "aot_inductor.enable_line_tables": False,  # debug information, not only for AOT
}
# Inductor (torch 2.13) may reuse the memory of a concatenation or a stack of which a contiguous part is still in use: in SB3's
# networks and ours only those of a batch of one, in users' own any
_WITHOUT_REUSE = {"inplace_buffers": False, "allow_buffer_reuse": False}
_MAKING = threading.Lock()  # torch records one program at a time
# Modules whose forward pass uses no numbers that an edit could change
_WITHOUT_NUMBERS = (nn.Linear, nn.ReLU, nn.Tanh, nn.Sequential, nn.ModuleList, nn.Flatten, FlattenExtractor)

Program = Callable[..., Sequence[th.Tensor | None]]


class CannotAccelerate(ValueError):
    """Compiled updates cannot be used for this policy on this machine; the text says why."""


def update_path(accelerate: str, policy: TD3Policy, updates_made: int = 0) -> str:
    """
    ``"plain"`` or ``"compiled"``, after so many updates since the model was constructed or loaded.

    :raises CannotAccelerate: for ``accelerate="compiled"`` where it cannot be used, as far as that is known without recording
    """
    if accelerate == "plain" or (accelerate == "auto" and updates_made < SWITCH_AFTER):
        return "plain"
    if (reason := _why_plain(accelerate, policy)) and accelerate == "compiled":
        raise CannotAccelerate(f"accelerate='compiled' cannot be used: {reason}")
    return "plain" if reason else "compiled"


def _why_plain(accelerate: str, policy: TD3Policy) -> str:
    """Why this policy's updates cannot be compiled here; empty if nothing is known against it."""
    if accelerate == "auto" and sys.platform != "linux":  # macOS: a second OpenMP library ends the process (torch #122705)
        return "compiled updates have been run on Linux only; accelerate='compiled' tries them"
    if policy.device.type != "cpu":
        return f"compiled updates are for the CPU, the networks are on {policy.device.type!r}"
    if kind_of(policy.critic) not in (SCALAR, QUANTILES):
        return "the critics are of a kind of their own, whose functions may draw numbers or hold some"
    return "" if has_compiler() else "there is no C++ compiler (install g++, or set CXX to another one, and start Python anew)"


@functools.cache  # asked before every series of updates, and PATH may be long
def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None  # as Inductor looks for it on Linux


class Updater(GradientStep):
    """
    Makes plain or compiled updates, as ``accelerate`` asks for.

    There are two programs, for the gradients of the critics and of the actor. They are made before the first update that needs
    them, and again only if something changes that is part of them: the batch size, a setting other than ``_NOT_IN_PROGRAMS``,
    frozen layers, modules, the number of torch threads.

    :param accelerate: with ``"auto"`` updates stay plain where no program can be made, with ``"compiled"`` that is an error
    :param kernels: matrix kernels of compiled updates; ``None`` chooses by the processor
    :param announce: called with a line of text before the programs are made, and if that fails with ``"auto"``
    """

    def __init__(
        self, policy: TD3Policy, accelerate: str, products: str, kernels: str | None, announce: Callable[[str], None]
    ):
        super().__init__(policy, products)
        self.made_for = policy, accelerate, products, kernels
        self.accelerate, self.announce = accelerate, announce
        self.kernels = kernels or precision.choose_matrix_kernels()
        self.updates_made = self.programs_made = 0
        self.declined: str | None = None
        self._guards: list[Any] = []
        self._programs: dict[tuple[Any, ...], dict[str, Program]] = {}

    def prepare(self, updates_made: int = 0) -> None:
        """:param updates_made: since the model was constructed or loaded, before this series"""
        self.updates_made = updates_made
        before = self.tensors
        super().prepare()
        if before is not self.tensors and [*map(id, before.modules)] != [*map(id, self.tensors.modules)]:
            self._programs.clear()  # recorded from other layers
        self._path = update_path(self.accelerate, self.policy, SWITCH_AFTER)  # of this series, which may pass the switch
        if self.accelerate == "auto" and self._path == "plain" and updates_made >= SWITCH_AFTER and self.declined is None:
            self.decline(_why_plain("auto", self.policy))
        may_compile = self._path == "compiled" and self.declined is None
        guards = [_has_hooks(self.tensors), *_guards(self.tensors)] if may_compile else self._guards
        if before is not self.tensors or guards != self._guards:
            self._guards, self._constants = guards, _constants(self.tensors, guards)
            self._inputs = [*self.tensors.named.values()]  # themselves, because `.data` of them may be set

    def __call__(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        is_due = self.accelerate == "compiled" or self.updates_made >= SWITCH_AFTER
        is_compiled = is_due and self.declined is None and self._path == "compiled"
        self._active: dict[str, Program] = {}
        if is_compiled:
            # A replay buffer's own batch may hold more, for example indices, which an update does not read
            batch = ReplayBufferSamples(*[getattr(batch, name, None) for name in ReplayBufferSamples._fields])  # type: ignore[arg-type]
            self._batch = [part for part in tree_leaves(batch) if part is not None]  # no discounts is None
            self._active = self._programs_for(batch, noise, settings)
        losses = super().__call__(batch, noise, settings, with_actor, number)
        self.updates_made += 1
        return losses

    def gradients(
        self, name: str, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings
    ) -> tuple[Losses, Gradients]:
        if name not in self._active:
            return super().gradients(name, batch, noise, settings)
        with th.no_grad(), precision.matrix_kernels(self.kernels):
            outputs = self._active[name](*self._inputs, _numbers(settings), noise, *self._batch)
        return Losses(*outputs[: len(Losses._fields)]), outputs[len(Losses._fields) :]

    def decline(self, reason: str) -> None:
        """Make plain updates from now on, and say why."""
        self.declined = reason
        self.announce(f"accelerate: plain ({reason})")

    def _programs_for(self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> dict[str, Program]:
        keys_of_dicts = [tuple(part) if isinstance(part, dict) else part is None for part in batch]
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in self._batch]
        key = (settings._replace(**_NOT_IN_PROGRAMS), *keys_of_dicts, *layouts, *self._constants)
        while key not in self._programs:
            if not self.tensors.is_current():  # plain updates of this series may have set buffers anew
                self.prepare(self.updates_made)
            try:
                self._programs[key] = self._make(batch, noise, settings)
            except CannotAccelerate as error:
                if str(error).startswith("compiling") and _cleared_after_signal(error):
                    continue
                if self.accelerate != "auto":
                    raise CannotAccelerate(f"accelerate='compiled' cannot be used: {error}") from error
                self.decline(str(error))
                return {}
        return self._programs[key]

    def _make(self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> dict[str, Program]:
        if self.accelerate == "auto" and self.programs_made >= MOST_PROGRAMS:
            raise CannotAccelerate(f"{MOST_PROGRAMS} programs were made: something that is part of them keeps changing")
        if not self._programs:
            self.announce("accelerate: compiling the update, about 10 s the first time, about 2 s from then on")
        # Each an object of its own: a batch may hold one tensor twice, and the next batch two of them
        tensors, parts = [[tensor.detach() for tensor in group] for group in (self._inputs, self._batch)]
        inputs = [*tensors, _numbers(settings), noise, *parts]
        # Both are copied first: meanwhile a thread may predict, which switches the layers' modes
        recordings = {name: _Recording(self, name, batch, settings) for name in self.tensors.networks}
        made = {name: recording.program(inputs) for name, recording in recordings.items()}
        self.programs_made += len(made)
        return made


NUMBERS = ("gamma", "target_policy_noise", "target_noise_clip")
"""Of ``UpdateSettings``, those that a program reads anew at every update."""
_NOT_IN_PROGRAMS: dict[str, Any] = dict.fromkeys((*NUMBERS, "tau", "max_grad_norm"), 0)
"""Changing these makes no new program."""


def _numbers(settings: UpdateSettings) -> th.Tensor:
    return th.tensor([getattr(settings, name) for name in NUMBERS], dtype=th.float64, device="cpu")


class _Recording:
    """
    A copy of the policy, and from it ``program``: loss and gradients of one network as a function of tensors alone.

    Its inputs are the policy's tensors in the order of ``PolicyTensors.named``, ``NUMBERS`` in one tensor, the noise, and the
    tensors of the batch. It changes buffers in place.
    """

    def __init__(self, updater: Updater, name: str, batch: ReplayBufferSamples, settings: UpdateSettings):
        """:raises CannotAccelerate: if the policy has what a program would not repeat"""
        self.products, self.kernels = updater.products, updater.kernels
        self.name, self.batch, self.settings = name, batch, settings
        tensors = updater.tensors
        if _has_hooks(tensors):
            raise CannotAccelerate("a layer or a parameter's gradient has a hook, which a program would not call")
        places = {id(tensor): place for place, tensor in enumerate(tensors.named.values())}
        if not places.keys() >= set(map(id, tensors.trained[name])):
            raise CannotAccelerate(f"the {name}'s optimizer has parameters that are not in the policy")
        self.trained = [places[id(parameter)] for parameter in tensors.trained[name]]
        with _explained("the policy cannot be copied"):
            optimizers = [network.optimizer for network in tensors.networks.values()]
            self.policy = copy_of(updater.policy, {id(optimizer): optimizer for optimizer in optimizers})
        parts = [part for module in self.policy.modules() for part in (module, *type(module).__mro__)]
        held = [value for part in parts for value in vars(part).values()]
        if any(isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)) for value in held):
            raise CannotAccelerate("a layer holds a random generator, whose numbers would be the same in every update")

    def program(self, inputs: list[th.Tensor]) -> Program:
        """:raises CannotAccelerate: if the policy cannot be recorded or the recorded program not be compiled"""
        with _MAKING, generators_kept(), th.autograd.set_detect_anomaly(False):
            drawn = numpy_and_python_states()
            with _explained("the policy cannot be recorded as one program"):
                graph = make_fx(self._step, tracing_mode="fake")(*inputs)
            known = ("torch.", "stable_baselines3.", "sb3_td3x.")  # whose layers draw none: another thread has drawn
            has_custom_layers = any(not type(part).__module__.startswith(known) for part in self.policy.modules())
            if has_custom_layers and numpy_and_python_states() != drawn:
                source = "the policy (or another thread) draws random numbers from numpy or python"
                raise CannotAccelerate(f"{source}: a program would have the same ones in every update")
            _refuse_random_layers(graph)
            with _explained("compiling the update failed"):
                import torch._inductor

                known_options = torch._inductor.list_options()  # an older torch lacks some
                may_reuse = len(self.batch.rewards) > 1 and not has_custom_layers
                options = {name: value for name, value in _OPTIONS.items() if name in known_options}
                options |= {} if may_reuse else _WITHOUT_REUSE  # torch refuses those that it does not know
                program: Program = torch._inductor.compile(graph, inputs, options=options)  # type: ignore[arg-type]
                with precision.matrix_kernels(self.kernels):  # some layers have no kernel that a program can call (LSTM)
                    program(*[tensor.clone() for tensor in inputs])
        return program

    def _step(self, *inputs: th.Tensor) -> list[th.Tensor | None]:
        originals = [*dict(self.policy.named_parameters()).values(), *dict(self.policy.named_buffers()).values()]
        tensors, others = inputs[: len(originals)], inputs[len(originals) :]
        stand_ins = {
            id(original): tensor.detach().requires_grad_(original.requires_grad)
            if isinstance(original, nn.Parameter)
            else tensor.clone()
            for original, tensor in zip(originals, tensors, strict=True)
        }
        trained = [stand_ins[id(originals[place])] for place in self.trained]
        memory = [(tensor, tensor.untyped_storage()._cdata) for tensor in stand_ins.values() if tensor.layout is th.strided]
        rounded = precision.hidden_layers(self.policy) if self.products == "bf16" else []
        with th.enable_grad(), _unchanged_attributes(self.policy), precision.bf16_products(rounded):
            before = swap_parameters(self.policy, stand_ins)
            numbers, noise, *parts = others
            batch = _rebuilt(self.batch, parts)
            values = zip(NUMBERS, numbers.to(th.result_type(batch.rewards, 0.0)), strict=True)  # as Python's numbers
            settings = self.settings._replace(**dict(values))
            loss, reported = gradient_step.losses_of(self.name, self.policy, batch, noise, settings)
            outputs = [*reported, *gradient_step.gradients_of(loss, trained)]
        if any(tensor.untyped_storage()._cdata != place for tensor, place in memory):
            raise ValueError("a layer sets `.data` of a parameter or buffer, which a program would not do")
        _write_buffers(before, dict(zip(map(id, originals), tensors, strict=True)), stand_ins)
        return outputs


def swap_parameters(network: nn.Module, stand_ins: dict[int, th.Tensor]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """
    Put other tensors in the place of a network's, by their ``id``; return what was held before, by holder.

    Unlike ``torch.func.functional_call`` this is right for a module that is part of two networks, such as a shared extractor.
    """
    holders: list[Any] = [holder for module in network.modules() for holder in (module._parameters, module._buffers)]
    before = [(holder, dict(holder)) for holder in holders]
    for holder in holders:
        holder.update({name: stand_ins[id(tensor)] for name, tensor in holder.items() if tensor is not None})
    return before


def _write_buffers(
    before: list[tuple[dict[str, Any], dict[str, Any]]], inputs: dict[int, th.Tensor], stand_ins: dict[int, th.Tensor]
) -> None:
    """
    Write what a forward pass has made of the buffers into the program's inputs; ``ValueError`` for one of another kind. A
    layer may have written into a buffer or set another one, as in ``self.mean = 0.9 * self.mean + 0.1 * new``.
    """
    for holder, originals in before:
        for name, tensor in holder.items():
            original = originals.get(name)
            stand_in = stand_ins.get(id(original))
            if stand_in is None or isinstance(original, nn.Parameter):
                is_same = tensor is stand_in
            elif is_same := tensor is not None and (tensor.shape, tensor.dtype) == (stand_in.shape, stand_in.dtype):
                inputs[id(original)].copy_(tensor.detach())
            if not is_same:
                raise ValueError(f"a layer changes what its buffer or parameter {name!r} is")


@contextmanager
def _unchanged_attributes(network: nn.Module) -> Iterator[None]:
    """
    ``ValueError`` if a custom module sets an attribute, or an item of a list or dict in one, which a program would not do;
    torch's own need none later.
    """
    before = [(module, _held(module)) for module in network.modules()]
    yield
    for module, held in before:
        changed = [name for name, parts in _held(module).items() if [*map(id, parts)] != [*map(id, held.get(name, ()))]]
        if changed and not type(module).__module__.startswith("torch."):
            what = f"{type(module).__name__}.{changed[0]}"
            raise ValueError(f"{what} is set in every call: register_buffer is for tensors that a layer keeps")


def _held(module: nn.Module) -> dict[str, list[Any]]:
    """The attributes of a module but for its tensors, by name; of lists and dicts their items."""
    return {name: tree_leaves(value) for name, value in vars(module).items() if name not in ("_parameters", "_buffers")}


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Whatever a custom network or a compiler raises becomes a ``CannotAccelerate`` of one line."""
    try:
        yield
    except Exception as error:
        lines = (str(error).strip() or "no message").splitlines()
        line = next((line for line in lines if "error: " in line), lines[0])  # a compiler's own is below torch's
        raise CannotAccelerate(f"{problem} ({type(error).__name__}: {line})") from error


def _cleared_after_signal(error: BaseException | None) -> bool:
    """Whether a signal has ended the compiler, now or in an earlier process; what that has begun to write is removed."""
    numbers = (signal.SIGINT, *stop_signals())
    while error is not None:
        if isinstance(error, (ImportError, OSError)) and (cut := re.match(r"(.+\.so): file too short", str(error))):
            is_there = Path(cut[1]).exists()
            Path(cut[1]).unlink(missing_ok=True)
            return is_there
        if -getattr(error, "returncode", 0) in numbers:  # a terminal or job sends it to all processes
            for option, output in pairwise(error.cmd):  # type: ignore[attr-defined]
                if option == "-o":
                    Path(output).unlink(missing_ok=True)
            return True
        error = error.__cause__ or error.__context__
    return False


def _refuse_random_layers(graph: GraphModule) -> None:
    """Dropout would draw other numbers than on the plain path."""
    for node in graph.graph.nodes:
        if th.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            arguments = node.normalized_arguments(graph, normalize_to_only_use_kwargs=True)
            if arguments is None or arguments.kwargs.get("dropout_p") != 0:  # attention may be without dropout
                raise CannotAccelerate(f"the policy draws random numbers ({node.target}), as dropout does")


def _has_hooks(tensors: PolicyTensors) -> bool:
    """Whether a layer or a trained parameter has a hook that is called during an update."""
    if _has_any_global_hook() or any(parameter._backward_hooks for group in tensors.trained.values() for parameter in group):
        return True
    return any(
        layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
        or any(not type(hook).__module__.startswith("torch.") for hook in layer._forward_pre_hooks.values())  # spectral_norm's
        for layer in tensors.modules
    )  # fmt: skip


def _guards(tensors: PolicyTensors) -> list[Any]:
    """What an edit between two series may change of a program: threads, modes, and numbers that are layers' attributes."""
    kinds = (int, float, str, np.generic, NoneType, FunctionType, BuiltinFunctionType, MethodType, functools.partial)
    modules = tensors.modules[1:]  # no update calls the policy
    holders = [module for module in modules if type(module) not in _WITHOUT_NUMBERS or "forward" in vars(module)]
    items = [pair for module in holders for pair in vars(module).items() if isinstance(pair[1], kinds)]
    numbers = [pair for pair in items if pair[0] != "training"]
    critics = [network for module in holders for network in vars(module).get("q_networks", ())]  # SB3's, in a plain list
    autocast = th.is_autocast_enabled("cpu") and th.get_autocast_dtype("cpu")
    modes = [th.get_num_threads(), autocast, *[module.training for module in modules if depends_on_mode(module)]]
    codes = [getattr(getattr(type(module), "forward", None), "__code__", None) for module in holders]  # not of scripts
    return [*modes, *critics, *numbers, *codes]


def _constants(tensors: PolicyTensors, guards: list[Any]) -> tuple[Any, ...]:
    """What a program takes from the networks and does not read anew at every update, its gradients' order too."""
    places = {id(tensor): place for place, tensor in enumerate(tensors.named.values())}
    trained = [tuple(places.get(id(parameter)) for parameter in parameters) for parameters in tensors.trained.values()]
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors.named.values()]
    return *trained, *layouts, *guards


def _rebuilt(template: ReplayBufferSamples, tensors: Sequence[th.Tensor]) -> ReplayBufferSamples:
    """A batch of these tensors in the order of ``tree_leaves``."""
    rest = iter(tensors)
    return tree_map(lambda part: None if part is None else next(rest), template)
