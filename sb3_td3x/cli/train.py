"""``td3x train``: one run, with a live bar, to a folder with scores, models, curve and film."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from sb3_td3x.experiment import Run


def command(
    env: Annotated[str, typer.Option(help="Registered Gymnasium environment.")],
    steps: Annotated[float | None, typer.Option(help="Environment steps; the preset's number if left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks, exploration and episodes.")] = 0,
    preset: Annotated[str, typer.Option(help="t3d (the texts' recipe), sb3 (rl-zoo3's values) or default.")] = "default",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: --set batch_size=128")] = None,
    n_envs: Annotated[int | None, typer.Option(help="Environments side by side.")] = None,
    eval_freq: Annotated[int, typer.Option(help="Environment steps between evaluations.")] = 5_000,
    eval_episodes: Annotated[int, typer.Option(help="Episodes of one evaluation.")] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads; more than one only on an idle machine.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("logs"),
    film: Annotated[bool, typer.Option(help="Film the best model at the end.")] = True,
) -> None:
    """Train a TD3X agent. Ctrl-C ends the run cleanly: model, scores and curve are there."""
    from sb3_td3x import experiment
    from sb3_td3x.cli.progress import Messages, ShowProgress

    console = Console(highlight=False, markup=False)
    run = experiment.prepare(
        experiment.Experiment(
            env, steps, seed, preset, tuple(set_ or ()), n_envs, eval_freq, eval_episodes, device, threads, out
        )
    )
    total = run.hyperparameters["n_timesteps"]
    console.print(f"{env}, preset {preset}, seed {seed}, {total:,} steps on {run.model.device.type} → {run.folder.path}")
    run.model.logger.output_formats.append(Messages(console))  # type: ignore[arg-type]  # SB3 takes both kinds of writers
    with ShowProgress(console, total) as progress:
        finished = experiment.train(run, [progress], progress.show_evaluation)
    if not finished:
        console.print(f"stopped at {run.model.num_timesteps:,} of {total:,} steps; what was learned is saved")
    _report(console, run)
    if film:
        _film(console, run)


def _report(console: Console, run: "Run") -> None:
    folder = run.folder
    if folder.evaluations.exists():
        steps, results = folder.scores()
        means = results.mean(axis=1)
        best = means.argmax()
        console.print(f"best score {means[best]:.0f} at {steps[best]:,} steps, last {means[-1]:.0f}")
    kept = (folder.best_model, folder.last_model, folder.curve, folder.evaluations)
    console.print("\n".join(f"  {path}" for path in kept if path.exists()), soft_wrap=True)


def _film(console: Console, run: "Run") -> None:
    from sb3_td3x.experiment import film

    with console.status("filming the best model"):
        try:
            score = film(run.folder, run.folder.film, run.experiment.seed)
        except ValueError as error:
            console.print(f"no film: {error}")
            return
    console.print(f"  {run.folder.film} (one episode, return {score:.0f})", soft_wrap=True)
