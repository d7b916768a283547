"""What asks a run to stop: Ctrl-C, and the SIGTERM of a cluster."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopping_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """
    The first Ctrl-C or SIGTERM calls ``stop``; a second Ctrl-C aborts.

    In a process that a study has started, only SIGTERM counts: the terminal sends Ctrl-C to it too, and the study decides.
    """
    ours = [signal.SIGTERM] if multiprocessing.parent_process() else [signal.SIGTERM, signal.SIGINT]

    def receive(number: int, frame: FrameType | None) -> None:
        stop()
        if signal.SIGINT in ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # Only the main thread may handle signals
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, receive) for number in ours if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
