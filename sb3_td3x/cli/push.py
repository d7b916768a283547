"""``td3x push``: a trained run on the Hugging Face Hub."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console


def command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repo: Annotated[str, typer.Option(help="Repository on the Hub, as user/name; made if it is not there.")],
    to_folder: Annotated[Path | None, typer.Option(help="Write the files here and upload nothing.")] = None,
    episodes: Annotated[int, typer.Option(help="Episodes of the evaluation that the model card reports.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Determines those episodes; training used other ones.")] = 1_000,
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others cannot see.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Push a model that readers have to trust you to load.")] = False,
) -> None:
    """Evaluate a run's best model, write its model card and upload both to the Hugging Face Hub."""
    from sb3_td3x.publish import hub
    from sb3_td3x.results.run_dir import RunDir

    console = Console(highlight=False, markup=False)
    folder = RunDir.open(run)
    if to_folder is not None:
        with console.status("evaluating"):
            hub.write(folder, to_folder, repo, episodes, seed, trust)
        console.print(str(to_folder), soft_wrap=True)
        return
    with TemporaryDirectory() as made:
        with console.status("evaluating"):
            hub.write(folder, Path(made), repo, episodes, seed, trust)
        with console.status("uploading"):
            address = hub.upload(Path(made), repo, private)
    console.print(address, soft_wrap=True)
