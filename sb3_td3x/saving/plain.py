"""
Values as plain JSON and back, without pickle: what a model is rebuilt from.

JSON's own values stand for themselves; everything else is an object with its kind under ``"@"``. Reading runs no code
of the file's author: kinds are those below, classes those of ``known.py``, and arrays are no larger than their text.
"""

import base64
import math
import pathlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import known
from sb3_td3x.td3x.exploration import AnnealedActionNoise, ScalarActionNoise

KIND = "@"
MAX_DEPTH = 40
"""Values inside values; SB3's nest about five deep."""

MAX_VALUES = 2**19
"""In a stranger's value, every 256 bytes of an array counted as one: what refers to itself often may not grow without end."""

_DTYPE = re.compile(r"[<>|=]?([iu][1248]|f2|[f][48]|c8|c16|b1)")
_NUMBERS = (int, float, list, np.ndarray, np.generic)
BIT_GENERATORS = {
    c.__name__: c for c in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}
TORCH_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        th.float64, th.float32, th.float16, th.bfloat16, th.int64, th.int32, th.int16, th.int8, th.uint8, th.bool,
    )
}  # fmt: skip

# Objects that are nothing but their attributes, and the types that those may have
_NOISE: dict[str, tuple[type, ...]] = {"_mu": _NUMBERS, "_sigma": _NUMBERS, "_dtype": (type, np.dtype)}
OBJECTS: dict[type, dict[str, tuple[type, ...]]] = {
    NormalActionNoise: _NOISE,
    ScalarActionNoise: _NOISE,
    AnnealedActionNoise: {**_NOISE, **dict.fromkeys(("_first", "_last", "_steps"), (int, float, np.generic))},
    OrnsteinUhlenbeckActionNoise: {
        **_NOISE,
        **dict.fromkeys(("_theta", "_dt", "noise_prev"), _NUMBERS),
        "initial_noise": (type(None), *_NUMBERS),
    },
    ConstantSchedule: {"val": (int, float, np.generic)},
    LinearSchedule: dict.fromkeys(("start", "end", "end_fraction"), (int, float, np.generic)),
    FloatSchedule: {"value_schedule": (ConstantSchedule, LinearSchedule)},
}
_OBJECTS_BY_NAME = {kind.__name__: kind for kind in OBJECTS}


class NotPlain(TypeError):
    """A value that JSON cannot hold: a function, an object of the user's own class. The message names it."""


def encode(value: Any) -> Any:
    """
    A value as ``json.dumps(..., allow_nan=False)`` takes it.

    :param value: None, numbers, texts, bytes, lists, tuples, dicts, deques, paths, numpy arrays, scalars, types and
        generators, torch tensors, generators, types and devices, gymnasium's spaces, SB3's noise and schedules,
        ``TrainFreq``, classes of ``known.py``. Tensors are read back on the CPU; an object that occurs twice
        is read back as two
    :raises NotPlain: for anything else, also inside
    """
    return _Encoder(math.inf).encode(value, MAX_DEPTH)


def rebuilt(value: Any) -> Any:
    """
    A value that came of a stranger's pickle, made anew.

    :raises NotPlain: if it is not plain, or too large
    """
    return decode(_Encoder(MAX_VALUES).encode(value, MAX_DEPTH))


def decode(value: Any) -> Any:
    """
    What ``encode`` was given.

    :param value: from ``json.loads``, made by anybody
    :raises ModelFileError: if ``encode`` cannot have made it
    """
    try:
        return _decode(value, MAX_DEPTH)
    except ModelFileError:
        raise
    # Whatever numpy, torch and gymnasium raise about arguments that do not fit
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
        AssertionError,
        MemoryError,
    ) as error:
        raise ModelFileError(f"a value in the file cannot be read: {type(error).__name__}: {error}") from error


