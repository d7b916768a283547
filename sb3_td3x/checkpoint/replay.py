"""
The replay buffer on disk: files of ``CHUNK_SIZE`` transitions that are written once and shared by all checkpoints, so that
the cost of a save follows what is new and not the size of the buffer. Steps are numbered in the order in which they were
stored; step n, of all environments, lies at index ``n % buffer_size``.
"""

import math
import uuid
import zlib
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from sb3_td3x.checkpoint.store import CHUNK, as_checkpoint_error
from sb3_td3x.common import files
from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from sb3_td3x.errors import CheckpointError

COVERED = (ReplayBuffer, DictReplayBuffer, NStepReplayBuffer, HerReplayBuffer, PrioritizedReplayBuffer)
"""The classes that are saved in chunks; a buffer of any other is pickled whole."""
MEMORY = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
MARKS = ("ep_start", "ep_length", "_current_ep_start", "priorities", "_largest")
"""Arrays whose entries change for old transitions, of hindsight and prioritized replay. They are saved whole each time."""
CHUNK_SIZE = 10_000
_saved_as: WeakKeyDictionary[ReplayBuffer, dict[Path, dict[str, Any]]] = WeakKeyDictionary()
"""By folder, what a buffer was last saved as there or loaded from."""


def save(buffer: ReplayBuffer, folder: Path, steps: int) -> dict[str, Any]:
    """
    Write the transitions that are new since this very buffer was last saved in the folder or loaded from it.

    :param steps: environment steps so far. If they have filled the buffer since then, everything is written
    :return: plain values that describe the buffer: its layout, ``added``, the number of steps so far, and ``chunks``
    """
    added = buffer.pos + buffer.buffer_size * buffer.full
    chunks: list[dict[str, Any]] = []
    previous = _saved_as.setdefault(buffer, {}).get(folder, {})
    total = previous.get("added", 0)
    total += (buffer.pos - total) % buffer.buffer_size
    holds_some = 0 <= steps - previous.get("at", -math.inf) < buffer.buffer_size * buffer.n_envs
    if holds_some and buffer.full == (total >= buffer.buffer_size):
        added = total
        # Without the last one: where an episode is cut, its last transition changes
        chunks = [chunk for chunk in previous["chunks"][:-1] if chunk["last"] > added - buffer.size()]
        sizes = {folder / chunk["file"]: chunk["bytes"] for chunk in chunks}
        is_there = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
        if not is_there or any(chunk.get("last row") != _row(buffer, chunk["last"]) for chunk in chunks):
            chunks = []  # a file is gone or cut off, or all of the buffer was written anew
    first, rows = chunks[-1]["last"] if chunks else added - buffer.size(), max(CHUNK_SIZE // buffer.n_envs, 1)
    while first < added:
        # Ends before round numbers, where saves often fall: the next save writes the last file again, here one step only
        last = min(((first + 1) // rows + 1) * rows - 1, added)
        chunks.append(_write(buffer, folder, first, last))
        first = last
    saved = _saved_as[buffer][folder] = {**_layout(buffer), "added": added, "at": steps, "chunks": chunks}
    return saved


def load(buffer: ReplayBuffer, folder: Path, saved: dict[str, Any]) -> None:
    """Fill an empty buffer with what ``save`` gave, from checked files; a ``CheckpointError`` if that does not fit."""
    differing = [f"{name} was {saved[name]}, is {value}" for name, value in _layout(buffer).items() if saved[name] != value]
    if differing:
        raise CheckpointError(folder, f"holds transitions that do not fit this run's replay buffer: {'; '.join(differing)}")
    added, memory = saved["added"], _memory(buffer)
    oldest = max(added - buffer.buffer_size, 0)
    for chunk in saved["chunks"]:
        first, last, path = chunk["first"], chunk["last"], folder / chunk["file"]
        if not 0 <= first < last <= min(added, first + CHUNK_SIZE):
            raise CheckpointError(path, f"is said to hold transitions {first} to {last}")
        with as_checkpoint_error(path):
            rows, start = files.read_arrays(path), max(first, oldest)
            for name, array in memory.items():
                array[np.arange(start, last) % buffer.buffer_size] = rows[name][start - first :]
    buffer.pos, buffer.full = added % buffer.buffer_size, added >= buffer.buffer_size
    _saved_as[buffer] = {folder: saved}


def marks(buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """What is saved anew each time: ``MARKS``, and with shared memory the observation after the last transition."""
    arrays = {name: getattr(buffer, name) for name in MARKS if hasattr(buffer, name)}
    saved = {name: array if name[0] == "_" else array[: buffer.size()] for name, array in arrays.items()}
    if buffer.optimize_memory_usage:
        saved["after"] = buffer.observations[buffer.pos]
    return saved


def set_marks(buffer: ReplayBuffer, saved: dict[str, np.ndarray]) -> None:
    """Set what ``marks`` gave; a ``ValueError`` for arrays of another shape."""
    for name in marks(buffer):
        array, value = buffer.observations[buffer.pos] if name == "after" else getattr(buffer, name), saved[name]
        if value.shape[1:] != array.shape[1:] or len(value) > len(array):
            raise ValueError(f"{name} is of shape {value.shape}, not {array.shape}")
        array[: len(value)] = value


def _layout(buffer: ReplayBuffer) -> dict[str, Any]:
    names = ("buffer_size", "n_envs", "optimize_memory_usage")
    return {"class": type(buffer).__name__, **{name: getattr(buffer, name) for name in names}}


def _memory(buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """The arrays of one entry per step; those of Dict observations one by one."""
    memory: dict[str, np.ndarray] = {}
    for name in MEMORY:
        part = getattr(buffer, name, None)
        if isinstance(part, dict):
            memory |= {f"{name}.{key}": array for key, array in part.items()}
        elif part is not None:
            memory[name] = part
    return memory


def _write(buffer: ReplayBuffer, folder: Path, first: int, last: int) -> dict[str, Any]:
    path = folder / f"{CHUNK}{first}_{last}_{uuid.uuid4().hex[:8]}.npz"
    start, end = first % buffer.buffer_size, (last - 1) % buffer.buffer_size + 1
    # A slice is no copy: one of images takes as much memory as the file
    rows: Any = slice(start, end) if start < end else np.arange(first, last) % buffer.buffer_size
    arrays: dict[str, Any] = {name: array[rows] for name, array in _memory(buffer).items()}
    files.write(path, lambda partial: np.savez(partial, **arrays))
    return {"file": path.name, "first": first, "last": last, "last row": _row(buffer, last), **files.describe(path)}


def _row(buffer: ReplayBuffer, last: int) -> int:
    """
    A checksum of the transitions that ``last`` counts last, and of the observations after them: the only ones of which
    ``optimize_memory_usage`` has one array, in which SB3 writes the newest over the oldest.
    """
    memory = _memory(buffer).items()
    rows = (array[(last - (name != "observations")) % buffer.buffer_size] for name, array in memory)
    return zlib.crc32(b"".join(row.tobytes() for row in rows))
