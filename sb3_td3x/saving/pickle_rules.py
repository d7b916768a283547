"""
The fixed list for pickles: what they may name, what may be called with which arguments, what may be given attributes.

SB3 and torch pickle by naming functions of numpy, torch and python. Those that are dangerous, or that trust their
arguments, are not called: ours of the same effect stand in for them.
"""

import io
import math
import pathlib
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import TrainFreq
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import known, plain

_DTYPES = (
    "bool",
    "bool_",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)


class Forbidden(Exception):
    """A pickle names, calls or sets what is not on the list. The message names it."""


class _Named:
    """Stands in for a function that a pickle names."""

    def __init__(self, name: str):
        self.name = name


class _Ignored:
    """A seed sequence: it only serves to spawn further generators, which models do not."""


def called(function: Any, arguments: Any) -> Any:
    """The result of a call that a pickle asks for."""
    name = function.name if isinstance(function, _Named) else None
    if isinstance(arguments, tuple):
        if name in _CALLS:
            return _CALLS[name](*arguments)
        if isinstance(function, type) and known.enum_name_of(function) and len(arguments) == 1:
            return function(*arguments)
        if function in _CLASS_CALLS:
            return _CLASS_CALLS[function](*arguments)
    raise Forbidden(f"a call of {name or plain.described(function)}")


def created(kind: Any, arguments: Any) -> Any:
    """The object without attributes that a pickle asks for."""
    if kind is TrainFreq:
        return TrainFreq(*arguments)
    if kind not in _bags() or arguments != ():
        raise Forbidden(f"an object of {plain.described(kind)}")
    return object.__new__(kind)


def named(module: str, name: str) -> Any:
    """What a pickle gets for a name."""
    if (module, name) not in _names():
        raise Forbidden(f"{module}.{name}")
    return _names()[module, name]


def build(target: Any, state: Any) -> None:
    """Give an object the attributes that a pickle holds for it."""
    builder = _build_attributes if type(target) in _bags() else _BUILDS.get(type(target))
    if builder is None:
        raise Forbidden(f"attributes of {plain.described(target)}")
    builder(target, state)


# What may be called. Each gives new data and nothing else


def _dtype(name: str, align: bool = False, copy: bool = True) -> np.dtype:
    if not plain.is_plain_dtype(name) and name != "O8":
        raise Forbidden(f"the array type {name!r}")
    return np.dtype(name, False, True)


def _from_buffer(data: bytes | bytearray, dtype: np.dtype, shape: tuple[int, ...], order: str, axes: Any = None) -> np.ndarray:
    _require_numbers(dtype)
    array = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    if order == "K" and axes is not None:
        return array.reshape(shape, order="C").transpose(axes)
    return array.reshape(shape, order=order)  # type: ignore[call-overload]


def _scalar(dtype: np.dtype, data: bytes) -> Any:
    _require_numbers(dtype)
    return np.ndarray((1,), dtype, data)[0] if len(data) == dtype.itemsize else _fail("a number of another size than its type")


def _empty_array(kind: type, shape: Any, code: Any) -> np.ndarray:
    return np.empty(0, np.int8) if kind is np.ndarray else _fail("an array of another class")


def _latin(text: str, encoding: str) -> bytes:
    return text.encode("latin1") if encoding == "latin1" else _fail("a text of another encoding")


def _attribute(owner: Any, name: str) -> Any:
    """How torch's protocol names the learning rate that SB3 writes into a policy's file."""
    if owner is BasePolicy and name == "_dummy_schedule":
        return BasePolicy._dummy_schedule
    raise Forbidden(f"the attribute {name!r} of {plain.described(owner)}")


def _bit_generator(kind: Any) -> Any:
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", None)
    return plain.BIT_GENERATORS[kind](0)


def _generator(source: Any, constructor: Any = None) -> np.random.Generator:
    made = source if isinstance(source, np.random.BitGenerator) else _bit_generator(source)
    return np.random.Generator(made)


