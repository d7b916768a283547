"""Make environments known to Gymnasium by their names. Importing this module is cheap: it needs no torch."""

import multiprocessing
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym

PACKAGES = {
    "pybullet_envs_gymnasium": ("pybullet-envs-gymnasium", r"Bullet"),
    "panda_gym": ("panda-gym", r"^Panda"),
    "gymnasium_robotics": ("gymnasium-robotics", r"^(Fetch|Hand|Adroit|AntMaze|PointMaze|FrankaKitchen)"),
}
"""By module: packages that register environments when they are imported, and the names of those environments."""


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
        hint = f"pip install {missing[0]}" if missing else f"one that a module of your own registers is my_module:{name}"
        raise ValueError(f"there is no environment {env_id!r}: {error} ({hint})") from error
    if env_kwargs and not trust:
        raise ValueError(f"the run passes {env_kwargs} to its environment: {advice}")
