"""
The one unpickler of this package: it reads pickles without running code that they name.

A pickle is a program that may call any function it can name. Here a name is looked up in the tables below, and nothing is
imported because a file names it. The functions that SB3, numpy and torch name in their pickles are not called: functions of
this module that check their arguments take their place. Objects are created only from the classes listed here, and their
attributes are checked.
"""

import io
import math
import pathlib
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import EnumMeta
from functools import cache
from importlib import import_module
from types import FunctionType, NoneType
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch as th
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule

from sb3_td3x.common import files
from sb3_td3x.common.random_state import BIT_GENERATORS, check_generator_state
from sb3_td3x.errors import ModelFileError

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
    "stable_baselines3.common.type_aliases": ("TrainFreq", "TrainFrequencyUnit"),
    "stable_baselines3.her.goal_selection_strategy": ("GoalSelectionStrategy",),
    "stable_baselines3.td3.policies": ("CnnPolicy", "MultiInputPolicy", "TD3Policy"),
    "sb3_td3x.td3x.policies": ("CnnPolicy", "MultiInputPolicy", "TD3XPolicy"),
}  # fmt: skip
"""Classes that a pickle may name, by the module that offers them. SB3 may call them: that only builds layers or optimizers."""

_NOISE = ("_mu", "_sigma", "_dtype")
_SPACE = ("_shape", "dtype", "_np_random")
_BUFFER = (
    "buffer_size", "n_envs", "pos", "full", "action_dim", "observation_space", "action_space", "observations", "actions",
    "rewards", "dones", "timeouts", "handle_timeout_termination", "optimize_memory_usage",
)  # fmt: skip
OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gymnasium.spaces": {
        "Box": (*_SPACE, "low", "high"), "Discrete": (*_SPACE, "n"), "MultiDiscrete": (*_SPACE, "nvec"),
        "MultiBinary": (*_SPACE, "n"), "Dict": (*_SPACE, "spaces"), "Tuple": (*_SPACE, "spaces"),
    },
    "stable_baselines3.common.buffers": dict.fromkeys(("DictReplayBuffer", "NStepReplayBuffer", "ReplayBuffer"), _BUFFER),
    "stable_baselines3.her.her_replay_buffer": {
        "HerReplayBuffer": (
            *_BUFFER, "infos", "ep_start", "ep_length", "_current_ep_start", "her_ratio", "goal_selection_strategy",
        ),
    },
    "stable_baselines3.common.noise": {
        "NormalActionNoise": _NOISE,
        "OrnsteinUhlenbeckActionNoise": (*_NOISE, "_theta", "_dt", "noise_prev", "initial_noise"),
        "VectorizedActionNoise": ("n_envs", "_base_noise", "_noises"),
    },
    "stable_baselines3.common.running_mean_std": {"RunningMeanStd": ("mean", "var", "count")},
    "stable_baselines3.common.utils": {
        "ConstantSchedule": ("val",), "FloatSchedule": ("value_schedule",), "LinearSchedule": ("start", "end", "end_fraction"),
    },
    "stable_baselines3.common.vec_env": {
        "VecNormalize": (
            "observation_space", "ret_rms", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon",
            "training",
        ),
    },
    "sb3_td3x.common.buffers": {"PrioritizedReplayBuffer": (*_BUFFER, "next_observations", "priorities", "_largest")},
    "sb3_td3x.presets": {"HeldSchedule": ("rate", "held")},
}  # fmt: skip
"""
Classes whose objects a pickle may create, by module, with the attributes that each object must have. Others may be there too,
such as those of older versions, but none that would replace a method.
A new schedule or noise class that is to load without trust gets one line here.
"""

_NUMPY_NAMES = ("bool", "bool_", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
                "float16", "float32", "float64")  # fmt: skip
_NUMPY_DTYPE = re.compile(r"[<|=]?([iu][1248]|f[248]|c8|c16|b1)")
_STORAGES = {
    "DoubleStorage": th.float64, "FloatStorage": th.float32, "HalfStorage": th.float16, "BFloat16Storage": th.bfloat16,
    "LongStorage": th.int64, "IntStorage": th.int32, "ShortStorage": th.int16, "CharStorage": th.int8,
    "ByteStorage": th.uint8, "BoolStorage": th.bool,
}  # fmt: skip


class NotAllowed(Exception):
    """A pickle names, calls or sets something that is not on the list. The message names it."""