def _random_state(source: Any, constructor: Any = None) -> np.random.RandomState:
    made = source if isinstance(source, np.random.BitGenerator) else _bit_generator(source)
    return np.random.RandomState(made)


def _storage(content: bytes) -> Any:
    """torch's own function would read it as an unrestricted pickle. torch writes its old format here, and no archive."""
    if content.startswith(b"PK"):
        return _fail("an archive where torch writes none")  # compressed, it would unpack to any size
    storage = th.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return storage if isinstance(storage, (th.storage.TypedStorage, th.UntypedStorage)) else _fail("no storage")


def _tensor(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], gradient: bool, hooks: Any, more: Any = None
) -> th.Tensor:
    if not isinstance(storage, th.storage.TypedStorage) or hooks or more:
        raise Forbidden("a tensor with hooks or without memory")
    if math.prod(size) > storage._size():
        raise ModelFileError("a tensor is larger than its memory")
    return th._utils._rebuild_tensor_v2(storage, offset, size, stride, bool(gradient), OrderedDict())


def _parameter(data: th.Tensor, gradient: bool, hooks: Any) -> th.nn.Parameter:
    return (
        th.nn.Parameter(data, bool(gradient)) if isinstance(data, th.Tensor) and not hooks else _fail("a parameter with hooks")
    )


def _fail(what: str) -> Any:
    raise ModelFileError(f"a pickle holds {what}")


def _require_numbers(dtype: Any) -> None:
    if not isinstance(dtype, np.dtype) or not plain.is_plain_dtype(dtype.str):
        raise Forbidden(f"an array of {dtype}")


_CALLS: dict[str | None, Callable[..., Any]] = {
    "numpy.dtype": _dtype,
    "_frombuffer": _from_buffer,
    "_reconstruct": _empty_array,
    "scalar": _scalar,
    "encode": _latin,
    "bytes": lambda: b"",
    "getattr": _attribute,
    "__bit_generator_ctor": _bit_generator,
    "__generator_ctor": _generator,
    "__randomstate_ctor": _random_state,
    "__pyx_unpickle_SeedSequence": lambda *arguments: _Ignored(),
    "_load_from_bytes": _storage,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_parameter": _parameter,
    "Generator": lambda device: th.Generator(),
    "device": lambda *arguments: th.device(*arguments),
    "path": lambda *parts: pathlib.Path(*parts),
}
_CLASS_CALLS: dict[Any, Callable[..., Any]] = {
    deque: lambda items=(), maxlen=None: deque(list(items), maxlen),
    OrderedDict: lambda: OrderedDict(),
}
_FUNCTIONS = (
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("numpy.random._pickle", name) for name in ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor")),
    *((f"numpy.random.{module}", "__pyx_unpickle_SeedSequence") for module in ("bit_generator", "_bit_generator")),
    ("_codecs", "encode"), ("__builtin__", "bytes"), ("builtins", "getattr"), ("__builtin__", "getattr"),
    ("torch.storage", "_load_from_bytes"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
    ("torch._C", "Generator"), ("torch", "device"),
)  # fmt: skip
_NAMED_ONLY = (np.ndarray, BasePolicy, *plain.BIT_GENERATORS.values(), np.random.SeedSequence)
_BAGS = (
    spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple,
    RunningMeanStd, VecNormalize, plain.VectorizedActionNoise, *plain.OBJECTS,
)  # fmt: skip


@cache
def _bags() -> frozenset[type]:
    """Classes whose objects are nothing but their attributes; ours can be imported only after this module."""
    return frozenset((*_BAGS, *(known.class_named(name) for name in known.BUFFERS)))


@cache
def _names() -> dict[tuple[str, str], Any]:
    """Everything that a pickle may name, and what it gets for it."""
    named: dict[tuple[str, str], Any] = {place: _Named(place[1]) for place in _FUNCTIONS}
    named["numpy", "dtype"] = _Named("numpy.dtype")
    for module in ("pathlib", "pathlib._local"):
        named |= {(module, name): _Named("path") for name in ("PosixPath", "WindowsPath", "Path")}
    named |= {("numpy", name): np.dtype(name).type for name in _DTYPES}  # numpy 1 has no np.bool
    named |= {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in plain.TORCH_DTYPES.values()}
    classes = [*_NAMED_ONLY, *_bags(), *_CLASS_CALLS, TrainFreq, *map(known.class_named, known.names())]
    classes += [known.enum_named(f"{module}:{name}") for module, names in known.ENUMS.items() for name in names]
    named |= {(kind.__module__, kind.__qualname__): kind for kind in classes}
    named |= {(module, name): getattr(import_module(module), name) for module, name in _OTHER_PLACES}
    return named


_OTHER_PLACES = (("numpy.random.bit_generator", "SeedSequence"),)


# What may be given attributes


def _build_dtype(dtype: np.dtype, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) < 8 or state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
        raise Forbidden("an array type of several fields")
    if (state[5], state[6]) != (-1, -1):
        raise Forbidden("an array type of another size")
    dtype.__setstate__((3, state[1], None, None, None, -1, -1, 63 if dtype.kind == "O" else 0))  # type: ignore[attr-defined]


def _build_array(array: np.ndarray, state: Any) -> None:
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, np.dtype) or not all(type(side) is int and side >= 0 for side in shape):
        raise ModelFileError("a pickle holds an array of no type or shape")
    if dtype.kind == "O":
        if type(data) is not list or len(data) != math.prod(shape):
            raise ModelFileError("a pickle holds an array of another length than its shape needs")
    else:
        _require_numbers(dtype)
        if not isinstance(data, bytes) or len(data) != dtype.itemsize * math.prod(shape):
            raise ModelFileError("a pickle holds an array of another length than its shape needs")
    array.__setstate__((1, tuple(shape), dtype, bool(fortran), data))  # type: ignore[arg-type]


