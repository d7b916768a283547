"""What SB3's loop assumes about a ``VecEnv`` and does not check: own arrays, no other users, living processes."""

import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from sb3_td3x.errors import EnvironmentDiedError

CLOSE_TIMEOUT = 2.0
"""Seconds that worker processes get to close their environments before they are killed."""
NOTICE_SECONDS = 1.0
"""Seconds after the first worker process has ended in which others that end are named with it."""


def copied(observations: VecEnvObs) -> Any:
    """A copy of the observations of all environments: some ``VecEnv``s write into one array at every step."""
    if isinstance(observations, dict):
        return {key: np.array(part) for key, part in observations.items()}
    return np.array(observations)


class _Hook:
    """
    Replaces a method of one environment. ``copy.deepcopy`` binds the method of the copy.

    :param method: the bound method
    """

    def __init__(self, method: Callable[..., Any]):
        functools.update_wrapper(self, method)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


class _CopiesTerminalObservation(_Hook):
    """``step`` whose last observation of an episode is not changed by the reset, where both are written into one array."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        if result[2] or result[3]:
            return copy.deepcopy(result[0]), *result[1:]
        return result


def _hook(target: Any, name: str, hook: type[_Hook] = _Hook) -> _Hook:
    present = getattr(target, name)
    if not isinstance(present, hook):
        setattr(target, name, present := hook(present))
    return present


class _InWorker:
    """
    Sent to a worker of ``SubprocVecEnv``, hooks the worker's environment while it is unpickled.

    SB3's workers have no command that gives anyone their environment, only attributes and results.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _hook_worker, ()


def _hook_worker() -> None:
    frame: Any = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "_worker" and "env" in frame.f_locals):
        frame = frame.f_back
    if frame is not None:
        _hook(frame.f_locals["env"], "step", _CopiesTerminalObservation)


def copy_terminal_observations(env: VecEnv) -> None:
    """
    Keep terminal observations apart from the reset that follows, for environments that write into one array.

    :param env: only SB3's ``DummyVecEnv`` and ``SubprocVecEnv`` need it
    """
    innermost = env.unwrapped
    if isinstance(innermost, DummyVecEnv):
        for single_env in innermost.envs:
            _hook(single_env, "step", _CopiesTerminalObservation)
    elif isinstance(innermost, SubprocVecEnv):
        innermost.set_attr("copies_terminal_observations", _InWorker())


class EnvironmentUse:
    """
    Counts the steps and resets of a ``VecEnv`` whoever makes them, so that a learner notices those that it has not made.

    Environments in this process are also counted where they are used without the ``VecEnv``, if they have a wrapper.
    """

    @classmethod
    def of(cls, env: VecEnv) -> "EnvironmentUse":
        """:param env: each ``VecEnv`` has one counter, for all its users"""
        innermost: Any = env.unwrapped
        if "environment_use" not in vars(innermost):
            copy_terminal_observations(env)
            innermost.environment_use = cls(innermost)
        return innermost.environment_use

    def __init__(self, env: VecEnv):
        self._calls = self._single_calls_seen = 0
        self._single_hooks = []
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
    Name the environments whose processes have ended where SB3 raises what its pipe raises, and end the others.

    :raises EnvironmentDiedError: naming all of them
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        innermost = None if env is None else env.unwrapped
        if not isinstance(innermost, SubprocVecEnv) or innermost.closed:
            raise
        noticed_by = time.monotonic() + NOTICE_SECONDS
        dead = [index for index, remote in enumerate(innermost.remotes) if _is_closed_by_worker(remote, noticed_by)]
        if not dead:
            raise
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for index in dead:  # their pipes close a moment before they have an exit code
            innermost.processes[index].join(max(deadline - time.monotonic(), 0))
        codes = ", ".join(str(innermost.processes[index].exitcode) for index in dead)
        close_env(innermost)
        how = f"ended with exit code {codes} (negative: a signal; -9 often means that memory ran out)"
        raise EnvironmentDiedError(dead, how) from error


def _is_closed_by_worker(remote: Any, noticed_by: float) -> bool:
    try:
        while remote.poll(max(noticed_by - time.monotonic(), 0)):
            remote.recv()  # an answer that nobody will ask for
    except (EOFError, OSError):
        return True
    return False


def close_env(env: VecEnv) -> None:
    """``env.close()`` that neither waits forever for a worker process that hangs nor fails for one that has ended."""
    innermost: Any = env.unwrapped
    if isinstance(innermost, SubprocVecEnv) and not innermost.closed:
        for remote in innermost.remotes:
            with suppress(OSError):
                remote.send(("close", None))
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for process in innermost.processes:
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()
        for remote in innermost.remotes:
            remote.close()
        innermost.closed = True
    env.close()
