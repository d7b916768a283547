"""
The fast path: the functions of ``update.py`` recorded once as one program of tensor operations, which is then compiled
by Inductor. There is no mathematics in here.
"""

import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch as th
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from sb3_td3x.common import random_state
from sb3_td3x.common.random_state import generators_kept
from sb3_td3x.common.validation import one_of
from sb3_td3x.errors import NonFiniteError
from sb3_td3x.td3x import gradient_step, precision
from sb3_td3x.td3x.gradient_step import Losses, UpdateSettings
from sb3_td3x.td3x.policies import TD3XPolicy
from sb3_td3x.td3x.recordable import NETWORKS, RecordableUpdate, State, attributes_kept, flat, layout

PATHS = ("auto", "plain", "compiled")
# Compiling takes 25 s on two slow cores and then saves 1 to 2 ms per update
WORTH_COMPILING = 20_000

_COMPILER = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
"""Which Inductor looks for (``torch/_inductor``: ``config.py``, and on Windows ``cpp_builder.py``)."""

Program = Callable[..., Sequence[th.Tensor]]
_MAKING = threading.Lock()
"""torch records one program at a time."""


class CannotAccelerate(ValueError):
    """A fast path cannot be used for this policy on this machine; the text says why."""


def choose(request: str, policy: TD3Policy, updates_ahead: float = 0, chosen_before: str | None = None) -> tuple[str, str]:
    """
    The path for a run and the reason for it.

    :param request: one of ``PATHS``
    :param policy: whose networks are to be updated
    :param updates_ahead: updates that the run is planned to make
    :param chosen_before: the path that ``"auto"`` chose when this run started, if it goes on
    :raises CannotAccelerate: if another path than ``"auto"`` is requested and cannot be used
    """
    one_of("accelerate", request, PATHS)
    if request != "auto":
        if obstacle := _obstacle(request, policy):
            raise CannotAccelerate(f"accelerate={request!r} cannot be used: {obstacle}")
        return request, "as requested"
    # Only a fast path is kept: what did not pay for compiling may do so in a longer `learn`
    if chosen_before not in (None, "plain") and not _obstacle(chosen_before, policy):
        return chosen_before, "as before"
    if obstacle := _obstacle("compiled", policy):
        return "plain", obstacle
    if updates_ahead < WORTH_COMPILING:
        return "plain", f"{updates_ahead:,.0f} updates ahead do not pay for compiling, {WORTH_COMPILING:,} do"
    return "compiled", f"{updates_ahead:,.0f} updates ahead"


def _obstacle(path: str, policy: TD3Policy) -> str | None:
    """What stands in the way, as far as it can be known without recording an update."""
    if path == "plain":
        return None
    if policy.device.type != "cpu":
        return f"compiled updates are for the CPU, the networks are on {policy.device.type!r}"
    if not isinstance(policy, TD3XPolicy):
        return f"{type(policy).__name__} is not a TD3XPolicy"
    for network in (policy.critic, policy.actor):
        if type(network.optimizer) not in (th.optim.Adam, th.optim.AdamW):
            return f"the optimiser {type(network.optimizer).__name__} is not torch's Adam or AdamW"
        if len(network.optimizer.param_groups) != 1:
            return "an optimiser has several parameter groups"
    if not _has_compiler():
        return f"there is no C++ compiler (install {_COMPILER}, or set CXX to another)"
    return None


def _has_compiler() -> bool:
    return _is_found(os.environ.get("CXX", _COMPILER), os.environ.get("PATH"))


@functools.cache
def _is_found(command: str, path: str | None) -> bool:
    """Cached, because it is asked before every series of updates and PATH may be long."""
    return shutil.which(command, path=path) is not None


