"""Whatever happens to a file, loading it gives the model that was saved or one documented error; nothing in between."""

import base64
import contextlib
import io
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch as th
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X, ModelFileError, NonFiniteError, TD3XPolicy, load_vecnormalize
from tests.tools import OBSERVATIONS, SOAK, LineEnv, largest_difference, model, weights
from tests.zips import members, packed, with_attributes, with_pickle

CASES = 2_000 if SOAK else 200

many = settings(
    max_examples=CASES, deadline=None, derandomize=not SOAK, database=None, suppress_health_check=list(HealthCheck)
)
few = settings(many, max_examples=CASES // 4)


def saved():
    file = io.BytesIO()
    model(action_noise=0.2).learn(40).save(file)
    return file.getvalue()


ZIPS = {"td3x": saved(), "sb3": (Path(__file__).parent / "golden" / "sb3_td3_2.9.2.zip").read_bytes()}
WEIGHTS = {name: weights(TD3X.load(io.BytesIO(content))) for name, content in ZIPS.items()}


# Accidents: the bytes of the file


def flipped(dice, content):
    changed = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 5])):
        changed[dice.randrange(len(changed))] ^= dice.randrange(1, 256)
    return bytes(changed)


def truncated(dice, content):
    return content[: dice.randrange(len(content))]


def shifted(dice, content):
    at = dice.randrange(len(content))
    if dice.random() < 0.5:
        return content[:at] + dice.randbytes(dice.randrange(1, 20)) + content[at:]
    return content[:at] + content[at + dice.randrange(1, 20) :]


def blanked(dice, content):
    at, length = dice.randrange(len(content)), dice.randrange(1, 5000)
    return content[:at] + bytes(len(content[at : at + length])) + content[at + length :]


# Edits: the zip is in order again afterwards, so that what is inside has to be looked at


def swapped(dice, content):
    parts = members(content)
    first, second = dice.choice(list(parts)), dice.choice(list(parts))
    parts[first], parts[second] = parts[second], parts[first]
    return packed(parts)


def member_flipped(dice, content):
    parts = members(content)
    name = dice.choice(list(parts))
    parts[name] = flipped(dice, parts[name]) if parts[name] else b"x"
    return packed(parts)


def tensors_pickle_flipped(dice, content):
    """The small pickle that describes the tensors, most of which is structure."""
    parts = members(content)
    name = dice.choice(["policy.pth", "actor.optimizer.pth", "critic.optimizer.pth"])
    pickled = next(content for inner, content in members(parts[name]).items() if inner.endswith("data.pkl"))
    return packed({**parts, name: with_pickle(parts[name], flipped(dice, pickled))})


VALUES = [
    None, True, -1, 0, 1, 3, 10**30, 0.5, -0.5, 1e308, "", "x", "auto", [], [1], {}, {"a": 1}, [[]],
    {":serialized:": "gASVAAAAAAAAAACMAm9zlIwGc3lzdGVtlJOULg=="},
]  # fmt: skip


