"""One writer per run folder: a file that says who writes, and lives as long as its writer."""

import json
import logging
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sb3_td3x.errors import LockLostError, RunLockedError

LOCK, DRAFT = "lock", ".lock."
"""The file's name, and the beginning of those of a lock that is being taken."""
BEAT_SECONDS = 10
STALE_SECONDS = 60
"""Without a heartbeat for so long, a lock of another machine is taken to be left behind."""


class RunLock:
    """
    The right to write into a run folder; a context manager.

    The file ``lock`` holds the writer's host, boot, process (its id, start and namespace of ids) and a token of its own, and
    is touched every 10 seconds. A lock is left behind if its process is gone (same host, boot and namespace), if the host
    has booted since, or if it was not touched for 60 seconds. Entering waits, a minute at most, for a sign of a writer
    that cannot be seen from here, as that of a container that was started again.

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
        :raises LockLostError: if it has left again since
        """
        if _is_missing(self.path):
            raise LockLostError(self.path.parent)
        holder = _read(self.path)
        if holder.get("token", self.token) != self.token:
            raise RunLockedError(self.path.parent, holder.get("host"), holder.get("pid"))

    def _take(self) -> None:
        beside = self.path.with_name(f"{DRAFT}{self.token}")
        try:
            beside.write_text(json.dumps({**_this_process(), "token": self.token}))
            for _ in range(3):  # another process may take or leave the lock meanwhile
                try:
                    self._name(beside)
                    return
                except FileExistsError:
                    holder = _read(self.path)
                    if is_still_held(self.path.parent):
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
    """Whether a writer has the folder's lock and is still there, as far as can be told at once."""
    path = folder / LOCK
    touched = _touched(path)
    if touched is None:
        return False
    holder, here = _read(path), _this_process()
    if holder.get("host") == here["host"] and holder.get("boot") != here["boot"]:
        return False
    if _is_seen(holder) and not _is_alive(holder):
        return False
    return time.time() - touched < STALE_SECONDS


def is_still_held(folder: Path) -> bool:
    """
    Whether a writer has the folder's lock and is still there.

    A writer that cannot be seen from here, on another machine or in another container, has a minute to touch its lock; that
    it did so not long ago says nothing where a killed container is started again within seconds.
    """
    path, deadline = folder / LOCK, time.monotonic() + STALE_SECONDS
    touched, holder = _touched(path), _read(path)
    if is_held(folder) and not _is_seen(holder):
        whose = f"process {holder.get('pid')} on {holder.get('host')}, which was writing into {folder}"
        logging.getLogger(__name__).warning("waiting up to a minute for a sign of %s", whose)
    while is_held(folder) and not _is_seen(_read(path)):
        if _touched(path) != touched:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return is_held(folder)


def _touched(path: Path) -> float | None:
    """The time of the last heartbeat; ``None`` if there is no lock."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_seen(holder: dict[str, object]) -> bool:
    """Whether the process of a lock would be seen from here if it were there; a lock without a namespace is an older one."""
    here = _this_process()
    namespace = holder.get("pid_namespace", here["pid_namespace"])
    return (holder.get("host"), holder.get("boot"), namespace) == (here["host"], here["boot"], here["pid_namespace"])


def _is_missing(path: Path) -> bool:
    """Whether there is no such file; not where a disk cannot say."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _this_process() -> dict[str, str | int]:
    pid = os.getpid()
    return {
        "host": socket.gethostname(), "boot": _boot(), "pid_namespace": _pid_namespace(), "pid": pid, "started": _started(pid)
    }  # fmt: skip


def _boot() -> str:
    """Names this boot of the machine; where the system does not say, all boots are one and the heartbeat decides."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """Names what process ids are unique in: containers with one host name have one each, and do not see each other's."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_alive(holder: dict[str, object]) -> bool:
    """Whether the process of a lock, of this boot and namespace, is there."""
    pid = holder.get("pid")
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
    started = _started(pid)
    is_same = started == -1 or holder.get("started", started) == started  # ids are used again
    return is_same and not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and only waits for its parent to ask how."""
    return _stat(pid)[:1] in (["Z"], ["X"])


def _started(pid: int) -> int:
    """When a process began, in the kernel's ticks since its boot; -1 where the system does not say."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else -1


def _stat(pid: int) -> list[str]:
    """``/proc/PID/stat`` (``man proc_pid_stat``) from its third field, the state, on; the second may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _read(path: Path) -> dict[str, object]:
    """A lock's content; a damaged one has none, so that only its heartbeat counts."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
