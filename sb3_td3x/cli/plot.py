"""``td3x plot``: learning curves of one or several runs."""

from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class XAxis(str, Enum):
    steps = "steps"
    time = "time"
    both = "both"


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or studies, or tables of scores (.csv).")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("curve.png"),
    x: Annotated[
        XAxis, typer.Option(help="Draw over environment steps, wall-clock time, or both side by side.")
    ] = XAxis.steps,
    iqm: Annotated[bool, typer.Option(help="For several environments, a panel with rliable's interquartile mean.")] = True,
    normalize: Annotated[bool, typer.Option(help="In it, scale each environment's scores from 0 to 1.")] = True,
) -> None:
    """Draw learning curves: a panel per environment, a line per algorithm and setting with the interval over its seeds."""
    if find_spec("matplotlib") is None:
        raise ValueError("td3x plot needs matplotlib: pip install matplotlib")
    from sb3_td3x.results.iqm import require_rliable
    from sb3_td3x.results.plots import draw
    from sb3_td3x.results.scores import read

    scores = read(runs)
    if iqm and len({one.env_id for one in scores}) > 1:
        require_rliable()
    draw(scores, out, ("steps", "time") if x is XAxis.both else (x.value,), iqm, normalize)
    Console(highlight=False, markup=False).print(str(out), soft_wrap=True)
