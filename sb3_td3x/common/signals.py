"""Signals that ask a run to stop: of Ctrl-C, a cluster, a closed terminal. A study handles its own (``cli/study.py``)."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

ACKNOWLEDGED = b"\nstopping; Ctrl-C again aborts\n"


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, and SIGHUP of a terminal that is closed, unless ``nohup`` has let it be ignored."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def end_with_parent(end: Callable[[], None]) -> None:
    """Call ``end`` when the process that has started this one has ended, which nobody else may notice."""

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            end()

    threading.Thread(target=wait, daemon=True).start()


def acknowledge() -> None:
    """Say that the run stops, and let the next Ctrl-C raise KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(OSError):
        os.write(2, ACKNOWLEDGED)  # `print` could have been interrupted in its middle, and cannot be entered twice


def only_here(handle: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """A handler for this process. Processes that an environment forks end at a signal, but not at the first Ctrl-C."""
    here = os.getpid()

    def receive(number: int, frame: FrameType | None) -> None:
        if os.getpid() == here:
            handle()
        elif number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # another one aborts
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    return receive


@contextmanager
def stopping_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """
    The first of these signals calls ``stop`` and is acknowledged on stderr at once; another Ctrl-C raises KeyboardInterrupt.

    In a process that a study has started Ctrl-C does not count, and nothing is said: a terminal sends Ctrl-C to it too, but
    the study decides and speaks. Outside of the main thread, which alone may handle signals, nothing changes.
    """
    is_child = multiprocessing.parent_process() is not None

    def stop_once() -> None:
        stop()
        if signal.getsignal(signal.SIGINT) is receive:
            acknowledge()

    receive = only_here(stop_once)
    numbers = stop_signals() if is_child else [*stop_signals(), signal.SIGINT]
    with ExitStack() as restored:
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            restored.callback(signal.signal, number, signal.signal(number, receive))
        yield
