"""What saved models and checkpoints are made of comes back as it was; what else there is, is named when it is saved."""

import io
import math
import pathlib
import pickle
from collections import OrderedDict, deque
from importlib import import_module

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy

from sb3_td3x import TD3X
from sb3_td3x.presets import HeldSchedule
from sb3_td3x.saving import safe_pickle
from sb3_td3x.saving.safe_pickle import CLASSES, OBJECTS, NotAllowed, dumps, loads
from tests.tools import equal


def seeded(space):
    space.seed(3)
    space.sample()
    return space


def a_vectorized_noise():
    noise = VectorizedActionNoise(OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2)), 3)
    noise()
    return noise


def named_classes():
    return [getattr(import_module(module), name) for module, names in CLASSES.items() for name in names]


VALUES = {
    "numbers": [None, True, 0, -(2**130), 1.5, math.nan, math.inf, -math.inf, -0.0],
    "tuples in dicts": {"a": (1, [2, (3,)]), "": {1: "one", (2, 3): None, b"": 1.5}},
    "ordered dict": OrderedDict(z=1, a=np.zeros(2)),
    "bytes and paths": [b"\0\xff", b"", pathlib.Path("logs") / "run"],
    "arrays": [np.arange(6).astype(t).reshape(2, 3) for t in ("<i8", "u1", "f4", "f8", "f2", "c8", "?")],
    "odd arrays": [np.zeros(()), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T, np.array([math.nan, -math.inf])],
    "a table by pairs and numbers": {((1, 2), 0): 1},
    "an array of dicts": np.array([[{"is_success": np.bool_(True)}], [{}]]),
    "scalars and types": [np.float32(0.1), np.int64(3), np.bool_(True), np.float32, np.dtype("f4")],
    "types and devices of torch": [th.float32, th.device("cpu")],
    "deques": [deque([{"r": 1.0, "l": 2}], maxlen=100), deque()],
    "numpy generators": [np.random.default_rng(1), np.random.Generator(np.random.MT19937(2))],
    "their states": np.random.default_rng(1).bit_generator.state,
    "numpy's global state": np.random.RandomState(1).get_state(),
    "box": seeded(spaces.Box(-1, np.array([1, np.inf], np.float32), (2,), np.float32)),
    "integer box without bounds": spaces.Box(-np.inf, np.inf, (2,), np.int32),
    "box of one number": spaces.Box(-1, 1, ()),
    "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
    "discrete": [seeded(spaces.Discrete(3, start=-1)), spaces.MultiDiscrete([2, 3])],
    "binary": [seeded(spaces.MultiBinary(4)), spaces.MultiBinary([2, 2])],
    "dict space in its order": seeded(spaces.Dict([("z", spaces.Box(-1, 1)), ("a", spaces.Tuple([spaces.Discrete(2)]))])),
    "noise": [NormalActionNoise(np.zeros(2), np.ones(2)), a_vectorized_noise()],
    "schedules": [ConstantSchedule(0.1), FloatSchedule(LinearSchedule(1.0, 0.0, 0.5)), HeldSchedule(1.0, 0.6)],
    "train frequency": TrainFreq(2, TrainFrequencyUnit.EPISODE),
    "enumerations": [TrainFrequencyUnit.STEP, GoalSelectionStrategy.FUTURE],
    "classes": named_classes(),
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_come_back_as_they_were(value):
    assert equal(loads(dumps(value)), value)
    for protocol in (2, 4):  # torch's and older files
        assert equal(loads(pickle.dumps(value, protocol)), value)


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True, database=None)
@given(VALUE)
def test_nested_values_come_back_as_they_were(value):
    assert equal(loads(dumps(value)), value)


@pytest.mark.parametrize(
    "dtype", [th.float64, th.float16, th.bfloat16, th.int64, th.int32, th.int16, th.int8, th.uint8, th.bool]
)
def test_tensors_of_every_kind_come_back(dtype):
    th.save(tensor := th.tensor([0, 1, 3]).to(dtype), file := io.BytesIO())
    loaded = safe_pickle.load_tensors(file.getvalue())
    assert loaded.dtype == dtype
    assert th.equal(loaded, tensor)


def test_every_listed_class_exists_and_every_policy_is_listed():
    assert all(isinstance(cls, type) for cls in named_classes())
    assert len(safe_pickle._created()) == sum(map(len, OBJECTS.values()))
    assert set(TD3X.policy_aliases.values()) <= set(named_classes())


class Own(NormalActionNoise):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda progress: 1e-3, "Can't pickle .*lambda"),
        (Own(np.zeros(1), np.ones(1)), "test_allowed_pickles_come_back.Own"),
        (Own, "test_allowed_pickles_come_back.Own"),
        (np.array([object()]), "array of objects|builtins.object"),
        (np.array([[1], [2, 3]], dtype=object), "array of objects"),
        ([np.array([{}]), np.array([{}])], "array of objects"),
        (np.array(["2020"], dtype="datetime64[Y]"), "array type 'M8'"),
        (FloatSchedule(math.sqrt), "math.sqrt"),
        (th.nn.Linear, "Linear"),
        (th.zeros(2), "torch"),
        ({1, 2}, "builtins.set|kind of value"),
        (open, "io.open"),
    ],
)
def test_what_cannot_be_read_again_is_named_when_it_is_saved(value, named):
    with pytest.raises((NotAllowed, pickle.PicklingError), match=named):
        dumps(value)
