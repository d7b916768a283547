"""What a model is made of comes back from JSON as it was, and no text makes anything else than the listed kinds."""

import json
import math
import pathlib
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy

from sb3_td3x import TD3X, ModelFileError
from sb3_td3x.saving import known
from sb3_td3x.saving.plain import NotPlain, decode, encode
from sb3_td3x.td3x.exploration import AnnealedActionNoise, ScalarActionNoise


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def equal(left, right):
    """Equal in type and value, deeply."""
    if type(left) is not type(right):
        return False
    if isinstance(left, th.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and equal(left.tolist(), right.tolist())
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict):  # an OrderedDict too
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, spaces.Space):
        return left == right and equal(*map(attributes_of, (left, right)))
    if isinstance(left, np.random.Generator):
        return equal(left.bit_generator.state, right.bit_generator.state)
    if isinstance(left, th.Generator):
        return th.equal(left.get_state(), right.get_state())
    return equal(vars(left), vars(right)) if hasattr(left, "__dict__") and not isinstance(left, type) else left == right


def attributes_of(space):
    """In any order, and without the texts that gymnasium makes when a space is first printed."""
    return {name: value for name, value in sorted(vars(space).items()) if not name.endswith("_repr")}


def seeded(space):
    space.seed(3)
    space.sample()
    return space


def a_vectorized_noise():
    noise = VectorizedActionNoise(OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2)), 3)
    noise()
    return noise


VALUES = {
    "numbers": [None, True, 0, -(2**130), 1.5, math.nan, math.inf, -math.inf, -0.0],
    "tuples in dicts": {"a": (1, [2, (3,)]), "@": "a key of ours", "": {1: "one", (2, 3): None}},
    "ordered dict": OrderedDict(z=1, a=np.zeros(2)),
    "bytes and paths": [b"\0\xff", pathlib.Path("logs") / "run"],
    "arrays": [np.arange(6).astype(t).reshape(2, 3) for t in ("<i8", ">i4", "u1", "f4", "f8", "f2", "c8", "?")],
    "odd arrays": [np.zeros(()), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T, np.array([math.nan, -math.inf])],
    "scalars and types": [np.float32(0.1), np.int64(3), np.bool_(True), np.float32, np.dtype("f4")],
    "tensors": [th.arange(6.0).reshape(2, 3), th.tensor(1, dtype=th.bfloat16), th.zeros(0, 2), th.tensor([True])],
    "torch": [th.float32, th.device("cpu"), th.Generator().manual_seed(5)],
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
    "noise": [NormalActionNoise(np.zeros(2), np.ones(2)), ScalarActionNoise(np.zeros(()), np.ones(())), a_vectorized_noise()],
    "annealed noise": AnnealedActionNoise(0.5, 0.1, 100, (2,)),
    "schedules": [ConstantSchedule(0.1), FloatSchedule(0.2), FloatSchedule(LinearSchedule(1.0, 0.0, 0.5))],
    "train frequency": TrainFreq(2, TrainFrequencyUnit.EPISODE),
    "enumerations": [TrainFrequencyUnit.STEP, GoalSelectionStrategy.FUTURE],
    "classes": [known.class_named(name) for name in known.names()],
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_come_back_as_they_were(value):
    assert equal(through_json(value), value)


def test_a_random_state_goes_on_where_it_was():
    random = np.random.RandomState(4)
    assert through_json(random).standard_normal() == random.standard_normal()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("@"), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(JSON)
def test_nested_values_come_back_as_they_were(value):
    assert equal(through_json(value), value)


def test_every_policy_has_a_name():
    assert all(known.name_of(policy) for policy in TD3X.policy_aliases.values())


class Own(NormalActionNoise):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda progress: 1e-3, "the function .*lambda"),
        (Own(np.zeros(1), np.ones(1)), "an object of the class .*Own"),
        (Own, "the class .*Own"),
        (pathlib.Path, "the class pathlib.*Path"),
        (np.array([object()]), "array of object"),
        ({"inside": [np.dtype("O")]}, "array of object"),
        (np.array(["2020"], dtype="datetime64[Y]"), "array of datetime64"),
        (FloatSchedule(math.sqrt), "value_schedule is the function"),
        (th.nn.Linear, "the class .*Linear"),
    ],
)
def test_what_is_not_plain_is_named(value, named):
    with pytest.raises(NotPlain, match=named):
        encode(value)


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(NotPlain, match="nested"):
        encode(loop)


@pytest.mark.parametrize(
    "text",
    [
        {"@": "no such kind"},
        {"@": ["list"]},
        {"@": "array", "dtype": "|O", "shape": [1], "data": ""},
        {"@": "array", "dtype": "<f8", "shape": [10**12], "data": "AAAA"},
        {"@": "array", "dtype": "<f8", "shape": [-1], "data": ""},
        {"@": "array", "dtype": "<f8", "shape": [1], "data": "???"},
        {"@": "tensor", "dtype": "load", "shape": [], "data": ""},
        {"@": "class", "name": "os:system"},
        {"@": "class", "name": "torch.nn:modules.activation.ReLU"},
        {"@": "enum", "name": "stable_baselines3.common.type_aliases:TrainFrequencyUnit", "member": "__class__"},
        {"@": "object", "name": "Popen", "attributes": {}},
        {"@": "object", "name": "FloatSchedule", "attributes": {"value_schedule": {"@": "class", "name": "torch.nn:ReLU"}}},
        {"@": "object", "name": "ConstantSchedule", "attributes": {"val": 1, "__call__": 2}},
        {"@": "space", "name": "Box", "random": None, "parts": {"low": 0}},
        {"@": "space", "name": "Graph", "random": None, "parts": {}},
        {"@": "numpy generator", "state": {"bit_generator": "os"}},
        {"@": "torch generator", "state": 3},
        {"@": "deque", "items": 3, "maxlen": 1},
        {"@": "dict", "items": [[[], 1]]},
        {"@": "float", "value": "1"},
        {"@": "tuple", "items": [], "more": 1},
    ],
    ids=str,
)
def test_texts_that_nobody_encoded_are_refused(text):
    with pytest.raises(ModelFileError):
        decode(text)


def test_deep_nesting_is_refused():
    deep = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(ModelFileError, match="nested"):
        decode(deep)
