"""What SB3's loop assumes about a ``VecEnv`` and does not check: own arrays, no other users, living processes."""

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_td3x.errors import EnvironmentDiedError

CLOSE_TIMEOUT = 2.0
"""Seconds that worker processes get to close their environments before they are killed."""
NOTICE_SECONDS = 1.0
"""Seconds after a worker process has ended in which others that end are named with it."""


class _Hook:
    """
    Replaces ``step`` or ``reset`` of one environment, and counts its calls.

    The last observation of an episode is copied, because the reset that follows may write into the same array.
    """

    def __init__(self, method: Callable[..., Any]):
        self.method, self.calls = method, 0  # `copy.deepcopy` binds the method of the copied environment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.method(*args, **kwargs)
        if len(result) == 5 and (result[2] or result[3]):
            return copy.deepcopy(result[0]), *result[1:]
        return result


def _hook(target: Any, name: str) -> _Hook:
    method = getattr(target, name)
    if not isinstance(method, _Hook):
        method = _Hook(method)
        setattr(target, name, method)
    return method


class _InWorker:
    """
    Sent to a worker of ``SubprocVecEnv``, hooks the worker's environment while it is unpickled.

    SB3's workers have no command that passes the environment to a function.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _hook_worker, ()


def _hook_worker() -> None:
    frame: Any = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "_worker" and "env" in frame.f_locals):
        frame = frame.f_back
    if frame is not None:
        _hook(frame.f_locals["env"], "step")


def copy_terminal_observations(env: VecEnv) -> None:
    """Keep terminal observations apart from the reset that follows; only SB3's own ``VecEnv``s need it."""
    innermost = env.unwrapped
    if isinstance(innermost, DummyVecEnv):
        for single_env in innermost.envs:
            _hook(single_env, "step")
    elif isinstance(innermost, SubprocVecEnv):
        innermost.set_attr("copies_terminal_observations", _InWorker())


class EnvironmentUse:
    """
    Counts the steps and resets of a ``VecEnv``, so that a learner notices those that it has not made.

    Environments in this process are also counted where they are used without the ``VecEnv``, if they have a wrapper.
    """

    @classmethod
    def of(cls, env: VecEnv) -> "EnvironmentUse":
        """The counter of a ``VecEnv``, one for all its users."""
        innermost: Any = env.unwrapped
        if "environment_use" not in vars(innermost):
            copy_terminal_observations(env)
            innermost.environment_use = cls(innermost)
        return innermost.environment_use

    def __init__(self, env: VecEnv):
        self._calls = self._single_calls_seen = 0
        self._single_hooks: list[_Hook] = []
        for layer in getattr(env, "envs", ()):
            while isinstance(layer, gym.Wrapper) and isinstance(layer.env, gym.Wrapper):
                layer = layer.env
            if isinstance(layer, gym.Wrapper):
                self._single_hooks += [_hook(layer, "step"), _hook(layer, "reset")]
        for name in ("step_wait", "reset"):
            setattr(env, name, functools.partial(self._count, getattr(env, name)))

    def _count(self, method: Callable[[], Any]) -> Any:
        result = method()
        self._calls += 1
        self._single_calls_seen = sum([hook.calls for hook in self._single_hooks])
        return result

    @property
    def count(self) -> int:
        """Grows by 1 with each step and reset of the ``VecEnv``, and by any use of its environments without it."""
        return self._calls + sum([hook.calls for hook in self._single_hooks]) - self._single_calls_seen


@contextmanager
def explained_deaths(env: VecEnv | None) -> Iterator[None]:
    """
    Where SB3 raises what a broken pipe raises, name all environments whose processes have ended, and end the others.

    :raises EnvironmentDiedError: naming them
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        innermost = None if env is None else env.unwrapped
        if not isinstance(innermost, SubprocVecEnv) or innermost.closed:
            raise
        _join(innermost.processes, NOTICE_SECONDS)
        exit_codes = {i: process.exitcode for i, process in enumerate(innermost.processes) if not process.is_alive()}
        if not exit_codes:
            raise
        close_env(innermost)
        codes = ", ".join(map(str, exit_codes.values()))
        how = f"ended with exit code {codes} (negative: a signal; -9 often means that memory ran out)"
        raise EnvironmentDiedError(list(exit_codes), how) from error


def _join(processes: list[Any], seconds: float) -> None:
    """Wait until all processes have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


def close_env(env: VecEnv) -> None:
    """``env.close()`` that neither waits forever for a worker process that hangs nor fails for one that has ended."""
    innermost: Any = env.unwrapped
    if isinstance(innermost, SubprocVecEnv) and not innermost.closed:
        for remote in innermost.remotes:
            with suppress(OSError):
                remote.send(("close", None))
        _join(innermost.processes, CLOSE_TIMEOUT)
        for process in innermost.processes:
            if process.is_alive():
                process.kill()
                process.join()
        for remote in innermost.remotes:
            remote.close()
        innermost.closed = True
    env.close()
