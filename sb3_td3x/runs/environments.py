"""Build the environments of a run: names, seeds of episodes, wrappers, processes, normalization."""

import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_td3x import presets
from sb3_td3x.checkpoint.env_state import ResumableEnv
from sb3_td3x.common.signals import end_with_parent, only_here, stop_signals
from sb3_td3x.common.validation import did_you_mean

TRAINING, EVALUATION, AFTERWARDS = 0, 1, 2
"""Streams of seeds: evaluations never repeat a training episode, nor does the evaluation of a finished run repeat those that
chose its model."""
PACKAGES = {
    "pybullet_envs_gymnasium": ("pybullet-envs-gymnasium", r"Bullet"),
    "panda_gym": ("panda-gym", r"^Panda"),
    "gymnasium_robotics": ("gymnasium-robotics", r"^(Fetch|Hand|Adroit|AntMaze|PointMaze|FrankaKitchen)"),
}
"""By module: packages that register environments when they are imported, and the names of those environments."""
LONGEST_EVALUATION = 10_000  # steps of an evaluation's episode at most, if the environment declares no time limit


def require_registered(env_id: str, trust: bool = True, env_kwargs: Any = None) -> None:
    """
    Register the environments of the package that has such names, if it is installed, and of the module in ``module:name``.

    :param trust: import that module and allow ``env_kwargs``; not where an untrusted run's folder names them
    :raises ValueError: for an unknown name, a module that cannot be imported, or what needs trust
    """
    module, _, name = env_id.rpartition(":")
    advice = "if you trust the run, say so with trust=True (td3x: --trust)"
    for package, (_, names) in PACKAGES.items():
        if re.search(names, name) and find_spec(package) is not None:
            import_module(package)
    if module and module not in sys.modules:
        if not trust:
            problem = f"the environment of the run is {env_id!r}, and importing {module} runs its code"
            raise ValueError(f"{problem}: {advice}, or import the module first")
        # As `python -m` does, in the main process: those that it starts later inherit the path and add nothing to it
        if "" not in sys.path and multiprocessing.parent_process() is None:
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
        otherwise = f": one that a module of your own registers is my_module:{name}"
        hint = f": pip install {missing[0]}" if missing else did_you_mean(name, gym.registry) or otherwise
        raise ValueError(f"there is no environment {env_id!r}{hint} ({error})") from error
    if env_kwargs and not trust:
        raise ValueError(f"the run passes {env_kwargs} to its environment: {advice}")


class EpisodeSeeds(gym.Wrapper):
    """
    Reset number k uses a seed derived from (stream, k).

    SB3 seeds only the first reset, so that every later episode depends on all that happened before it.

    :param env: environment to wrap
    :param stream: integers, such as the run's seed, training or evaluation, and the environment's number. Environments with
        the same ones have the same episodes, whatever seed ``reset`` is given
    :raises ValueError: without any, as from ``make_vec_env(wrapper_class=EpisodeSeeds)``
    """

    def __init__(self, env: gym.Env, *stream: int):
        super().__init__(env)
        if not stream:
            raise ValueError("EpisodeSeeds needs integers that differ between environments, or all have the same episodes")
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
    env_kwargs: Mapping[str, Any] | None = None,
) -> VecEnv:
    """
    The environments of a run as its settings say: wrapped, in processes if there are several, normalized.

    :param stream: ``TRAINING``, or ``EVALUATION`` or ``AFTERWARDS`` for a single environment
    :param entry: hyperparameters in rl-zoo3's keys; ``None`` for one plain environment
    :param monitor_folder: where each environment's ``<i>.monitor.csv`` goes, or is continued; ``None`` for no file
    """
    entry = entry or {}
    n_envs = int(entry.get("n_envs", 1)) if stream == TRAINING else 1

    def make_env(index: int) -> gym.Env:
        if n_envs > 1:  # in a process of its own
            # A terminal and a cluster send their signals to every process; the main process decides when to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in stop_signals():  # not SIG_IGN, which a simulator that it starts would inherit and not end
                signal.signal(number, only_here(lambda: None))
                if hasattr(signal, "siginterrupt"):
                    signal.siginterrupt(number, False)
            end_with_parent(lambda: os._exit(1))  # the environment may hang
        require_registered(env_id)  # also in a process of its own
        env = _make(env_id, render_mode, env_kwargs or {})
        env = presets.wrap(EpisodeSeeds(env, seed, stream, index), entry.get("env_wrapper"))
        if stream != TRAINING and env.spec is not None and env.spec.max_episode_steps is None:
            ends = f"episodes of evaluations end after {LONGEST_EVALUATION:,} steps at the latest"
            warnings.warn(f"{env_id} declares no time limit (max_episode_steps): {ends}", stacklevel=2)
            # Outermost: wrappers such as TimeFeatureWrapper ask for the limit
            env = gym.wrappers.TimeLimit(env, LONGEST_EVALUATION)
        file = str(monitor_folder / f"{index}.{Monitor.EXT}") if monitor_folder else None
        return ResumableEnv(Monitor(env, file, override_existing=not (file and Path(file).exists())))

    if n_envs > 1:
        Finalize(None, _kill_workers, exitpriority=0)
    try:
        env: VecEnv = (SubprocVecEnv if n_envs > 1 else DummyVecEnv)([partial(make_env, index) for index in range(n_envs)])
    except (EOFError, ConnectionError) as error:
        advice = "its own error is above; if there is none, memory may have run out, and a smaller --n-envs helps"
        raise ValueError(f"one of the {n_envs} processes of {env_id} ended while it started: {advice}") from error
    return presets.normalize(env, entry, training=stream == TRAINING)


def _kill_workers() -> None:
    """At its end Python sends SIGTERM to its daemonic processes, which those of environments ignore, and waits for them."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _make(env_id: str, render_mode: str | None, env_kwargs: Mapping[str, Any]) -> gym.Env:
    rendering: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    # Where PyBullet can open no window, it prints why and ends the process
    with _native_output_silenced() if is_bullet(env_id) and render_mode != "human" else nullcontext():
        try:
            env = gym.make(env_id, **{**env_kwargs, **rendering})
        except ImportError as error:  # of tasks that Gymnasium has removed, or that need JAX
            raise ValueError(f"{env_id} cannot be made: {error}") from error
        except TypeError as error:
            if not env_kwargs:
                raise
            raise ValueError(f"{env_id} cannot be made with env_kwargs {dict(env_kwargs)}: {error}") from error
        if is_bullet(env_id):
            env.reset()  # the first loads the scene, and that episode differs from all later ones (bullet3 issue 2639)
    return env


def is_bullet(env_id: str) -> bool:
    """Whether a registered environment is one of ``pybullet_envs_gymnasium``."""
    return str(gym.spec(env_id.rpartition(":")[2]).entry_point).startswith("pybullet_envs_gymnasium")


@contextmanager
def _native_output_silenced() -> Iterator[None]:
    """PyBullet's C code prints its build time and ``argv[0]=`` past Python's ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout.flush(), sys.stderr.flush()
    with open(os.devnull, "w") as nowhere, ExitStack() as restored:
        for number in (1, 2):
            copy = os.dup(number)
            restored.callback(os.close, copy)
            restored.callback(os.dup2, copy, number)  # called first
            os.dup2(nowhere.fileno(), number)
        yield
