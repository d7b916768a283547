"""The folder of a run's checkpoints: finding them, judging whether they are whole, adding one, removing old ones."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_td3x.checkpoint import shapes
from sb3_td3x.common import files, links
from sb3_td3x.common.lock import RunLock
from sb3_td3x.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
SEGMENTS, SEGMENT = "replay", "transitions_"
"""The folder of transitions, and how its files' names begin."""
NAME = re.compile(r".*_\d+_steps(_again)*", re.DOTALL)
"""Of a checkpoint's folder; one that was copied or renamed is its owner's."""


@dataclass(frozen=True)
class Checkpoint:
    """
    One checkpoint: a folder of files and a manifest that lists them with their checksums.

    :param path: ``<folder>/<prefix>_<steps>_steps``
    :param manifest: plain values; ``number`` counts the saves of the run, ``steps`` the environment steps
    """

    path: Path
    manifest: dict[str, Any]

    @property
    def steps(self) -> int:
        return self.manifest["steps"]

    @property
    def number(self) -> int:
        """Counts the saves of the run."""
        return self.manifest["number"]

    @property
    def total(self) -> float:
        """Steps that the run is to make in all."""
        return self.manifest["total"]

    @property
    def is_finished(self) -> bool:
        return 0 < self.total <= self.steps

    def check(self) -> None:
        """
        :raises CheckpointError: naming the file of this checkpoint that is missing or damaged
        """
        for name, described in self.manifest["files"].items():
            files.check(self.path / name, described)


class Store:
    """
    :param folder: holds one folder per checkpoint, and ``replay/`` with the segments that they share
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.segments = folder / SEGMENTS

    def checkpoints(self) -> list[Checkpoint]:
        """All with a readable manifest, oldest first."""
        return sorted(_readable(self._manifests()), key=lambda one: one.number)

    def find(self, steps: int | None = None) -> Checkpoint:
        """
        The newest checkpoint, or the newest of so many steps, checked file by file.

        :raises CheckpointError: if there is none, or it is damaged; it names the file and the last one that is whole
        """
        self._require_own()
        every = self.checkpoints()
        wanted = every if steps is None else [one for one in every if one.steps == steps]
        if steps is None and (error := self._unreadable()) is not None:
            raise CheckpointError(error.path, error.problem, _steps(_last_whole(every))) from error
        if not wanted:
            there = ", ".join(f"{one.steps:,}" for one in every) or "none"
            which = "no checkpoint" if steps is None else f"no checkpoint of {steps:,} steps"
            inside = [] if every else [path.name for path in sorted(self.folder.glob("*/")) if Store(path).checkpoints()]
            hint = f", its folder {inside[0]} does" if inside else ""
            raise CheckpointError(self.folder, f"holds {which} (there: {there}){hint}")
        try:
            wanted[-1].check()
        except CheckpointError as error:
            others = [one for one in every if one is not wanted[-1]]
            raise CheckpointError(error.path, error.problem, _steps(_last_whole(others))) from error
        return wanted[-1]

    def _require_own(self) -> None:
        """
        :raises CheckpointError: for a link to elsewhere: what is old is removed in this folder, and nowhere else
        """
        if (link := links.first_out(self.folder)) is not None:
            raise CheckpointError(link, f"leads out of {self.folder}: put there what it leads to")

    def _manifests(self) -> Iterator[Path]:
        return (path for path in self.folder.glob(f"[!.]*/{MANIFEST}") if NAME.fullmatch(path.parent.name))

    def _unreadable(self) -> CheckpointError | None:
        """Why a manifest cannot be read: nobody knows then which checkpoint is the newest."""
        for path in self._manifests():
            try:
                _read(path)
            except CheckpointError as error:
                return error
        return None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """
        While a checkpoint is added or removed nobody else does so.

        :raises RunLockedError: if another process is at it
        """
        with files.explained(self.folder):
            self.segments.mkdir(parents=True, exist_ok=True)
        self._require_own()
        with RunLock(self.folder):
            yield

    @contextmanager
    def adding(self, prefix: str, steps: int) -> Iterator[tuple[Path, Callable[[dict[str, Any]], Checkpoint]]]:
        """
        A new checkpoint, which gets its name when all of it is on the disk.

        :return: the folder to write files into, and the function that ends it with its manifest
        """
        every = self.checkpoints()
        number = every[-1].number + 1 if every else 1
        name = f"{prefix}_{steps}_steps"
        while (self.folder / name).exists():
            name += "_again"
        partial = self.folder / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

        def complete(manifest: dict[str, Any]) -> Checkpoint:
            listed = {path.name: files.describe(path) for path in sorted(partial.iterdir())}
            whole = {"format": FORMAT, "number": number, "steps": steps, **manifest, "files": listed}
            for path in partial.iterdir():
                files.flush(path)
            files.write(partial / MANIFEST, _sealed(whole))
            partial.rename(self.folder / name)
            files.flush(self.folder)
            return Checkpoint(self.folder / name, whole)

        try:
            with files.explained(partial):
                yield partial, complete
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def prune(self, keep_last: int) -> None:
        """
        Remove all checkpoints but the newest, damaged ones, which would keep a run from being resumed, then the segments that
        no checkpoint needs and what is left of checkpoints that were being written or removed. Files of other names stay,
        among them the owner's copies of checkpoints, and so does what they need.
        """
        with files.explained(self.folder):
            for old in self.checkpoints()[:-keep_last]:
                files.remove(old.path)
            for path in self._manifests():
                if _unsealed(path) is None:  # not one of a newer format, which is whole
                    files.remove(path.parent)
            self._remove_unneeded_segments()
        for leftover in ("partial", "removed"):
            for hidden in self.folder.glob(f".*_steps*.{leftover}"):
                shutil.rmtree(hidden, ignore_errors=True)

    def _remove_unneeded_segments(self) -> None:
        """None where a whole manifest cannot be read, as one of a newer format: nobody knows what it needs."""
        whole = [path for path in self.folder.glob(f"[!.]*/{MANIFEST}") if _unsealed(path) is not None]
        kept = _readable(whole)
        if len(kept) < len(whole):
            return
        needed = {segment["file"] for one in kept for segment in one.manifest["replay"].get("segments", [])}
        for path in self.segments.iterdir():
            if path.name.lstrip(".").startswith(SEGMENT) and path.name not in needed:
                path.unlink(missing_ok=True)


def require_prefix(prefix: str) -> None:
    """
    :raises ValueError: for a checkpoint's name that would be hidden, or in another folder
    """
    if prefix.startswith(".") or Path(prefix).name != prefix:
        raise ValueError(f"name_prefix is how the names of folders begin: without slashes and no dot first, not {prefix!r}")


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON, its own checksum in the first line."""
    text = json.dumps(manifest, indent=1)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()


