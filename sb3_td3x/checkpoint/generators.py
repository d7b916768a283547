"""The random generators that a run draws from, except the algorithm's own, which is in the model."""

import random
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces


def state(action_space: spaces.Space) -> dict[str, Any]:
    """
    States of the generators of python, numpy, torch (CPU and every CUDA device) and the action space.

    :param action_space: random actions of the warm-up come from it
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys, *rest],
        "torch": th.get_rng_state().numpy(),
        "cuda": [one.numpy() for one in th.cuda.get_rng_state_all()] if th.cuda.is_available() else [],
        "action_space": action_space.np_random.bit_generator.state,
    }


def restore(saved: dict[str, Any], action_space: spaces.Space) -> list[str]:
    """
    :param saved: from ``state``
    :return: what could not be restored, in words
    """
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    th.set_rng_state(th.from_numpy(saved["torch"].copy()))
    action_space.np_random.bit_generator.state = saved["action_space"]
    devices = th.cuda.device_count() if th.cuda.is_available() else 0
    if devices != len(saved["cuda"]):
        return [f"the random generators of {len(saved['cuda'])} CUDA devices (this machine has {devices})"]
    for device, one in enumerate(saved["cuda"]):
        th.cuda.set_rng_state(th.from_numpy(one.copy()), device)
    return []
