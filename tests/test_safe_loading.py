"""Loading a file of a stranger runs no code of his; what cannot be loaded so is named, and nothing else changes."""

import base64
import builtins
import copyreg
import functools
import io
import os
import pickle
import struct
import sys
import warnings
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy, UntrustedModelError, load_vecnormalize
from sb3_td3x.replay import DeviceReplayBuffer
from sb3_td3x.serialization import fields, known
from tests.test_plain_values import equal
from tests.tools import SMALL, LineEnv, largest_difference, model, weights
from tests.zips import members, packed, signed, with_attributes, with_fields

GOLDEN = Path(__file__).parent / "golden"
OBSERVATIONS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def named(module, name, *arguments):
    """Protocol 4: a call of a name, dots and all, looked up in a module."""
    texts = b"".join(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name))
    tail = pickle.dumps(arguments, 0)[:-1]
    return pickle.PROTO + b"\4" + texts + pickle.STACK_GLOBAL + tail + pickle.REDUCE + pickle.STOP


def attacks(canary):
    """Pickles that create the file ``canary`` when python's own reader reads them, or that would harm otherwise."""
    touch = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w').close()"
    inner = pickle.dumps(Calls(os.system, touch))
    reconstruct = pickle.dumps(np.zeros(2), 4)
    yield "os.system", inner
    yield "exec", pickle.dumps(Calls(builtins.exec, code))
    yield "eval", pickle.dumps(Calls(builtins.eval, code))
    yield "partial", pickle.dumps(Calls(functools.partial(os.system, touch)))
    yield "a function of numpy that runs text", named("numpy.f2py.crackfortran", "myeval", code)
    yield "numpy's test runner", named("numpy.testing._private.utils", "runstring", code, {})
    yield "torch's own unrestricted reader", pickle.dumps(Calls(th.storage._load_from_bytes, inner))
    yield "torch.load", pickle.dumps(Calls(th.load, io.BytesIO(inner)))
    yield "dots in a name", named("stable_baselines3.common.save_util", "os.system", touch)
    yield "dots behind a known class", named("stable_baselines3.common.buffers", "ReplayBuffer.__init__.__globals__", touch)
    yield "a method of a known class", named("stable_baselines3.td3.policies", "TD3Policy.load", str(canary))
    yield "getattr", pickle.dumps(Calls(getattr, TD3Policy, "load"))
    yield "getattr of a module", b"cbuiltins\ngetattr\n(cos\n__dict__\nVsystem\ntR."
    yield "copyreg", pickle.dumps(Calls(copyreg.add_extension, "os", "system", 77))
    yield "reconstructor", named("copyreg", "_reconstructor", "x", "y", None)
    yield "an extension", pickle.PROTO + b"\2" + pickle.EXT1 + b"\x4d" + pickle.STOP
    yield "the first protocol", b"(S'" + touch.encode() + b"'\nios\nsystem\n."
    yield "object", b"(cos\nsystem\nS'" + touch.encode() + b"'\no."
    yield "numpy.load", named("numpy", "load", str(canary))
    yield "array constructed from a class", reconstruct.replace(b"ndarray", b"memmap\0"[:7])
    yield "open", pickle.dumps(Calls(open, str(canary), "w"))
    yield "a layer", pickle.dumps(th.nn.ReLU())
    yield "a known class called", pickle.dumps(Calls(ReplayBuffer, 10, spaces.Box(0, 1), spaces.Box(0, 1)))
    yield (
        "attributes of a class",
        (
            pickle.dumps(ReplayBuffer, 4)[:-1] + b"N}\x8c\x03addNs\x86b."  # sets ReplayBuffer.add for the whole process
        ),
    )
    yield "a method covered", pickle.dumps(_bag(NormalActionNoise, __call__=None, reset=1))
    yield "persistent", b"Vx\nQ."
    yield "a set", pickle.dumps({1, 2})


def _bag(kind, **attributes):
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


ATTACKS = [name for name, _ in attacks("x")]