class FastUpdate:
    """
    Updates as one program each: one for the critics alone, one for a whole update with actor and targets.

    A program is made when its kind of update comes first, and again only if something changes that is part of it: the
    batch size, the count of dropped quantiles, the prioritisation, whether gradients are bounded, frozen layers, options of
    the optimiser other than the learning rate, the number of torch threads.

    :param policy: changed in place, and the states of its optimisers with it
    :param products: ``"fp32"`` or ``"bf16"``, see ``precision.py``
    :param falls_back: makes plain updates if no program can be made of the policy, instead of raising
    :param announce: called with a line of text before the first program is made, and on falling back
    :raises CannotAccelerate: at the first update, if no program can be made of the policy
    """

    def __init__(
        self,
        policy: TD3Policy,
        products: str = "fp32",
        falls_back: bool = False,
        announce: Callable[[str], None] = lambda _: None,
    ):
        self.policy, self.products, self.announce = policy, products, announce
        self.kernels = precision.choose_matrix_kernels()
        self.falls_back, self._declined = falls_back, False
        self.plain = gradient_step.PlainUpdate(policy, products)
        self.last_good = 0
        self.programs_made = 0
        self._programs: dict[tuple[Any, ...], Program] = {}
        self._state = State(policy)

    @contextmanager
    def running(self, batch_size: int) -> Iterator[None]:
        self._batch_size = batch_size
        self.last_good = 0
        self._refresh()
        self._constants = self._state.constants()
        self._settings: tuple[Any, th.Tensor | None] = None, None
        self._fault = th.zeros((), dtype=th.int64, device=self.policy.device)
        self._faults: dict[int, th.Tensor] = {}
        with th.no_grad():
            try:
                yield
            finally:
                first_bad = self._first_bad()
                self._state.leave()
        self._raise(first_bad)

    def __call__(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        if len(noise) != self._batch_size or self._declined:
            return self._plain_update(batch, noise, settings, with_actor, number)
        # A buffer's own batch may hold more, indices for example, which an update does not read
        batch = ReplayBufferSamples(*[getattr(batch, name, None) for name in ReplayBufferSamples._fields])  # type: ignore[arg-type]
        tensors = flat(batch)
        inputs = [*self._state.tensors, self._as_tensor(settings), self._fault, noise, *tensors]
        key = (with_actor, *settings.constants(), *layout(batch), *self._constants)
        if key not in self._programs:
            try:
                self._programs[key] = self._make_program(batch, with_actor, settings, inputs)
            except CannotAccelerate as error:
                if not self.falls_back:
                    raise
                self._declined = True
                self.announce(f"accelerate: plain ({error})")
                return self._plain_update(batch, noise, settings, with_actor, number)
        with precision.matrix_kernels(self.kernels):
            self._fault, *losses = self._programs[key](*inputs)
        self._faults[number] = self._fault
        rest = iter(losses)
        return Losses(*[next(rest) if has else None for has in gradient_step.reported(self.policy, settings, with_actor)])  # type: ignore[arg-type]

    def _plain_update(
        self, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings, with_actor: bool, number: int
    ) -> Losses:
        """For a batch of another size, which is not worth a program of its own, or where no program can be made."""
        self._raise(self._first_bad())
        with th.enable_grad(), self.plain.running(len(noise)):
            losses = self.plain(batch, noise, settings, with_actor, number)
        self._refresh()  # a plain optimiser step may have made new states
        self.last_good = number
        return losses

    def _refresh(self) -> None:
        if self._state.is_current():
            return
        before, self._state = self._state, State(self.policy)
        if not self._state.is_of_the_same_modules(before):
            self._programs.clear()

    def _first_bad(self) -> int | None:
        """The first update that was not made."""
        if not self._faults:
            return None
        if not int(self._fault):
            self.last_good = max(self.last_good, *self._faults)
            return None
        first_bad = next(number for number, fault in self._faults.items() if int(fault))
        self.last_good = first_bad - 1
        return first_bad

    def _raise(self, first_bad: int | None) -> None:
        if first_bad is not None:
            raise NonFiniteError(f"{NETWORKS[int(self._fault) - 1]} loss or its gradient", f"update {first_bad}")

    def _as_tensor(self, settings: UpdateSettings) -> th.Tensor:
        """The numbers that may change, learning rates included, as one tensor: an edit makes no new program."""
        values = (*settings.inputs(), *[network.optimizer.param_groups[0]["lr"] for network in self._state.networks])
        if self._settings[0] != values:
            tensor = th.tensor([float(value) for value in values], dtype=th.float64, device=self.policy.device)
            self._settings = values, tensor
        return self._settings[1]  # type: ignore[return-value]

    def _make_program(
        self, batch: ReplayBufferSamples, with_actor: bool, settings: UpdateSettings, inputs: list[th.Tensor]
    ) -> Program:
        if not self._programs:
            self.announce("accelerate: compiling the update, 10 to 60 s the first time, a few seconds from then on")
        recorded = RecordableUpdate(self.policy, self.products, self._state, batch, with_actor, settings)
        with _MAKING, generators_kept(self.policy.device):
            try:
                program = _compile(recorded, inputs)
                with precision.matrix_kernels(self.kernels):  # some layers have no kernel that a program can call (LSTM)
                    program(*[tensor.clone() for tensor in inputs])
            except CannotAccelerate:
                raise
            except Exception as error:  # a compiler that fails, a cache that cannot be written
                raise CannotAccelerate(f"making the program failed ({_first_line(error)})") from error
        self.programs_made += 1
        return program


def _compile(recorded: RecordableUpdate, inputs: Sequence[th.Tensor]) -> Program:
    drawn = random_state.numpys_and_pythons()
    try:
        with attributes_kept(recorded.policy):
            program = make_fx(recorded.step, tracing_mode="fake")(*inputs)
    except Exception as error:  # whatever a user's network raises when it meets tensors without values
        raise CannotAccelerate(f"the policy cannot be recorded as one program ({_first_line(error)})") from error
    if random_state.numpys_and_pythons() != drawn and _is_alone():
        raise CannotAccelerate(
            "the policy draws random numbers of numpy's or python's, which would be the same in every update"
        )
    _refuse_random_layers(program)
    import torch._inductor

    options: dict[str, Any] = {
        "cpp_wrapper": True,  # the calls between the kernels are compiled too
        "compile_threads": 1,  # without a pool of processes
        # Numbers that many elements share are computed once, before the loop over the elements: Adam's two powers
        # inside it cost a quarter of a millisecond per update
        "realize_opcount_threshold": 1,
    }
    return torch._inductor.compile(program, list(inputs), options=options)


def _is_alone() -> bool:
    """Whether no other thread of the program can have drawn random numbers meanwhile; progress bars and loggers do not."""
    return all(thread.daemon or thread is threading.current_thread() for thread in threading.enumerate())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _refuse_random_layers(program: GraphModule) -> None:
    """Dropout would draw other numbers than on the plain path."""
    for node in program.graph.nodes:
        if th.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _dropout_of(node) != 0:
            raise CannotAccelerate(f"the policy draws random numbers ({node.target}), as dropout does")


def _dropout_of(node: Node) -> Any:
    """The share that an attention's dropout leaves out; ``None`` for other operations."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return None
    place = names.index("dropout_p")
    return node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