class _Encoder:
    """:param most: values in all"""

    def __init__(self, most: float):
        self.left = most

    def encode(self, value: Any, depth: int) -> Any:
        size = len(value) if isinstance(value, (str, bytes)) else 0
        self.left -= 1 + (value.nbytes if isinstance(value, (np.ndarray, th.Tensor)) else size) // 256
        if depth == 0 or self.left < 0:
            raise NotPlain(f"{described(value)}, {f'nested more than {MAX_DEPTH} deep' if depth == 0 else 'too large'}")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
        if kind is list:
            return [self.encode(one, depth - 1) for one in value]
        if kind is dict and KIND not in value and all(type(key) is str for key in value):
            return {key: self.encode(one, depth - 1) for key, one in value.items()}
        tag, parts = _parts(value)
        return {
            KIND: tag,
            **{name: part if isinstance(part, _Raw) else self.encode(part, depth - 1) for name, part in parts.items()},
        }


class _Raw(str):
    """A text that is JSON already."""


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    """The kind of a value and the plainer values that make it up."""
    if (take := _PARTS.get(type(value))) is not None:
        return take(value)
    if (name := known.name_of(value)) is not None:
        return "class", {"name": name}
    if isinstance(value, type) and issubclass(value, np.generic) and is_plain_dtype(np.dtype(value).str):
        return "scalar type", {"name": np.dtype(value).str}
    if isinstance(value, np.generic):
        return "scalar", {"array": np.asarray(value)}
    if isinstance(value, np.dtype):
        return "dtype", {"name": _dtype_name(value)}
    if isinstance(value, pathlib.PurePath):
        return "path", {"value": str(value)}
    if (name := known.enum_name_of(type(value))) is not None:
        return "enum", {"name": name, "member": value.name}
    raise NotPlain(described(value))


def described(value: Any) -> str:
    """A value in an error's text: what it is and the full name of its class."""
    kind = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    what = "the class" if isinstance(value, type) else "the function" if kind is value else "an object of the class"
    return f"{what} {getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', '?')}"


def is_plain_dtype(name: str) -> bool:
    """Whether numpy's name of an array type is one of numbers or booleans."""
    return _DTYPE.fullmatch(name) is not None


def _dtype_name(dtype: np.dtype) -> str:
    if not is_plain_dtype(dtype.str):
        raise NotPlain(f"an array of {dtype}")
    return dtype.str


def _array_parts(array: np.ndarray) -> tuple[str, dict[str, Any]]:
    data = _Raw(base64.b64encode(_plain_array(array).tobytes()).decode())
    return "array", {"dtype": _dtype_name(array.dtype), "shape": list(array.shape), "data": data}


def _plain_array(array: np.ndarray) -> np.ndarray:
    _dtype_name(array.dtype)  # before `tobytes`, which would give an object array's addresses
    return array


def _tensor_parts(tensor: th.Tensor) -> tuple[str, dict[str, Any]]:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES or tensor.layout is not th.strided:
        raise NotPlain(f"a tensor of {tensor.dtype}, {tensor.layout}")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(th.uint8).numpy().tobytes()
    return "tensor", {"dtype": name, "shape": list(tensor.shape), "data": _Raw(base64.b64encode(raw).decode())}


def _generator_parts(generator: th.Generator) -> tuple[str, dict[str, Any]]:
    if generator.device.type != "cpu":
        raise NotPlain(f"a torch generator on {generator.device}")
    return "torch generator", {"state": generator.get_state()}


def _object_parts(value: Any) -> tuple[str, dict[str, Any]]:
    attributes = vars(value)
    _require_attributes(type(value), attributes, NotPlain)
    return "object", {"name": type(value).__name__, "attributes": dict(attributes)}


def _require_attributes(kind: type, attributes: dict[str, Any], error: type[Exception]) -> None:
    expected = OBJECTS[kind]
    if attributes.keys() != expected.keys():
        raise error(f"a {kind.__name__} with the attributes {', '.join(map(str, attributes))}")
    for name, types in expected.items():
        if not isinstance(attributes[name], types):
            raise error(f"a {kind.__name__} whose {name} is {described(attributes[name])}")


def _space_parts(space: spaces.Space, **parts: Any) -> tuple[str, dict[str, Any]]:
    random: np.random.Generator | None = space._np_random
    return "space", {"name": type(space).__name__, "random": random, "parts": parts}


def _random_parts(random: np.random.Generator) -> tuple[str, dict[str, Any]]:
    if type(random.bit_generator).__name__ not in BIT_GENERATORS:
        raise NotPlain(described(random.bit_generator))
    return "numpy generator", {"state": random.bit_generator.state}


