"""
What one run is made from, and everything that can be checked before torch is imported.

Importing torch and Stable-Baselines3 takes seconds; a wrong name or number is reported at once.
"""

import difflib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym

from sb3_td3x import presets
from sb3_td3x.common.validation import check_int
from sb3_td3x.results.run_dir import RunDir

ARGUMENT_NAMES = {"env_id": "env", "steps": "n_timesteps", "threads": "num_threads"}
"""rl-zoo3's names in ``args.yml``, where they differ from the fields of ``Experiment``."""

MINIMUM = {"eval_freq": 1, "eval_episodes": 1, "save_freq": 1, "threads": 1, "seed": 0}
"""Fields that are whole numbers, with the smallest value of each."""

PACKAGES = {
    "pybullet_envs_gymnasium": ("pybullet-envs-gymnasium", r"Bullet"),
    "panda_gym": ("panda-gym", r"^Panda"),
    "gymnasium_robotics": ("gymnasium-robotics", r"^(Fetch|Hand|Adroit|AntMaze|PointMaze|FrankaKitchen)"),
}
"""By module: packages that register environments when they are imported, and the names of those environments."""


@dataclass(frozen=True)
class Experiment:
    """
    What one run is made from. The same values give the same run.

    :param env_id: registered name of the environment
    :param steps: environment steps; ``None`` takes the preset's ``n_timesteps``
    :param seed: seed of the networks, the exploration and every episode of the environments
    :param preset: name of a preset, or path of a YAML file like one
    :param overrides: ``key=value`` texts that change the preset
    :param n_envs: number of parallel environments; above 1 there are as many updates as environment steps.
        ``None`` takes the preset's number, which is 1 if it names none
    :param eval_freq: environment steps between two evaluations
    :param eval_episodes: episodes of an evaluation, 1 or more
    :param save_freq: environment steps between two checkpoints
    :param device: ``"auto"``, ``"cpu"`` or ``"cuda"``
    :param threads: torch threads; more than one helps only on an otherwise idle machine and slows down a busy one
    :param out: folder that holds the runs
    :param setting: name of what is tried, for plots and tables; ``None`` is the preset's name
    :param env_kwargs: keyword arguments of the environment
    :param video: whether the command makes a video at the end
    """

    env_id: str
    steps: float | None = None
    seed: int = 0
    preset: str = "default"
    overrides: tuple[str, ...] = ()
    n_envs: int | None = None
    eval_freq: int = 5_000
    eval_episodes: int = 10
    save_freq: int = 10_000
    device: str = "auto"
    threads: int = 1
    out: Path = Path("logs")
    setting: str | None = None
    env_kwargs: Mapping[str, Any] | None = None
    video: bool = True

    def hyperparameters(self) -> dict[str, Any]:
        """
        The preset's entry with all that this run changes, in rl-zoo3's keys.

        :raises ValueError: for an unknown preset or key, or settings that exclude each other
        """
        entry = presets.load(self.preset, self.env_id)
        entry["n_envs"] = check_int("n_envs", entry.get("n_envs", 1) if self.n_envs is None else self.n_envs, minimum=1)
        if entry["n_envs"] > 1:
            # One update per environment step, as with one environment: SB3 would make one per step of all together
            entry["gradient_steps"] = -1
        entry = presets.override(entry, self.overrides)
        if entry["n_envs"] > 1 and "episode" in str(entry.get("train_freq")):
            raise ValueError("training after each episode (preset t3d) needs n_envs=1: episodes would end at different times")
        entry["n_timesteps"] = check_int("steps", entry["n_timesteps"] if self.steps is None else self.steps, minimum=1)
        return entry

    @property
    def chooses_policy(self) -> bool:
        """Whether the user has named the policy, which is otherwise chosen by the observation space."""
        return any(assignment.partition("=")[0].strip() == "policy" for assignment in self.overrides)

    def arguments(self) -> dict[str, Any]:
        """The fields under the names of rl-zoo3's ``args.yml``, which its scripts read back."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "out"}
        named = {ARGUMENT_NAMES.get(name, name): value for name, value in values.items()}
        return {**named, "overrides": list(self.overrides), "env_kwargs": dict(self.env_kwargs) if self.env_kwargs else None}

    @classmethod
    def of_arguments(cls, folder: RunDir) -> "Experiment":
        """
        The settings of a run as its folder holds them.

        :raises ValueError: if they are not as ``td3x train`` writes them
        """
        arguments = folder.arguments()
        if not isinstance(arguments.get("overrides"), list):
            raise ValueError(f"{folder.args_file} has no list of overrides, so td3x train has not made this run")
        keys = {field.name: ARGUMENT_NAMES.get(field.name, field.name) for field in fields(cls) if field.name != "out"}
        values = {name: arguments[key] for name, key in keys.items() if key in arguments}
        experiment = cls(**{**values, "overrides": tuple(arguments["overrides"]), "out": folder.path.parent.parent})
        return experiment.with_whole_numbers()

    def with_whole_numbers(self) -> "Experiment":
        """The same experiment with integers where a file may have ``1.0``; ``ValueError`` for other numbers."""
        numbers: dict[str, Any] = {name: check_int(name, getattr(self, name), minimum=low) for name, low in MINIMUM.items()}
        return replace(self, **numbers)


def check(experiment: Experiment) -> dict[str, Any]:
    """
    Check every setting that needs neither torch nor, except for Gymnasium's own tasks, the environment.

    :return: the hyperparameters
    :raises ValueError: for anything that cannot be run, in one line that says what to change
    """
    require_registered(experiment.env_id)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", experiment.device):
        raise ValueError(f"there is no device {experiment.device!r}: use auto, cpu or cuda")
    if not isinstance(experiment.env_kwargs or {}, Mapping):
        raise ValueError(f"env_kwargs must be a mapping of names to values, not {experiment.env_kwargs!r}")
    entry = experiment.hyperparameters()
    experiment.with_whole_numbers()
    presets.check(entry)
    if str(gym.spec(name_in(experiment.env_id)).entry_point).startswith("gymnasium.envs."):
        with suppress(gym.error.DependencyNotInstalled):
            env = make(experiment.env_id, experiment.env_kwargs or {})
            env.close()
            require_continuous(experiment.env_id, env.action_space)
    return entry


def require_continuous(env_id: str, action_space: gym.Space) -> None:
    """:raises ValueError: unless the actions are a ``Box``"""
    if not isinstance(action_space, gym.spaces.Box):
        actions = (
            "discrete actions" if isinstance(action_space, gym.spaces.Discrete) else f"{type(action_space).__name__} actions"
        )
        raise ValueError(f"{env_id} has {actions}; TD3 needs continuous ones (a Box)")


def make(env_id: str, env_kwargs: Mapping[str, Any], **kwargs: Any) -> gym.Env:
    """``gym.make`` with the user's arguments; ``ValueError`` if the environment does not take them."""
    try:
        return gym.make(env_id, **env_kwargs, **kwargs)
    except TypeError as error:
        if not env_kwargs:
            raise
        raise ValueError(f"{env_id} cannot be made with env_kwargs {dict(env_kwargs)}: {error}") from error