@pytest.fixture(params=ATTACKS)
def attack(request, tmp_path):
    """A pickle, and the file that must not be there afterwards."""
    canary = tmp_path / "canary"
    adder = ReplayBuffer.add
    yield dict(attacks(canary))[request.param]
    assert not canary.exists()
    assert ReplayBuffer.add is adder
    assert "x" not in copyreg._extension_registry


@pytest.fixture(scope="module")
def trained():
    return model().learn(40)


@pytest.fixture(scope="module")
def zipped(trained):
    file = io.BytesIO()
    trained.save(file)
    return file.getvalue()


def test_the_attacks_would_work_on_sb3s_road(tmp_path):
    written = io.BytesIO()  # here: pickle alone does not read with numpy 1 what numpy 2 wrote
    model(cls=TD3).save(written)
    attack = dict(attacks(tmp_path / "canary"))["exec"]
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever SB3 says to what it unpickled
        TD3X.load(io.BytesIO(with_attributes(written.getvalue(), gamma=attack)), trust=True)
    assert (tmp_path / "canary").exists()


class TestNoCodeRuns:
    @pytest.mark.parametrize("golden", ["sb3_td3_2.9.2", "td3x_format_1"])
    def test_from_the_pickles_of_a_zip_of_sb3s_format(self, attack, golden):
        content = with_attributes((GOLDEN / f"{golden}.zip").read_bytes(), action_noise=attack)
        with pytest.raises(ModelFileError):
            TD3X.load(io.BytesIO(content))

    def test_from_the_pickles_of_our_zip_which_are_not_read(self, attack, zipped, trained):
        content = with_attributes(zipped, action_noise=attack, observation_space=attack)
        assert largest_difference(weights(TD3X.load(io.BytesIO(content))), weights(trained)) == 0

    def test_from_tensors(self, attack, zipped):
        tensors = members(zipped)["policy.pth"]
        parts = members(tensors)
        name = next(name for name in parts if name.endswith("data.pkl"))
        content = packed(signed({**members(zipped), "policy.pth": packed({**parts, name: attack})}))
        with pytest.raises(ModelFileError):
            TD3X.load(io.BytesIO(content))

    def test_from_a_policy(self, attack, trained, tmp_path):
        trained.policy.save(tmp_path / "policy.pth")
        parts = members((tmp_path / "policy.pth").read_bytes())
        name = next(name for name in parts if name.endswith("data.pkl"))
        (tmp_path / "policy.pth").write_bytes(packed({**parts, name: attack}))
        with pytest.raises(ModelFileError):
            TD3XPolicy.load(tmp_path / "policy.pth")

    def test_from_a_replay_buffer(self, attack, tmp_path):
        (tmp_path / "buffer.pkl").write_bytes(attack)
        with pytest.raises(ModelFileError):
            model().load_replay_buffer(tmp_path / "buffer.pkl")

    def test_from_normalisation_statistics(self, attack, tmp_path):
        (tmp_path / "vecnormalize.pkl").write_bytes(attack)
        with pytest.raises(ModelFileError):
            load_vecnormalize(tmp_path / "vecnormalize.pkl", DummyVecEnv([LineEnv]))

    def test_from_an_object_inside_a_buffer(self, attack, trained, tmp_path):
        content = pickle.dumps(trained.replay_buffer, 4)
        (tmp_path / "buffer.pkl").write_bytes(content[:-1] + b"\x8c\x01x" + attack[:-1] + b"\x86.")
        with pytest.raises(ModelFileError):
            model().load_replay_buffer(tmp_path / "buffer.pkl")

    def test_of_a_module_that_an_environments_name_asks_for(self, zipped, tmp_path, monkeypatch):
        (tmp_path / "evil_module.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        for content in (zipped, (GOLDEN / "sb3_td3_2.9.2.zip").read_bytes()):
            with pytest.raises(ModelFileError, match="sets env"):
                TD3X.load(io.BytesIO(with_attributes(content, env="evil_module:Env-v0")))
        assert "evil_module" not in sys.modules


def test_a_pickle_that_repeats_itself_without_end_is_refused_quickly():
    laughs = (
        b"\x80\x04]\x94" + b"".join(b"]\x94(" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"e" for i in range(35)) + b"."
    )
    content = with_attributes((GOLDEN / "sb3_td3_2.9.2.zip").read_bytes(), ep_info_buffer=laughs)
    with pytest.raises(ModelFileError, match="too large"):
        TD3X.load(io.BytesIO(content))


@pytest.mark.parametrize("length", [2**33, 2**62])
@pytest.mark.parametrize("code", [pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.FRAME])
def test_a_length_without_its_bytes_allocates_nothing(tmp_path, code, length):
    (tmp_path / "buffer.pkl").write_bytes(pickle.PROTO + b"\5" + code + struct.pack("<Q", length) + b"x.")
    with pytest.raises(ModelFileError, match="cut off"):
        model().load_replay_buffer(tmp_path / "buffer.pkl")


def line_envs(count):
    return DummyVecEnv([LineEnv] * count)


IMAGES = spaces.Box(0, 255, (3, 36, 36), np.uint8)
DICTS = spaces.Dict({"position": spaces.Box(-10, 10, (2,)), "image": spaces.Box(0, 255, (2, 2), np.uint8)})
GOALS = spaces.Dict({key: spaces.Box(-10, 10, (1,)) for key in ("observation", "achieved_goal", "desired_goal")})


class GoalEnv(LineEnv):
    def __init__(self):
        super().__init__(GOALS)

    def compute_reward(self, achieved, desired, info):
        return -np.abs(np.asarray(achieved) - desired)[..., 0]


def optimised(name, **options):
    return {"policy_kwargs": {**SMALL, "optimizer_class": getattr(th.optim, name), "optimizer_kwargs": options}}


SETTINGS = {
    "mlp": {},
    "cnn": {"env": lambda: LineEnv(IMAGES), "policy": "CnnPolicy"},
    "dict": {"env": lambda: LineEnv(DICTS), "policy": "MultiInputPolicy"},
    "her": {"env": GoalEnv, "policy": "MultiInputPolicy", "replay_buffer_class": HerReplayBuffer, "learning_starts": 25,
            "replay_buffer_kwargs": {"goal_selection_strategy": "future"}},
    "n-step": {"n_steps": 3},
    "own buffer class": {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 2, "gamma": 0.9}},
    "device buffer": {"replay_buffer_class": DeviceReplayBuffer},
    "prioritised replay": {"prioritization": "lap"},
    "adamw": optimised("AdamW", weight_decay=0.01),
    "rmsprop": optimised("RMSprop", alpha=0.9),
    "sgd": optimised("SGD", momentum=0.9),
    "amsgrad": optimised("Adam", amsgrad=True),
    "layers": {"policy_kwargs": {"net_arch": {"pi": [8], "qf": [9, 8]}, "activation_fn": th.nn.Tanh, "n_critics": 3}},
    "normal noise": {"action_noise": NormalActionNoise(np.zeros(1), 0.2 * np.ones(1))},
    "correlated noise": {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.2 * np.ones(1))},
    "vectorized noise": {"env": lambda: line_envs(2), "action_noise": 0.2, "gradient_steps": -1},
    "no noise": {"action_noise": None},
    "schedule": {"learning_rate": LinearSchedule(1e-3, 0.0, 1.0)},
    "episodes": {"train_freq": (1, "episode"), "gradient_steps": -1},
    "normalised": {"env": lambda: VecNormalize(line_envs(1))},
    "scalar action": {"env": lambda: LineEnv(action_space=spaces.Box(-1, 1, ()))},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_kind_of_model_comes_back_without_trust(settings, tmp_path):
    env = settings.get("env", LineEnv)
    arguments = {key: value for key, value in settings.items() if key != "env"}
    saved = model(env(), **arguments).learn(50)
    saved.save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", env=env(), force_reset=False)
    assert largest_difference(weights(loaded), weights(saved)) == 0
    for name in ("actor", "critic"):
        assert equal(*(dict(getattr(one, name).optimizer.state_dict()) for one in (loaded, saved)))
    left_out = {
        "env",
        "policy",
        "replay_buffer",
        "_logger",
        "_vec_normalize_env",
        "device",
        "_maker",
        "_is_refilling",
        "_pace",
    }
    # Building a network for images draws from the observation space
    for name in set(vars(saved)) - left_out - {"_overlapping", "observation_space"}:
        assert equal(getattr(loaded, name), getattr(saved, name)), name
    assert loaded.observation_space == saved.observation_space
    observation = saved.env.observation_space.sample()
    np.testing.assert_array_equal(loaded.predict(observation)[0], saved.predict(observation)[0])
    assert isinstance(TD3.load(tmp_path / "model", env=env(), custom_objects=None), TD3)


