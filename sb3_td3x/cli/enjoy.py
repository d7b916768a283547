"""``td3x enjoy``: watch a trained run, in a window or as a film."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    video: Annotated[Path | None, typer.Option(help="Write a film to this .mp4 instead of opening a window.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to show in the window.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Determines the episodes.")] = 1_000,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that the run's files may hold.")] = False,
) -> None:
    """Watch a run's best model: in a window where there is a display, otherwise as a film."""
    from sb3_td3x.results.run_dir import RunDir
    from sb3_td3x.results.scores import score_text
    from sb3_td3x.runs import play

    console = Console(highlight=False, markup=False)
    folder = RunDir.open(run)
    if video is None and play.has_display():
        for score in play.show(folder, episodes, seed, trust):
            console.print(f"return {score_text(score)}")
        return
    out = video or folder.film
    if video is None:
        console.print("there is no display: making a film")
    with console.status("filming"):
        filmed = play.film(folder, out, seed, trust=trust)
    console.print(f"{out} ({filmed})", soft_wrap=True)
