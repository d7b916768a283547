"""Precision and kernels of an update's matrix products, and what becomes of the smallest numbers; all in updates only."""

import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch as th
from torch import nn
from torch.nn import functional as F

# Products with a shorter side are cheap, and mostly carry observations, actions and values: they stay in float32
SHORTEST_HIDDEN_SIDE = 64
ZEN_5 = ("AuthenticAMD", "family 26 ")
MAX_RELATIVE_ERROR = 1e-6  # of a product, compared with float64; float32's own error is 4e-7


def has_bf16_units() -> bool:
    """Whether this x86 processor multiplies bfloat16 numbers itself; otherwise a product takes 4 to 10 times as long."""
    # `torch.cpu.get_capabilities` is not in torch 2.8. All processors with AMX have bfloat16 in it
    return th.cpu._is_avx512_bf16_supported() or th.cpu._is_amx_tile_supported()


def require_supported(products: str, device: th.device) -> None:
    """Refuse updates in ``"bf16"`` where they take several times as long, or were not measured: ``ValueError``."""
    if products == "fp32" or (device.type == "cpu" and has_bf16_units()):
        return
    reason = f"it has not been measured on {device.type!r}"
    if device.type == "cpu":
        reason = "this processor has no units for bfloat16 products (avx512_bf16 or amx_bf16)"
    raise ValueError(f"precision={products!r} cannot be used for updates: {reason}; set precision='fp32'")


def hidden_layers(network: nn.Module) -> list[nn.Linear]:
    """Every large ``nn.Linear`` but the last one of an actor or critic."""
    outputs: set[nn.Module] = set()
    for module in network.modules():
        for head in (*getattr(module, "q_networks", ()), getattr(module, "mu", None)):
            if type(head) is nn.Sequential:
                outputs.update([layer for layer in head if type(layer) is nn.Linear][-1:])
    layers = [layer for layer in network.modules() if type(layer) is nn.Linear]
    return [layer for layer in layers if layer not in outputs and min(layer.weight.shape) >= SHORTEST_HIDDEN_SIDE]


@contextmanager
def bf16_products(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """
    Inside, these layers' products have factors and results rounded to bfloat16, forward and backward, and stored as float32.
    Layers with a ``forward`` of their own keep it.
    """
    layers = [layer for layer in layers if "forward" not in vars(layer)]
    try:
        for layer in layers:
            layer.forward = partial(_bf16_linear, layer)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _bf16_linear(layer: nn.Linear, inputs: th.Tensor) -> th.Tensor:
    product = F.linear(inputs.bfloat16(), layer.weight.bfloat16()).to(inputs.dtype)
    return product if layer.bias is None else product + layer.bias


@contextmanager
def matrix_kernels(choice: str) -> Iterator[None]:
    """
    Inside, float32 products on the CPU use the kernels of ``choice``, ``"default"`` or ``"onednn"``, unless a user has set any
    of torch's float32 precisions. Torch reaches oneDNN's by its "bf16", which really rounds to bfloat16 on some processors.
    """
    if choice == "default" or not _is_untouched():
        yield
        return
    th.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        th.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """
    Inside, numbers below 1.2e-38 count as 0, if torch uses one thread and where the processor can.

    Adam's moments of units that no longer get a gradient shrink to such numbers and stay there: 40 % of all moments after
    300,000 steps of the half-cheetah. Updates then take longer, by 3 to 4 % on a Zen 4. Torch's other threads inherit the
    setting when they start and keep it.
    """
    is_flushing = sys.float_info.min / 2 == 0
    th.set_flush_denormal(is_flushing or th.get_num_threads() == 1)
    try:
        yield
    finally:
        th.set_flush_denormal(is_flushing)


def _is_untouched() -> bool:
    """Whether all of torch's settings that reach CPU products are as torch sets them; torch 2.8 does not have them."""
    settings = (th.backends, th.backends.mkldnn, getattr(th.backends.mkldnn, "matmul", None))
    return all(getattr(setting, "fp32_precision", None) == "none" for setting in settings)


def choose_matrix_kernels() -> str:
    """``"onednn"`` on AMD's family 26 (Zen 5), twice as fast there, if accurate. Nothing is timed: a seed gives one run."""
    is_known = _is_untouched() and all(part in processor() for part in ZEN_5)  # a user's setting would be what is compared
    return "onednn" if is_known and is_accurate("onednn") else "default"


@cache
def is_accurate(kernels: str) -> bool:
    """Whether these matrix kernels compute in float32 here, without touching any global generator."""
    generator = th.Generator().manual_seed(0)
    left, right = (th.randn(*shape, generator=generator, device="cpu") for shape in ((256, 400), (400, 300)))
    exact = left.double() @ right.double()
    with matrix_kernels(kernels):
        product = (left @ right).double()
    return float((product - exact).norm() / exact.norm()) <= MAX_RELATIVE_ERROR


@cache
def processor() -> str:
    """The processor's model, as precisely as the system tells it."""
    described = ""
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        lines = [line.split(":", 1) for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if ":" in line]
        values = {name.strip(): value.strip() for name, value in lines}
        prefixes = {"vendor_id": "", "model name": "", "cpu family": "family ", "model": "model ", "stepping": "stepping "}
        described = " ".join(prefix + values[name] for name, prefix in prefixes.items() if name in values)
    return f"{described or platform.processor() or platform.machine()}, {th.backends.cpu.get_cpu_capability()}"
