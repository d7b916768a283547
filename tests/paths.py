"""Models on each path of the update, and what makes them equal."""

import pytest
import torch as th

from sb3_td3x.td3x import compiled
from tests.tools import feed, model, weights, without_output


def noise(seed, size=8):
    return th.randn(size, 1, generator=th.Generator().manual_seed(seed))


def ready(path, **kwargs):
    """Skips the test where this path needs a compiler that is not there."""
    if path == "compiled" and not compiled.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    return without_output(model(accelerate=path, batch_size=8, **kwargs))


def pair(**kwargs):
    return ready("plain", **kwargs), ready("compiled", **kwargs)


def train(algorithm, batches, first=0):
    batches = list(batches)
    feed(algorithm, batches, [noise(first + index, len(batch.rewards)) for index, batch in enumerate(batches)])
    for batch in batches:
        algorithm.train(1, len(batch.rewards))


def optimizer_states(algorithm):
    return {
        f"{name} {index} {key}": value.clone()
        for name in ("actor", "critic")
        for index, state in getattr(algorithm, name).optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def assert_equal(plain, compiled, rtol=1e-5, atol=1e-7):
    for left, right in ((weights(plain), weights(compiled)), (optimizer_states(plain), optimizer_states(compiled))):
        assert left.keys() <= right.keys()
        # Moments that no gradient has reached yet are zeros on the compiled path and absent on the plain one
        left = {name: left.get(name, th.zeros_like(value)) for name, value in right.items()}
        for name in left:
            th.testing.assert_close(
                right[name], left[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def programs(algorithm):
    return algorithm._get_updater().programs_made