def _build_bit_generator(generator: Any, state: Any) -> None:
    values = state[0] if isinstance(state, tuple) else state
    if values["bit_generator"] != type(generator).__name__:
        raise ModelFileError("a pickle holds the state of another generator")
    generator.state = plain.numpy_generator(values).bit_generator.state


def _build_random_state(random: np.random.RandomState, state: Any) -> None:
    plain.numpy_generator({key: state[key] for key in ("bit_generator", "state")})
    random.set_state(state)


def _build_torch_generator(generator: th.Generator, state: Any) -> None:
    generator.set_state(next(part for part in reversed(state) if isinstance(part, th.Tensor)))


def _build_ordered_dict(target: OrderedDict, state: Any) -> None:
    if not isinstance(state, dict) or state.keys() > {"_metadata"}:
        raise Forbidden("attributes of an OrderedDict")
    target._metadata = state.get("_metadata")  # type: ignore[attr-defined]


def _build_attributes(target: Any, state: Any) -> None:
    if isinstance(state, tuple) and len(state) == 2 and state[1] is None:
        (state, _) = state
    if type(state) is not dict:
        raise Forbidden(f"attributes of {plain.described(target)}")
    for name in state:
        if type(name) is not str or name.startswith("__") or callable(getattr(type(target), name, None)):
            raise Forbidden(f"the attribute {name!r} of {plain.described(target)}")
    if hasattr(type(target), "__setstate__"):
        target.__setstate__(state)
    else:
        target.__dict__.update(state)


_BUILDS: dict[type, Callable[[Any, Any], None]] = {
    **dict.fromkeys(plain.BIT_GENERATORS.values(), _build_bit_generator),
    **{type(np.dtype(code)): _build_dtype for code in "?bhilqBHILQefdFDO"},
    np.ndarray: _build_array,
    np.random.Generator: lambda made, state: _build_bit_generator(made.bit_generator, state),
    np.random.RandomState: _build_random_state,
    th.Generator: _build_torch_generator,
    OrderedDict: _build_ordered_dict,
    _Ignored: lambda made, state: None,
}
