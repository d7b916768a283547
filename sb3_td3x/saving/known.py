"""
The fixed list of classes that a file may name.

Whoever reads a model file does so without running code of the file's author: a file names classes, and only those
below are looked up. None of them does anything when it is called but build layers, optimisers or memory.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

CLASSES: dict[str, tuple[str, ...]] = {
    "torch.nn": (
        "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LayerNorm",
        "LeakyReLU", "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus",
        "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    ),
    "torch.optim": (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    ),
    "stable_baselines3.common.sb2_compat.rmsprop_tf_like": ("RMSpropTFLike",),
    "stable_baselines3.common.torch_layers": ("CombinedExtractor", "FlattenExtractor", "NatureCNN"),
    "stable_baselines3.td3.policies": ("CnnPolicy", "MultiInputPolicy", "TD3Policy"),
    "stable_baselines3.common.buffers": ("DictReplayBuffer", "NStepReplayBuffer", "ReplayBuffer"),
    "stable_baselines3.her.her_replay_buffer": ("HerReplayBuffer",),
    "sb3_td3x.td3x.policies": ("CnnPolicy", "MultiInputPolicy", "TD3XPolicy"),
    "sb3_td3x.common.buffers": ("PrioritizedReplayBuffer",),
}  # fmt: skip
"""By the module that offers them: layers, optimisers, feature extractors, policies and replay buffers."""

ENUMS: dict[str, tuple[str, ...]] = {
    "stable_baselines3.common.type_aliases": ("TrainFrequencyUnit",),
    "stable_baselines3.her.goal_selection_strategy": ("GoalSelectionStrategy",),
}

_WITH_BUFFERS = (
    "stable_baselines3.common.buffers", "stable_baselines3.her.her_replay_buffer",
    "sb3_td3x.common.buffers",
)  # fmt: skip
BUFFERS = tuple(f"{module}:{name}" for module in _WITH_BUFFERS for name in CLASSES[module])


def names() -> tuple[str, ...]:
    """Of all classes, as ``class_named`` takes them."""
    return tuple(_by_name())


def class_named(name: str) -> type:
    """
    The class that ``"module:Name"`` stands for.

    :raises KeyError: if it is not on the list
    """
    return _by_name()[name]


def name_of(value: Any) -> str | None:
    """``"module:Name"`` of a class on the list, ``None`` for anything else."""
    return _by_class().get(value) if isinstance(value, type) else None


def enum_named(name: str) -> type:
    """As ``class_named``, for enumerations."""
    return dict(_found(ENUMS))[name]


def enum_name_of(value: Any) -> str | None:
    """As ``name_of``, for enumerations."""
    return next((name for name, enumeration in _found(ENUMS) if enumeration is value), None)


@cache
def _by_name() -> dict[str, type]:
    return dict(_found(CLASSES))


@cache
def _by_class() -> dict[type, str]:
    return {found: name for name, found in _found(CLASSES)}


def _found(table: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, type]]:
    for module, names in table.items():
        for name in names:
            found = getattr(import_module(module), name, None)  # an older torch may lack a layer
            if isinstance(found, type):
                yield f"{module}:{name}", found
