"""The random generators that a run draws from, except the algorithm's own, which is in the model."""

import random
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_td3x.saving import plain


def state(action_space: spaces.Space, device: th.device) -> dict[str, Any]:
    """
    States of the generators of python, numpy, torch (of the CPU, and the model's CUDA device if it is on one) and the action
    space.

    :param action_space: random actions of the warm-up come from it
    :param device: the model's
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys, *rest],
        "torch": th.get_rng_state().numpy(),
        "cuda": [th.cuda.get_rng_state(one).numpy() for one in _cuda(device)],
        "action_space": action_space.np_random.bit_generator.state,
    }


def restore(saved: dict[str, Any], action_space: spaces.Space, device: th.device) -> list[str]:
    """
    :param saved: from ``state``
    :param device: the model's
    :return: what could not be restored, in words
    """
    of_python, of_numpy, of_torch, of_actions = _made(saved)
    random.setstate(of_python.getstate())
    np.random.set_state(of_numpy.get_state())
    th.set_rng_state(of_torch.get_state())
    action_space.np_random.bit_generator.state = of_actions.bit_generator.state
    if len(saved["cuda"]) != len(_cuda(device)):
        return [f"the random generator of the device (saved with {len(saved['cuda'])} of CUDA devices, this one is {device})"]
    for own, one in zip(_cuda(device), saved["cuda"], strict=True):
        th.cuda.set_rng_state(th.from_numpy(one.copy()), own)
    return []


def _cuda(device: th.device) -> list[th.device]:
    """Not every device that is there: to ask for their states sets all of them up, also for a model on the CPU."""
    return [device] if device.type == "cuda" else []


def are_valid(saved: Any) -> bool:
    """Whether ``state`` can have given this."""
    try:
        _made(saved)
        return all(isinstance(one, np.ndarray) for one in saved["cuda"])
    except Exception:  # each library has its own errors
        return False


def _made(saved: dict[str, Any]) -> tuple[random.Random, np.random.RandomState, th.Generator, np.random.Generator]:
    """Generators of our own in the saved states, of python, numpy, torch's CPU and the action space."""
    version, words, gauss = saved["python"]
    of_python, of_torch = random.Random(), th.Generator()  # noqa: S311  # no secrets are made with it
    of_python.setstate((version, tuple(words), gauss))
    of_torch.set_state(th.from_numpy(saved["torch"].copy()))
    return of_python, plain.numpy_random_state(saved["numpy"]), of_torch, plain.numpy_generator(saved["action_space"])
