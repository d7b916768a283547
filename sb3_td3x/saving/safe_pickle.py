"""
Reading pickles of SB3 and torch without running their author's code.

A pickle is a program that may call any function it can name. Here it may name, call and build only what
``pickle_rules.py`` lists. Python's own reader of pickles, in Python, is used for it: the one in C cannot be told what
to build.
"""

import io
import pickle
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, ClassVar

from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import pickle_rules, plain
from sb3_td3x.saving.pickle_rules import Forbidden

_KEYS = (str, int, float, bool, bytes, type(None))  # hashed in a time that their text bounds


_PythonUnpickler: Any = pickle._Unpickler


class Unpickler(_PythonUnpickler):
    """``pickle.Unpickler`` for the fixed list. Also what ``torch.load`` takes as the ``Unpickler`` of a pickle module."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: BinaryIO, **options: Any):
        super().__init__(_Bounded(file), **{"encoding": "ASCII", **options})

    def find_class(self, module: str, name: str) -> Any:
        return pickle_rules.named(module, name)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = pickle_rules.called(self.stack[-1], arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = pickle_rules.created(self.stack[-1], arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        pickle_rules.build(self.stack[-1], state)

    def load_append(self) -> None:
        value = self.stack.pop()
        _require_list(self.stack[-1]).append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        _require_list(self.stack[-1]).extend(values)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _put(self.stack[-1], [key, value])

    def load_setitems(self) -> None:
        pairs = self.pop_mark()
        _put(self.stack[-1], pairs)

    def load_dict(self) -> None:
        pairs = self.pop_mark()
        self.append({})
        _put(self.stack[-1], pairs)

    def load_bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    def refuse(self) -> None:
        raise Forbidden("a kind of value that models do not have")

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        **dict.fromkeys(
            (code[0] for code in (
                pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4,
                pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET,
            )),
            refuse,
        ),
    }  # fmt: skip


def unpickle(file: BinaryIO) -> Any:
    """
    What the file's one pickle holds.

    :raises Forbidden: naming what is not on the list
    :raises ModelFileError: for anything that is no whole pickle
    """
    _require_pickle(file)
    with readable():
        return Unpickler(file).load()


def _require_pickle(file: BinaryIO) -> None:
    """Another kind of file, read as a pickle, would be said to be damaged or to run code."""
    start = file.tell()
    begin = file.read(2)
    file.seek(max(file.seek(0, io.SEEK_END) - 1, 0))
    end = file.read(1)
    file.seek(start)
    if begin == b"PK":
        raise ModelFileError("it is a zip, such as a model's, and no pickle")
    if begin[:1] != pickle.PROTO and end != pickle.STOP:  # the first formats have no mark at their beginning
        raise ModelFileError("it is no pickle")


@contextmanager
def readable() -> Iterator[None]:
    """Turn what a damaged pickle makes python, numpy and torch raise into ``ModelFileError``."""
    try:
        yield
    except (Forbidden, plain.NotPlain, ModelFileError, OSError):
        raise
    except Exception as error:
        raise ModelFileError(f"damaged pickle: {type(error).__name__}: {error}") from error


class _Bounded:
    """A file of which no more can be asked than it has: a length of a few bytes must not allocate gigabytes."""

    def __init__(self, file: BinaryIO):
        self.file = file
        start = file.tell()
        self.left = file.seek(0, io.SEEK_END) - start
        file.seek(start)
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        if count > self.left:
            raise pickle.UnpicklingError("the file is cut off")
        content = self.file.read(count)
        self.left -= len(content)
        return content


def _require_list(value: Any) -> Any:
    if type(value) not in (list, deque):
        raise Forbidden(f"items of {plain.described(value)}")
    return value


def _put(target: Any, pairs: list[Any]) -> None:
    if type(target) not in (dict, OrderedDict):
        raise Forbidden(f"items of {plain.described(target)}")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) not in _KEYS:
            raise Forbidden(f"{plain.described(key)} as a key")
        target[key] = value