def places(value, path=()):
    """Every place inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def edited_json(dice, content):
    parts = members(content)
    data = json.loads(parts["data"])
    path, target = dice.choice([path for path in places(data) if path]), data
    for key in path[:-1]:
        target = target[key]
    action = dice.choice(["replace", "remove", "rename"])
    if action == "replace":
        target[path[-1]] = dice.choice(VALUES)
    elif action == "remove":
        del target[path[-1]]
    elif isinstance(target, dict):
        target[dice.choice(["x", "learn", "env", "gamma"])] = target.pop(path[-1])
    return packed({**parts, "data": json.dumps(data).encode()})


def edited_pickle(dice, content):
    """The bytes of an attribute that SB3 has pickled."""
    data = json.loads(members(content)["data"])
    pickles = {name: value[":serialized:"] for name, value in data.items() if isinstance(value, dict) and len(value) > 1
               and ":serialized:" in value}  # fmt: skip
    name = dice.choice(list(pickles))
    return with_attributes(
        content, **{name: dice.choice([flipped, shifted, truncated])(dice, base64.b64decode(pickles[name]))}
    )


ACCIDENTS = (flipped, truncated, shifted, blanked)
EDITS = (
    swapped, member_flipped, tensors_pickle_flipped, edited_json, edited_json, edited_pickle,
)  # fmt: skip


def outcome(name, content):
    """``"refused"``, ``"equal"`` to what was saved, or ``"another"`` model, which is whole."""
    before = th.get_rng_state()
    try:
        loaded = TD3X.load(io.BytesIO(content))
    except ModelFileError:
        return "refused"
    finally:
        assert th.equal(before, th.get_rng_state())
    assert loaded.predict(OBSERVATIONS)[0].shape == (4, 1)
    return "equal" if largest_difference(weights(loaded), WEIGHTS[name]) == 0 else "another"


@many
@given(st.randoms(use_true_random=False), st.sampled_from(list(ZIPS)), st.sampled_from(ACCIDENTS))
def test_an_accident_gives_the_error_or_the_model_that_was_saved(dice, name, change):
    assert outcome(name, change(dice, ZIPS[name])) in ("refused", "equal")


@many
@given(st.randoms(use_true_random=False), st.sampled_from(list(ZIPS)), st.sampled_from(EDITS))
def test_an_edit_gives_the_error_or_a_whole_model(dice, name, change):
    outcome(name, change(dice, ZIPS[name]))


@pytest.mark.parametrize(("model_of", "name"), [("sb3", "seed"), ("td3x", "n_envs")])
def test_a_number_that_nothing_has_gives_the_error(model_of, name):
    with pytest.raises(ModelFileError):
        TD3X.load(io.BytesIO(with_attributes(ZIPS[model_of], **{name: 10**30})))


@few
@given(st.randoms(use_true_random=False), st.sampled_from(list(ZIPS)), st.sampled_from((*ACCIDENTS, *EDITS)))
def test_a_model_takes_all_parameters_of_a_damaged_file_or_none(dice, name, change):
    content = change(dice, ZIPS[name])
    algorithm = model(seed=3)
    before, moments = weights(algorithm), len(algorithm.critic.optimizer.state)
    try:
        algorithm.set_parameters(io.BytesIO(content))
    except ModelFileError:
        assert largest_difference(weights(algorithm), before) == 0
        assert len(algorithm.critic.optimizer.state) == moments
    else:
        assert largest_difference(weights(algorithm), before) > 0
        assert change in EDITS or largest_difference(weights(algorithm), WEIGHTS[name]) == 0


def other_files():
    trained = model().learn(40)
    policy, normalized = io.BytesIO(), VecNormalize(DummyVecEnv([LineEnv]))
    trained.policy.save(policy)
    normalized.reset()
    buffer = pickle.dumps(trained.replay_buffer, pickle.HIGHEST_PROTOCOL)
    return {"policy": policy.getvalue(), "buffer": buffer, "statistics": pickle.dumps(normalized)}


OTHERS = other_files()


@few
@given(st.randoms(use_true_random=False), st.sampled_from(list(OTHERS)), st.sampled_from(ACCIDENTS))
def test_a_damaged_policy_buffer_or_statistics_gives_the_error_or_a_whole_one(tmp_path_factory, dice, name, change):
    path = tmp_path_factory.getbasetemp() / f"{name}.damaged"
    path.write_bytes(change(dice, OTHERS[name]))
    algorithm, env = model(), DummyVecEnv([LineEnv])
    load = {
        "policy": lambda: TD3XPolicy.load(path),
        "buffer": lambda: algorithm.load_replay_buffer(path),
        "statistics": lambda: load_vecnormalize(path, env),
    }
    try:
        loaded = load[name]()
    except ModelFileError:
        return
    except ValueError as error:
        if not re.search("the replay buffer has|does not fit the environments", str(error)):  # whole, and of another kind
            raise
        return
    if name == "policy":
        assert loaded.predict(OBSERVATIONS)[0].shape == (4, 1)
    elif name == "buffer":
        with contextlib.suppress(NonFiniteError):  # of a transition
            algorithm.learn(20)
    else:
        loaded.reset()
        loaded.step(np.zeros((1, 1), np.float32))
