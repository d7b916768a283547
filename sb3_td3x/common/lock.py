"""One writer per run folder: a thin wrapper of filelock's lease, which expires with its holder."""

import logging
import time
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import SoftFileLease, Timeout

from sb3_td3x.common import files
from sb3_td3x.errors import CheckpointError, RunLockedError

LOCK = "lock"  # the file's name; filelock briefly makes others, whose names begin with "lock."
LEASE_SECONDS = 30.0  # after which a lock that was not refreshed is taken over; its holder refreshes it three times as often


class RunLock:
    """
    The right to write into a run's folder, which exists; a context manager.

    If the holder is known to live (on the same host, in the same container), ``RunLockedError`` is raised; if filelock knows
    it to be dead, its lock is taken over at once. Any other holder, for example a zombie or in another container, has
    ``LEASE_SECONDS`` to refresh its lock.

    :param patience: seconds to wait for a living holder, which may be about to leave, before ``RunLockedError``
    """

    def __init__(self, folder: Path, patience: float = 0):
        self.folder, self.patience = folder, patience
        self._lease = _lease(folder / LOCK)

    def __enter__(self) -> "RunLock":
        if self._acquires(0) or self._acquires(0):  # the first attempt may only remove a dead process's lock
            return self
        before = _stamp(self.folder / LOCK)
        patience, is_lease = self._patience()
        if self._acquires(patience):
            return self
        if is_lease and _stamp(self.folder / LOCK) == before is not None:
            # No heartbeat, and filelock takes over by exchanging two names, which NFS refuses, and never an empty file
            (self.folder / LOCK).unlink(missing_ok=True)
            if self._acquires(0):
                return self
        raise self._locked()

    def _acquires(self, patience: float) -> bool:
        with suppress(Timeout), files.explained(self.folder, only_full=True):
            self._lease.acquire(timeout=patience, poll_interval=0.2)
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self._lease.release()  # leaves a successor's lock alone

    def require_ours(self) -> None:
        """Call this before each write: a process that was suspended for longer than a lease may have lost its lock."""
        for _ in range(2):  # a process that examines the lock moves it aside for a moment
            owner = self._lease.owner
            is_unreadable = owner is None and (self.folder / LOCK).exists()  # as files of a network sometimes are
            if is_unreadable or (owner is not None and owner.token == self._lease.token):
                return
            time.sleep(0.1)
        if owner is not None:
            raise self._locked()
        problem = (
            "is no longer locked by this process: another one has resumed the run, or the folder was moved: resume it again"
        )
        raise CheckpointError(self.folder, problem)

    def _patience(self) -> tuple[float, bool]:
        """Seconds to wait for the lock, and whether that is for a sign of a holder that may be dead."""
        owner = self._lease.owner  # None of one killed before it wrote into its lock; on a network folder also of a living one
        if owner is not None and owner.hostname == _this_host(self.folder) and not _has_ended(owner.pid, owner.start):
            return self.patience, False
        whose = "whoever" if owner is None else f"process {owner.pid} on {_host(owner.hostname)}, which"
        problem = f"waiting up to {int(LEASE_SECONDS)} seconds for a sign of {whose} was writing into {self.folder}"
        logging.getLogger(__name__).warning(problem)
        return LEASE_SECONDS + 2, True

    def _locked(self) -> RunLockedError:
        owner = self._lease.owner
        return RunLockedError(self.folder, *(("a host", "unknown") if owner is None else (_host(owner.hostname), owner.pid)))


def is_touched(folder: Path) -> bool:
    """Whether the folder's lock was refreshed within a lease, so that probably a process writes there; for display only."""
    with suppress(OSError):
        return time.time() - (folder / LOCK).stat().st_mtime < LEASE_SECONDS
    return False


def _lease(path: Path) -> SoftFileLease:
    return SoftFileLease(path, lease_duration=LEASE_SECONDS, thread_local=False)


def _this_host(folder: Path) -> str:
    """This host as filelock names it in its locks, with the namespace of process ids where it is a container's."""
    with _lease(folder / f"{LOCK}.{uuid.uuid4().hex}") as lease:
        return lease.owner.hostname  # type: ignore[union-attr]


def _has_ended(pid: int, start: int | None = None) -> bool:
    """Whether a process of this host has ended, also if its parent has not asked how: filelock takes that one for alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_another = start is not None and start % 2**64 != int(fields[19])  # filelock's has the boot above 64 bits
        return is_another or fields[0] in ("Z", "X")
    except (OSError, IndexError, ValueError):
        return Path("/proc/self").exists()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What every heartbeat of the lock's holder changes."""
    with suppress(OSError):
        return (status := path.stat()).st_ino, status.st_mtime_ns, status.st_ctime_ns  # the last is of creation on Windows
    return None


def _host(name: str) -> str:
    return ascii(name.partition("?")[0] or name)[1:-1]  # a lock of an untrusted run may hold control characters
