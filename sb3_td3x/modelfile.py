"""Telling a TD3 model's zip from anything else before it is read, and saying clearly what is wrong with it."""

import io
import json
import pathlib
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sb3_td3x.errors import ModelFileError

FORMAT_VERSION = 1
"""Written into every zip; raised when a newer program's zip could no longer be read by an older one."""

BEFORE = {"n_quantiles": 1}
"""What a program did that did not have these keywords: for zips without them, whatever today's default is."""

MEMBERS = ("data", "policy.pth", "actor.optimizer.pth", "critic.optimizer.pth")


def check(path: str | pathlib.Path | io.BufferedIOBase) -> dict[str, Any]:
    """
    Read the zip's directory and its JSON; nothing is unpickled.

    :return: the saved attributes as JSON: plain values as they are, a description of everything else
    :raises FileNotFoundError: if there is no such file
    :raises ModelFileError: if it is damaged, another algorithm's, or of a newer format
    """
    try:
        with zipfile.ZipFile(_existing(path)) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ModelFileError(f"{_name(path)} is damaged: its member {damaged!r} fails its checksum")
            missing = sorted(set(MEMBERS) - set(archive.namelist()))
            if missing:
                raise ModelFileError(f"{_name(path)} is not a TD3 model: it lacks {', '.join(missing)}")
            data = json.loads(archive.read("data"))
    except (zipfile.BadZipFile, json.JSONDecodeError, UnicodeDecodeError, EOFError) as error:
        raise ModelFileError(f"{_name(path)} is not a model zip, or is damaged: {error}") from error
    if not isinstance(data, dict) or "policy_delay" not in data:
        raise ModelFileError(f"{_name(path)} was not saved by TD3X or SB3's TD3")
    version = data.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ModelFileError(
            f"{_name(path)} has format {version}; this sb3_td3x reads up to {FORMAT_VERSION}: please upgrade it"
        )
    return data


@contextmanager
def explained_errors(path: str | pathlib.Path | io.BufferedIOBase) -> Iterator[None]:
    """Turn what unpickling and torch raise about a bad file into ``ModelFileError``."""
    try:
        yield
    except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{_name(path)} cannot be loaded: {error}") from error


def _existing(path: str | pathlib.Path | io.BufferedIOBase) -> pathlib.Path | io.BufferedIOBase:
    """SB3's rule: ``.zip`` is appended to the name of a file that is not there."""
    if isinstance(path, io.IOBase):
        path.seek(0)
        return path
    plain = pathlib.Path(path)
    return plain if plain.exists() else plain.with_name(f"{plain.name}.zip")


def _name(path: str | pathlib.Path | io.BufferedIOBase) -> str:
    return str(path) if isinstance(path, (str, pathlib.Path)) else "the file"
