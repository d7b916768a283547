"""The command's console: names and texts that it prints may come from untrusted files."""

import errno
import signal
from contextlib import suppress
from typing import Any

from rich.console import Console

from sb3_td3x.errors import escaped


class PlainConsole(Console):
    """Prints text as it is: no markup, emoji codes or wrapping, and control characters (but not newlines) escaped."""

    def __init__(self, **kwargs: Any):
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **kwargs)

    @property
    def is_terminal(self) -> bool:
        """Rich takes a file for one too if colors are forced (``FORCE_COLOR``)."""
        return super().is_terminal and self.file.isatty()

    def _check_buffer(self) -> None:
        """Where a terminal has gone without a signal, as after ``disown``, a run continues unseen."""
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            with suppress(SystemExit):
                super().on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Where nobody reads any more, a run ends as when its terminal is closed: with a checkpoint."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                raise
            signal.raise_signal(signal.SIGTERM)

    def print(self, *objects: Any, **kwargs: Any) -> None:
        super().print(*[escaped(part) if isinstance(part, str) else part for part in objects], **kwargs)
