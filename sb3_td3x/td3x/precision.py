"""
Which numbers and which kernels the matrix products of an update use.

Both are set for the updates only: acting, evaluation and everything else in the user's process stay as they were.
"""

import hashlib
import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch as th
from torch import nn
from torch.nn import functional as F

PRECISIONS = ("fp32", "bf16")
KERNELS = ("default", "onednn")
# Products with a shorter side are cheap, and mostly carry observations, actions and values: they stay in float32
SHORTEST_HIDDEN_SIDE = 64
# A kernel has to be this much faster to be taken, and at most this far from float64 (float32's own error is 4e-7)
WORTHWHILE, ACCURATE = 1.2, 1e-6


@contextmanager
def hidden_products(network: nn.Module, products: str) -> Iterator[None]:
    """
    Inside, ``network`` multiplies its hidden layers' matrices in this precision; the result of each product is float32.

    :param network: every ``nn.Linear`` in it whose both sides have at least 64 units is a hidden layer, except the
        last of an actor or critic, however many actions or quantiles it gives, and one whose ``forward`` is the user's
    :param products: ``"fp32"`` changes nothing; ``"bf16"`` rounds both factors to bfloat16 (8 significant bits),
        forward and backward. Weights, optimiser and losses stay float32
    """
    heads = [
        head for module in network.modules() for head in (*getattr(module, "q_networks", ()), getattr(module, "mu", None))
    ]
    outputs = [[layer for layer in head if type(layer) is nn.Linear][-1:] for head in heads if type(head) is nn.Sequential]
    layers = [
        module
        for module in network.modules()
        if products == "bf16"
        and "forward" not in vars(module)  # a user's own
        and type(module) is nn.Linear
        and min(module.weight.shape) >= SHORTEST_HIDDEN_SIDE
        and not any(module is output for last in outputs for output in last)
    ]
    for layer in layers:
        layer.forward = _bf16_linear(layer)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _bf16_linear(layer: nn.Linear) -> Callable[[th.Tensor], th.Tensor]:
    def forward(inputs: th.Tensor) -> th.Tensor:
        product = F.linear(inputs.bfloat16(), layer.weight.bfloat16()).to(inputs.dtype)
        return product if layer.bias is None else product + layer.bias

    return forward


@contextmanager
def matrix_kernels(choice: str) -> Iterator[None]:
    """
    Inside, float32 products on the CPU use the kernels of ``choice``: ``"default"`` or ``"onednn"``.

    ``"onednn"`` allows oneDNN to take bfloat16, which it does on processors with units for it; ``fastest_matrix_kernels``
    never chooses it there. A user who has set any of torch's float32 precisions keeps that choice.
    """
    if choice == "default" or not _is_untouched():
        yield
        return
    th.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        th.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def _is_untouched() -> bool:
    """Whether all of torch's settings that reach CPU products are as torch sets them."""
    try:
        settings = (th.backends, th.backends.mkldnn, th.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        return all(setting.fp32_precision == "none" for setting in settings)
    except AttributeError:  # a torch without these settings
        return False


def fastest_matrix_kernels() -> str:
    """
    ``"onednn"`` where that makes CPU products faster and not less accurate, else ``"default"``.

    On some AMD processors oneDNN's float32 kernel has twice the speed of the default; on Intel processors with AMX
    oneDNN rounds to bfloat16, which is declined. Measured once per processor and torch version
    and kept in the user's cache folder, so that two runs of one seed cannot differ by a noisy measurement.
    """
    return _fastest_matrix_kernels(f"{processor()}, torch {th.__version__}")


@cache
def _fastest_matrix_kernels(machine: str) -> str:
    try:
        cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sb3_td3x"
    except RuntimeError:  # no home folder, as in a container whose user has no entry in /etc/passwd
        return _probe()
    name = hashlib.sha256(machine.encode()).hexdigest()[:12]
    file = cache_folder / f"matrix_kernels_{name}.json"  # one for each machine: several may share a home folder
    return _kept(file) or _keep(file, {"machine": machine, "kernels": _probe()})


def _kept(file: Path) -> str | None:
    try:
        choice = json.loads(file.read_text())["kernels"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return choice if choice in KERNELS else None


def _keep(file: Path, measured: dict[str, str]) -> str:
    """Of runs that begin together and measure differently all take what the first has kept."""
    beside = file.with_suffix(f".{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(measured, indent=1))
        with suppress(OSError):  # there is one already, or the disk has no hard links
            os.link(beside, file)
        if _kept(file) is None:
            beside.replace(file)
        beside.unlink(missing_ok=True)
    except OSError:
        pass  # measured again in the next process
    return _kept(file) or measured["kernels"]


def _probe() -> str:
    """Compare both kernels on two layers' products, on one thread and without touching any global generator."""
    threads = th.get_num_threads()
    generator = th.Generator().manual_seed(0)
    inputs = th.randn(256, 28, generator=generator)
    first, second = th.randn(28, 400, generator=generator), th.randn(400, 300, generator=generator)
    exact = inputs.double() @ first.double() @ second.double()
    seconds, error = {}, {}
    try:
        th.set_num_threads(1)
        for choice in KERNELS:
            with matrix_kernels(choice):
                error[choice] = float(((inputs @ first @ second).double() - exact).norm() / exact.norm())
                seconds[choice] = min(_seconds(inputs, first, second) for _ in range(20))
    finally:
        th.set_num_threads(threads)
    faster = seconds["default"] / seconds["onednn"] >= WORTHWHILE
    return "onednn" if faster and error["onednn"] <= ACCURATE else "default"


def _seconds(inputs: th.Tensor, first: th.Tensor, second: th.Tensor) -> float:
    """Forward and both backward products, a short one (observations) and a long one (hidden)."""
    start = time.perf_counter()
    hidden = inputs @ first
    outputs = hidden @ second
    hidden.t() @ outputs
    inputs.t() @ (outputs @ second.t())
    return time.perf_counter() - start


def processor() -> str:
    """The processor's model, as precisely as the system tells it."""
    names = ("model name", "cpu family", "model", "stepping")
    try:
        lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
        found = {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}
        described = " ".join(found[name] for name in names if name in found)
    except OSError:
        described = ""
    return f"{described or platform.processor() or platform.machine()}, {th.backends.cpu.get_cpu_capability()}"
