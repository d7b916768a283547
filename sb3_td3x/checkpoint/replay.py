"""
The replay buffer on disk: segments of transitions that are written once and shared by all checkpoints.

Transitions are numbered in the order in which they came; number n lies at index ``n % buffer_size``. A save writes those
that are new since the last one, so that its cost follows what is new and not the size of the buffer.
"""

import hashlib
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from sb3_td3x.checkpoint.store import SEGMENT
from sb3_td3x.common import arrays, files
from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from sb3_td3x.common.transitions import cut
from sb3_td3x.errors import CheckpointError

COVERED = (ReplayBuffer, DictReplayBuffer, NStepReplayBuffer, HerReplayBuffer, PrioritizedReplayBuffer)
MEMORY = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
PRIORITIES = ("priorities", "_largest")
# What changes for old transitions, in hindsight and prioritised replay
MARKS = ("ep_start", "ep_length", "_current_ep_start", *PRIORITIES)
SMALL_ROWS = 10_000
"""A segment below this many rows is joined with the next one, so that frequent saves do not leave thousands of files."""

PRINTED_ROWS = 8
KIND = {
    "class": "the class",
    "buffer_size": "the number of steps",
    "memory": "shape and type of each array",
}
"""What has to be equal for a buffer to be filled, in words."""


def covers(buffer: ReplayBuffer) -> bool:
    """Whether a buffer's transitions can be saved in segments; any other class is saved whole."""
    return type(buffer) in COVERED and not getattr(buffer, "copy_info_dict", False)


def save(buffer: ReplayBuffer, folder: Path, previous: dict[str, Any] | None, new_rows: int) -> dict[str, Any]:
    """
    Write the transitions that ``previous`` does not hold.

    :param folder: of the segments
    :param previous: what this buffer was last saved as or loaded from; everything is written if it does not continue that
    :param new_rows: steps that were added since
    :return: plain values that describe the buffer: ``added``, the number of transitions up to now, and ``segments``
    :raises CheckpointError: naming the file that cannot be written
    """
    added = buffer.pos + buffer.buffer_size * buffer.full
    segments: list[dict[str, Any]] = []
    if previous is not None and (segments := _kept(buffer, folder, previous, new_rows)):
        added = previous["added"] + new_rows
    oldest = added - buffer.size()
    first = segments[-1]["last"] if segments else oldest
    while segments and oldest <= segments[-1]["first"] and _is_to_be_joined(segments[-1], added - first):
        first = segments.pop()["first"]
    if first < added:
        segments.append(_write(buffer, folder, first, added))
    return {**_kind(buffer), "added": added, "segments": segments}


def require_kind(buffer: ReplayBuffer, folder: Path, saved: dict[str, Any]) -> None:
    """
    :param buffer: to be filled
    :param folder: of the segments
    :param saved: from ``save``
    :raises CheckpointError: naming what the saved buffer had of another class, size or shape
    """
    if saved["n_envs"] != buffer.n_envs:
        raise CheckpointError(folder, f"holds transitions of n_envs={saved['n_envs']}, this run has n_envs={buffer.n_envs}")
    differing = [f"{KIND[name]} was {saved[name]}, is {own}" for name, own in _kind(buffer).items() if saved[name] != own]
    if differing:
        raise CheckpointError(folder, f"holds transitions that do not fit this run's replay buffer: {'; '.join(differing)}")


def load(
    buffer: ReplayBuffer, folder: Path, saved: dict[str, Any], drop_damaged: bool = False
) -> tuple[list[str], np.ndarray]:
    """
    Fill an empty buffer with what was saved.

    :param buffer: of the saved kind, see ``require_kind``
    :param saved: from ``save``
    :param drop_damaged: go on without the transitions of damaged segments
    :return: what is missing, in words; and which rows of the buffer hold a transition, ``(buffer_size,)``
    :raises CheckpointError: naming a segment that is damaged
    """
    intact, missing = [], []
    for segment in saved["segments"]:
        if not 0 <= segment["first"] < segment["last"] <= min(saved["added"], segment["first"] + buffer.buffer_size):
            raise CheckpointError(
                folder / segment["file"], f"is said to hold transitions {segment['first']} to {segment['last']}"
            )
        try:
            files.check(folder / segment["file"], segment)
            intact.append(segment)
        except CheckpointError as error:
            if not drop_damaged:
                raise
            missing.append(f"transitions {segment['first']} to {segment['last'] - 1} ({error})")
    held = _place(buffer, folder, intact, saved["added"], bool(missing))
    return missing, held