_PARTS: dict[type, Callable[[Any], tuple[str, dict[str, Any]]]] = {
    tuple: lambda value: ("tuple", {"items": list(value)}),
    dict: lambda value: ("dict", {"items": [[key, one] for key, one in value.items()]}),
    OrderedDict: lambda value: ("ordered dict", {"items": [[key, one] for key, one in value.items()]}),
    bytes: lambda value: ("bytes", {"data": _Raw(base64.b64encode(value).decode())}),
    deque: lambda value: ("deque", {"items": list(value), "maxlen": value.maxlen}),
    np.ndarray: _array_parts,
    np.random.Generator: _random_parts,
    np.random.RandomState: lambda value: ("numpy random state", {"state": value.get_state(legacy=True)}),
    th.Tensor: _tensor_parts,
    th.Generator: _generator_parts,
    th.dtype: lambda value: ("torch dtype", {"name": str(value).removeprefix("torch.")}),
    th.device: lambda value: ("device", {"name": str(value)}),
    TrainFreq: lambda value: ("train frequency", {"frequency": value.frequency, "unit": value.unit.value}),
    spaces.Box: lambda s: _space_parts(
        s, low=s.low, high=s.high, dtype=s.dtype, bounded_below=s.bounded_below, bounded_above=s.bounded_above
    ),
    spaces.Discrete: lambda s: _space_parts(s, n=s.n, start=s.start),
    spaces.MultiDiscrete: lambda s: _space_parts(s, nvec=s.nvec, dtype=s.dtype, start=s.start),
    spaces.MultiBinary: lambda s: _space_parts(s, n=s.n),
    spaces.Dict: lambda s: _space_parts(s, spaces=list(s.spaces.items())),
    spaces.Tuple: lambda s: _space_parts(s, spaces=tuple(s.spaces)),
    VectorizedActionNoise: lambda v: ("vectorized noise", {"base": v.base_noise, "noises": list(v.noises)}),
    **dict.fromkeys(OBJECTS, _object_parts),
}


def _decode(value: Any, depth: int) -> Any:
    if depth == 0:
        raise ModelFileError(f"a value in the file is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_decode(one, depth - 1) for one in value]
    if not isinstance(value, dict):
        return value
    parts = {key: _decode(one, depth - 1) for key, one in value.items() if key != KIND}
    if KIND not in value:
        return parts
    if value[KIND] not in _MAKERS:
        raise ModelFileError(f"the file holds a value of the unknown kind {value[KIND]!r}")
    return _MAKERS[value[KIND]](**parts)


def _make_float(value: str) -> float:
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value]


def _make_dict(items: list[list[Any]]) -> dict[Any, Any]:
    return {key: one for key, one in items}  # dict() would also take pairs that are texts


def _make_deque(items: list[Any], maxlen: int | None) -> deque[Any]:
    if not isinstance(items, list):
        raise ModelFileError("a deque in the file is no list")
    return deque(items, maxlen)


def _make_dtype(name: str) -> np.dtype:
    if not is_plain_dtype(name):
        raise ModelFileError(f"the file names the array type {name!r}")
    return np.dtype(name)


def _make_array(dtype: str, shape: list[int], data: str) -> np.ndarray:
    kind = _make_dtype(dtype)
    raw = _sized(data, kind.itemsize, shape)
    return np.ndarray(shape, kind, raw).copy()


def _make_tensor(dtype: str, shape: list[int], data: str) -> th.Tensor:
    kind = TORCH_DTYPES[dtype]
    raw = _sized(data, kind.itemsize, shape)
    if not raw:
        return th.empty(shape, dtype=kind)
    return th.frombuffer(bytearray(raw), dtype=kind).reshape(shape)


def _sized(data: str, itemsize: int, shape: list[int]) -> bytes:
    """The bytes of an array, which must be as many as its shape declares."""
    raw = base64.b64decode(data, validate=True)
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ModelFileError(f"an array in the file has the shape {shape!r}")
    if len(raw) != itemsize * math.prod(shape):
        raise ModelFileError(f"an array in the file has {len(raw)} bytes, which is not what the shape {shape} needs")
    return raw


