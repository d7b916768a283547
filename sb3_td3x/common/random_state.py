"""The global random generators, set aside."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th


@contextmanager
def generators_kept(device: th.device | None = None, seed: int | None = None) -> Iterator[None]:
    """
    After this, the generators of python, numpy and torch go on where they were: what is drawn inside, a run does not see.

    :param device: keep this device's generator too, if it is a CUDA device
    :param seed: inside, they start from it; ``None`` leaves them as they are
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    python, array = random.getstate(), np.random.get_state()
    try:
        with th.random.fork_rng(devices=devices):
            if seed is not None:
                _seed(seed, devices)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def numpys_and_pythons() -> tuple[Any, ...]:
    """The states of the two, which can be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def _seed(seed: int, devices: list[th.device]) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    th.default_generator.manual_seed(seed)  # `th.manual_seed` would seed every device
    for device in devices:
        with th.cuda.device(device):
            th.cuda.manual_seed(seed)
