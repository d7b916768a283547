"""Writing files so that a crash leaves the old one or the new one, detecting files that were damaged since, and unpacking."""

import errno
import hashlib
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np

from sb3_td3x.errors import CheckpointError, ModelFileError

MAX_RATIO = 20  # how many times its own size the members of a zip file may declare to have


def flush(path: Path) -> None:
    """Wait until the content of a file, or where the system can a folder's list of names, is on the disk."""
    with suppress(OSError) if path.is_dir() else nullcontext():
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(path: Path) -> Path:
    """Make a folder and its parents, and flush their names, so that a power failure does not lose what is in the folder."""
    if not path.is_dir():
        if path.parent != path:  # a drive that is missing has none above it
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Make the folder, and give a temporary path that is renamed to ``path`` at the end. After an error the old file stays."""
    make_folder(path.parent)
    # With the suffix, by which libraries choose the format, and unique, so that several threads may write the same file
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.partial{path.suffix}")
    try:
        partial.touch()  # a library that is to write it may hide why it cannot
        yield partial
        flush(partial)
        with suppress(OSError):  # there is none yet, or its disk has no modes
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush(path.parent)


def write(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write bytes, or what a function writes to a path it is given, completely or raise a ``CheckpointError``."""
    with explained(path), replacing(path) as partial:
        if isinstance(content, bytes):
            partial.write_bytes(content)
        else:
            content(partial)


def unpacked(archive: zipfile.ZipFile, size: int) -> dict[str, bytes]:
    """The members of a zip file of ``size`` bytes, see ``check_zip``."""
    check_zip(archive, size)
    # Without a limit `zipfile` unpacks a gigabyte of a member before it looks at what that declares
    return {member.filename: archive.open(member).read(member.file_size) for member in archive.infolist()}


def check_zip(archive: zipfile.ZipFile, size: int) -> None:
    """``ModelFileError`` for members in an unusual compression, or far larger than the file of ``size`` bytes."""
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in archive.infolist()):
        raise ModelFileError("it is compressed in a way that its kind of file is not")
    declared = sum(member.file_size for member in archive.infolist())
    if declared > MAX_RATIO * size:
        raise ModelFileError(f"it has {size} bytes and would unpack to {declared}")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file; ``ValueError`` if it is damaged or holds objects."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_zip(archive, path.stat().st_size)
            return {name.removesuffix(".npy"): np.lib.format.read_array(archive.open(name)) for name in archive.namelist()}
    except OSError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have no common class of errors
        raise ValueError(f"it is not an npz file of numbers: {error}") from error


def describe(path: Path) -> dict[str, int | str]:
    """The size and SHA-256 of a file, for ``check``."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def check(path: Path, described: dict[str, int | str]) -> None:
    """Raise a ``CheckpointError`` that names the file if it is missing or has changed since ``describe``."""
    with explained(path):
        if not path.is_file():
            raise CheckpointError(path, "is missing")
        if describe(path)["sha256"] != described["sha256"]:
            raise CheckpointError(path, "is damaged: its checksum differs")


def link_out_of(folder: Path) -> Path | None:
    """A link in a folder that leads out of it; through such a link an untrusted run could change other files."""

    def refuse(error: OSError) -> None:  # `os.walk` passes over a folder that cannot be listed, but perhaps be entered
        if os.access(error.filename, os.X_OK):
            raise error

    with explained(folder):
        for parent, folders, names in os.walk(folder, onerror=refuse):
            for path in (Path(parent, name) for name in (*folders, *names)):
                if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
                    return path
    return None


@contextmanager
def explained(path: Path, only_full: bool = False) -> Iterator[None]:
    """Turn errors of the operating system, or only of a full disk or quota, into a ``CheckpointError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        # A ConnectionError comes from the pipe to an environment's process
        if isinstance(error, ConnectionError) or (only_full and error.errno not in (errno.ENOSPC, errno.EDQUOT)):
            raise
        raise CheckpointError(path, f"cannot be read or written: {error.strerror or error}") from error
