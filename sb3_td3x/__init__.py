"""TD3X: TD3 for Stable-Baselines3, with the same interface, for the same scripts and models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sb3_td3x.errors import (
    CheckpointError,
    EnvironmentDiedError,
    ModelFileError,
    NonFiniteError,
    RunLockedError,
    UntrustedModelError,
)
from sb3_td3x.version import __version__

if TYPE_CHECKING:
    from sb3_td3x.checkpoint import ResumableEnv, TD3XCheckpointCallback, resume_run, save_run
    from sb3_td3x.common.ray_vec_env import RayVecEnv
    from sb3_td3x.runs.environments import EpisodeSeeds
    from sb3_td3x.saving.pickle_files import load_vecnormalize
    from sb3_td3x.td3x.policies import CnnPolicy, MlpPolicy, MultiInputPolicy, TD3XPolicy
    from sb3_td3x.td3x.td3x import TD3X

__all__ = [
    "TD3X", "CheckpointError", "CnnPolicy", "EnvironmentDiedError", "EpisodeSeeds", "MlpPolicy",
    "ModelFileError", "MultiInputPolicy", "NonFiniteError", "RayVecEnv", "ResumableEnv", "RunLockedError",
    "TD3XCheckpointCallback", "TD3XPolicy", "UntrustedModelError", "__version__", "load_vecnormalize",
    "resume_run", "save_run",
]  # fmt: skip

# Loaded at first use: torch and SB3 take seconds to import, and `td3x --help` needs neither
_MODULES = {
    "TD3X": "td3x.td3x",
    **dict.fromkeys(("CnnPolicy", "MlpPolicy", "MultiInputPolicy", "TD3XPolicy"), "td3x.policies"),
    **dict.fromkeys(("ResumableEnv", "TD3XCheckpointCallback", "resume_run", "save_run"), "checkpoint"),
    "EpisodeSeeds": "runs.environments",
    "RayVecEnv": "common.ray_vec_env",
    "load_vecnormalize": "saving.pickle_files",
}


if not TYPE_CHECKING:  # a type checker would take it for every misspelled name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
