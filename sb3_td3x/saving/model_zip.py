"""A model's zip as an archive: what it must hold, how large that may be, and saying clearly what is wrong with it."""

import hashlib
import io
import json
import pathlib
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sb3_td3x.errors import ModelFileError

FORMAT_VERSION = 1
"""Written into every zip; raised when a newer program's zip could no longer be read by an older one."""

BEFORE: dict[str, Any] = {
    "n_quantiles": 1, "qf_learning_rate": None, "max_grad_norm": None, "prioritization": None,
}  # fmt: skip
"""What a program did that did not have these keywords: for zips without them, whatever today's default is."""

PLAIN = "td3x.json"
"""Our own member beside SB3's: the attributes as plain JSON. A zip without it is SB3's, or of an early TD3X."""

TENSORS = ("policy.pth", "actor.optimizer.pth", "critic.optimizer.pth")
MEMBERS = ("data", *TENSORS)
OTHER_MEMBERS = (PLAIN, "pytorch_variables.pth", "_stable_baselines3_version", "system_info.txt")

MAX_JSON = 64 * 2**20
"""Bytes of one JSON member. A usual model's have 20 kB; ``_last_obs`` of many environments with images is the largest part."""

MAX_RATIO = 20
"""How many times the file's own size its members may declare to have. SB3 and torch store without compression."""

_TORCH_MEMBER = re.compile(
    r"[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|data/\d+|\.data/serialization_id)"
)

