"""``td3x report``: a run as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Page to write (.html); RUN/report.html if left out.")] = None,
) -> None:
    """Write a run as one HTML page that loads nothing: scores, training diagnostics, film, settings, commands."""
    from sb3_td3x.publish import report
    from sb3_td3x.results.run_dir import RunDir

    folder = RunDir.open(run)
    page = out or folder.report
    report.write(folder, page)
    Console(highlight=False, markup=False).print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