def load(file: BinaryIO) -> Any:
    """Read a pickle. It raises ``NotAllowed``, or a ``ModelFileError`` if the file holds no whole pickle."""
    if file.read(1) != pickle.PROTO:
        raise ModelFileError("it is not a pickle")
    file.seek(0)
    try:
        return Unpickler(file).load()
    except (NotAllowed, ModelFileError, OSError):
        raise
    except Exception as error:  # whatever Python, numpy, torch and gymnasium raise for values that do not fit
        raise ModelFileError(f"damaged pickle: {type(error).__name__}: {error}") from error


def loads(content: bytes) -> Any:
    """``load`` for bytes."""
    return load(io.BytesIO(content))


def dumps(value: Any) -> bytes:
    """Pickle a value for ``loads``; the error of ``pickle`` or ``loads`` names what of it cannot be saved."""
    content = pickle.dumps(value, protocol=5)
    loads(content)
    return content


def load_tensors(content: bytes) -> Any:
    """Like ``loads``, for what ``torch.save`` wrote, on the CPU. Torch's own reader does not compare checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ModelFileError("it is compressed, which files of tensors are not")
            members = {name.partition("/")[2]: member for name, member in files.unpacked(archive, len(content)).items()}
        if "data.pkl" not in members:
            raise ModelFileError("it is an archive of something else than tensors")
        if members.get("byteorder", b"little") != b"little":
            raise ModelFileError("its tensors are in big-endian byte order")
        return Unpickler(io.BytesIO(members["data.pkl"]), members).load()
    except (NotAllowed, ModelFileError):
        raise
    except Exception as error:
        raise ModelFileError(f"damaged file of tensors: {type(error).__name__}: {error}") from error


def described(value: Any) -> str:
    """A value in an error's text: what it is and the full name of its class."""
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    what = "the class" if isinstance(value, type) else "the function" if named is value else "an object of the class"
    return f"{what} {getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"


_PythonUnpickler: Any = pickle._Unpickler


