"""What SB3's loop assumes about a ``VecEnv`` and does not check: own arrays, no other users, living processes."""

import copy
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from typing import Any

import gymnasium as gym
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecEnvWrapper

from sb3_td3x.errors import EnvironmentDiedError

CLOSE_TIMEOUT = 2.0  # seconds that worker processes get to close their environments before they are killed
NOTICE_SECONDS = 1.0  # after a worker process has ended: others that end until then are named with it


class Hook:
    """Replaces a method of one environment or ``VecEnv``, counts its calls, and copies the last observation of an episode."""

    def __init__(self, method: Any, replaced: Any = None):
        self.method, self.calls = method, 0
        self.replaced = replaced  # what the object itself had; none for a method of its class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.method(*args, **kwargs)
        try:
            has_ended = isinstance(result, tuple) and len(result) == 5 and (result[2] or result[3])
        except (ValueError, RuntimeError):  # arrays or tensors of several agents, of which a wrapper makes one
            has_ended = True
        # The reset that follows may write into the same array
        return (copy.deepcopy(result[0]), *result[1:]) if has_ended else result


class _StateHook(Hook):
    """Replaces ``__getstate__``, so that copies and pickles have no hooks: theirs would use the object that was copied."""

    def __call__(self) -> Any:
        return without_hooks(self.method())


def without_hooks(state: Any) -> Any:
    """The attributes of an object without what ``hook_uses`` has added."""
    if not isinstance(state, dict):
        return state
    before = {name: value.replaced if isinstance(value, Hook) else value for name, value in state.items()}
    return {name: value for name, value in before.items() if value is not None or state[name] is None}


def _hook(target: Any, name: str) -> Hook:
    attributes = vars(target)  # its `__setattr__` may refuse a method, or pass it on
    held = attributes.pop(name, None)
    hook = held if isinstance(held, Hook) else Hook(held, replaced=held)
    if hook.replaced is None:
        hook.method = getattr(target, name)  # again at each `learn`: its class may have been edited, as in a notebook
    attributes[name] = hook
    get_state = getattr(target, "__getstate__", lambda: dict(attributes))  # Python 3.10's objects have none
    attributes.setdefault("__getstate__", _StateHook(get_state))
    return hook


class _Hooked:
    """Hooks an environment that ``isinstance`` compares with it: SB3's workers pass theirs to no other function."""

    def __instancecheck__(self, env: Any) -> bool:
        _hook(env, "step")
        return True


def vec_layers(env: VecEnv) -> list[VecEnv]:
    """A ``VecEnv`` and those inside it, outermost first. The innermost may wrap something of another library."""
    inside = [env]
    while isinstance(env, VecEnvWrapper) and isinstance(env := env.venv, VecEnv):
        inside.append(env)
    return inside


def env_id_of(env: VecEnv) -> str:
    """The registered name of the environments; empty if they have none, or are closed."""
    try:
        spec = env.get_attr("spec", 0)[0] if env.has_attr("spec") else None  # environments of other libraries may lack it
    except (OSError, IndexError):
        return ""
    return "" if spec is None else spec.id


def hook_uses(env: VecEnv) -> list[Hook]:
    """
    Count the uses of a ``VecEnv`` and of its environments in this process, and copy their terminal observations, also in the
    processes of a ``SubprocVecEnv`` if the environments have a wrapper.
    """
    innermost = vec_layers(env)[-1]
    if isinstance(innermost, SubprocVecEnv) and not isinstance(innermost.step_wait, Hook):
        innermost.env_is_wrapped(_Hooked())  # type: ignore[arg-type]
    hooks = [_hook(innermost, name) for name in ("step_wait", "reset")]
    if isinstance(innermost, DummyVecEnv):
        for single_env in innermost.envs:
            _hook(single_env, "step")
            base: Any = single_env
            while isinstance(base, gym.Wrapper) and isinstance(base.env, gym.Env):  # not of a simulator in an adapter
                base = base.env
            hooks += [_hook(base, name) for name in ("step", "reset")]
    return hooks


@contextmanager
def explained_deaths(env: VecEnv | None) -> Iterator[None]:
    """Turn what a broken pipe raises into an ``EnvironmentDiedError`` that names all that have ended; end the others."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        innermost = None if env is None else vec_layers(env)[-1]
        if not isinstance(innermost, SubprocVecEnv) or innermost.closed:
            raise
        connection.wait([process.sentinel for process in innermost.processes], timeout=10)  # a busy machine is slow to notice
        _join(innermost.processes, NOTICE_SECONDS)
        exit_codes = {i: process.exitcode for i, process in enumerate(innermost.processes) if not process.is_alive()}
        if not exit_codes:
            raise
        close_env(innermost)
        codes = ", ".join(map(str, exit_codes.values()))
        how = f"ended with exit code {codes} (negative: a signal; -9 often means that memory ran out; 0: Ctrl-C in a notebook)"
        traceback.clear_frames(error.__traceback__)  # Connection.send's crash the garbage collector of Python 3.12.1
        raise EnvironmentDiedError(list(exit_codes), how) from error


def _join(processes: list[Any], seconds: float) -> None:
    """Wait until all processes have ended, at most so many seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


def close_env(env: VecEnv) -> None:
    """``env.close()`` that neither waits forever for a worker process that hangs nor fails for one that has ended."""
    innermost: Any = vec_layers(env)[-1]
    if isinstance(innermost, SubprocVecEnv) and not innermost.closed:
        for remote in innermost.remotes:
            with suppress(OSError):
                remote.send(("close", None))
        _join(innermost.processes, CLOSE_TIMEOUT)
        for process in innermost.processes:
            process.kill()
            process.join()
        for remote in innermost.remotes:
            remote.close()
        innermost.closed = True
    env.close()
