"""Zips whose parts contradict each other, or that no model could have written, are refused by name."""

import base64
import io
import warnings
import zipfile
from pathlib import Path

import pytest
import torch as th

from sb3_td3x import TD3X, ModelFileError
from tests.tools import SMALL, LineEnv, largest_difference, model, weights
from tests.zips import members, packed, signed, with_attributes, with_fields

GOLDEN = Path(__file__).parent / "golden"


def stored(value):
    file = io.BytesIO()
    th.save(value, file)
    return file.getvalue()


def altered(zipped, member, change):
    """The zip with a change in the tensors of a member."""
    parts = members(zipped)
    state = th.load(io.BytesIO(parts[member]), weights_only=True)
    change(state)
    return packed(signed({**parts, member: stored(state)}))


FIRST = "actor.mu.0.weight"
TENSOR_CHANGES = {
    "shape": ("policy.pth", lambda s: s.update({FIRST: s[FIRST][:, :1]}), f"{FIRST} has the shape"),
    "type": ("policy.pth", lambda s: s.update({FIRST: s[FIRST].double()}), f"{FIRST} has the type"),
    "missing": ("policy.pth", lambda s: s.pop(FIRST), f"{FIRST} is in one of them only"),
    "additional": ("policy.pth", lambda s: s.update(more=th.zeros(1)), "more is in one of them only"),
    "no tensor": ("policy.pth", lambda s: s.update({FIRST: 3}), "no tensor"),
    "sparse": ("policy.pth", lambda s: s.update({FIRST: s[FIRST].to_sparse()}), "no tensor"),
    "moments": ("actor.optimizer.pth", lambda s: s["state"][0].update(exp_avg=th.zeros(2)), "exp_avg has the shape"),
    "groups": ("actor.optimizer.pth", lambda s: s["param_groups"].clear(), "0 groups"),
    "parameters": ("critic.optimizer.pth", lambda s: s["param_groups"][0]["params"].pop(), "number of parameters"),
    "foreign state": ("critic.optimizer.pth", lambda s: s["state"].update({99: {}}), "does not list"),
    "rate": ("critic.optimizer.pth", lambda s: s["param_groups"][0].update(lr="fast"), "another kind of lr"),
    "no state": ("critic.optimizer.pth", lambda s: s.clear(), "no optimiser"),
    "variables": ("pytorch_variables.pth", lambda s: s.update({"policy.actor": th.zeros(1)}), "tensors beside the networks"),
}


@pytest.mark.parametrize("what", TENSOR_CHANGES)
def test_tensors_that_do_not_fit_are_named_and_leave_a_model_as_it_was(what, zipped, tmp_path):
    member, change, said = TENSOR_CHANGES[what]
    (tmp_path / "model.zip").write_bytes(altered(zipped, member, change))
    with pytest.raises(ModelFileError, match=said):
        TD3X.load(tmp_path / "model")
    if member != "pytorch_variables.pth":
        other = model(seed=1)
        before = weights(other)
        with pytest.raises(ModelFileError, match=said):
            other.set_parameters(tmp_path / "model.zip")
        assert largest_difference(weights(other), before) == 0


def _with(parameters, **policy):
    return {**parameters, "policy": {**parameters["policy"], **policy}}


DICTIONARIES = {
    "optimisers missing": (True, lambda p: {"policy": p["policy"]}, "there must be parameters of"),
    "unknown": (True, lambda p: {**p, "nonsense": {}}, "there must be parameters of"),
    "unknown, not exact": (False, lambda p: {**p, "actor.optimiser": {}}, "did you mean actor.optimizer"),
    "no network": (False, lambda p: {**p, "gamma": {}}, "no network or optimiser 'gamma'"),
    "shape, not exact": (False, lambda p: _with(p, **{"critic_target.qf1.4.bias": th.zeros(7)}), "has the shape"),
    "moments, not exact": (False, lambda p: {**p, "critic.optimizer": {}}, "no optimiser's state"),
}  # fmt: skip


@pytest.mark.parametrize("what", DICTIONARIES)
def test_parameters_are_taken_all_or_none(what):
    is_exact, change, said = DICTIONARIES[what]
    algorithm = model().learn(60)
    before = weights(algorithm)
    with pytest.raises((ValueError, ModelFileError), match=said):
        algorithm.set_parameters(change(model(seed=1).get_parameters()), exact_match=is_exact)
    assert largest_difference(weights(algorithm), before) == 0


def test_parameters_of_a_part_are_taken_where_that_is_asked_for():
    algorithm, other = model(), model(seed=1)
    before, given = weights(algorithm), weights(other)
    bias = "actor.mu.0.bias"
    algorithm.set_parameters({"policy": {bias: given[bias] + 1, "more": th.zeros(1)}}, exact_match=False)
    assert th.equal(weights(algorithm).pop(bias), given[bias] + 1)
    assert all(th.equal(value, before[name]) for name, value in weights(algorithm).items() if name != bias)


