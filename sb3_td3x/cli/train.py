"""``td3x train``: one run, with a live bar, to a folder with scores, models, checkpoints, curve and film."""

import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from sb3_td3x.results.run_dir import RunDir
    from sb3_td3x.runs.experiment import Experiment, Run


def command(
    context: typer.Context,
    run_folder: Annotated[Path | None, typer.Argument(metavar="RUN", help="With --resume: the run's folder.")] = None,
    env: Annotated[str | None, typer.Option(help="Registered Gymnasium environment, or module:Name.")] = None,
    steps: Annotated[float | None, typer.Option(help="Environment steps; the preset's number if left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks, exploration and episodes.")] = 0,
    preset: Annotated[str, typer.Option(help="default, sb3 (rl-zoo3's values) or t3d (a tutorial's).")] = "default",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: --set batch_size=128")] = None,
    n_envs: Annotated[int | None, typer.Option(help="Environments side by side.")] = None,
    eval_freq: Annotated[int, typer.Option(help="Environment steps between evaluations.")] = 5_000,
    eval_episodes: Annotated[int, typer.Option(help="Episodes of one evaluation.")] = 10,
    save_freq: Annotated[int, typer.Option(help="Environment steps between checkpoints.")] = 10_000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads; more than one only on an idle machine.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("logs"),
    film: Annotated[bool, typer.Option(help="Film the best model at the end.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with RUN, or with the newest of these settings.")] = False,
    checkpoint: Annotated[int | None, typer.Option(help="With --resume: steps of the checkpoint to go on from.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="With --resume: run code that the checkpoint may hold.")] = False,
) -> None:
    """
    Train a TD3X agent, or go on with a run.

    Ctrl-C ends the run cleanly (exit code 1): model, scores, curve and a checkpoint are there, and --resume goes on from it.
    """
    from sb3_td3x.runs import experiment

    _check_resume_options(context, resume)
    console = Console(highlight=False, markup=False)
    if resume and run_folder is not None:
        _refuse_other_options(context)
        run = experiment.resume(experiment.RunDir.open(run_folder), steps, checkpoint, trust)
    else:
        if env is None:
            raise typer.BadParameter("--env is missing: the environment to train in (or --resume RUN)")
        wanted = experiment.Experiment(
            env, steps, seed, preset, tuple(set_ or ()), n_envs, eval_freq, eval_episodes, save_freq, device, threads, out
        )
        if resume:
            run = experiment.resume(_newest_unfinished(wanted), None, checkpoint, trust)
        else:
            _name_unfinished(console, wanted)
            run = experiment.prepare(wanted)
    if not _train(console, run):
        raise typer.Exit(1)
    if film:
        _film(console, run, trust)


def _train(console: Console, run: "Run") -> bool:
    """Whether the run reached its last step."""
    from sb3_td3x.cli.progress import Messages, ShowProgress
    from sb3_td3x.runs import experiment

    what = run.experiment
    steps = f"steps {run.model.num_timesteps:,} to {run.total:,}" if run.is_resumed else f"{run.total:,} steps"
    where = f"{run.model.device.type} → {run.folder.path}"
    console.print(f"{what.env_id}, preset {what.preset}, seed {what.seed}, {steps} on {where}", soft_wrap=True)
    run.model.logger.output_formats.append(Messages(console))  # type: ignore[arg-type]  # SB3 takes both kinds of writers
    with ShowProgress(console, run.total) as progress, _plain_warnings(console):
        finished = experiment.train(run, [progress], progress.show_evaluation)
    if not finished:
        done = f"{run.model.num_timesteps:,} of {run.total:,} steps"
        console.print(f"stopped at {done}; what was learned is saved. Go on with:", soft_wrap=True)
        console.print(f"  {_resumption(run.folder)}", soft_wrap=True)
    _report(console, run)
    return finished


@contextmanager
def _plain_warnings(console: Console) -> Iterator[None]:
    """Show a warning as a sentence, without the place in the code it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(f"warning: {message}", soft_wrap=True)
        yield


def _check_resume_options(context: typer.Context, resume: bool) -> None:
    for name in ("run_folder", "checkpoint", "trust"):
        if not resume and _is_given(context, name):
            instead = "; an environment is named with --env" if name == "run_folder" else ""
            raise typer.BadParameter(f"{_shown(name)} is for --resume{instead}")


def _refuse_other_options(context: typer.Context) -> None:
    """A resumed run has its settings already; only its length may change."""
    allowed = {"resume", "run_folder", "steps", "checkpoint", "trust", "film"}
    given = [_shown(name) for name in context.params if name not in allowed and _is_given(context, name)]
    if given:
        raise typer.BadParameter(
            f"{', '.join(given)} cannot be changed with --resume RUN: the run's folder holds its settings"
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _shown(name: str) -> str:
    return {"run_folder": "RUN", "set_": "--set"}.get(name, f"--{name.replace('_', '-')}")


def _newest_unfinished(wanted: "Experiment") -> "RunDir":
    from sb3_td3x.runs import environments, experiment

    environments.require_registered(wanted.env_id)  # the command names it, not the run's folder
    if found := experiment.unfinished(wanted):
        return found[-1]
    differing = "; ".join(
        f"{name} has {', '.join(what)}" for name, what in experiment.differing_settings(wanted).items() if what
    )
    raise ValueError(f"no unfinished run with these settings in {wanted.out}" + (f" ({differing})" if differing else ""))


def _name_unfinished(console: Console, wanted: "Experiment") -> None:
    from sb3_td3x.common.lock import is_touched
    from sb3_td3x.runs import experiment

    if found := [folder for folder in experiment.unfinished(wanted) if not is_touched(folder.path)]:
        console.print(f"an unfinished run of these settings could go on: {_resumption(found[-1])}", soft_wrap=True)


def _resumption(folder: "RunDir") -> str:
    """The command that goes on with a run; the module of ``module:Name`` is imported only where it is trusted."""
    trust = ["--trust"] if ":" in folder.env_id else []
    return shlex.join(["td3x", "train", "--resume", str(folder.path), *trust])


def _report(console: Console, run: "Run") -> None:
    from sb3_td3x.results.scores import score_text

    folder = run.folder
    if folder.evaluations.exists():
        steps, results = folder.scores()
        means = results.mean(axis=1)
        best = means.argmax()
        console.print(f"best score {score_text(means[best])} at {steps[best]:,} steps, last {score_text(means[-1])}")
    kept = (folder.best_model, folder.last_model, folder.curve, folder.evaluations)
    console.print("\n".join(f"  {path}" for path in kept if path.exists()), soft_wrap=True)


def _film(console: Console, run: "Run", trust: bool) -> None:
    from sb3_td3x.runs.play import film

    with console.status("filming the best model"):
        try:
            filmed = film(run.folder, run.folder.film, run.experiment.seed, trust=trust)
        except ValueError as error:
            console.print(f"no film: {error}", soft_wrap=True)
            return
    console.print(f"  {run.folder.film} ({filmed})", soft_wrap=True)
