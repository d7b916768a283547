"""Where the runs of a study are made: in processes on this machine, or on a Ray cluster."""

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from multiprocessing import connection
from typing import Any

from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.signals import end_with_parent
from sb3_td3x.errors import EnvironmentDiedError
from sb3_td3x.runs.study import StudyFolder, StudyRun, Train, attempt

RETRIES = 5  # how often a run's process, one of its environments' or its machine may be lost
ENDED, FAILED, DIED = 0, 11, 12  # exit codes of a run's process; with any but the first two it is lost, and resumed

Ended = Generator[tuple[StudyRun, str], None, None]  # runs as they end, with the error in one line, or "" without one
Runner = Callable[[Train, StudyFolder, Sequence[StudyRun]], Ended]
"""Attempts each run, again where a process or a machine is lost. Closed, it stops the runs under way and waits."""


def drive(runs: Sequence[StudyRun], folder: StudyFolder, train: Train, runner: Runner) -> Ended:
    """Make the unfinished runs; closing the generator stops them. ``RunLockedError`` if another process drives this study."""
    folder.runs.mkdir(parents=True, exist_ok=True)
    with RunLock(folder.runs):
        yield from runner(train, folder, [run for run in runs if not folder.is_finished(run)])


def jobs_here(threads: int) -> int:
    """As many runs at a time as this machine has cores for, with ``threads`` each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // threads, 1)


def local(jobs: int) -> Runner:
    """:param jobs: runs at a time, a process each"""

    def runner(train: Train, folder: StudyFolder, runs: Sequence[StudyRun]) -> Ended:
        context = multiprocessing.get_context("spawn")
        waiting, lost = list(runs), Counter[StudyRun]()
        running: dict[Any, tuple[StudyRun, Any, Any]] = {}  # by the handle that tells of the process's end
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    errors, error_of_run = context.Pipe(duplex=False)
                    process = context.Process(target=_in_process, args=(train, folder, run, error_of_run), name=run.name)
                    # A terminal sends Ctrl-C to every process; those started here ignore it: the study tells them to stop
                    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    try:
                        process.start()
                    finally:
                        signal.signal(signal.SIGINT, before)
                    error_of_run.close()  # of this process, so that the other's end can be seen
                    running[process.sentinel] = run, process, errors
                for sentinel in connection.wait(list(running)):
                    run, process, errors = running.pop(sentinel)
                    process.join()
                    code = process.exitcode
                    if code in (ENDED, FAILED) or (code == DIED and lost[run] >= RETRIES):
                        yield run, "" if code == ENDED else errors.recv()
                    elif lost[run] < RETRIES:
                        lost[run] += 1
                        waiting.insert(0, run)
                    else:
                        hint = " (memory may have run out: fewer --jobs)" if code == -9 else ""
                        yield run, f"it was lost {RETRIES + 1} times; at last its process ended with {code}{hint}"
        finally:
            try:
                for _, process, _ in running.values():
                    process.terminate()
                for _, process, _ in running.values():
                    process.join()
            finally:  # also at another Ctrl-C
                for _, process, _ in running.values():
                    process.kill()

    return runner


def _in_process(train: Train, folder: StudyFolder, run: StudyRun, error_of_run: Any) -> None:
    """
    What a local run's process does. It ends at once then, whatever threads and processes the run has left.

    :param error_of_run: the connection that its error is sent to
    """
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # with a checkpoint, when the study itself is killed
    code = ENDED
    try:
        attempt(train, folder, run)
    except Exception as error:
        code = DIED if isinstance(error, EnvironmentDiedError) else FAILED
        error_of_run.send(_in_one_line(error))
    for process in multiprocessing.active_children():
        process.kill()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:2_000]


def on_ray(address: str, threads: int = 1) -> Runner:
    """On the cluster at ``address``, as of ``ray.init``; ``threads``: cores of a run. ``ValueError`` for a dead host:port."""
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():  # a cluster's address, which Ray itself tries for several minutes
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()  # brackets: of IPv6
        except (OSError, OverflowError) as error:
            raise ValueError(f"no Ray cluster answers at {address}: {error}") from error

    def runner(train: Train, folder: StudyFolder, runs: Sequence[StudyRun]) -> Ended:
        cores: dict[str, Any] = {"num_cpus": max(jobs_here(1), threads)} if address == "local" else {}
        before = signal.getsignal(signal.SIGTERM)
        with ray.init(address, **cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR):
            if callable(before) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)  # Ray's would end the study without its summary
            options: dict[str, Any] = {"num_cpus": threads, "max_retries": RETRIES, "retry_exceptions": [EnvironmentDiedError]}
            task: Any = ray.remote(**options)(attempt)
            pending = {task.remote(train, folder, run): run for run in runs}
            try:
                while pending:
                    (done,), _ = ray.wait(list(pending))
                    error = ""
                    try:
                        ray.get(done)
                    except ray.exceptions.RayTaskError as failed:  # also of a machine that cannot reach the study's folder
                        error = _in_one_line(failed.cause)
                    except ray.exceptions.RayError as lost:  # its machine was lost too often
                        error = " ".join(str(lost).split())
                    yield pending.pop(done), error
            finally:
                for reference in pending:
                    ray.cancel(reference)  # reaches the run as a Ctrl-C
                ray.wait(list(pending), num_returns=len(pending))

    return runner