def _unsealed(path: Path) -> str | None:
    """The text of a manifest; ``None`` if it is not what was written."""
    seal, _, text = path.read_bytes().decode(errors="replace").partition("\n")
    return text if hashlib.sha256(text.removesuffix("\n").encode()).hexdigest() == seal else None


def _read(path: Path) -> dict[str, Any]:
    """
    :raises CheckpointError: if it is damaged or of a newer format
    """
    with files.explained(path):
        text = _unsealed(path)
    if text is None:
        raise CheckpointError(path, "is damaged: its checksum differs")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON: {error}") from error
    if (part := shapes.unlike(manifest, shapes.MANIFEST)) is not None:
        raise CheckpointError(path, f"has no valid {part!r}, as manifests have")
    if manifest["format"] > FORMAT:
        raise CheckpointError(path, f"has format {manifest['format']}, newer than this sb3_td3x reads ({FORMAT})")
    segments = [segment["file"] for segment in manifest["replay"].get("segments", [])]
    if outside := [name for name in (*manifest["files"], *segments) if Path(name).name != name]:
        raise CheckpointError(path, f"names a file outside its folder: {outside[0]!r}")
    return manifest


def _readable(manifests: Iterable[Path]) -> list[Checkpoint]:
    found = []
    for path in manifests:
        try:
            found.append(Checkpoint(path.parent, _read(path)))
        except CheckpointError:
            continue
    return found


def _last_whole(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    for one in reversed(checkpoints):
        try:
            one.check()
        except CheckpointError:
            continue
        return one
    return None


def _steps(checkpoint: Checkpoint | None) -> int | None:
    return None if checkpoint is None else checkpoint.steps