class TestArchives:
    @pytest.mark.parametrize("name", ["../../escaped", "/escaped", "C:\\escaped", "more.pth", "td3x.json/"])
    def test_members_that_no_model_has_are_refused(self, zipped, name):
        with pytest.raises(ModelFileError, match="that no TD3 model has"):
            TD3X.load(io.BytesIO(packed(signed({**members(zipped), name: b""}))))

    def test_two_members_of_one_name_are_refused(self, zipped):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = packed([*members(zipped).items(), ("data", members(zipped)["data"])])
        with pytest.raises(ModelFileError, match="two members of one name"):
            TD3X.load(io.BytesIO(content))

    @pytest.mark.parametrize("member", ["data", "policy.pth", "actor.optimizer.pth", "critic.optimizer.pth"])
    def test_a_missing_member_is_named(self, zipped, member):
        with pytest.raises(ModelFileError, match=f"lacks {member}"):
            TD3X.load(io.BytesIO(packed({key: value for key, value in members(zipped).items() if key != member})))

    def test_a_bomb_is_not_unpacked(self, zipped):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members(zipped).items():
                archive.writestr(name, bytes(30 * 2**20) if name == "system_info.txt" else content)
        with pytest.raises(ModelFileError, match="would unpack to"):
            TD3X.load(file)

    def test_a_bomb_inside_tensors_is_not_unpacked(self, zipped):
        parts = members(zipped)
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members(parts["policy.pth"]).items():
                archive.writestr(name, content)
        with pytest.raises(ModelFileError, match="is compressed"):
            TD3X.load(io.BytesIO(packed(signed({**parts, "policy.pth": file.getvalue()}))))

    def test_compiled_code_of_torch_is_not_loaded(self, zipped):
        file = io.BytesIO()
        th.jit.save(th.jit.script(th.nn.Linear(1, 1)), file)
        with pytest.raises(ModelFileError, match="no file of tensors has"):
            TD3X.load(io.BytesIO(packed(signed({**members(zipped), "policy.pth": file.getvalue()}))))

    def test_json_of_any_size_is_not_read(self, zipped, monkeypatch):
        monkeypatch.setattr("sb3_td3x.saving.model_zip.MAX_JSON", 1000)
        with pytest.raises(ModelFileError, match="more than 1000 bytes"):
            TD3X.load(io.BytesIO(zipped))

    def test_members_of_two_models_are_not_mixed(self, zipped):
        other = io.BytesIO()
        model(seed=5).save(other)
        mixed = {**members(zipped), "policy.pth": members(other.getvalue())["policy.pth"]}
        with pytest.raises(ModelFileError, match=r"policy\.pth is not the one"):
            TD3X.load(io.BytesIO(packed(mixed)))


HOSTILE = {
    "huge networks": {"policy_kwargs": {"net_arch": [10**7, 10**7]}},
    "a great many critics": {"policy_kwargs": {"net_arch": [16, 12], "n_critics": 10**9}},
    "a great many layers": {"policy_kwargs": {"net_arch": [16] * 10_000}},
    "a great many layers of critics": {"policy_kwargs": {"net_arch": {"pi": [16], "qf": [16] * 10}, "n_critics": 10}},
    "a huge space": {
        "observation_space": {"@": "space", "name": "Discrete", "random": None, "parts": {"n": 10**12, "start": 0}}
    },
    "a huge buffer": {"buffer_size": 10**15},
    "a huge buffer for many": {"n_envs": 10**15},
    "noise for many": {"n_envs": 10**6},
    "a great many values": {"resumptions": [0] * 600_000},
    "no space": {"observation_space": None},
    "a layer as policy": {"policy_class": {"@": "class", "name": "torch.nn:ReLU"}},
    "a policy as buffer": {"replay_buffer_class": {"@": "class", "name": "sb3_td3x.td3x.policies:TD3XPolicy"}},
    "a buffer as layer": {
        "policy_kwargs": {"activation_fn": {"@": "class", "name": "sb3_td3x.common.buffers:PrioritizedReplayBuffer"}}
    },
    "a layer as optimiser": {"policy_kwargs": {**SMALL, "optimizer_class": {"@": "class", "name": "torch.nn:ReLU"}}},
    "a covered method": {"learn": 1},
    "a covered policy": {"policy": 1},
    "a text as settings": {"policy_kwargs": "x"},
    "a negative discount": {"gamma": -1},
    "a text as noise": {"action_noise": "x"},
    "a table as buffer's settings": {"replay_buffer_kwargs": {"no such": 1}},
    "a rate that is no number": {"learning_rate": []},
    "a frequency of nothing": {"train_freq": None},
    "numbers that are none": {"num_timesteps": "many"},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_attributes_that_no_model_has_are_refused(what, zipped):
    for given in ({}, {"env": LineEnv()}, {"buffer_size": 1} if what != "a huge buffer" else {}):
        with pytest.raises(ModelFileError):
            TD3X.load(io.BytesIO(with_fields(zipped, **HOSTILE[what])), **given)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("huge networks", "has the shape"),
        ("a huge space", "has the shape"),
        ("a great many critics", "asks for"),
        ("a great many layers", "asks for 30000 layers"),
        ("a great many layers of critics", "asks for 101 layers"),
    ],
)
def test_networks_that_the_file_does_not_hold_are_not_made(what, said, zipped):
    with pytest.raises(ModelFileError, match=said):  # not: no memory
        TD3X.load(io.BytesIO(with_fields(zipped, **HOSTILE[what])))


def test_the_same_attributes_in_a_zip_of_sb3_are_refused():
    golden = (GOLDEN / "sb3_td3_2.9.2.zip").read_bytes()
    for what in (
        "huge networks",
        "a great many critics",
        "a huge buffer",
        "no space",
        "a covered method",
        "a negative discount",
    ):
        with pytest.raises(ModelFileError):
            TD3X.load(io.BytesIO(with_attributes(golden, **HOSTILE[what])))
    for broken in ("no base64", base64.b64encode(b"no pickle").decode(), 3):
        with pytest.raises(ModelFileError, match="action_noise"):
            TD3X.load(io.BytesIO(with_attributes(golden, action_noise={":serialized:": broken})))
