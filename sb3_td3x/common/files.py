"""Writing files so that a crash leaves the old one or the new one, and recognising a file that is not what was written."""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sb3_td3x.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The disk, or its owner's share of it."""
UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What disks answer that cannot flush a folder, as those shared with a virtual machine."""


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder; its renames are journaled
    handle = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in UNSUPPORTED):
            raise
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    Where to write a file that takes the name ``path`` when the block ends. What is there stays until then, or if it fails.

    The place ends as ``path`` does, so that a library finds the format by it.
    """
    beside = path.with_name(f".{path.stem}.partial{path.suffix}")
    beside.unlink(missing_ok=True)  # a stranger's may be a link to elsewhere
    try:
        yield beside
        flush(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    flush(path.parent)


def require_writable(path: Path) -> None:
    """
    Make a file's folder, and find out before the work whether the file can be written there.

    :raises CheckpointError: naming the file, if not
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass


def write(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """
    Write a file whole or not at all.

    :param content: the bytes, or a function that writes the file at the path it is given, which ends as the file's does
    :raises CheckpointError: naming the file, if the disk is full or the folder cannot be written
    """
    with explained(path), replacing(path) as beside:
        if isinstance(content, bytes):
            beside.write_bytes(content)
        else:
            content(beside)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder first loses its name, so that half of one is never taken for a whole."""
    if path.is_dir():
        hidden = path.with_name(f".{path.name}.removed")
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def describe(path: Path) -> dict[str, int | str]:
    """What ``check`` compares a file with."""
    return {"bytes": path.stat().st_size, "sha256": digest(path)}


def has_its_size(path: Path, described: dict[str, int | str]) -> bool:
    """Whether a file is there and as long as ``describe`` found it; ``check`` also reads it."""
    return path.is_file() and path.stat().st_size == described["bytes"]


def check(path: Path, described: dict[str, int | str]) -> None:
    """
    :raises CheckpointError: naming the file, if it is missing, cut off or changed since ``describe``
    """
    with explained(path):
        if not path.exists():
            raise CheckpointError(path, "is missing")
        if (size := path.stat().st_size) != described["bytes"]:
            raise CheckpointError(path, f"is damaged: it has {size} bytes instead of {described['bytes']}")
        if digest(path) != described["sha256"]:
            raise CheckpointError(path, "is damaged: its checksum differs")


@contextmanager
def explained_if_full(folder: Path) -> Iterator[None]:
    """Say which disk is full, in ``CheckpointError``: where a write fails, the operating system names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        raise CheckpointError(folder, f"cannot be written: {error.strerror}") from error


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file into ``CheckpointError``."""
    try:
        yield
    except ConnectionError:
        raise  # no file: the pipe to an environment's process
    except OSError as error:
        raise CheckpointError(path, f"cannot be read or written: {error.strerror or error}") from error
