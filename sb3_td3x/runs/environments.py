"""Build the environments of a run: names, seeds of episodes, wrappers, processes, normalization."""

import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_td3x import presets
from sb3_td3x.checkpoint.env_state import ResumableEnv

TRAINING, EVALUATION, AFTERWARDS = 0, 1, 2
"""Streams of seeds: evaluations never repeat a training episode, nor does the evaluation of a finished run repeat those that
chose its model."""
LONGEST_EVALUATION = 10_000
"""Steps after which an evaluation's episode is truncated if the environment declares no time limit."""
_WORKERS: WeakSet[BaseProcess] = WeakSet()


PACKAGES = {
    "pybullet_envs_gymnasium": ("pybullet-envs-gymnasium", r"Bullet"),
    "panda_gym": ("panda-gym", r"^Panda"),
    "gymnasium_robotics": ("gymnasium-robotics", r"^(Fetch|Hand|Adroit|AntMaze|PointMaze|FrankaKitchen)"),
}
"""By module: packages that register environments when they are imported, and the names of those environments."""


def require_registered(env_id: str, may_import: bool = True) -> None:
    """
    Register the environments of the packages that are installed, and of the module that the name may have.

    :param env_id: a registered name, or ``module:name`` where importing the module registers it
    :param may_import: import that module; not where a run's folder gives the name, unless its author is trusted
    :raises ValueError: for a name that Gymnasium does not know, or a module that may not or cannot be imported
    """
    for package in PACKAGES:
        if find_spec(package) is not None:
            import_module(package)
    module, _, name = env_id.rpartition(":")
    if module and module not in sys.modules:
        if not may_import:
            raise ValueError(
                f"the environment of the run is {env_id!r}, and importing {module} runs its code: if you trust the run, say "
                "so with trust=True (td3x: --trust), or import the module first"
            )
        if "" not in sys.path:  # as `python -m` does; processes that are started later inherit it
            sys.path.insert(0, str(Path.cwd()))
        try:
            import_module(module)
        except (ImportError, TypeError) as error:
            raise ValueError(f"{env_id!r}: the module {module} cannot be imported: {error}") from error
    try:
        gym.spec(name)
    except gym.error.Error as error:
        missing = [distribution for package, (distribution, names) in PACKAGES.items()
                   if re.search(names, name) and find_spec(package) is None]  # fmt: skip
        hint = f"pip install {missing[0]}" if missing else f"one that a module of your own registers is my_module:{name}"
        raise ValueError(f"there is no environment {env_id!r}: {error} ({hint})") from error


def require_continuous(env_id: str, action_space: gym.Space) -> None:
    """:raises ValueError: unless the actions are a ``Box``"""
    if not isinstance(action_space, gym.spaces.Box):
        actions = "discrete" if isinstance(action_space, gym.spaces.Discrete) else type(action_space).__name__
        raise ValueError(f"{env_id} has {actions} actions; TD3 needs continuous ones (a Box)")


def require_no_arguments(env_kwargs: Any) -> None:
    """
    For runs that are not trusted.

    :raises ValueError: if the run's folder would pass keyword arguments to the constructor of its environment
    """
    if env_kwargs:
        raise ValueError(
            f"the run passes {env_kwargs} to its environment: if you trust the run, say so with trust=True (td3x: --trust)"
        )


class EpisodeSeeds(gym.Wrapper):
    """
    Reset number k uses a seed derived from (stream, k).

    SB3 seeds only the first reset, so that every later episode depends on all that happened before it.

    :param env: environment to wrap
    :param stream: integers, such as the run's seed, training or evaluation, and the environment's number
    """

    def __init__(self, env: gym.Env, *stream: int):
        super().__init__(env)
        self.stream = stream
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        derived = int(np.random.SeedSequence([*self.stream, self.episode]).generate_state(1)[0])
        self.episode += 1
        return self.env.reset(seed=derived, options=options)

    def get_run_state(self) -> dict[str, int]:
        """State for checkpoints, see ``checkpoint/env_state.py``."""
        return {"episode": self.episode}

    def set_run_state(self, state: dict[str, int]) -> None:
        self.episode = state["episode"]

    def rewind(self) -> None:
        """Let the next reset repeat the last one."""
        self.episode = max(self.episode - 1, 0)