class Unpickler(_PythonUnpickler):
    """
    Python's unpickler written in Python, because the one in C cannot be told what to build.

    :param members: of the archive that ``torch.save`` wrote around the pickle, by name: the memory of its tensors
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: _PythonUnpickler.dispatch[code]
        for code in (ord(known.code) for known in pickletools.opcodes if known.proto <= 5)  # what later ones do is not known
    }

    def __init__(self, file: BinaryIO, members: dict[str, bytes] | None = None):
        super().__init__(file)
        self.members = members
        self.has_object_array = False

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _names():
            unsafe = ascii(f"{module}.{name}")[1:-1]  # the file's author chose the name: no control characters in messages
            raise NotAllowed("a function or class saved with its code" if "cloudpickle" in module else unsafe)
        return _names()[module, name]

    def persistent_load(self, identifier: Any) -> Any:
        """The memory of a tensor, as a flat tensor."""
        kind, dtype, key, _, count = identifier
        if self.members is None or kind != "storage" or not isinstance(dtype, th.dtype) or type(key) is not str:
            raise NotAllowed("a reference to another file")
        content = self.members[f"data/{key}"]
        if type(count) is not int or len(content) != count * dtype.itemsize:
            raise ModelFileError(f"a tensor has {len(content)} bytes in place of {count} numbers of {dtype}")
        return th.frombuffer(bytearray(content), dtype=dtype) if content else th.empty(0, dtype=dtype)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        is_member = type(function) is EnumMeta and [*map(type, arguments)] in ([int], [str])
        if not (is_member or isinstance(function, FunctionType)) or type(arguments) is not tuple:
            raise NotAllowed(f"a call of {described(function)}")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack[-1]
        if cls is TrainFreq and [*map(type, arguments)] == [int, TrainFrequencyUnit]:
            self.stack[-1] = TrainFreq(*arguments)
        elif isinstance(cls, type) and cls in _created() and type(arguments) is tuple and not arguments:
            self.stack[-1] = object.__new__(cls)
        else:
            raise NotAllowed(f"an object of {described(cls)}")

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is np.ndarray:
            self._build_array(target, state)
        elif isinstance(target, np.dtype):  # made already: only the usual state is allowed
            if state[1] not in ("<", "|", "=") or state[2:7] != (None, None, None, -1, -1):
                raise NotAllowed("an array type in big-endian byte order, or of several fields")
        elif isinstance(target, (np.random.BitGenerator, np.random.Generator)):
            bit_generator: Any = getattr(target, "bit_generator", target)
            bit_generator.state = check_generator_state(state[0] if isinstance(state, tuple) else state)
        elif type(target) is OrderedDict and type(state) is dict and state.keys() <= {"_metadata"}:
            # Torch's, of a state dict; more of it could have the file's tensors put in the place of parameters
            of_layers: dict[str, Any] = state.get("_metadata") or {}
            versions = {name: {"version": part.get("version")} for name, part in of_layers.items()}
            target._metadata = versions  # type: ignore[attr-defined]
        elif type(target) in _created():
            _build_object(target, state)
        elif type(target) is not object:  # in place of a seed sequence
            raise NotAllowed(f"attributes of {described(target)}")

    def _build_array(self, array: np.ndarray, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if array.size or not array.flags.owndata:
            raise ModelFileError("a pickle holds an array that is made twice")
        if isinstance(dtype, np.dtype) and dtype.kind == "O":  # SB3's files have only the infos of hindsight buffers
            if self.has_object_array or type(data) is not list or any(type(info) is not dict for info in data):
                raise NotAllowed("an array of objects other than one array of dicts")
            self.has_object_array = True
        _fill(array, shape, dtype, is_fortran, data)

    def _extend(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is deque:
            _queue(values)  # checks them
        elif type(self.stack[-1]) is not list:
            raise NotAllowed(f"items of {described(self.stack[-1])}")
        self.stack[-1].extend(values)

    def _put(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise NotAllowed(f"items of {described(target)}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not _is_key(key):
                raise NotAllowed(f"{described(key)} as a key")
            target[key] = value

    def refuse(self) -> None:
        raise NotAllowed("a set, or another kind of value that saved models do not have")

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._put([self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self._put(self.pop_mark()),
        # The memory of an array: numpy takes bytes without a copy, and a wrong length allocates nothing
        pickle.BYTEARRAY8[0]: dispatch[pickle.BINBYTES8[0]],
        **dict.fromkeys(
            (code[0] for code in (
                pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.EMPTY_SET,
                pickle.ADDITEMS, pickle.FROZENSET, pickle.DICT, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER,
            )),
            refuse,
        ),
    }  # fmt: skip


def _is_key(key: Any, depth: int = 3) -> bool:
    """Whether a dict may have this key: hashing it is no deep recursion in C."""
    if type(key) is tuple:
        return depth > 0 and all(_is_key(part, depth - 1) for part in key)
    return type(key) in (str, bytes, bool, int, float, NoneType)


def _build_object(target: Any, state: Any) -> None:
    if type(state) is tuple and len(state) == 2 and state[1] is None:
        (state, _) = state
    if type(state) is not dict or vars(target):
        raise NotAllowed(f"attributes of {described(target)}")
    for name in state:  # torch would take a Dict space with `_metadata` for a state dict
        if type(name) is not str or name.startswith(("__", "_metadata")) or callable(getattr(type(target), name, None)):
            raise NotAllowed(f"the attribute {name!r} of {described(target)}")
    if missing := [name for name in _created()[type(target)] if name not in state]:
        raise ModelFileError(f"a {type(target).__name__} lacks {missing[0]}")
    if hasattr(type(target), "__setstate__"):
        target.__setstate__(state)
    else:
        vars(target).update(state)


# What takes the place of the functions that pickles name. Each makes new data from checked arguments and does nothing else


def _dtype(name: str, align: bool = False, copy: bool = True) -> np.dtype:
    if type(name) is not str or not (_NUMPY_DTYPE.fullmatch(name) or name == "O8"):
        raise NotAllowed(f"the array type {name!r}")
    return np.dtype(name)


def _fill(array: np.ndarray, shape: Any, dtype: Any, is_fortran: Any, data: Any) -> None:
    """Give an empty array its numbers, or its list of objects."""
    if len(shape) > 32 or not all(type(side) is int and side >= 0 for side in shape):  # numpy writes beyond its own limit
        raise ModelFileError(f"a pickle holds an array of the shape {shape!r}")
    if not isinstance(dtype, np.dtype) or type(data) is not (list if dtype.kind == "O" else bytes):
        raise NotAllowed(f"an array of {dtype}")
    if len(data) != math.prod(shape) * (1 if dtype.kind == "O" else dtype.itemsize):
        raise ModelFileError(f"a pickle holds an array of another length than its shape {shape} needs")
    array.__setstate__((1, tuple(shape), dtype, bool(is_fortran), data))  # type: ignore[arg-type]


def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray:
    if type(data) is not bytes or order not in ("C", "F", "K"):
        raise NotAllowed(f"an array of {described(data)}")
    _fill(array := np.empty(0, np.int8), shape, dtype, order == "F", data)
    return array if axes is None else array.transpose(axes)


def _scalar(dtype: Any, data: Any) -> Any:
    return _array_from_buffer(data, dtype, (1,), "C")[0]


def _bytes_from_latin(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise NotAllowed(f"text in the encoding {encoding!r}")
    return text.encode("latin1")


def _dummy_schedule(owner: Any, name: str) -> Any:
    """``getattr`` in the old protocol that torch writes: how a policy's file names its learning rate, which is 0."""
    if owner is not BasePolicy or name != "_dummy_schedule":
        raise NotAllowed(f"the attribute {name!r} of {described(owner)}")
    return ConstantSchedule(0.0)


