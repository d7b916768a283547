"""Zips whose parts contradict each other, or that no model could have written, are refused by name."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy, load_vecnormalize
from sb3_td3x.common.validation import CHECKS
from tests.paths import optimizer_states
from tests.tools import SMALL, LineEnv, equal, model, weights
from tests.zips import members, packed, with_attributes, with_tensors

FIRST = "actor.mu.0.weight"
TENSOR_CHANGES = {
    "shape": ("policy.pth", lambda s: s.update({FIRST: s[FIRST][:, :1]}), f"size mismatch for {FIRST}"),
    "missing": ("policy.pth", lambda s: s.pop(FIRST), f'Missing key.*"{FIRST}"'),
    "additional": ("policy.pth", lambda s: s.update(more=th.zeros(1)), 'Unexpected key.*"more"'),
    "no tensor": ("policy.pth", lambda s: s.update({FIRST: 3}), FIRST),
    "sparse": ("policy.pth", lambda s: s.update({FIRST: s[FIRST].to_sparse()}), "policy.pth: torch._utils._rebuild_sparse"),
    "moments": ("actor.optimizer.pth", lambda s: s["state"][0].update(exp_avg=th.zeros(2)), r"shape \(2,\) of exp_avg"),
    # Torch's fused step writes it as far as the parameter goes
    "second moments": ("critic.optimizer.pth", lambda s: s["state"][0].update(exp_avg_sq=th.zeros(())), "of exp_avg_sq"),
    "groups": ("actor.optimizer.pth", lambda s: s["param_groups"].clear(), "number of parameter groups"),
    "parameters": ("critic.optimizer.pth", lambda s: s["param_groups"][0]["params"].pop(), "match the size"),
    "no state": ("critic.optimizer.pth", lambda s: s.clear(), "critic.optimizer|param_groups"),
    "variables": ("pytorch_variables.pth", lambda s: s.update({"policy.actor": th.zeros(1)}), "tensors beside the networks"),
}


@pytest.mark.parametrize("what", TENSOR_CHANGES)
def test_tensors_that_do_not_fit_are_named_and_leave_a_model_as_it_was(what, zipped, tmp_path):
    member, change, said = TENSOR_CHANGES[what]
    (tmp_path / "model.zip").write_bytes(with_tensors(zipped, member, change))
    with pytest.raises(ModelFileError, match=said):
        TD3X.load(tmp_path / "model")
    if member != "pytorch_variables.pth":
        other = model(seed=1)
        before = weights(other), optimizer_states(other)
        with pytest.raises(ModelFileError, match=said):
            other.set_parameters(tmp_path / "model.zip")
        assert equal((weights(other), optimizer_states(other)), before)


def _with(parameters, **policy):
    return {**parameters, "policy": {**parameters["policy"], **policy}}


DICTIONARIES = {
    "optimizers missing": (True, lambda p: {"policy": p["policy"]}, "there must be parameters of"),
    "unknown": (True, lambda p: {**p, "nonsense": {}}, "there must be parameters of"),
    "unknown, not exact": (False, lambda p: {**p, "actor.optimzer": {}}, "actor.optimzer is an invalid object name"),
    "no network": (False, lambda p: {**p, "gamma": {}}, "do not fit the model"),
    "shape, not exact": (False, lambda p: _with(p, **{"critic_target.qf1.4.bias": th.zeros(7)}), "size mismatch"),
    "moments, not exact": (False, lambda p: {**p, "critic.optimizer": {}}, "do not fit"),
}  # fmt: skip


@pytest.mark.parametrize("what", DICTIONARIES)
def test_parameters_are_taken_all_or_none(what):
    is_exact, change, said = DICTIONARIES[what]
    algorithm = model().learn(60)
    before = weights(algorithm), optimizer_states(algorithm)
    with pytest.raises((ValueError, ModelFileError), match=said):
        algorithm.set_parameters(change(model(seed=1).get_parameters()), exact_match=is_exact)
    assert equal((weights(algorithm), optimizer_states(algorithm)), before)


def test_parameters_of_a_part_are_taken_where_that_is_asked_for():
    algorithm, other = model(), model(seed=1)
    before, given = weights(algorithm), weights(other)
    bias = "actor.mu.0.bias"
    algorithm.set_parameters({"policy": {bias: given[bias] + 1, "more": th.zeros(1)}}, exact_match=False)
    assert th.equal(weights(algorithm).pop(bias), given[bias] + 1)
    assert all(th.equal(value, before[name]) for name, value in weights(algorithm).items() if name != bias)


READERS = {
    "load": TD3X.load,
    "set_parameters": lambda path: model().set_parameters(path),
    "load_replay_buffer": lambda path: model().load_replay_buffer(path),
    "policy": TD3XPolicy.load,
    "load_vecnormalize": lambda path: load_vecnormalize(path, DummyVecEnv([LineEnv])),
}


class TestArchives:
    @pytest.mark.parametrize("name", ["../../escaped", "/escaped", "C:\\escaped"])
    def test_a_member_that_no_model_has_is_written_nowhere(self, zipped, name, tmp_path, monkeypatch):
        (tmp_path / "a" / "b").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "a" / "b")
        TD3X.load(io.BytesIO(packed({**members(zipped), name: b"x"})))
        assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]
        assert not Path("/escaped").exists()

    @pytest.mark.parametrize(
        ("member", "named"),
        [("data", "lacks data"), ("policy.pth", "lacks policy"), ("actor.optimizer.pth", "not of policy, critic.optimizer")],
    )
    def test_a_missing_member_is_named(self, zipped, member, named):
        with pytest.raises(ModelFileError, match=named):
            TD3X.load(io.BytesIO(packed({key: value for key, value in members(zipped).items() if key != member})))

    def test_tensors_of_a_part_that_a_model_does_not_have_are_refused(self, zipped):
        parts = members(zipped)
        with pytest.raises(ModelFileError, match=r"there must be parameters of .* not of .*more"):
            TD3X.load(io.BytesIO(packed({**parts, "more.pth": parts["policy.pth"]})))

    def test_a_bomb_is_not_unpacked(self, zipped):
        content = packed({**members(zipped), "system_info.txt": bytes(30 * 2**20)}, zipfile.ZIP_DEFLATED)
        with pytest.raises(ModelFileError, match="would unpack to"):
            TD3X.load(io.BytesIO(content))

    def test_deflated_members_are_read_and_others_refused(self, zipped):
        assert isinstance(TD3X.load(io.BytesIO(packed(members(zipped), zipfile.ZIP_DEFLATED))), TD3X)
        with pytest.raises(ModelFileError, match="compressed in a way"):
            TD3X.load(io.BytesIO(packed(members(zipped), zipfile.ZIP_LZMA)))

    @pytest.mark.parametrize("where", ["member", "attribute"])
    def test_control_characters_in_names_do_not_reach_the_terminal(self, zipped, where):
        name = "\x1b]0;owned\x07"
        parts = members(zipped) | ({f"{name}.pth": b""} if where == "member" else {})
        content = packed(parts) if where == "member" else with_attributes(zipped, **{name: print})
        with pytest.raises(ModelFileError, match=r"\\x1b\]0;owned") as raised:
            TD3X.load(io.BytesIO(content))
        assert str(raised.value).isprintable()

    def test_compressed_tensors_are_refused(self, zipped):
        parts = members(zipped)
        compressed = packed(members(parts["policy.pth"]), zipfile.ZIP_DEFLATED)
        with pytest.raises(ModelFileError, match="is compressed"):
            TD3X.load(io.BytesIO(packed({**parts, "policy.pth": compressed})))

    def test_compiled_code_of_torch_is_not_loaded(self, zipped):
        file = io.BytesIO()
        th.jit.save(th.jit.script(th.nn.Linear(1, 1)), file)
        with pytest.raises(ModelFileError, match=r"policy\.pth"):
            TD3X.load(io.BytesIO(packed({**members(zipped), "policy.pth": file.getvalue()})))

    @pytest.mark.parametrize("read", READERS)
    def test_a_pipe_or_a_folder_is_not_opened(self, read, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path):
            with pytest.raises(ModelFileError, match=f"{path} is not a file"):
                READERS[read](path)


HOSTILE = {
    "no space": {"observation_space": None},
    "a space of another kind": {"action_space": spaces.Discrete(3)},
    "a layer as policy": {"policy_class": th.nn.ReLU},
    "a policy as buffer": {"replay_buffer_class": TD3XPolicy},
    "a buffer as layer": {"policy_kwargs": {"activation_fn": ReplayBuffer}},
    "a layer as optimizer": {"policy_kwargs": {**SMALL, "optimizer_class": th.nn.ReLU}},
    "other networks": {"policy_kwargs": {"net_arch": [7]}},
    "a covered method": {"learn": 1},
    "a covered policy": {"policy": 1},
    "a text as settings": {"policy_kwargs": "x"},
    "a negative discount": {"gamma": -1},
    "a text as noise": {"action_noise": "x"},
    "noise of another shape": {"action_noise": NormalActionNoise(np.zeros(3), np.ones(3))},
    "a table as buffer's settings": {"replay_buffer_kwargs": {"no such": 1}},
    "a rate that is no number": {"learning_rate": []},
    "a class as a rate": {"qf_learning_rate": ReplayBuffer},
    "a negative rate": {"qf_learning_rate": -1.0},
    "a text as a bound": {"max_grad_norm": "small"},
    "a frequency of nothing": {"train_freq": None},
    "an invalid generator": {"noise_generator": np.zeros(5, np.uint8)},
    "a generator behind its end": {"noise_generator": np.full(5056, 255, np.uint8)},
    "no base64": {"action_noise": {":serialized:": "no base64"}},
    "no pickle": {"action_noise": {":serialized:": 3}},
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_attributes_that_no_model_has_are_refused(what, zipped):
    content = with_attributes(zipped, **HOSTILE[what])
    error = ValueError if "space of another kind" in what else ModelFileError  # it may be the environment that is wrong
    for given in ({}, {"env": LineEnv()}, {"buffer_size": 1}):
        with pytest.raises(error, match="|".join(CHECKS.keys() & HOSTILE[what].keys())):  # settings by name
            TD3X.load(io.BytesIO(content), **given)


def test_a_files_control_characters_are_not_printed(zipped, capsys):
    file = io.BytesIO(packed({**members(zipped), "system_info.txt": b"\x1b]0;owned\x07"}))
    TD3X.load(file, print_system_info=True)
    assert "\x1b" not in capsys.readouterr().out


def test_statistics_of_another_shape_are_refused(tmp_path):
    env = VecNormalize(DummyVecEnv([LineEnv]))
    env.obs_rms.mean = np.zeros(2)
    env.save(str(tmp_path / "statistics.pkl"))
    with pytest.raises(ModelFileError, match="not in the shape of the observations"):
        load_vecnormalize(tmp_path / "statistics.pkl", DummyVecEnv([LineEnv]))


def test_a_policy_that_lacks_tensors_is_refused(tmp_path):
    model().policy.save(tmp_path / "policy.pth")
    saved = th.load(tmp_path / "policy.pth", weights_only=False)
    del saved["state_dict"]["actor.mu.0.bias"]
    th.save(saved, tmp_path / "policy.pth")
    with pytest.raises(ModelFileError, match=r"actor\.mu\.0\.bias"):
        TD3XPolicy.load(tmp_path / "policy.pth")
