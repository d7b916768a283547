"""Building the environments of a run: registered names, wrappers, seeds, normalisation."""

import difflib
import inspect
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

import gymnasium as gym
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x.checkpoint.env_state import ResumableEnv
from sb3_td3x.presets import known_class
from sb3_td3x.common.validation import above_0, did_you_mean, share, switch

TRAINING, EVALUATION, AFTERWARDS = 0, 1, 2
"""Streams of seeds: no evaluation begins like a training episode, none of a finished run like those that chose its model."""
NORMALIZATION_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "norm_obs": switch, "norm_reward": switch, "gamma": share, "clip_obs": above_0, "clip_reward": above_0, "epsilon": above_0
}  # fmt: skip
"""Of what rl-zoo3's ``normalize`` may hold."""
_WORKERS: WeakSet[BaseProcess] = WeakSet()


class EpisodeSeeds(gym.Wrapper):
    """
    Reset number k uses a seed derived from (stream, k).

    SB3 seeds only the first reset, so that what comes later depends on all that went before.

    :param env: environment to wrap
    :param stream: whole numbers, such as the run's seed, training or evaluation, and the environment's number
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
        """For checkpoints, see ``checkpoint/world.py``."""
        return {"episode": self.episode}

    def set_run_state(self, state: dict[str, int]) -> None:
        self.episode = state["episode"]

    def rewind(self) -> None:
        """Let the next reset be the last one again."""
        self.episode = max(self.episode - 1, 0)


def require_registered(env_id: str, may_import: bool = True) -> None:
    """
    :param env_id: a registered name, or ``module:name`` where importing the module registers it
    :param may_import: import that module; not where a run's folder gives the name, unless its author is trusted
    :raises ValueError: for a name that Gymnasium does not know, with the nearest ones, or a module that may not be imported
    """
    _import_bullet()
    module, _, name = env_id.rpartition(":")
    if module and not may_import and module not in sys.modules:
        raise ValueError(
            f"the run is of {env_id!r}, and importing {module} runs its code: if you trust the run, say so with trust=True "
            "(td3x: --trust), or import the module first"
        )
    if module:
        if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
            raise ValueError(
                f"{env_id!r}: {module!r} is no name of a module: write it as in an import, as in my_module:{name}"
            )
        if module not in sys.modules:
            _find_modules_in_the_working_directory()
        try:
            import_module(module)
        except ImportError as error:
            raise ValueError(f"{env_id!r}: the module {module} cannot be imported: {error}") from error
    if name in gym.registry:
        return
    prefix = env_id.removesuffix(name)
    near = [f"{prefix}{one}" for one in difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.5)]
    hint = f"; the nearest are {', '.join(near)}" if near else ""
    if not module:
        hint += f"; one that a module of your own registers is my_module:{name}"
    if "Bullet" in env_id and find_spec("pybullet_envs_gymnasium") is None:
        hint = "; PyBullet's come with: pip install pybullet_envs_gymnasium"
    raise ValueError(f"there is no environment {env_id!r}{hint}")


def _find_modules_in_the_working_directory() -> None:
    """As ``python -m sb3_td3x`` does; the script ``td3x`` looks beside itself. Processes that are started later inherit it."""
    if getattr(sys.flags, "safe_path", False):  # the user has asked Python not to (-P), which 3.10 does not know
        return
    with suppress(FileNotFoundError):  # of a working directory that is gone
        if not {"", here := str(Path.cwd())} & set(sys.path):
            sys.path.insert(0, here)


def build(
    env_id: str,
    seed: int,
    stream: int,
    n_envs: int = 1,
    wrapper: str | dict[str, Any] | list[Any] | None = None,
    monitor_folder: Path | None = None,
    render_mode: str | None = None,
    append: bool = False,
) -> VecEnv:
    """
    :param env_id: registered name
    :param seed: the run's seed
    :param stream: ``TRAINING``, ``EVALUATION`` or ``AFTERWARDS``
    :param n_envs: more than one run in processes of their own
    :param wrapper: see ``wrapped``
    :param monitor_folder: where each environment's ``<i>.monitor.csv`` goes; ``None`` for no file
    :param render_mode: Gymnasium's; ``"rgb_array"`` for a film
    :param append: go on with the Monitor files that are there
    """

    def maker(index: int) -> Callable[[], gym.Env]:
        def make() -> gym.Env:
            if n_envs > 1:  # in a process of its own
                # A terminal sends Ctrl-C to every process, a cluster SIGTERM; when to stop is the main one's decision
                signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
            require_registered(env_id)  # also in a process of its own
            env = wrapped(EpisodeSeeds(_make(env_id, render_mode), seed, stream, index), wrapper)
            file = None if monitor_folder is None else str(monitor_folder / str(index))
            return ResumableEnv(Monitor(env, file, override_existing=not append))

        return make

    makers = [maker(index) for index in range(n_envs)]
    return DummyVecEnv(makers) if n_envs == 1 else _in_processes(makers)


def _in_processes(makers: list[Callable[[], gym.Env]]) -> VecEnv:
    before = multiprocessing.active_children()
    try:
        return SubprocVecEnv(makers)
    finally:  # also where an environment cannot be made
        _WORKERS.update(one for one in multiprocessing.active_children() if one not in before)


def _end_workers() -> None:
    for process in _WORKERS:
        process.kill()


# At its end Python sends SIGTERM to the processes that nobody has closed, which these ignore, and waits for them
Finalize(None, _end_workers, exitpriority=0)


def wrapped(env: gym.Env, wrapper: str | dict[str, Any] | list[Any] | None) -> gym.Env:
    """
    :param wrapper: rl-zoo3's ``env_wrapper``: a name, ``{name: keyword arguments}``, or a list of them, innermost first
    :raises ValueError: for a wrapper that is not on the presets' list
    """
    for wrapper_class, arguments in wrappers(wrapper):
        env = wrapper_class(env, **arguments)
    return env


def wrappers(wrapper: str | dict[str, Any] | list[Any] | None) -> list[tuple[Any, dict[str, Any]]]:
    """The classes that ``wrapper`` names, and their arguments."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for item in wrapper if isinstance(wrapper, list) else [wrapper] if wrapper else []:
        ((name, arguments),) = item.items() if isinstance(item, dict) and len(item) == 1 else [(item, {})]
        found.append((known_class("env_wrapper", name), arguments or {}))
    return found


