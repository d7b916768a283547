"""The states of random generators: kept while something else draws, and saved in checkpoints."""

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

BIT_GENERATORS = {name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")}
_LAST_POSITIONS = {"MT19937": 624, "Philox": 4}  # numpy does not check them; MT19937 reads beyond its memory for larger ones


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch (of the CPU) at the end."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with th.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def numpy_and_python_states() -> tuple[Any, ...]:
    """The states of numpy's and Python's global generators, in a form that can be compared."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest


def check_generator_state(state: dict[str, Any]) -> dict[str, Any]:
    """A saved ``BitGenerator.state`` of numpy as a generator accepted it; an invalid one is an error of this or of numpy."""
    name = state["bit_generator"]
    if name in _LAST_POSITIONS:
        position = state["state"]["pos"] if name == "MT19937" else state["buffer_pos"]
        if type(position) is not int or not 0 <= position <= _LAST_POSITIONS[name]:
            raise ValueError(f"a random generator is at position {position!r} of {_LAST_POSITIONS[name]}")
    generator = BIT_GENERATORS[name](0)
    generator.state = state
    return generator.state


def torch_state(saved: np.ndarray) -> th.Tensor:
    """A saved state of torch's generator on the CPU; ``ValueError`` for one that would have it read beyond its memory."""
    left, _, position = struct.unpack_from("<iiQ", saved.tobytes(), 8)
    if left + position > 625:  # torch checks each of the two alone
        raise ValueError(f"a random generator is at position {position} and has {left} numbers left")
    return th.from_numpy(saved.copy())


def get_states(action_space: spaces.Space, device: th.device) -> dict[str, Any]:
    """The states of the generators that a run draws from, without the algorithm's own, which is part of the model."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": th.get_rng_state().numpy(),
        "cuda": [th.cuda.get_rng_state(device).numpy()] if device.type == "cuda" else [],
        "action_space": action_space.np_random.bit_generator.state,
    }


def set_states(saved: dict[str, Any], action_space: spaces.Space, device: th.device) -> list[str]:
    """Restore what ``get_states`` returned, and return what could not be restored, in words."""
    of_actions = check_generator_state(saved["action_space"])
    check_generator_state(saved["numpy"])  # which also holds a number drawn in advance
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    th.set_rng_state(torch_state(saved["torch"]))
    action_space.np_random.bit_generator.state = of_actions
    if len(saved["cuda"]) != (device.type == "cuda"):
        return [f"the random generator of the device (saved on a {'GPU' if saved['cuda'] else 'CPU'}, this one is {device})"]
    for state in saved["cuda"]:
        th.cuda.set_rng_state(th.from_numpy(state.copy()), device)
    return []
