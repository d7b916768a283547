"""Links in a folder of somebody else: what they lead to outside of it is not to be read, cut, deleted or passed on."""

import os
from pathlib import Path


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path in a folder stands for something outside of it."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def first_out(folder: Path) -> Path | None:
    """A link that leads out of a folder, wherever in it; a run that is being written may remove files meanwhile."""
    walked = os.walk(folder)  # not rglob, which fails where a folder vanishes before it is read (Python 3.11)
    paths = sorted(Path(place, name) for place, folders, names in walked for name in (*folders, *names))
    return next((path for path in paths if path.is_symlink() and leads_out(path, folder)), None)
