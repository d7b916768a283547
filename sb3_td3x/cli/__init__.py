"""The ``td3x`` command."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sb3_td3x.cli import commands, study, train
from sb3_td3x.cli.console import escaped
from sb3_td3x.version import __version__

LIBRARIES_OF_WRAPPERS = ("gymnasium.wrappers.", "stable_baselines3.", "sb3_td3x.")

app = typer.Typer(
    help="Train, watch and compare TD3X agents.",
    no_args_is_help=True,
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


COMMANDS: dict[str, Callable[..., None]] = {"train": train.command, "study": study.command, **commands.COMMANDS}
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)


def main() -> None:
    """
    Run the command.

    An error that the user can fix is one line and exit code 2 (``TD3X_DEBUG=1`` adds the traceback), any other error a
    traceback and exit code 3. Exit code 1 means that the same command, or ``--resume``, continues.
    """
    try:
        app()
    except Exception as error:
        is_known = _can_be_fixed(error)
        if not is_known or os.environ.get("TD3X_DEBUG"):
            print(escaped(traceback.format_exc()), file=sys.stderr)  # noqa: T201
        sys.exit(fail(error) if is_known else 3)


def _can_be_fixed(error: Exception) -> bool:
    """Whether the user can: bad input, too little memory, a folder that is not writable, a missing simulator."""
    gymnasium = sys.modules.get("gymnasium")  # only a command that made an environment has loaded it
    if isinstance(error, MemoryError) or (gymnasium and isinstance(error, gymnasium.error.DependencyNotInstalled)):
        return True
    return isinstance(error, (ValueError, OSError)) and not (gymnasium and _is_of(gymnasium.Env, error))


def _is_of(env_class: type, error: Exception) -> bool:
    """Whether an environment's own code raised an error; errors of wrappers are about input and files, as a library's are."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    environments = [caller for caller in callers if isinstance(caller, env_class)]
    return bool(environments) and not type(environments[-1]).__module__.startswith(LIBRARIES_OF_WRAPPERS)


def fail(error: Exception) -> int:
    """Print an error as one line; return the exit code."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, (str, os.PathLike)):
        path = Path(error.filename)  # a hidden file is a temporary one of ours
        text = f"{path.parent if path.name.startswith('.') else path} cannot be read or written: {error.strerror}"
    print(escaped("error: " + " ".join(text.split())), file=sys.stderr)  # noqa: T201
    return 2
