"""One writer per run folder: a file that says who writes, and lives as long as its writer."""

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sb3_td3x.errors import RunLockedError

LOCK, DRAFT = "lock", ".lock."
"""The file's name, and the beginning of those of a lock that is being taken."""
BEAT_SECONDS = 10
STALE_SECONDS = 60
"""Without a heartbeat for so long, a lock of another machine is taken to be left behind."""


class RunLock:
    """
    The right to write into a run folder; a context manager.

    The file ``lock`` holds the writer's host, boot, process id and a token of its own, and is touched every 10 seconds.
    A lock is left behind if its process is gone (same host and boot), if the host has booted since, or if it was not
    touched for 60 seconds.

    :param folder: of the run; must exist
    :raises RunLockedError: on entering, naming the process that writes there
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self.token = uuid.uuid4().hex
        self._stop = threading.Event()

    def __enter__(self) -> "RunLock":
        self._take()
        self._stop.clear()
        threading.Thread(target=self._beat, name=f"heartbeat of {self.path}", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop.set()
        if self.is_ours():
            self.path.unlink(missing_ok=True)

    def is_ours(self) -> bool:
        """Whether nobody took the lock meanwhile, as happens to a process that slept for more than a minute."""
        return _read(self.path).get("token") == self.token

    def require_ours(self) -> None:
        """
        :raises RunLockedError: if another process has taken the lock
        """
        holder = _read(self.path)
        if holder.get("token", self.token) != self.token:
            raise RunLockedError(self.path.parent, holder.get("host"), holder.get("pid"))

    def _take(self) -> None:
        beside = self.path.with_name(f"{DRAFT}{self.token}")
        try:
            beside.write_text(json.dumps({**_process(os.getpid()), "token": self.token}))
            for _ in range(3):  # another process may take or leave the lock meanwhile
                try:
                    self._name(beside)
                    return
                except FileExistsError:
                    holder = _read(self.path)
                    if is_held(self.path.parent):
                        break
                    self._put_away(holder.get("token"))
            raise RunLockedError(self.path.parent, holder.get("host"), holder.get("pid"))
        finally:
            beside.unlink(missing_ok=True)

    def _name(self, beside: Path) -> None:
        """Make the lock, unless there is one (``FileExistsError``)."""
        try:
            os.link(beside, self.path)  # its content is there with its name
        except FileExistsError:
            raise
        except OSError:  # a disk without hard links, as exFAT and some network and FUSE file systems
            with self.path.open("x") as file:
                file.write(beside.read_text())

    def _put_away(self, token: object) -> None:
        """Remove the lock that was left behind, but not one that somebody has taken since it was looked at."""
        aside = self.path.with_name(f"{DRAFT}{self.token}.stale")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside).get("token") != token:
            with suppress(FileExistsError):
                self._name(aside)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            if self.is_ours():
                with suppress(OSError):  # of a network's disk, which may be there again at the next beat
                    os.utime(self.path)


def is_held(folder: Path) -> bool:
    """Whether a writer has the folder's lock and is still there."""
    path = folder / LOCK
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    holder = _read(path)
    here = _process(os.getpid())
    is_here = holder.get("host") == here["host"]
    if is_here and (holder.get("boot") != here["boot"] or not _is_alive(holder.get("pid"))):
        return False
    return age < STALE_SECONDS


def _process(pid: int) -> dict[str, str | int]:
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid}


def _boot() -> str:
    """Names this boot of the machine; where the system does not say, all boots are one and the heartbeat decides."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _is_alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    if os.name == "nt":
        return True  # signal 0 would end the process there; the heartbeat decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and only waits for its parent to ask how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "ZX"


def _read(path: Path) -> dict[str, object]:
    """A lock's content; a damaged one has none, so that only its heartbeat counts."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