def open_env(
    env_id: str,
    seed: int,
    stream: int,
    entry: Mapping[str, Any] | None = None,
    *,
    monitor_folder: Path | None = None,
    render_mode: str | None = None,
    append: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
) -> VecEnv:
    """
    The environments of a run as its settings say: wrapped, in processes if there are several, normalized.

    :param env_id: registered name
    :param seed: the run's seed
    :param stream: ``TRAINING``, ``EVALUATION`` or ``AFTERWARDS``
    :param entry: hyperparameters in rl-zoo3's keys; ``None`` for one plain environment
    :param monitor_folder: where each environment's ``<i>.monitor.csv`` goes; ``None`` for no file
    :param render_mode: Gymnasium's; ``"rgb_array"`` for a video
    :param append: continue the Monitor files that are there
    :param env_kwargs: keyword arguments of the environment
    """
    entry = entry or {}
    n_envs = entry.get("n_envs", 1)

    def maker(index: int) -> Callable[[], gym.Env]:
        def make_env() -> gym.Env:
            if n_envs > 1:  # in a process of its own
                # A terminal sends Ctrl-C to every process, a cluster SIGTERM; the main process decides when to stop
                signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
            require_registered(env_id)  # also in a process of its own
            env = _make(env_id, render_mode, env_kwargs or {})
            if stream != TRAINING:
                env = _limited(env, env_id, warn=stream == EVALUATION)
            env = presets.wrap(EpisodeSeeds(env, seed, stream, index), entry.get("env_wrapper"))
            file = None if monitor_folder is None else str(monitor_folder / str(index))
            return ResumableEnv(Monitor(env, file, override_existing=not append))

        return make_env

    makers = [maker(index) for index in range(n_envs)]
    env = DummyVecEnv(makers) if n_envs == 1 else _in_processes(makers)
    return presets.normalize(env, entry.get("normalize"), entry.get("gamma", 0.99), training=stream == TRAINING)


def _limited(env: gym.Env, env_id: str, warn: bool) -> gym.Env:
    if env.spec is None or env.spec.max_episode_steps is not None:
        return env
    if warn:
        warnings.warn(
            f"{env_id} declares no time limit (max_episode_steps): episodes of evaluations end after "
            f"{LONGEST_EVALUATION:,} steps at the latest",
            stacklevel=2,
        )
    return gym.wrappers.TimeLimit(env, LONGEST_EVALUATION)


def _in_processes(makers: list[Callable[[], gym.Env]]) -> VecEnv:
    before = multiprocessing.active_children()
    try:
        return SubprocVecEnv(makers)
    finally:  # also where an environment cannot be made
        _WORKERS.update(process for process in multiprocessing.active_children() if process not in before)


def _end_workers() -> None:
    for process in _WORKERS:
        process.kill()


# At its end Python sends SIGTERM to the processes that nobody has closed, which these ignore, and waits for them
Finalize(None, _end_workers, exitpriority=0)


def _make(env_id: str, render_mode: str | None, env_kwargs: Mapping[str, Any]) -> gym.Env:
    rendering: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    is_bullet = str(gym.spec(env_id.rpartition(":")[2]).entry_point).startswith("pybullet_envs_gymnasium")
    with _native_output_silenced() if is_bullet else nullcontext():
        try:
            env = gym.make(env_id, **env_kwargs, **rendering)
        except ImportError as error:  # of tasks that Gymnasium has removed, or that need JAX
            raise ValueError(f"{env_id} cannot be made: {error}") from error
        except TypeError as error:
            if not env_kwargs:
                raise
            raise ValueError(f"{env_id} cannot be made with env_kwargs {dict(env_kwargs)}: {error}") from error
        if is_bullet:  # its first reset loads the scene, and that episode differs from all later ones (bullet3 issue 2639)
            env.reset()
    return env


@contextmanager
def _native_output_silenced() -> Iterator[None]:
    """PyBullet's C code prints its build time and ``argv[0]=`` past Python's ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout.flush(), sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with open(os.devnull, "w") as nowhere:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