def _queue(items: Any = (), maxlen: Any = None) -> deque[Any]:
    if deque in map(type, items):  # to free queues in queues, Python takes the stack of C
        raise NotAllowed("a queue in a queue")
    return deque(items, maxlen)


def _bit_generator(source: Any) -> np.random.BitGenerator:
    name = source if isinstance(source, str) else getattr(source, "__name__", None)
    return BIT_GENERATORS[name](0)  # type: ignore[index]


def _generator(source: Any, constructor: Any = None) -> np.random.Generator:
    return np.random.Generator(source if isinstance(source, np.random.BitGenerator) else _bit_generator(source))


_SEEDS = ("numpy.random.bit_generator", "numpy.random._bit_generator")
"""Where numpy has its seed sequences, only needed to make further generators from: an ``object()`` takes their place."""


def _tensor(memory: Any, offset: Any, size: Any, stride: Any, gradient: Any, hooks: Any, metadata: Any = None) -> th.Tensor:
    if not isinstance(memory, th.Tensor) or hooks or metadata or len(size) > 64:
        raise NotAllowed("a tensor with hooks, or without memory")
    if math.prod(size) > memory.numel():
        raise ModelFileError("a tensor is larger than its memory")
    # Torch refuses one that leaves its memory
    return memory.as_strided(size, stride, offset).clone().requires_grad_(bool(gradient))


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _dtype,
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array_from_buffer for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: np.empty(0, np.int8) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    ("numpy.random._pickle", "__bit_generator_ctor"): _bit_generator,
    ("numpy.random._pickle", "__generator_ctor"): _generator,
    **{(module, "__pyx_unpickle_SeedSequence"): lambda *arguments: object() for module in _SEEDS},
    ("_codecs", "encode"): _bytes_from_latin,
    **{(builtins, "bytes"): lambda: b"" for builtins in ("__builtin__", "builtins")},
    **{(builtins, "getattr"): _dummy_schedule for builtins in ("__builtin__", "builtins")},
    **{
        (module, name): lambda *parts: pathlib.Path(*parts)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "Path")
    },
    ("collections", "deque"): _queue,
    ("numpy", "ndarray"): object,  # only named
    ("collections", "OrderedDict"): lambda: OrderedDict(),
    ("torch", "device"): lambda *arguments: th.device(*arguments),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
}


def is_known(cls: type) -> bool:
    """Whether a file may name this class without trust."""
    return _names().get((cls.__module__, cls.__qualname__)) is cls


@cache
def _names() -> dict[tuple[str, str], Any]:
    """Everything that a pickle may name, and what it gets for it. A class is named by the module that defines it."""
    classes = [getattr(import_module(module), name) for module, names in CLASSES.items() for name in names]
    classes += [*_created(), *BIT_GENERATORS.values(), BasePolicy]
    return {
        **_FUNCTIONS,
        **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in _STORAGES.values()},
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        **{("numpy", name): np.dtype(name.rstrip("_")).type for name in _NUMPY_NAMES},  # numpy 1 has no np.bool
        **{(module, "SeedSequence"): object for module in _SEEDS},
        **{(cls.__module__, cls.__qualname__): cls for cls in classes},
    }


@cache
def _created() -> dict[type, tuple[str, ...]]:
    """``OBJECTS`` by class."""
    return {getattr(import_module(module), name): names for module, table in OBJECTS.items() for name, names in table.items()}
