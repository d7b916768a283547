"""The errors that TD3X adds to SB3's. All are of the kind ``ValueError``, which rl-zoo3 turns into pruned trials."""

import inspect
import re
from pathlib import Path
from typing import Any


def escaped(text: str) -> str:
    """Show the characters that a terminal would obey, such as those that set its title, but not newlines."""
    return re.sub(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", lambda match: repr(match[0])[1:-1], text
    )


class _Error(ValueError):
    """
    Has its constructor's arguments as attributes, and is pickled by them (``SubprocVecEnv``, Ray). The message may quote what
    an untrusted file holds.
    """

    def __init__(self, message: str):
        super().__init__(escaped(message))
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in inspect.signature(type(self)).parameters)


class NonFiniteError(_Error):
    """
    A NaN, an infinity or a reward beyond 1e15 came from the environment, or a NaN or an infinity arose in an update.

    The replay buffer holds no such value, and no optimizer step was made with it: the weights are those of the last
    good step. ``VecNormalize`` sees what the environment returns before TD3X does: its statistics are restored, and it
    clips an infinite terminal observation to a finite one, which passes.

    :param tensor: what holds the value, for example ``"reward"`` or ``"critic loss or its gradient"``
    :param when: where in the run it was found, for example ``"environment step 1200"``
    :param problem: what is wrong with it, as the rest of a sentence
    """

    def __init__(self, tensor: str, when: str, problem: str = "is not finite"):
        super().__init__(
            f"{tensor} {problem} at {when}. The weights are those of the last good step. "
            "If it comes from the environment, fix the environment (SB3's VecCheckNan helps to locate NaNs); "
            "in a loss or gradient, lower learning_rate or normalize observations and rewards. "
            "If a run ends like this whenever it is resumed, resume an earlier checkpoint: "
            "resume_run(..., checkpoint=STEPS), td3x train --resume RUN --checkpoint STEPS."
        )
        self.tensor, self.when, self.problem = tensor, when, problem


class ModelFileError(_Error):
    """A saved model, policy, replay buffer or ``VecNormalize`` is damaged or of another kind, or parameters do not fit."""


class UntrustedModelError(ModelFileError):
    """
    A file holds something that is read by running code of its author, and its reader did not say that it trusts the author.

    Cured by ``trust=True``, or for a model's zip by giving the object as ``custom_objects={field: ...}``.

    :param field: the model's attribute, or what else is concerned
    :param held: what the file holds there
    :param file: name of the file
    """

    def __init__(self, field: str, held: str, file: str = "the file"):
        instead = f", or with custom_objects={{{field!r}: ...}}" if field.isidentifier() else ""
        super().__init__(
            f"{file} cannot be loaded without trusting it: {field} holds {held}, which runs code of whoever made the file. "
            f"If you trust them, load with trust=True (td3x: --trust){instead}."
        )
        self.field, self.held, self.file = field, held, file


class CheckpointError(_Error):
    """
    A checkpoint's file or folder, ``path``, cannot be written or read.

    :param problem: what is wrong with it, as the rest of a sentence
    :param last_good: steps of the last checkpoint that is whole, if another one is
    """

    def __init__(self, path: Path, problem: str, last_good: int | None = None):
        advice = "" if last_good is None else (
            f". The last checkpoint that is whole has {last_good:,} steps: ask for it with checkpoint={last_good} "
            f"(td3x train --resume RUN --checkpoint {last_good})"
        )  # fmt: skip
        super().__init__(f"{path} {problem}{advice}")
        self.path, self.problem, self.last_good = path, problem, last_good


class RunLockedError(_Error):
    """Process ``pid`` on ``host`` is writing into the run's ``folder``."""

    def __init__(self, folder: Path, host: object, pid: object):
        advice = "end that first, or train into another folder; in a copy of its run, remove the file named lock"
        super().__init__(f"{folder} is being written by process {pid} on {host}: {advice}")
        self.folder, self.host, self.pid = folder, host, pid


class EnvironmentDiedError(_Error):
    """The processes of environments of a ``SubprocVecEnv`` or ``RayVecEnv`` have ended; ``which`` holds their indices."""

    def __init__(self, which: list[int], how: str):
        super().__init__(f"the process of environment {', '.join(map(str, which))} {how}")
        self.which, self.how = which, how