def test_every_class_that_is_read_by_name_is_one_of_the_list():
    assert len(known.names()) == sum(map(len, known.CLASSES.values()))
    assert set(model()._excluded_save_params()) <= set(fields.NEVER_SAVED)


class OwnNoise(NormalActionNoise):
    pass


class OwnPolicy(TD3XPolicy):
    pass


UNTRUSTED = {
    "learning_rate": ({"learning_rate": lambda progress: 1e-3 * progress}, "the function .*lambda", 1e-3),
    "action_noise": ({"action_noise": OwnNoise(np.zeros(1), np.ones(1))}, "OwnNoise", None),
    "policy_class": ({"policy": OwnPolicy}, "the class .*OwnPolicy", OwnPolicy),
    "policy_kwargs": ({"policy_kwargs": {**SMALL, "activation_fn": type("Own", (th.nn.ReLU,), {})}}, "Own", SMALL),
}


@pytest.mark.parametrize("field", UNTRUSTED)
def test_what_needs_trust_is_saved_and_named_and_can_be_given(field, tmp_path):
    arguments, held, instead = UNTRUSTED[field]
    policy = arguments.pop("policy", "MlpPolicy") if "policy" in arguments else "MlpPolicy"
    model(policy=policy, **arguments).save(tmp_path / "model")
    with pytest.raises(
        UntrustedModelError, match=rf"{field} holds .*{held}.*trust=True.*custom_objects={{'{field}'"
    ) as caught:
        TD3X.load(tmp_path / "model")
    assert (caught.value.field, caught.value.file) == (field, str(tmp_path / "model"))
    assert isinstance(TD3X.load(tmp_path / "model", trust=True), TD3X)
    assert isinstance(TD3X.load(tmp_path / "model", custom_objects={field: instead}), TD3X)
    assert isinstance(TD3X.load(tmp_path / "model", **{field: instead}), TD3X)


