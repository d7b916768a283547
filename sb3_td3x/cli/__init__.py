"""The ``td3x`` command."""

import os
import sys
import traceback
from io import TextIOWrapper
from typing import Annotated

import typer

from sb3_td3x.cli import commands, study, train
from sb3_td3x.errors import escaped
from sb3_td3x.version import __version__

LIBRARIES_OF_WRAPPERS = ("gymnasium.wrappers.", "stable_baselines3.", "sb3_td3x.")

app = typer.Typer(
    help="Train, watch and compare TD3X agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.command)
app.command("study")(study.command)
app.command("eval")(commands.evaluate)
for _each in (commands.enjoy, commands.plot, commands.report, commands.export, commands.push, commands.pull, commands.bench):
    app.command()(_each)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


def main() -> None:
    """Run the command, with the exit codes of docs/command.md; ``TD3X_DEBUG=1`` adds the traceback to an error of one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know no arrow, or a path not be text
    try:
        app()
    except Exception as error:
        can_be_fixed = _can_be_fixed(error)
        if not can_be_fixed or os.environ.get("TD3X_DEBUG"):
            print(escaped(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        if can_be_fixed:
            advice = f": pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
            print(escaped("error: " + " ".join((str(error) or repr(error)).split()) + advice), file=sys.stderr)  # noqa: T201
        sys.exit(2 if can_be_fixed else 3)


def _can_be_fixed(error: Exception) -> bool:
    """Whether the user can fix it. What an environment's code raises is a bug; errors of wrappers are about input."""
    import gymnasium as gym  # here, because `td3x --help` needs none of it

    if isinstance(error, (MemoryError, gym.error.DependencyNotInstalled)):
        return True
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    environments = [type(caller).__module__ for caller in callers if isinstance(caller, gym.Env)]
    is_of_environment = bool(environments) and not environments[-1].startswith(LIBRARIES_OF_WRAPPERS)
    return isinstance(error, (ValueError, OSError, ModuleNotFoundError, NotImplementedError)) and not is_of_environment
