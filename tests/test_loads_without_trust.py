"""Every kind of model, buffer and policy comes back without trust; what needs trust is named, and nothing else changes."""

import io
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecTransposeImage

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy, UntrustedModelError, load_vecnormalize
from sb3_td3x.common.validation import CHECKS
from sb3_td3x.presets import HeldSchedule
from sb3_td3x.saving.safe_pickle import CLASSES, NotAllowed
from tests.tools import OBSERVATIONS, SMALL, LineEnv, equal, largest_difference, line_envs, model, weights, without_constructor

IMAGES = spaces.Box(0, 255, (3, 36, 36), np.uint8)
DICTS = spaces.Dict({"position": spaces.Box(-10, 10, (2,)), "image": spaces.Box(0, 255, (2, 2), np.uint8)})
GOALS = spaces.Dict({key: spaces.Box(-10, 10, (1,)) for key in ("observation", "achieved_goal", "desired_goal")})


class GoalEnv(LineEnv):
    def __init__(self):
        super().__init__(GOALS)

    def compute_reward(self, achieved, desired, info):
        return -np.abs(np.asarray(achieved) - desired)[..., 0]


def optimized(name, **options):
    return {"policy_kwargs": {**SMALL, "optimizer_class": getattr(th.optim, name), "optimizer_kwargs": options}}


SETTINGS = {
    "mlp": {},
    "cnn": {"env": lambda: LineEnv(IMAGES), "policy": "CnnPolicy"},
    "dict": {"env": lambda: LineEnv(DICTS), "policy": "MultiInputPolicy"},
    "her": {"env": GoalEnv, "policy": "MultiInputPolicy", "replay_buffer_class": HerReplayBuffer, "learning_starts": 25,
            "replay_buffer_kwargs": {"goal_selection_strategy": "future"}},
    "n-step": {"n_steps": 3},
    "own buffer class": {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 2, "gamma": 0.9}},
    "prioritized replay": {"prioritization": "lap"},
    **{name: optimized(name) for name in CLASSES["torch.optim"] if name not in ("Adam", "SGD")},
    "sgd": {**optimized("SGD", momentum=0.9), "max_grad_norm": 0.5},
    "amsgrad": optimized("Adam", amsgrad=True),
    "layers": {"policy_kwargs": {"net_arch": {"pi": [8], "qf": [9, 8]}, "activation_fn": th.nn.Tanh, "n_critics": 3}},
    "normal noise": {"action_noise": NormalActionNoise(np.zeros(1), 0.2 * np.ones(1))},
    "correlated noise": {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.2 * np.ones(1))},
    "vectorized noise": {"env": lambda: line_envs(2), "action_noise": 0.2, "gradient_steps": -1},
    "no noise": {"action_noise": None},
    "schedule": {"learning_rate": HeldSchedule(1e-3, 0.6)},
    "episodes": {"train_freq": (1, "episode"), "gradient_steps": -1},
    "normalized": {"env": lambda: VecNormalize(line_envs(1))},
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
        assert equal(*(dict(getattr(algorithm, name).optimizer.state_dict()) for algorithm in (loaded, saved)))
    left_out = set(saved._excluded_save_params()) - CHECKS.keys()  # never a setting
    # Building a network for images draws from the observation space
    for name in set(vars(saved)) - left_out - {"observation_space"}:
        assert equal(getattr(loaded, name), getattr(saved, name)), name
    assert loaded.observation_space == saved.observation_space
    observation = saved.env.observation_space.sample()
    np.testing.assert_array_equal(loaded.predict(observation)[0], saved.predict(observation)[0])
    assert isinstance(TD3.load(tmp_path / "model", env=env(), custom_objects=None), TD3)


class OwnNoise(NormalActionNoise):
    pass


class OwnPolicy(TD3XPolicy):
    pass