def marks(buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """What is saved anew each time: hindsight's marks, priorities, and with shared memory the observation after the last."""
    found = {name: getattr(buffer, name)[: buffer.size()] if name[0] != "_" else getattr(buffer, name) for name in MARKS
             if hasattr(buffer, name)}  # fmt: skip
    if buffer.optimize_memory_usage:
        found["after"] = buffer.observations[buffer.pos]
    return found


def set_marks(buffer: ReplayBuffer, saved: dict[str, np.ndarray], is_complete: bool) -> None:
    """
    :param saved: from ``marks``
    :param is_complete: whether no transition is missing; else others have taken their places, and priorities begin anew
    :raises ValueError: for marks of another shape, or priorities that nothing could be drawn by
    """
    for name, value in saved.items():
        if name not in (*MARKS, "after") or (name in PRIORITIES and not is_complete):
            continue
        array = buffer.observations[buffer.pos] if name == "after" else getattr(buffer, name)
        if value.shape[1:] != array.shape[1:] or len(value) > len(array):
            raise ValueError(f"{name} is of shape {value.shape}, not {array.shape}")
        if name in PRIORITIES and not (np.isfinite(value) & (value >= 0)).all():
            raise ValueError(f"{name} holds what is no priority")
        array[: len(value)] = value


def forget_broken_episodes(buffer: HerReplayBuffer, held: np.ndarray) -> None:
    """
    Draw from no episode of which a transition is missing: its goals would be drawn from rows that hold nothing.

    :param held: from ``load``
    """
    missing = np.flatnonzero(~held[: buffer.size()])
    for env in range(buffer.n_envs):
        broken = buffer.ep_start[missing, env]
        buffer.ep_length[np.isin(buffer.ep_start[:, env], broken), env] = 0
        if buffer._current_ep_start[env] in broken:  # what is left of it begins here
            buffer._current_ep_start[env] = buffer.pos


def _kind(buffer: ReplayBuffer) -> dict[str, Any]:
    memory = _memory(buffer)
    return {
        "class": type(buffer).__name__,
        "buffer_size": buffer.buffer_size,
        "n_envs": buffer.n_envs,
        "memory": {name: [list(array.shape[1:]), str(array.dtype)] for name, array in memory.items()},
    }


def _memory(buffer: ReplayBuffer) -> dict[str, Any]:
    """Arrays with one entry per step; those of Dict observations side by side."""
    found: dict[str, Any] = {}
    for name in MEMORY:
        memory = getattr(buffer, name, None)
        if isinstance(memory, dict):
            found |= {f"{name}.{key}": array for key, array in memory.items()}
        elif memory is not None:
            found[name] = memory
    return found


def _rows(buffer: ReplayBuffer, numbers: np.ndarray) -> dict[str, np.ndarray]:
    index = numbers % buffer.buffer_size
    return {name: memory[index] for name, memory in _memory(buffer).items()}


def _stretch(buffer: ReplayBuffer, first: int, last: int) -> dict[str, np.ndarray]:
    """``_rows`` of all from ``first`` to ``last``, without a copy where they lie side by side."""
    begin = first % buffer.buffer_size
    end = begin + last - first
    if end > buffer.buffer_size:
        return _rows(buffer, np.arange(first, last))
    return {name: memory[begin:end] for name, memory in _memory(buffer).items()}


def _write(buffer: ReplayBuffer, folder: Path, first: int, last: int) -> dict[str, Any]:
    path = folder / f"{SEGMENT}{first}_{last}_{uuid.uuid4().hex[:8]}.npz"

    def content(beside: Path) -> None:
        with beside.open("wb") as file:
            np.savez(file, **_stretch(buffer, first, last))  # type: ignore[arg-type]

    files.write(path, content)
    prints = list(_fingerprints(buffer, first, last, first).values())
    return {"file": path.name, "first": first, "last": last, "prints": prints, **files.describe(path)}


def _is_to_be_joined(segment: dict[str, Any], new_rows: int) -> bool:
    """Segments grow like the digits of a counter: each row is written again a few times at most."""
    rows = segment["last"] - segment["first"]
    return rows < SMALL_ROWS and rows <= new_rows


def _fingerprints(buffer: ReplayBuffer, first: int, last: int, oldest: int) -> dict[int, str]:
    """
    Of a few transitions of a segment, the last among them: enough to tell whether the memory still holds these.

    :param oldest: those before it are left out
    """
    places = np.unique(np.linspace(first, last - 1, PRINTED_ROWS).astype(np.int64))
    numbers = {place: number for place, number in enumerate(places) if number >= oldest}
    arrays = [np.ascontiguousarray(array) for array in _rows(buffer, np.array([*numbers.values()])).values()]
    rows = (b"".join(array[index].tobytes() for array in arrays) for index in range(len(numbers)))
    return {place: hashlib.sha256(row).hexdigest()[:8] for place, row in zip(numbers, rows, strict=True)}


def _kept(buffer: ReplayBuffer, folder: Path, previous: dict[str, Any], new_rows: int) -> list[dict[str, Any]]:
    """
    The segments of which the buffer still holds transitions; none if it does not hold what was saved, or a file has gone, as
    where old files are cleaned up.
    """
    kind, added = _kind(buffer), previous["added"] + new_rows
    if kind != {name: previous.get(name) for name in kind} or new_rows < 0 or added % buffer.buffer_size != buffer.pos:
        return []
    oldest = added - buffer.size()
    kept = [one for one in previous["segments"] if one["last"] > oldest]
    if not all(files.has_its_size(folder / one["file"], one) for one in kept):
        return []
    for one in kept:
        found = _fingerprints(buffer, one["first"], one["last"], oldest)
        if not found.items() <= dict(enumerate(one.get("prints") or ())).items():
            return []
    return kept


def _place(buffer: ReplayBuffer, folder: Path, segments: list[dict[str, Any]], added: int, incomplete: bool) -> np.ndarray:
    """Fill the buffer; return which of its rows hold a transition, ``(buffer_size,)``."""
    memory = _memory(buffer)
    in_place = not incomplete or isinstance(buffer, HerReplayBuffer)  # whose marks name indices
    oldest = max(added - buffer.buffer_size, 0)
    count = 0
    held = np.zeros(buffer.buffer_size, dtype=bool)
    for segment in segments:
        numbers = np.arange(max(segment["first"], oldest), segment["last"])
        if not in_place and count:
            buffer.pos = count
            cut(buffer)  # what comes next in memory did not come next in time
        index = numbers % buffer.buffer_size if in_place else np.arange(count, count + len(numbers))
        for name, rows in _read(folder / segment["file"], memory, segment["last"] - segment["first"]).items():
            values = rows[len(rows) - len(numbers) :]
            memory[name][index] = values
        held[index] = True
        count += len(numbers)
    end = added if in_place else count
    buffer.pos, buffer.full = end % buffer.buffer_size, end >= buffer.buffer_size
    if not in_place and segments and segments[-1]["last"] < added:
        cut(buffer)  # nor will what is stored next
    return held


def _read(path: Path, memory: dict[str, Any], length: int) -> dict[str, np.ndarray]:
    rows = read_arrays(path)
    for name, array in memory.items():
        if name not in rows or rows[name].shape != (length, *array.shape[1:]) or rows[name].dtype != array.dtype:
            raise CheckpointError(path, f"holds {name} of another shape or type")
    return rows


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """
    ``arrays.read`` for a file of a checkpoint.

    :raises CheckpointError: where that raises an error
    """
    try:
        return arrays.read(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
