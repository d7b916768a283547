"""``td3x train``: one run to a folder with scores, models, checkpoints, plot and video."""

import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sb3_td3x.cli.console import PlainConsole

if TYPE_CHECKING:
    from sb3_td3x.results.run_dir import RunDir
    from sb3_td3x.runs.experiment import Run

OPTIONAL = {
    "matplotlib": ("no plot of the scores", "matplotlib"),
    "tensorboard": ("no TensorBoard events", "tensorboard"),
    "imageio_ffmpeg": ("no video", '"imageio[ffmpeg]"'),
}
"""By module: what is left out without it, and what to install."""
WITH_RESUME = {"resume", "steps", "checkpoint", "trust", "video", "verbose", "track"}
"""Options that ``--resume`` allows; the run's folder holds the others."""


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
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print SB3's table of training values.")] = False,
    track: Annotated[str | None, typer.Option(help="Also log to an experiment tracker: wandb.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of a run to resume.")] = None,
    checkpoint: Annotated[int | None, typer.Option(help="With --resume: steps of the checkpoint to resume from.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="With --resume: run code that the checkpoint may hold.")] = False,
) -> None:
    """
    Train a TD3X agent, or resume a run.

    Ctrl-C ends the run cleanly (exit code 1): model, scores, plot and a checkpoint are there, and --resume continues from it.
    """
    from sb3_td3x.results.run_dir import RunDir

    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    _check_options(chosen, track)
    console = PlainConsole()
    if resume is not None:
        resumed = RunDir.open(resume)
        from sb3_td3x.runs import experiment

        run = experiment.resume(resumed, steps, checkpoint, trust)
    else:
        if env is None:
            raise typer.BadParameter("--env is missing: the environment to train in (or --resume RUN)")
        from sb3_td3x.common.lock import is_touched
        from sb3_td3x.runs import experiment

        requested = experiment.Experiment(
            env, steps, seed, preset, tuple(set_ or ()), n_envs, eval_freq, eval_episodes, save_freq, device, threads, out,
            env_kwargs=_env_kwargs(env_kwargs), video=video,
        )  # fmt: skip
        if stopped := [folder for folder in experiment.unfinished(requested) if not is_touched(folder.path)]:
            console.print(f"to resume an unfinished run of these settings: {_resumption(stopped[-1])}")
        run = experiment.prepare(requested, command=_command_line())
    makes_video = video if "video" in chosen else run.experiment.video
    _name_left_out(console, makes_video)
    if not _train(console, run, verbose, track):
        raise typer.Exit(1)
    if makes_video:
        _record(console, run, trust)
    folder = shlex.quote(str(run.folder.path))
    console.print(f"watch it: td3x enjoy {folder}\nread about it: td3x report {folder}")


def _env_kwargs(texts: list[str] | None) -> dict[str, Any] | None:
    """``key:value``, as in rl-zoo3; values are YAML."""
    from sb3_td3x import presets

    pairs = [text.partition(":") for text in texts or ()]
    if wrong := [key for key, colon, _ in pairs if not colon or not key.isidentifier()]:
        raise ValueError(f"--env-kwargs needs key:value, not {wrong[0]!r}")
    return {key: presets.parse(value) for key, _, value in pairs} or None


def _command_line() -> str:
    """For ``args.yml``, without --out: it says where this machine has its files, not what the run is."""
    words = ["td3x", *sys.argv[1:]]
    pairs = zip(["", *words], words, strict=False)
    return shlex.join(word for before, word in pairs if before != "--out" and not re.match("--out(=|$)", word))


def _name_left_out(console: PlainConsole, video: bool) -> None:
    missing = [name for name in OPTIONAL if find_spec(name) is None and (video or name != "imageio_ffmpeg")]
    if missing:
        results, packages = zip(*(OPTIONAL[name] for name in missing), strict=True)
        console.print(f"not installed: {', '.join(missing)}, so there will be {', '.join(results)}")
        console.print(f"  to get all of it: pip install {' '.join(packages)}")


def _train(console: PlainConsole, run: "Run", verbose: bool, track: str | None) -> bool:
    """Whether the run reached its last step."""
    from stable_baselines3.common.logger import HumanOutputFormat

    from sb3_td3x.cli.progress import Messages, ShowProgress, Wandb
    from sb3_td3x.runs import experiment

    settings = run.experiment
    steps = f"steps {run.model.num_timesteps:,} to {run.total:,}" if run.is_resumed else f"{run.total:,} steps"
    where = f"{run.model.device.type} → {run.folder.path}"
    console.print(f"{settings.env_id}, preset {settings.preset}, seed {settings.seed}, {steps} on {where}")
    outputs: list[Any] = run.model.logger.output_formats
    outputs.append(Messages(console))
    if verbose:
        outputs.append(HumanOutputFormat(sys.stdout))
    if track:
        outputs.append(Wandb(run))
    with ShowProgress(console, run.total, bar=console.is_terminal and not verbose) as progress, _plain_warnings(console):
        finished = experiment.train(run, [progress], progress.show_evaluation)
    if not finished:
        done = f"{run.model.num_timesteps:,} of {run.total:,} steps"
        console.print(f"stopped at {done}; what was learned is saved. Resume with:")
        console.print(f"  {_resumption(run.folder)}")
    _report(console, run)
    return finished


@contextmanager
def _plain_warnings(console: PlainConsole) -> Iterator[None]:
    """Show a warning as a sentence, without the place in the code that it came from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.print(f"warning: {message}")
        yield


def _check_options(chosen: set[str], track: str | None) -> None:
    if track not in (None, "wandb"):
        raise typer.BadParameter(f"--track can be wandb, not {track}")
    if track and find_spec("wandb") is None:
        raise ValueError("--track wandb needs wandb: pip install wandb")
    if "resume" in chosen:
        refused, reason = chosen - WITH_RESUME, "cannot be changed with --resume RUN: the run's folder holds its settings"
    else:
        refused, reason = chosen & {"checkpoint", "trust"}, "is for --resume"
    if refused:
        options = sorted(f"--{name.strip('_').replace('_', '-')}" for name in refused)
        raise typer.BadParameter(f"{', '.join(options)} {reason}")


def _resumption(folder: "RunDir") -> str:
    """The command that resumes a run; modules are imported and arguments passed to environments only with trust."""
    trust = ["--trust"] if ":" in folder.env_id or folder.arguments().get("env_kwargs") else []
    return shlex.join(["td3x", "train", "--resume", str(folder.path), *trust])


def _report(console: PlainConsole, run: "Run") -> None:
    from sb3_td3x.results.scores import score_text

    folder = run.folder
    if folder.evaluations.exists():
        steps, results = folder.scores()
        means = results.mean(axis=1)
        best = means.argmax()
        console.print(f"best score {score_text(means[best])} at {steps[best]:,} steps, last {score_text(means[-1])}")
    written = (folder.best_model, folder.last_model, folder.curve, folder.evaluations)
    console.print("\n".join(f"  {path}" for path in written if path.exists()))


def _record(console: PlainConsole, run: "Run", trust: bool) -> None:
    from sb3_td3x.runs import play

    trust = trust or not run.is_resumed  # settings that this command was given need no trust
    with console.status("making a video of the best model"):
        try:
            recorded = play.record_video(run.folder, run.folder.video, run.experiment.seed, trust=trust)
        except ValueError as error:
            console.print(f"no video: {error}")
            return
    console.print(f"  {run.folder.video} ({recorded})")
