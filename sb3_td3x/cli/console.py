"""What the command prints: one place, because names and texts may come from files that nobody has vouched for."""

import re
from typing import Any

from rich.console import Console
from rich.table import Table


class PlainConsole(Console):
    """Prints text as it is, without markup and wrapping, and control characters (but not newlines) escaped."""

    def __init__(self, **kwargs: Any):
        super().__init__(highlight=False, markup=False, **kwargs)

    def print(self, *objects: Any, **kwargs: Any) -> None:
        shown = [escaped(thing) if isinstance(thing, str) else thing for thing in objects]
        super().print(*shown, **{"soft_wrap": not any(isinstance(thing, Table) for thing in objects), **kwargs})


def escaped(text: str) -> str:
    """
    Show the characters that a terminal would obey, such as those that set its title or hide text.

    :param text: from anybody
    """
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda match: repr(match[0])[1:-1], text
    )