_FAULTS = (
    RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, EOFError,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip

PathOrFile = str | pathlib.Path | io.BufferedIOBase


@dataclass(frozen=True)
class ModelFile:
    """
    A zip whose directory and JSON are in order; nothing is unpickled.

    :param name: for errors
    :param content: all of it, so that what was checked is what is read
    :param data: SB3's member ``data``: plain values as they are, a description of everything else
    :param plain: our member ``td3x.json``, ``None`` if there is none
    """

    name: str
    content: bytes
    data: dict[str, Any]
    plain: dict[str, Any] | None

    def open(self) -> io.BytesIO:
        return io.BytesIO(self.content)

    def member(self, name: str) -> bytes | None:
        """One member's content, ``None`` if there is none of that name."""
        with zipfile.ZipFile(self.open()) as archive:
            return archive.read(name) if name in archive.namelist() else None


def read(path: PathOrFile, strict: bool = True) -> ModelFile:
    """
    Read a model's zip and check it.

    :param strict: also refuse members that no model has, and members and tensors that would take far more memory
        than the file has bytes
    :raises FileNotFoundError: if there is no such file
    :raises ModelFileError: if it is damaged, another algorithm's, or of a newer format
    """
    name = name_of(path)
    content = _content(path)
    with explained_errors(name, everything=True), zipfile.ZipFile(io.BytesIO(content)) as archive:
        _require_members(archive, name)
        if strict:
            _require_modest(archive, len(content), name)
            for member in archive.namelist():
                if member.endswith((".pth", ".pt")):
                    require_tensors(archive.read(member), f"{name}: {member}")
        if (damaged := archive.testzip()) is not None:
            raise ModelFileError(f"{name} is damaged: its member {damaged!r} fails its checksum")
        data = _json(archive, "data", name)
        _require_known_format(data, name)
        plain = _json(archive, PLAIN, name) if PLAIN in archive.namelist() else None
        if plain is not None and strict:
            _require_unchanged(archive, plain, name)
    return ModelFile(name, content, data, plain)


def with_plain(zipped: io.BytesIO, fields: dict[str, Any], untrusted: dict[str, str]) -> None:
    """
    Add our own member to a zip that SB3 wrote.

    :param zipped: the zip, changed in place
    :param fields: attributes as ``plain.encode`` gives them
    :param untrusted: attributes that it refuses, with what they hold
    """
    with zipfile.ZipFile(zipped, "a") as archive:
        checksums = {member: _sha256(archive.read(member)) for member in archive.namelist()}
        plain = {"fields": fields, "untrusted": untrusted, "sha256": checksums}
        archive.writestr(PLAIN, json.dumps({**plain, "own sha256": _sha256(_canonical(plain))}, allow_nan=False))


def require_tensors(content: bytes, name: str) -> None:
    """
    Check the archive that ``torch.save`` wrote, before torch reads it.

    :raises ModelFileError: for a member that ``torch.save`` does not write (TorchScript's among them), for a
        compressed one, and for torch's format of before 2020
    """
    with explained_errors(name, everything=True), zipfile.ZipFile(io.BytesIO(content)) as archive:
        for member in archive.infolist():
            if not _TORCH_MEMBER.fullmatch(member.filename):
                raise ModelFileError(f"{name} has a member {member.filename!r} that no file of tensors has")
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise ModelFileError(f"{name} is compressed, which torch's files are not")


@contextmanager
def explained_errors(name: str, everything: bool = False) -> Iterator[None]:
    """
    Turn what reading a bad file raises into ``ModelFileError``.

    :param name: of the file
    :param everything: whatever is raised is the file's fault; otherwise a ``ValueError`` or ``AssertionError`` may come
        from what the caller has given, and is left
    """
    faults = (Exception,) if everything else _FAULTS
    try:
        yield
    except ModelFileError as error:
        raise error if name in str(error) else ModelFileError(f"{name} cannot be loaded: {error}") from error
    except faults as error:
        if isinstance(error, zipfile.BadZipFile):
            raise ModelFileError(f"{name} is not a model zip, or is damaged: {error}") from error
        raise ModelFileError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def name_of(path: Any) -> str:
    return str(path) if isinstance(path, (str, pathlib.Path)) else "the file"


def _content(path: PathOrFile) -> bytes:
    """SB3's rule: ``.zip`` is appended to the name of a file that is not there."""
    if isinstance(path, io.IOBase):
        path.seek(0)
        return path.read()
    plain = pathlib.Path(path)
    return (plain if plain.exists() else plain.with_name(f"{plain.name}.zip")).read_bytes()


def _require_members(archive: zipfile.ZipFile, name: str) -> None:
    names = archive.namelist()
    missing = sorted(set(MEMBERS) - set(names))
    if missing:
        raise ModelFileError(f"{name} is not a TD3 model, or is cut off: it lacks {', '.join(missing)}")
    if len(names) != len(set(names)):
        raise ModelFileError(f"{name} is damaged: it has two members of one name")


def _require_modest(archive: zipfile.ZipFile, size: int, name: str) -> None:
    extra = sorted(set(archive.namelist()) - {*MEMBERS, *OTHER_MEMBERS})
    if extra:
        raise ModelFileError(f"{name} has a member {extra[0]!r} that no TD3 model has")
    declared = sum(member.file_size for member in archive.infolist())
    if declared > MAX_RATIO * size:
        raise ModelFileError(f"{name} has {size} bytes and would unpack to {declared}: more than {MAX_RATIO} times as many")


def _json(archive: zipfile.ZipFile, member: str, name: str) -> dict[str, Any]:
    if archive.getinfo(member).file_size > MAX_JSON:
        raise ModelFileError(f"{name}: {member} has more than {MAX_JSON} bytes")
    data = json.loads(archive.read(member))
    if not isinstance(data, dict):
        raise ModelFileError(f"{name}: {member} is not a table of attributes")
    return data


def _require_known_format(data: dict[str, Any], name: str) -> None:
    if "policy_delay" not in data:
        raise ModelFileError(f"{name} was not saved by TD3X or SB3's TD3")
    version = data.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ModelFileError(f"{name} has format {version}; this sb3_td3x reads up to {FORMAT_VERSION}: please upgrade it")


def _require_unchanged(archive: zipfile.ZipFile, plain: dict[str, Any], name: str) -> None:
    """The members are those that were written together. This finds damage, not fraud: anybody can compute a checksum."""
    own = {key: value for key, value in plain.items() if key != "own sha256"}
    if own.keys() != {"fields", "untrusted", "sha256"} or plain.get("own sha256") != _sha256(_canonical(own)):
        raise ModelFileError(f"{name} is damaged: {PLAIN} is not as it was written")
    written = {member: _sha256(archive.read(member)) for member in archive.namelist() if member != PLAIN}
    if written != own["sha256"]:
        changed = sorted({*written.items()} ^ {*own["sha256"].items()})
        raise ModelFileError(f"{name} is damaged: {changed[0][0]} is not the one that was written with {PLAIN}")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