UNTRUSTED = {
    "learning_rate": ({"learning_rate": lambda progress: 1e-3 * progress}, "a function or class saved with its code", 1e-3),
    "qf_learning_rate": ({"qf_learning_rate": lambda progress: 1e-3}, "a function or class saved with its code", 1e-3),
    "action_noise": ({"action_noise": OwnNoise(np.zeros(1), np.ones(1))}, "OwnNoise", None),
    "policy_class": ({"policy": OwnPolicy}, "OwnPolicy", OwnPolicy),
    "policy_kwargs": (
        {"policy_kwargs": {**SMALL, "activation_fn": type("Own", (th.nn.ReLU,), {})}},
        "a function or class",
        SMALL,
    ),
}


@pytest.mark.parametrize("field", UNTRUSTED)
def test_what_needs_trust_is_saved_and_named_and_can_be_given(field, tmp_path):
    arguments, held, instead = UNTRUSTED[field]
    model(**arguments).save(tmp_path / "model")
    with pytest.raises(
        UntrustedModelError, match=rf"{field} holds .*{held}.*trust=True.*custom_objects={{'{field}'"
    ) as caught:
        TD3X.load(tmp_path / "model")
    assert (caught.value.field, caught.value.file) == (field, str(tmp_path / "model"))
    assert isinstance(caught.value.__cause__, NotAllowed)  # not the error itself: whoever follows causes would never end
    assert isinstance(TD3X.load(tmp_path / "model", trust=True), TD3X)
    assert isinstance(TD3X.load(tmp_path / "model", custom_objects={field: instead}), TD3X)
    assert isinstance(TD3X.load(tmp_path / "model", **{field: instead}), TD3X)


def test_a_model_of_sb3_1_is_loaded_as_the_page_for_its_users_says(tmp_path, monkeypatch):
    noise = NormalActionNoise(np.zeros(1), np.ones(1))
    saved = TD3("MlpPolicy", LineEnv(), policy_kwargs=SMALL, action_noise=noise, buffer_size=1)
    with monkeypatch.context() as past:
        for name in ("gym", "gym.spaces", "gym.spaces.box"):
            past.setitem(sys.modules, name, ModuleType(name))
        sys.modules["gym"].__version__ = "0.21.0"
        old = sys.modules["gym.spaces.box"].Box = type("Box", (), {"__module__": "gym.spaces.box"})
        for name in ("observation_space", "action_space"):
            space = old()
            vars(space).update(vars(getattr(saved, name)))
            setattr(saved, name, space)
        del saved.action_noise._dtype
        saved.save(tmp_path / "model")
    env = LineEnv()
    given = {"observation_space": env.observation_space, "action_space": env.action_space, "action_noise": 0.1}
    loaded = TD3X.load(tmp_path / "model", env=env, custom_objects=given)
    assert (loaded.n_quantiles, loaded.action_noise._sigma) == (1, [0.1])
    assert equal(weights(loaded), weights(saved))


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


class TestBuffers:
    @pytest.mark.parametrize("kind", ["mlp", "dict", "her", "n-step", "vectorized noise"])
    def test_every_kind_comes_back_without_trust(self, kind, tmp_path):
        settings = dict(SETTINGS[kind])
        env = settings.pop("env", LineEnv)
        first, second = model(env(), **settings).learn(50), model(env(), **settings)
        first.save_replay_buffer(tmp_path / "buffer")
        second.load_replay_buffer(tmp_path / "buffer")
        del second.replay_buffer  # so that there are never two of them in memory
        second.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
        for name, value in vars(first.replay_buffer).items():
            if name not in ("env", "infos"):
                assert equal(vars(second.replay_buffer)[name], value), name
        second.learn(30)

    def test_a_hindsight_buffer_that_sb3_saved_comes_back(self, tmp_path):
        settings = {key: value for key, value in SETTINGS["her"].items() if key != "env"}
        theirs, ours = model(GoalEnv(), cls=TD3, **settings).learn(50), model(GoalEnv(), **settings)
        theirs.replay_buffer.infos[3, 0]["note"] = {"values": np.ones(2)}
        theirs.save_replay_buffer(tmp_path / "buffer")
        ours.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
        assert equal(ours.replay_buffer.infos, theirs.replay_buffer.infos)
        ours.learn(30)

    def test_a_buffer_of_a_users_class_needs_trust(self, tmp_path):
        algorithm = model(replay_buffer_class=OwnBuffer).learn(20)
        algorithm.save_replay_buffer(tmp_path / "buffer")
        with pytest.raises(UntrustedModelError, match=r"OwnBuffer.*trust=True"):
            algorithm.load_replay_buffer(tmp_path / "buffer")
        algorithm.load_replay_buffer(tmp_path / "buffer", trust=True)

    @pytest.mark.parametrize("change", [{"pos": 10**6}, {"rewards": np.zeros((3, 1))}, {"n_envs": "1"}, {"sample": 1}])
    def test_one_that_contradicts_itself_is_refused_and_the_old_one_kept(self, change, tmp_path):
        algorithm = model().learn(20)
        before = algorithm.replay_buffer
        changed = without_constructor(ReplayBuffer, **{**vars(before), **change})
        (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(changed))
        with pytest.raises(ModelFileError, match=r"buffer\.pkl"):
            algorithm.load_replay_buffer(tmp_path / "buffer.pkl")
        assert algorithm.replay_buffer is before


