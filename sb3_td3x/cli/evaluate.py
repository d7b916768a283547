"""``td3x eval``: scores of a trained run on fresh episodes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    episodes: Annotated[int, typer.Option(help="Number of episodes.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Determines the episodes; training used other ones.")] = 1_000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that the run's files may hold.")] = False,
) -> None:
    """Evaluate a run's best model without exploration noise."""
    from sb3_td3x.results.run_dir import RunDir
    from sb3_td3x.results.scores import score_text
    from sb3_td3x.runs.play import evaluate

    folder = RunDir.open(run)
    returns = evaluate(folder, episodes, seed, device, trust)
    Console(highlight=False, markup=False).print(
        f"{folder.env_id}, {folder.model().name}: return {score_text(returns.mean())} ± {score_text(returns.std())} "
        f"over {len(returns)} episode{'' if len(returns) == 1 else 's'} "
        f"(from {score_text(returns.min())} to {score_text(returns.max())})",
        soft_wrap=True,
    )
