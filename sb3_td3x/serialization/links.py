"""Links in a folder of somebody else: what they lead to outside of it is not to be read, cut, deleted or passed on."""

import os
from pathlib import Path


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path in a folder stands for something outside of it."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def first_out(folder: Path) -> Path | None:
    """A link that leads out of a folder, wherever in it."""
    return next((path for path in sorted(folder.rglob("*")) if path.is_symlink() and leads_out(path, folder)), None)