class Migrates(th.nn.Linear):
    """As torch documents it: an old file's parameter is changed, which its version tells from a new one."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[f"{prefix}bias"] = state_dict[f"{prefix}bias"] + 1
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Migrating(FlattenExtractor):
    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layer = Migrates(3, 3)


def test_a_layer_that_has_versions_is_loaded_as_it_was_saved(tmp_path):
    kwargs = {**SMALL, "features_extractor_class": Migrating}
    (saved := model(policy_kwargs=kwargs)).save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", custom_objects={"policy_kwargs": kwargs})
    assert largest_difference(weights(loaded), weights(saved)) == 0


class OwnBuffer(ReplayBuffer):
    pass


def test_normalization_comes_back_without_trust(tmp_path):
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
        with pytest.raises(ValueError, match="make_vec_env"):
            load_vecnormalize(tmp_path / "statistics.pkl", LineEnv(space))


def test_normalization_of_a_run_on_images_fits_environments_as_they_are_made(tmp_path):
    """The statistics may be of transposed images, as models have them."""
    made = [lambda: LineEnv(spaces.Box(0, 255, (36, 36, 3), np.uint8))]
    for around, shape in ((VecTransposeImage, (1, 3, 36, 36)), (lambda env: env, (1, 36, 36, 3))):
        env = VecNormalize(around(DummyVecEnv(made)))
        env.save(str(tmp_path / "statistics.pkl"))
        loaded = load_vecnormalize(tmp_path / "statistics.pkl", DummyVecEnv(made))
        assert loaded.reset().shape == env.reset().shape == shape


@pytest.mark.parametrize(
    "settings", [{"cls": TD3}, {"n_quantiles": 5}, {"policy_kwargs": {**SMALL, "normalize_observations": True}}]
)
def test_the_policy_alone_comes_back_also_from_sb3(settings, tmp_path):
    policy = model(**settings).learn(40).policy
    policy.save(tmp_path / "policy.pth")
    loaded = TD3XPolicy.load(tmp_path / "policy.pth")
    assert largest_difference(loaded.state_dict(), policy.state_dict()) == 0
    np.testing.assert_array_equal(loaded.predict(OBSERVATIONS)[0], policy.predict(OBSERVATIONS)[0])


class Falling:
    """A schedule of the user's."""

    def __call__(self, progress_remaining):
        return 1e-3 * progress_remaining


@pytest.mark.filterwarnings("ignore:Could not deserialize")
def test_a_class_that_is_gone_is_an_error_and_no_default_takes_its_place(tmp_path, monkeypatch):
    model(learning_rate=Falling()).save(tmp_path / "model")
    monkeypatch.delattr(sys.modules[__name__], "Falling")
    with pytest.raises(ModelFileError, match=r"SB3 cannot read learning_rate: give it as custom_objects=\{'learning_rate'"):
        TD3X.load(tmp_path / "model", trust=True)
    assert TD3X.load(tmp_path / "model", trust=True, custom_objects={"learning_rate": 0.25}).learning_rate == 0.25
