"""
A pytest plugin that makes SB3's own tests exercise TD3X: ``pytest -p tests.sb3_swap <SB3's tests folder>``.

SB3's tests import ``TD3`` from the top level of ``stable_baselines3`` only, so replacing that one name before
collection is enough. Kept are the tests that are parametrised with the class or name it in their code.
"""

import pytest
import stable_baselines3

from sb3_td3x import TD3X


class SwappedTD3X(TD3X):
    """TD3X under the log name that ``test_tensorboard`` looks for, with small batches where a test names no size."""

    def __init__(self, *args, batch_size=64, **kwargs):
        super().__init__(*args, batch_size=batch_size, **kwargs)

    def learn(self, *args, tb_log_name="TD3", **kwargs):
        return super().learn(*args, tb_log_name=tb_log_name, **kwargs)


stable_baselines3.TD3 = SwappedTD3X


def exercises_td3(item: pytest.Function) -> bool:
    if hasattr(item, "callspec"):
        parameters = list(item.callspec.params.values())
        if any(value is SwappedTD3X or (isinstance(value, str) and value == "td3") for value in parameters):
            return True
        if any(
            isinstance(value, type) and issubclass(value, stable_baselines3.common.base_class.BaseAlgorithm)
            for value in parameters
        ):
            return False
    return "TD3" in item.function.__code__.co_names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if isinstance(item, pytest.Function) and exercises_td3(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
