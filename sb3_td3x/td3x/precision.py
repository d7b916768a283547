"""
Which numbers and which kernels the matrix products of an update use.

Both are set for the updates only: acting, evaluation and everything else in the user's process stay as they were.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch as th
from torch import nn
from torch.nn import functional as F

PRECISIONS = ("fp32", "bf16")
KERNELS = ("default", "onednn")
# Products with a shorter side are cheap, and mostly carry observations, actions and values: they stay in float32
SHORTEST_HIDDEN_SIDE = 64
ZEN_5 = ("AuthenticAMD", "family 26 ")
MAX_RELATIVE_ERROR = 1e-6  # of a product, compared with float64; float32's own error is 4e-7


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

    ``"onednn"`` allows oneDNN to take bfloat16, which it does on processors with units for it; ``choose_matrix_kernels``
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


def choose_matrix_kernels() -> str:
    """
    ``"onednn"`` on processors where oneDNN's float32 products are known to be faster and are not less accurate here, else
    ``"default"``.

    On AMD's family 26 (Zen 5) they take half the time of the default kernels. The choice is made by the processor's name, not
    by a measurement, so that two runs with one seed cannot differ by noise.
    """
    return "onednn" if all(part in processor() for part in ZEN_5) and _onednn_is_accurate() else "default"


@cache
def _onednn_is_accurate() -> bool:
    """Whether oneDNN computes in float32 here, without touching any global generator."""
    generator = th.Generator().manual_seed(0)
    left, right = th.randn(256, 400, generator=generator), th.randn(400, 300, generator=generator)
    exact = left.double() @ right.double()
    with matrix_kernels("onednn"):
        product = (left @ right).double()
    return float((product - exact).norm() / exact.norm()) <= MAX_RELATIVE_ERROR


@cache
def processor() -> str:
    """The processor's model, as precisely as the system tells it."""
    names = {"vendor_id": "", "model name": "", "cpu family": "family ", "model": "model ", "stepping": "stepping "}
    try:
        lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()]
        values = {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}
        described = " ".join(prefix + values[name] for name, prefix in names.items() if name in values)
    except OSError:
        described = ""
    return f"{described or platform.processor() or platform.machine()}, {th.backends.cpu.get_cpu_capability()}"
