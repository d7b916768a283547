"""The folder of a run's checkpoints: finding them, judging whether they are whole, adding one, removing old ones."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_td3x.common import files
from sb3_td3x.common.lock import RunLock
from sb3_td3x.errors import CheckpointError, EnvironmentDiedError, UntrustedModelError

FORMAT = 2
MANIFEST, MODEL = "manifest.json", "model.zip"
CHUNKS, CHUNK = "replay", "transitions_"  # the folder of transitions, and how the names of its files begin
NAME = re.compile(r"(?!\.).*_\d+_steps(_again)*", re.DOTALL)
"""Name of a checkpoint's folder."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: a folder of files, and a manifest of plain values that lists them with their checksums."""

    path: Path
    manifest: dict[str, Any]

    @property
    def steps(self) -> int:
        """Environment steps made."""
        return self.manifest["steps"]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The files of transitions that it needs, which it shares with other checkpoints."""
        return self.manifest["replay"].get("chunks", [])

    def check(self) -> None:
        """Raise a ``CheckpointError`` that names the file, also of transitions, that is missing or damaged."""
        for name, described in self.manifest["files"].items():
            files.check(self.path / name, described)
        for chunk in self.chunks:
            files.check(self.path.parent / CHUNKS / chunk["file"], chunk)
        for path in self.path.iterdir():  # also where a forged manifest does not list a file: reading a pipe may never end
            if not (path.is_file() or path.is_dir()):  # file browsers leave folders of their own
                raise CheckpointError(path, "is not a file")


class Store:
    """A folder with one folder per checkpoint, and ``replay/`` with the chunks of transitions that they share."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.chunks = folder / CHUNKS

    def paths(self) -> list[Path]:
        """The folders of all checkpoints, whole or damaged."""
        return list(_own(self._contents()))

    def _contents(self) -> dict[Path, "Checkpoint | CheckpointError"]:
        """Of folders that are not hidden. ``Path.glob`` would give none where the folder cannot be listed for a moment."""
        with files.explained(self.folder), suppress(FileNotFoundError, NotADirectoryError):
            folders = [path for path in self.folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
            return {path: _read(path) for path in folders}
        return {}

    def checkpoints(self) -> list[Checkpoint]:
        """All with a readable manifest, oldest first."""
        return _in_order(_own(self._contents()).values())

    def find(self, steps: int | None = None) -> Checkpoint:
        """
        The newest checkpoint, or the newest whole one of so many steps, checked file by file.

        :raises CheckpointError: if there is none, or it is damaged; it names the file and the last whole checkpoint
        """
        self._require_no_link()
        contents = _own(self._contents()).values()  # once: a second reading may succeed where the first did not
        readable, damaged = _in_order(contents), [error for error in contents if isinstance(error, CheckpointError)]
        candidates = [checkpoint for checkpoint in readable if steps in (None, checkpoint.steps)]
        try:
            if damaged and (steps is None or not candidates):  # nobody knows which of them it is
                raise damaged[0]
            if candidates:
                chosen = (steps is not None and _last_whole(candidates)) or candidates[-1]  # of two alike one may be damaged
                chosen.check()
                return chosen
        except CheckpointError as error:
            last = _last_whole(readable)
            raise CheckpointError(error.path, error.problem, last.steps if last else None) from error
        nothing = "none" if self.folder.exists() else "no such folder"
        there = ", ".join(f"{checkpoint.steps:,}" for checkpoint in readable) or nothing
        which = "no checkpoint" if steps is None else f"no checkpoint of {steps!r} steps"
        inside = [path.name for path in sorted(self.folder.glob("*")) if Store(path).paths()]
        hint = f", its folder {inside[0]} does" if inside and not readable else ""
        if isinstance(itself := _read(self.folder), Checkpoint):
            hint = f", it is one: give {self.folder.parent} and checkpoint={itself.steps}"
        raise CheckpointError(self.folder, f"holds {which} (there: {there}){hint}")

    def _require_no_link(self) -> None:
        """Refuse a link to elsewhere, where nothing is to be written or removed."""
        if (link := files.link_out_of(self.folder)) is not None:
            raise CheckpointError(link, f"leads out of {self.folder}: put there what it leads to")

    @contextmanager
    def adding(self, prefix: str, steps: int, newest: int) -> Iterator[tuple[Path, Callable[[dict[str, Any]], Checkpoint]]]:
        """
        A new checkpoint, which gets its name when all of it is on the disk. Meanwhile no other process adds or removes any.

        :param newest: number of the newest checkpoint that the run knows, 0 for none
        :return: the folder to write files into, and the function that completes the checkpoint with its manifest
        """
        with files.explained(self.folder):
            files.make_folder(self.chunks)
        self._require_no_link()
        with files.explained(self.folder), RunLock(self.folder):
            others = [checkpoint.path for checkpoint in self.checkpoints() if checkpoint.manifest["number"] > newest]
            if newest == 0:  # a new run also leaves alone those with an unreadable manifest, which `prune` would remove
                others = others or self.paths()
            if others:
                problem = f"holds {others[-1].name}, which this run did not save"
                raise CheckpointError(self.folder, f"{problem}: use a folder per run, or continue that one with resume_run")
            name = f"{prefix}_{steps}_steps"
            while (self.folder / name).exists():
                name += "_again"
            partial = self.folder / f".{name}.partial"

            def complete(manifest: dict[str, Any]) -> Checkpoint:
                described = {path.name: files.describe(path) for path in sorted(partial.iterdir())}
                sealed = {"format": FORMAT, "name": name, "number": newest + 1, "steps": steps, **manifest, "files": described}
                for path in partial.iterdir():
                    files.flush(path)
                files.write(partial / MANIFEST, _sealed(sealed))
                partial.rename(self.folder / name)
                return Checkpoint(self.folder / name, sealed)

            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir()
                yield partial, complete
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    def prune(self, keep_last: int) -> None:
        """
        While ``adding``, keep the newest ``keep_last`` checkpoints. Remove all others (one with a damaged manifest would keep
        the run from being resumed), the chunks that no checkpoint needs, and what is left of interrupted saves. All else
        in the folder stays, among it copies of checkpoints under other names, and the chunks that these need.
        """
        files.flush(self.folder)  # the name of a new checkpoint is on the disk before an old one is removed
        contents = self._contents()
        for result in contents.values():
            if isinstance(result, CheckpointError) and isinstance(result.__cause__, OSError):
                raise result  # it may pass, as on a network: it is no damage, and nothing is removed
        own = _own(contents)
        kept = {checkpoint.path for checkpoint in _in_order(own.values())[-keep_last:]}
        for path in own.keys() - kept:
            hidden = path.with_name(f".{path.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            path.rename(hidden)  # so that a part of it is never taken for the whole
            del contents[path]
        needed = {chunk["file"] for checkpoint in _in_order(contents.values()) for chunk in checkpoint.chunks}
        for path in self.chunks.iterdir():
            if path.name.lstrip(".").startswith(CHUNK) and path.name not in needed:
                path.unlink(missing_ok=True)
        for leftover in ("partial", "removed"):
            for hidden in self.folder.glob(f".*_steps*.{leftover}"):
                shutil.rmtree(hidden, ignore_errors=True)


def require_prefix(prefix: str) -> None:
    """Refuse a checkpoint's name that would be hidden, or in another folder."""
    if prefix.startswith(".") or Path(prefix).name != prefix:
        raise ValueError(f"name_prefix begins the names of folders, so it has no slashes and no dot first: not {prefix!r}")


@contextmanager
def as_checkpoint_error(path: Path, problem: str = "cannot be restored") -> Iterator[None]:
    """Name the file in whatever Python raises: a forged one may hold anything where its checksum fits."""
    try:
        yield
    # The last three: an environment's process died
    except (CheckpointError, UntrustedModelError, EnvironmentDiedError, ConnectionError, EOFError):
        raise
    except Exception as error:
        raise CheckpointError(path, f"{problem}: {type(error).__name__}: {error}") from error


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON, with its own checksum in the first line."""
    text = json.dumps(manifest, indent=1) + "\n"
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode()


def _read(folder: Path) -> Checkpoint | CheckpointError:
    """The checkpoint in a folder, or what is wrong with its manifest. A forged one names no file outside of the run."""
    path = folder / MANIFEST
    try:
        if not path.is_file():  # nothing that would block, such as a pipe, is opened
            return CheckpointError(path, "is missing")
        seal, _, text = path.read_bytes().decode().partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != seal:
            return CheckpointError(path, "is damaged: its checksum differs")
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return CheckpointError(path, f"has format {manifest['format']}; this sb3_td3x reads format {FORMAT}")
        kinds = {"name": str, "number": int, "steps": int} | dict.fromkeys(("files", "logs", "replay", "machine"), dict)
        for name, kind in kinds.items():
            if not isinstance(manifest[name], kind) or (kind is int and manifest[name] >= 2**63):
                return CheckpointError(path, f"has no valid {name!r}")
        checkpoint = Checkpoint(folder, manifest)
        chunks = [(chunk["file"], chunk) for chunk in checkpoint.chunks]
        for name, described in (*manifest["files"].items(), *chunks):
            if not described.keys() >= {"bytes", "sha256"}:
                return CheckpointError(path, "lists a file without its size and checksum")
            if Path(name).name != name:
                return CheckpointError(path, f"names a file outside of its folder: {name!r}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = CheckpointError(path, f"cannot be read: {error}")
        problem.__cause__ = error
        return problem
    return checkpoint


def _own(contents: dict[Path, Checkpoint | CheckpointError]) -> dict[Path, Checkpoint | CheckpointError]:
    """Those saved under the names that they have, and what damage has left of such. All others are the user's."""

    def is_own(path: Path, found: Checkpoint | CheckpointError) -> bool:
        if isinstance(found, Checkpoint):
            return found.manifest["name"] == path.name
        return any((path / name).exists() for name in (MANIFEST, MODEL))

    return {path: found for path, found in contents.items() if NAME.fullmatch(path.name) and is_own(path, found)}


def _in_order(found: Iterable[Checkpoint | CheckpointError]) -> list[Checkpoint]:
    """The readable ones, oldest first."""
    readable = [checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)]
    return sorted(readable, key=lambda checkpoint: checkpoint.manifest["number"])


def _last_whole(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The newest checkpoint of which every file is as it was written."""
    for checkpoint in reversed(checkpoints):
        with suppress(CheckpointError):
            checkpoint.check()
            return checkpoint
    return None
