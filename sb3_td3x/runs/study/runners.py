"""
Where runs are made: processes on this machine, or a Ray cluster.

A runner takes a function, which makes one run and returns whether it is finished, and the runs. It gives an outcome as each
run ends. A run whose process, environment's process or machine is lost is made again. Closing it tells the runs under way to
stop and waits for them.
"""

import logging
import multiprocessing
import os
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import connection
from typing import Any, NamedTuple

from sb3_td3x.errors import EnvironmentDiedError
from sb3_td3x.runs.study.grid import StudyRun

RETRIES = 5
"""Times that a run's process, one of its environments' or its machine may be lost."""

LONGEST_LINE = 2_000
LINGER_SECONDS = 10
"""That a process may take to end after its run has ended."""


@dataclass(frozen=True)
class Outcome:
    """
    How an attempt ended.

    :param run: the run
    :param is_finished: whether it reached its end
    :param error: what went wrong, in a line; empty for a run that is finished or was stopped
    """

    run: StudyRun
    is_finished: bool
    error: str = ""


Function = Callable[[StudyRun], bool]
Runner = Callable[[Function, Sequence[StudyRun]], Generator[Outcome, None, None]]


class _Answer(NamedTuple):
    """Of a process about its run; one that is lost, with its process or an environment's, can go on from its checkpoint."""

    is_finished: bool
    error: str = ""
    is_lost: bool = False


@dataclass
class _Attempt:
    """A run in a process of its own, which answers when the run has ended, and may have threads that go on after it."""

    run: StudyRun
    process: Any
    receiver: connection.Connection

    @classmethod
    def begin(cls, context: Any, function: Function, run: StudyRun) -> "_Attempt":
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_in_process, args=(function, run, sender), name=run.name)
        with _without_ctrl_c():
            process.start()
        sender.close()
        return cls(run, process, receiver)

    @property
    def signs(self) -> list[Any]:
        """What becomes ready when it ends: its answer, or its process without one."""
        return [self.receiver, self.process.sentinel]

    def has_ended(self) -> bool:
        return self._has_answered() or not self.process.is_alive()

    def _has_answered(self) -> bool:
        try:
            return self.receiver.poll()
        except BrokenPipeError:  # on Windows where the process was killed; elsewhere `poll` says that there is an end to read
            return False

    def end(self) -> "_Answer":
        """The answer; for a process that was killed, its exit code."""
        answer = None
        if self._has_answered():
            with suppress(EOFError):
                answer = self.receiver.recv()
        self.process.join(LINGER_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return answer or _Answer(False, f"its process ended with {self.process.exitcode}", is_lost=True)


def jobs_here(threads: int) -> int:
    """As many runs at a time as this machine has cores for, of ``threads`` each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // threads, 1)


def local(jobs: int) -> Runner:
    """:param jobs: runs at a time, a process each"""

    def runner(function: Function, runs: Sequence[StudyRun]) -> Generator[Outcome, None, None]:
        context = multiprocessing.get_context("spawn")
        waiting, lost = list(runs), Counter[StudyRun]()
        running: list[_Attempt] = []
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_Attempt.begin(context, function, waiting.pop(0)))
                connection.wait([sign for one in running for sign in one.signs])
                for one in [one for one in running if one.has_ended()]:
                    running.remove(one)
                    answer = one.end()
                    lost[one.run] += answer.is_lost
                    if not answer.is_lost:
                        yield Outcome(one.run, answer.is_finished, answer.error)
                    elif lost[one.run] > RETRIES:
                        yield Outcome(one.run, False, f"it was lost {lost[one.run]} times; at last {answer.error}")
                    else:
                        waiting.insert(0, one.run)
        finally:
            for one in running:
                one.process.terminate()
            for one in running:
                connection.wait(one.signs)
                one.end()

    return runner


def on_ray(address: str, jobs: int | None = None, threads: int = 1) -> Runner:
    """
    :param address: ``"local"`` starts a cluster on this machine; otherwise that of a running one, as ``ray.init`` takes it
    :param jobs: runs at a time of a local cluster; ``None`` takes all cores. A running one has its own
    :param threads: cores that a run takes
    :raises ValueError: if Ray is not installed, or nobody answers at the address
    """
    if find_spec("ray") is None:
        raise ValueError("studies on Ray need Ray: pip install ray")
    if jobs is not None and address != "local":
        raise ValueError("--jobs is for this machine: how many runs a cluster makes at a time, its cores decide")
    _require_answer(address)

    def runner(function: Function, runs: Sequence[StudyRun]) -> Generator[Outcome, None, None]:
        import ray

        own: dict[str, Any] = {}
        if address == "local":
            own = {"num_cpus": (jobs or jobs_here(threads)) * threads, "include_dashboard": False}
        with ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own):
            _warn_of_small_nodes(ray.nodes(), threads)
            options: dict[str, Any] = {"num_cpus": threads, "max_retries": RETRIES, "retry_exceptions": [EnvironmentDiedError]}
            task: Any = ray.remote(**options)(lambda run: function(run))
            pending = {task.remote(run): run for run in runs}
            try:
                while pending:
                    (done,), _ = ray.wait(list(pending))
                    yield _outcome(pending.pop(done), done)
            finally:
                for reference in pending:
                    ray.cancel(reference)  # reaches the run as a Ctrl-C
                ray.wait(list(pending), num_returns=len(pending))

    return runner


def _warn_of_small_nodes(nodes: Sequence[Mapping[str, Any]], threads: int) -> None:
    """Ray waits without a word for a node that is large enough; a cluster that grows may yet get one."""
    if max((node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]), default=0) < threads:
        warnings.warn(f"no node of the cluster has the {threads} cores of a run: runs wait until one joins", stacklevel=2)


def _require_answer(address: str) -> None:
    """Ray itself tries for more than a minute, and says nothing of it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()  # brackets: of IPv6
        except (OSError, OverflowError) as error:
            raise ValueError(f"no Ray cluster answers at {address}: {error}") from error


def _outcome(run: StudyRun, reference: Any) -> Outcome:
    import ray

    try:
        return Outcome(run, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        return Outcome(run, False, _line(error.cause))
    except ray.exceptions.RayError as error:  # the machine was lost too often
        return Outcome(run, False, _line(error))


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """A terminal sends Ctrl-C to every process; those started here ignore it: when a run stops, the study says."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_process(function: Function, run: StudyRun, sender: connection.Connection) -> None:
    """What a local run's process does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = _Answer(function(run))
    except Exception as error:
        answer = _Answer(False, _line(error), is_lost=isinstance(error, EnvironmentDiedError))
    with suppress(BrokenPipeError):  # the study was killed
        sender.send(answer)


def _end_with_parent() -> None:
    """Stop as for SIGTERM, with a checkpoint, when the study itself is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _line(error: BaseException) -> str:
    """For a table: what is longer is in the run's log."""
    return " ".join(f"{error}".split())[:LONGEST_LINE] or type(error).__name__