def normalized(env: VecEnv, normalize: bool | dict[str, Any] | None, gamma: float, training: bool) -> VecEnv:
    """
    :param normalize: rl-zoo3's key: ``True`` (observations and rewards), ``VecNormalize``'s arguments, or nothing
    :param gamma: for the return that rewards are scaled by
    :param training: whether the statistics follow the data; an evaluation's rewards are never normalised
    :raises ValueError: for a text such as ``"none"``, which would count as on
    """
    if not checked_normalize(normalize):
        return env
    arguments = {"gamma": gamma, **(normalize if isinstance(normalize, dict) else {})}
    if not training:
        arguments["norm_reward"] = False
    result = VecNormalize(env, training=training, **arguments)
    if BaseAlgorithm._wrap_env(result, monitor_wrapper=False) is result:
        return result
    # SB3 would turn images around it, and store them as they were (its issue #819)
    return VecNormalize(BaseAlgorithm._wrap_env(env, monitor_wrapper=False), training=training, **arguments)


def checked_normalize(normalize: Any) -> bool | dict[str, Any] | None:
    """rl-zoo3's key ``normalize`` as it is, or ``ValueError``."""
    if not isinstance(normalize, (bool, dict, type(None))):
        raise ValueError(f"normalize must be true, false or a mapping of VecNormalize's arguments, not {normalize!r}")
    known = inspect.signature(VecNormalize).parameters.keys() - {"venv", "training"}
    for name, value in normalize.items() if isinstance(normalize, dict) else ():
        if name not in known:
            raise ValueError(f"normalize has no {name!r}{did_you_mean(str(name), known)}")
        if name in NORMALIZATION_CHECKS:
            NORMALIZATION_CHECKS[name](f"normalize.{name}", value)
    return normalize


def _import_bullet() -> None:
    """PyBullet's environments exist only once their package has been imported."""
    if find_spec("pybullet_envs_gymnasium") is not None:
        import pybullet_envs_gymnasium  # noqa: F401


def _make(env_id: str, render_mode: str | None) -> gym.Env:
    options: dict[str, Any] = {} if render_mode is None else {"render_mode": render_mode}
    if not str(gym.spec(env_id.rpartition(":")[2]).entry_point).startswith("pybullet_envs_gymnasium"):
        return gym.make(env_id, **options)
    # PyBullet's first reset loads the scene, and its episode differs from all later ones (bullet3 issue 2639)
    with _native_output_silenced():
        env = gym.make(env_id, **options)
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
