"""The commands that make a run again, from what its folder says of it."""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sb3_td3x.runs.experiment import ARGUMENT_NAMES, Experiment


def commands(arguments: Mapping[str, Any]) -> list[str]:
    """
    Lines of shell, safe to paste whatever the folder says.

    A run that was given another length had another schedule and another warm-up until then, so it is begun at its first one.

    :param arguments: of ``RunDir.arguments``, by anybody
    """
    before = arguments.get("earlier_lengths")
    earlier = [one for one in (before if isinstance(before, list) else []) if _is_length(one)]
    if not (earlier and _is_number(arguments.get("n_timesteps"))):
        return [shlex.join(["td3x", "train", *_options(arguments)])]
    first = shlex.join(["td3x", "train", *_options({**arguments, "n_timesteps": earlier[0]["planned"]})])
    lengths = [*(one["planned"] for one in earlier[1:]), arguments["n_timesteps"]]
    lines = [first, *(f"td3x train --resume RUN --steps {length:.0f}" for length in lengths)]
    for number, one in enumerate(earlier):
        if one["until"] < one["planned"]:
            lines[number] += f"  # stop it with Ctrl-C after {one['until']:,.0f} steps"
    return [*lines, "# RUN: the folder that the first command made"]


def _options(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Of ``td3x train``: which run it is, and what is not the command's default."""
    always = ("env_id", "steps", "seed", "preset")
    for field in fields(Experiment):
        value = arguments.get(ARGUMENT_NAMES.get(field.name, field.name))
        if (
            field.name in ("overrides", "out", "setting")
            or value is None
            or (value == field.default and field.name not in always)
        ):
            continue
        name = "env" if field.name == "env_id" else field.name.replace("_", "-")
        yield from (f"--{name}", f"{value:.0f}" if isinstance(value, float) and math.isfinite(value) else str(value))
    overrides = arguments["overrides"]
    for override in overrides if isinstance(overrides, Sequence) and not isinstance(overrides, str) else ():
        yield from ("--set", str(override))


def _is_length(value: Any) -> bool:
    return isinstance(value, dict) and _is_number(value.get("planned")) and _is_number(value.get("until"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