def _make_torch_generator(state: th.Tensor) -> th.Generator:
    generator = th.Generator()
    generator.set_state(state)
    return generator


def numpy_generator(state: dict[str, Any]) -> np.random.Generator:
    """
    A generator that goes on where ``bit_generator.state`` was taken.

    :raises ModelFileError: for a position behind the end of the generator's memory, which numpy would follow
    """
    generator = BIT_GENERATORS[state["bit_generator"]](0)
    if state["bit_generator"] == "MT19937":
        _require_position(state["state"]["pos"], 624)
    if state["bit_generator"] == "Philox":
        _require_position(state["buffer_pos"], 4)
    generator.state = state  # type: ignore[assignment]
    return np.random.Generator(generator)


def _require_position(position: Any, end: int) -> None:
    if not isinstance(position, (int, np.integer)) or not 0 <= position <= end:
        raise ModelFileError(f"a random generator in the file is at position {position!r} of {end}")


def numpy_random_state(state: Sequence[Any]) -> np.random.RandomState:
    """As ``numpy_generator``, for what ``RandomState.get_state`` gave."""
    random = np.random.RandomState(0)
    _require_position(state[2], 624)
    random.set_state(tuple(state))
    return random


def _make_object(name: str, attributes: dict[str, Any]) -> Any:
    kind = _OBJECTS_BY_NAME[name]
    _require_attributes(kind, attributes, ModelFileError)
    made: Any = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def _make_vectorized_noise(base: Any, noises: list[Any]) -> VectorizedActionNoise:
    made = VectorizedActionNoise.__new__(VectorizedActionNoise)
    made.n_envs = len(noises)
    made.base_noise = base
    states = [vars(noise).copy() for noise in noises]
    made.noises = noises  # which resets them
    for noise, state in zip(noises, states, strict=True):
        vars(noise).update(state)
    return made


def _make_space(name: str, random: np.random.Generator | None, parts: dict[str, Any]) -> spaces.Space:
    made: spaces.Space
    if name == "Box":
        bounded = {key: _boolean(parts.pop(key), np.shape(parts["low"])) for key in ("bounded_below", "bounded_above")}
        made = spaces.Box(shape=np.shape(parts["low"]), **parts)
        vars(made).update(bounded)
    else:
        made = _SPACES[name](**parts)
    if random is not None and not isinstance(random, np.random.Generator):
        raise ModelFileError(f"a space in the file has {described(random)} as its generator")
    made._np_random = random  # type: ignore[assignment]
    return made


def _boolean(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    # Gymnasium before 1.0 keeps a scalar for a box of one number
    if not isinstance(array, (np.ndarray, np.bool_)) or array.dtype != bool or array.shape != shape:
        raise ModelFileError("a space in the file has bounds of another shape than its values")
    return array  # type: ignore[return-value]


_SPACES = {c.__name__: c for c in (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Dict, spaces.Tuple)}

_MAKERS: dict[str, Callable[..., Any]] = {
    "float": _make_float,
    "tuple": lambda items: tuple(items),
    "dict": _make_dict,
    "ordered dict": lambda items: OrderedDict(_make_dict(items)),
    "bytes": lambda data: base64.b64decode(data, validate=True),
    "deque": _make_deque,
    "path": lambda value: pathlib.Path(value),
    "array": _make_array,
    "scalar": lambda array: array[()],
    "scalar type": lambda name: _make_dtype(name).type,
    "dtype": _make_dtype,
    "numpy generator": numpy_generator,
    "numpy random state": numpy_random_state,
    "tensor": _make_tensor,
    "torch generator": _make_torch_generator,
    "torch dtype": lambda name: TORCH_DTYPES[name],
    "device": lambda name: th.device(name),
    "train frequency": lambda frequency, unit: TrainFreq(frequency, TrainFrequencyUnit(unit)),
    "class": known.class_named,
    "enum": lambda name, member: known.enum_named(name)[member],  # type: ignore[index]
    "object": _make_object,
    "space": _make_space,
    "vectorized noise": _make_vectorized_noise,
}
