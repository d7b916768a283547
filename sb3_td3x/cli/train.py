"""``td3x train``: one run to a folder with scores, models, checkpoints, plot and video."""

import shlex
import shutil
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sb3_td3x import presets
from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.common import files
from sb3_td3x.results.run_dir import RunDir

if TYPE_CHECKING:
    from sb3_td3x.runs.experiment import Run

OPTIONAL = {"matplotlib": "plot of the scores", "tensorboard": "TensorBoard events"}  # what a run lacks without them
# The run's folder holds the others
WITH_RESUME = {"resume", "steps", "checkpoint", "trust", "device", "threads", "video", "track"}


def command(
    context: typer.Context,
    env: Annotated[str | None, typer.Option(help="Registered Gymnasium environment, or module:Name.")] = None,
    steps: Annotated[float | None, typer.Option(help="Environment steps; the preset's number if left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of networks, exploration and episodes.")] = 0,
    preset: Annotated[str, typer.Option(help="default, sb3 (rl-zoo3's values), t3d (a tutorial's) or FILE.yml.")] = "default",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a setting: --set batch_size=128")] = None,
    env_kwargs: Annotated[list[str] | None, typer.Option(help="Argument of the environment: --env-kwargs gravity:5")] = None,
    n_envs: Annotated[int | None, typer.Option(help="Number of parallel environments.")] = None,
    eval_freq: Annotated[int, typer.Option(help="Environment steps between evaluations.")] = 5_000,
    eval_episodes: Annotated[int, typer.Option(help="Episodes of one evaluation.")] = 10,
    save_freq: Annotated[int, typer.Option(help="Environment steps between checkpoints.")] = 10_000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Torch threads; more than one only on an idle machine.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("logs"),
    video: Annotated[bool, typer.Option(help="Make a video of the best model at the end.")] = True,
    track: Annotated[Literal["wandb"] | None, typer.Option(help="Also log to an experiment tracker.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of a run to resume.")] = None,
    checkpoint: Annotated[int | None, typer.Option(help="With --resume: steps of the checkpoint to resume from.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="With --resume: run code that the checkpoint may hold.")] = False,
) -> None:
    """
    Train a TD3X agent, or resume a run.

    Ctrl-C ends the run cleanly (exit code 1): model, scores so far and a checkpoint are there; --resume continues from it.
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    _check_options(chosen)
    if track:
        import_module(track)  # if it is missing, that is said before the run begins
    console = PlainConsole()
    if resume is not None:
        folder = RunDir.open(resume)  # before torch is imported, so that an error appears at once
        from sb3_td3x.runs import experiment

        options: dict[str, Any] = {name: context.params[name] for name in ("device", "threads") if name in chosen}
        run = experiment.resume(folder, steps, checkpoint, trust, **options)
    elif env is None:
        raise typer.BadParameter("--env is missing: the environment to train in (or --resume RUN)")
    else:
        from sb3_td3x.runs import experiment

        requested = experiment.Experiment(
            env, steps, seed, preset, tuple(set_ or ()), n_envs, eval_freq, eval_episodes, save_freq, device, threads, out,
            env_kwargs=_env_kwargs(env_kwargs), video=video,
        )  # fmt: skip
        run = experiment.prepare(requested, command=_command_line())
    for package, result in OPTIONAL.items():
        if find_spec(package) is None:
            console.print(f"no {result}: pip install {package}")
    trusts = trust or resume is None  # settings that this command was given need no trust
    again = "".join(f" --{name} {context.params[name]}" for name in ("device", "threads", "track") if name in chosen)
    if not _train(console, run, track, trusts, again):
        raise typer.Exit(1)
    if video if "video" in chosen else run.experiment.video:
        from sb3_td3x.runs import play

        with console.status("making a video of the best model"):
            try:
                recorded = play.record_video(run.folder, run.folder.video, run.experiment.seed, trust=trusts)
                console.print(f"  {run.folder.video} ({recorded})")
            except ValueError as error:
                console.print(str(error))
    words = _words(run.folder, trusts)
    console.print(f"watch it: td3x enjoy {words}\nread about it: td3x report {words}")


def _check_options(chosen: set[str]) -> None:
    if "resume" in chosen:
        refused, reason = chosen - WITH_RESUME, "cannot be changed with --resume RUN: the run's folder holds its settings"
    else:
        refused, reason = chosen & {"checkpoint", "trust"}, "is for --resume"
    if refused:
        options = sorted(f"--{name.strip('_').replace('_', '-')}" for name in refused)
        raise typer.BadParameter(f"{', '.join(options)} {reason}")


def _env_kwargs(texts: list[str] | None) -> dict[str, Any] | None:
    """``key:value``, as in rl-zoo3; values are YAML."""
    pairs = [text.partition(":") for text in texts or ()]
    if wrong := ["".join(pair) for pair in pairs if not pair[1] or not pair[0].isidentifier()]:
        raise ValueError(f"--env-kwargs needs name:value, not {wrong[0]!r}")
    return {key: presets.parse(value) for key, _, value in pairs} or None


def _command_line() -> str:
    """For ``args.yml``, without --out: it says where this machine has its files, not what the run is."""
    words = ["td3x", *sys.argv[1:]]
    pairs = zip(["", *words], words, strict=False)
    return shlex.join(word for before, word in pairs if before != "--out" and not word.startswith("--out"))


def _train(console: PlainConsole, run: "Run", track: str | None, trusts: bool, again: str) -> bool:
    """Whether the run reached its last step; ``again``: options that resuming takes too."""
    from sb3_td3x.cli.progress import Messages, ShowProgress, Wandb, scores_text
    from sb3_td3x.runs import experiment

    settings = run.experiment
    steps = f"steps {run.model.num_timesteps:,} to {run.total:,}" if run.is_resumed else f"{run.total:,} steps"
    where = f"{run.model.device.type} → {run.folder.path}"
    console.print(f"{settings.env_id}, preset {settings.preset}, seed {settings.seed}, {steps} on {where}")
    outputs: list[Any] = run.model.logger.output_formats
    outputs.append(Messages(console))
    with run.resources:  # its lock, also where wandb refuses
        if track:
            try:
                outputs.append(Wandb(run))
            except BaseException:
                if not run.is_resumed:
                    shutil.rmtree(run.folder.path, ignore_errors=True)
                raise
        progress = ShowProgress(console, run, has_bar=console.is_interactive)
        with progress.bar, warnings.catch_warnings():
            # As a sentence, without the place in the code that it came from
            warnings.showwarning = lambda message, *_: console.print(f"warning: {message}")
            finished = experiment.train(run, [progress], progress.show_evaluation)
    if not finished:
        done = f"{run.model.num_timesteps:,} of {run.total:,} steps"
        console.print(f"stopped at {done}; what was learned is saved. Resume with:")
        console.print(f"  td3x train --resume {_words(run.folder, trusts)}{again}")
    console.print(scores_text(run.folder))
    for path in (run.folder.best_model, run.folder.last_model, run.folder.curve, run.folder.evaluations):
        if path.exists():
            console.print(f"  {path}")
    return finished


def _words(folder: RunDir, trusts: bool) -> str:
    """The folder as a command's words, with ``--trust`` where its environment's module or arguments, or a link, need it."""
    needs_trust = trusts and (":" in folder.env_id or folder.arguments().get("env_kwargs") or files.link_out_of(folder.path))
    return shlex.quote(folder.path.as_posix()) + (" --trust" if needs_trust else "")