def test_the_objects_that_rl_zoo_gives_are_taken(zipped):
    given = {"learning_rate": 0.0, "lr_schedule": lambda _: 0.0, "clip_range": lambda _: 0.0}
    loaded = TD3X.load(io.BytesIO(zipped), custom_objects=given, device="cpu", buffer_size=1)
    assert loaded.learning_rate == 0.0
    assert not hasattr(loaded, "clip_range")


def test_a_trusted_load_is_the_same_model(zipped):
    plain, trusted = (TD3X.load(io.BytesIO(zipped), trust=trust) for trust in (False, True))
    assert largest_difference(weights(plain), weights(trusted)) == 0
    different = [
        n for n, v in vars(plain).items() if n not in ("policy", "replay_buffer") and not equal(v, getattr(trusted, n))
    ]
    assert different == []


def test_the_errors_survive_being_sent_between_processes():
    error = UntrustedModelError("learning_rate", "a function", "model.zip")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


class TestBuffers:
    @pytest.mark.parametrize("kind", ["mlp", "dict", "her", "n-step", "device buffer", "vectorized noise"])
    def test_every_kind_comes_back_without_trust(self, kind, tmp_path):
        settings = dict(SETTINGS[kind])
        env = settings.pop("env", LineEnv)
        first, second = model(env(), **settings).learn(50), model(env(), **settings)
        first.save_replay_buffer(tmp_path / "buffer")
        second.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
        for name, value in vars(first.replay_buffer).items():
            if name not in ("env", "infos"):
                assert equal(vars(second.replay_buffer)[name], value), name
        second.learn(30)

    def test_a_buffer_of_a_users_class_needs_trust(self, tmp_path):
        algorithm = model(replay_buffer_class=OwnBuffer).learn(20)
        algorithm.save_replay_buffer(tmp_path / "buffer")
        with pytest.raises(UntrustedModelError, match=r"OwnBuffer.*trust=True"):
            algorithm.load_replay_buffer(tmp_path / "buffer")
        algorithm.load_replay_buffer(tmp_path / "buffer", trust=True)

    @pytest.mark.parametrize(
        "change", [{"pos": 10**6}, {"rewards": np.zeros((3, 1))}, {"full": 2}, {"n_envs": "1"}, {"sample": 1}]
    )
    def test_one_that_contradicts_itself_is_refused_and_the_old_one_kept(self, change, tmp_path):
        algorithm = model().learn(20)
        before = algorithm.replay_buffer
        changed = _bag(ReplayBuffer, **{**vars(before), **change})
        (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(changed))
        with pytest.raises(ModelFileError, match=r"buffer\.pkl"):
            algorithm.load_replay_buffer(tmp_path / "buffer.pkl")
        assert algorithm.replay_buffer is before


