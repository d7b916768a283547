"""``td3x export``: a trained run's actor as a file that acts without torch."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    onnx: Annotated[Path | None, typer.Option(help="File to write; RUN/best_model.onnx if left out.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that the run's files may hold.")] = False,
) -> None:
    """Write a run's best model as an ONNX graph, from raw observations to actions of the environment."""
    from sb3_td3x.common import files
    from sb3_td3x.results.run_dir import RunDir
    from sb3_td3x.runs import play

    folder = RunDir.open(run)
    out = onnx or folder.model().with_suffix(".onnx")
    if out.suffix != ".onnx":
        raise ValueError(f"a graph is written as .onnx, not as {out.name}")
    files.require_writable(out)
    env = play.open_evaluation_env(folder, seed=0, trust=trust)
    try:
        play.load_model(folder, env, "cpu", trust).export_onnx(out)
    finally:
        env.close()
    Console(highlight=False, markup=False).print(str(out), soft_wrap=True)
