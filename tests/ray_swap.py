"""
A pytest plugin that makes SB3's own tests of ``SubprocVecEnv`` exercise ``RayVecEnv``:
``pytest -p tests.ray_swap <SB3's tests folder>/test_vec_envs.py``.

SB3's test imports ``SubprocVecEnv`` from ``stable_baselines3.common.vec_env``, so replacing that one name before
collection is enough. Kept are the tests that are parametrised with the class or name it in their code.
"""

import multiprocessing

import pytest
import ray
from stable_baselines3.common import vec_env

from sb3_td3x import RayVecEnv


class SwappedRayVecEnv(RayVecEnv):
    """Three environments in two actors, as processes would be started: there is one way here."""

    def __init__(self, env_fns, start_method="spawn"):
        super().__init__(env_fns, envs_per_actor=2)


vec_env.SubprocVecEnv = SwappedRayVecEnv
multiprocessing.get_all_start_methods = lambda: ["spawn"]


def exercises_processes(item: pytest.Function) -> bool:
    if "start_method" in item.name:  # what it checks is how processes are started
        return False
    if hasattr(item, "callspec") and "vec_env_class" in item.callspec.params:
        return item.callspec.params["vec_env_class"] is SwappedRayVecEnv
    return "SubprocVecEnv" in item.function.__code__.co_names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if isinstance(item, pytest.Function) and exercises_processes(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for module in {item.module for item in kept}:
        ray.cloudpickle.register_pickle_by_value(module)  # an actor finds our folder `tests`, not SB3's


def pytest_sessionstart(session: pytest.Session) -> None:
    ray.init(
        "local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
