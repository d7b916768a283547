"""The command's console: names and texts that it prints may come from untrusted files."""

import re
from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """Prints text as it is: no markup, emoji codes or wrapping, and control characters (but not newlines) escaped."""

    def __init__(self, **kwargs: Any):
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **kwargs)

    def print(self, *objects: Any, **kwargs: Any) -> None:
        super().print(*map(escaped, objects), **kwargs)


def escaped(text: Any) -> Any:
    """Show characters that a terminal would obey, such as those that set its title; other objects stay as they are."""
    if not isinstance(text, str):
        return text
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda match: repr(match[0])[1:-1], text
    )
