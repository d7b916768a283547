"""``td3x plot``: learning curves of one or several runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("curve.png"),
) -> None:
    """Draw learning curves: a line per algorithm and environment, with the interval over its runs."""
    if find_spec("matplotlib") is None:
        raise ValueError("td3x plot needs matplotlib: pip install matplotlib")
    from sb3_td3x.curves import draw
    from sb3_td3x.rundir import RunDir

    draw([RunDir.open(path) for path in runs], out)
    Console(highlight=False, markup=False).print(str(out), soft_wrap=True)
