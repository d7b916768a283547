"""The ``td3x`` command."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from sb3_td3x.cli import bench, enjoy, evaluate, export, plot, push, report, study, train
from sb3_td3x.version import __version__

LIBRARIES_OF_WRAPPERS = ("gymnasium.wrappers.", "stable_baselines3.", "sb3_td3x.")

app = typer.Typer(
    help="Train, watch and compare TD3X agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None: ...


app.command("train")(train.command)
app.command("eval")(evaluate.command)
app.command("enjoy")(enjoy.command)
app.command("plot")(plot.command)
app.command("report")(report.command)
app.command("export")(export.command)
app.command("push")(push.command)
app.command("bench")(bench.command)
app.command("study")(study.command)


def main() -> None:
    """
    Run the command.

    What the user can mend is one line and exit code 2 (``TD3X_DEBUG=1`` shows where it arose), any other error exit code 3: 1
    is for what can go on as it is.
    """
    try:
        app()
    except Exception as error:
        is_known = _can_be_mended(error)
        if not is_known or os.environ.get("TD3X_DEBUG"):
            traceback.print_exc()
        sys.exit(fail(error) if is_known else 3)


def _can_be_mended(error: Exception) -> bool:
    """By the user: bad input, a place that cannot be written, or a simulator or drawing library that is not installed."""
    gymnasium = sys.modules.get("gymnasium")  # only a command that made an environment has loaded it
    if gymnasium is not None and isinstance(error, gymnasium.error.DependencyNotInstalled):
        return True
    return isinstance(error, (ValueError, OSError)) and (gymnasium is None or not _is_of(gymnasium.Env, error))


def _is_of(env_class: type, error: Exception) -> bool:
    """Whether an environment's own code raised it; wrappers write files and refuse input, as the rest of a library does."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    environments = [one for one in callers if isinstance(one, env_class)]
    return bool(environments) and not type(environments[-1]).__module__.startswith(LIBRARIES_OF_WRAPPERS)


def fail(error: Exception) -> int:
    print("error: " + " ".join(_text(error).split()), file=sys.stderr)  # noqa: T201
    return 2


def _text(error: Exception) -> str:
    """Of what the operating system says, the file or the folder first; hidden files are our own, on their way to a name."""
    if not isinstance(error, OSError) or not error.strerror or not isinstance(error.filename, (str, os.PathLike)):
        return str(error)
    path = Path(error.filename)
    return f"{path.parent if path.name.startswith('.') else path} cannot be read or written: {error.strerror}"
