"""The command's console: names and texts that it prints may come from untrusted files."""

from typing import Any

from rich.console import Console

from sb3_td3x.errors import escaped


class PlainConsole(Console):
    """Prints text as it is: no markup, emoji codes or wrapping, and control characters (but not newlines) escaped."""

    def __init__(self, **kwargs: Any):
        super().__init__(highlight=False, markup=False, emoji=False, soft_wrap=True, **kwargs)

    def print(self, *objects: Any, **kwargs: Any) -> None:
        super().print(*[escaped(part) if isinstance(part, str) else part for part in objects], **kwargs)