def name_in(env_id: str) -> str:
    """``Own-v0`` of ``my_module:Own-v0``."""
    return env_id.rpartition(":")[2]


def require_registered(env_id: str, may_import: bool = True) -> None:
    """
    Register the environments of the packages that are installed, and of the module that the name may have.

    :param env_id: a registered name, or ``module:name`` where importing the module registers it
    :param may_import: import that module; not where a run's folder gives the name, unless its author is trusted
    :raises ValueError: for a name that Gymnasium does not know, with the nearest ones, or a module that may not be imported
    """
    for package in PACKAGES:
        if find_spec(package) is not None:
            import_module(package)
    module, _, name = env_id.rpartition(":")
    if module and not may_import and module not in sys.modules:
        raise ValueError(
            f"the environment of the run is {env_id!r}, and importing {module} runs its code: if you trust the run, say so "
            "with trust=True (td3x: --trust), or import the module first"
        )
    if module:
        _import(module, env_id)
    if name not in _usable():
        raise ValueError(f"there is no environment {env_id!r}{_hint(env_id, module)}")


def _import(module: str, env_id: str) -> None:
    if not all(part.isidentifier() for part in module.split(".")) or module.endswith(".py"):
        raise ValueError(
            f"{env_id!r}: {module!r} is no name of a module: write it as in an import, as in my_module:{name_in(env_id)}"
        )
    if module not in sys.modules and not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P forbids it
        # As `python -m` does; the script td3x looks in its own folder. Processes that are started later inherit it
        with suppress(FileNotFoundError):  # the working directory was removed
            if not {"", here := str(Path.cwd())} & set(sys.path):
                sys.path.insert(0, here)
    try:
        import_module(module)
    except ImportError as error:
        raise ValueError(f"{env_id!r}: the module {module} cannot be imported: {error}") from error


def _usable() -> set[str]:
    """Registered names without tasks that Gymnasium has removed, whose entry points only raise, or that need JAX."""
    return {
        name for name, spec in gym.registry.items()
        if not (getattr(spec.entry_point, "__name__", "").startswith("_raise")
                or re.match(r"gymnasium\.envs\.(phys2d|tabular)\.", str(spec.entry_point)))
    }  # fmt: skip


def _hint(env_id: str, module: str) -> str:
    name = name_in(env_id)
    for package, (distribution, names) in PACKAGES.items():
        if re.search(names, name) and find_spec(package) is None:
            return f"; the package {distribution} registers it: pip install {distribution}"
    near = difflib.get_close_matches(name, _usable(), n=3, cutoff=0.5)
    prefix = f"{module}:" if module else ""
    hint = f"; the nearest are {', '.join(prefix + other for other in near)}" if near else ""
    return hint if module else f"{hint}; one that a module of your own registers is my_module:{name}"


def require_no_foreign_arguments(env_kwargs: Any) -> None:
    """
    For runs that are not trusted.

    :raises ValueError: if the run's folder would pass keyword arguments to the constructor of its environment
    """
    if env_kwargs:
        raise ValueError(
            f"the run passes {env_kwargs} to its environment: if you trust the run, say so with trust=True (td3x: --trust)"
        )