class OwnBuffer(ReplayBuffer):
    pass


def test_normalisation_comes_back_without_trust(tmp_path):
    for space in (spaces.Box(-10, 10, (3,)), DICTS):
        env = VecNormalize(
            DummyVecEnv([lambda space=space: LineEnv(space)]), norm_obs_keys=["position"] if space is DICTS else None
        )
        env.reset()
        env.step(np.zeros((1, 1), np.float32))
        env.save(str(tmp_path / "statistics.pkl"))
        loaded = load_vecnormalize(tmp_path / "statistics.pkl", DummyVecEnv([lambda space=space: LineEnv(space)]))
        assert equal(loaded.obs_rms, env.obs_rms)
        assert equal(loaded.ret_rms, env.ret_rms)
        loaded.reset()
        loaded.step(np.zeros((1, 1), np.float32))


def test_sb3s_policy_files_are_read_too(tmp_path):
    theirs = model(cls=TD3).policy
    theirs.save(tmp_path / "policy.pth")
    np.testing.assert_array_equal(
        TD3XPolicy.load(tmp_path / "policy.pth").predict(OBSERVATIONS)[0], theirs.predict(OBSERVATIONS)[0]
    )


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
        monkeypatch.setattr("sb3_td3x.serialization.modelfile.MAX_JSON", 1000)
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
    "a huge space": {
        "observation_space": {"@": "space", "name": "Discrete", "random": None, "parts": {"n": 10**12, "start": 0}}
    },
    "a huge buffer": {"buffer_size": 10**15},
    "a huge buffer for many": {"n_envs": 10**15},
    "no space": {"observation_space": None},
    "a layer as policy": {"policy_class": {"@": "class", "name": "torch.nn:ReLU"}},
    "a policy as buffer": {"replay_buffer_class": {"@": "class", "name": "sb3_td3x.policies:TD3XPolicy"}},
    "a buffer as layer": {"policy_kwargs": {"activation_fn": {"@": "class", "name": "sb3_td3x.replay:DeviceReplayBuffer"}}},
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
    [("huge networks", "has the shape"), ("a huge space", "has the shape"), ("a great many critics", "asks for")],
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


def test_containers_keep_their_kind(tmp_path):
    algorithm = model()
    algorithm.ep_info_buffer = deque([OrderedDict(r=1.0)], maxlen=3)
    algorithm.save(tmp_path / "model")
    assert equal(TD3X.load(tmp_path / "model").ep_info_buffer, algorithm.ep_info_buffer)
