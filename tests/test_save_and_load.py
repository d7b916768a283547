"""What is saved comes back, files of earlier versions stay readable, and what is no model is refused with a reason."""

import copy
import io
import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO, TD3, HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import (
    TD3X,
    ModelFileError,
    TD3XCheckpointCallback,
    TD3XPolicy,
    UntrustedModelError,
    load_vecnormalize,
    resume_run,
)
from sb3_td3x.saving.model_zip import FORMAT_VERSION
from tests.tools import OBSERVATIONS, Calls, LineEnv, largest_difference, model, reloaded, weights
from tests.zips import with_attributes


@pytest.fixture
def algorithm():
    return model(learning_rate=2e-3).learn(60)


@pytest.fixture
def saved(algorithm, tmp_path):
    algorithm.save(tmp_path / "model")
    return tmp_path / "model.zip"


def test_a_link_is_written_through(algorithm, tmp_path):
    (tmp_path / "latest.zip").symlink_to(tmp_path / "elsewhere.zip")
    algorithm.save(tmp_path / "latest")
    assert (tmp_path / "latest.zip").is_symlink()
    assert largest_difference(weights(TD3X.load(tmp_path / "elsewhere")), weights(algorithm)) == 0


@pytest.mark.parametrize("trust", [False, True])
def test_a_folder_of_the_same_name_does_not_hide_a_file(algorithm, tmp_path, trust):
    folder = tmp_path / "walker"
    folder.mkdir()
    algorithm.save(folder)
    algorithm.save_replay_buffer(folder)
    loaded = TD3X.load(folder, env=LineEnv(), trust=trust)
    loaded.load_replay_buffer(folder, trust=trust)
    assert loaded.num_timesteps == loaded.replay_buffer.pos == 60
    VecNormalize(env := DummyVecEnv([LineEnv])).save(f"{folder}.pkl")
    assert load_vecnormalize(folder, env, trust=trust).venv is env
    algorithm.policy.save(f"{folder}.pth")
    actions = TD3XPolicy.load(folder, trust=trust).predict(OBSERVATIONS)[0]
    np.testing.assert_array_equal(actions, algorithm.predict(OBSERVATIONS)[0])


def test_a_model_that_is_loaded_takes_the_name_of_an_environment(tmp_path):
    model("Pendulum-v1").save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", env="Pendulum-v1")
    loaded.set_env("Pendulum-v1")
    assert loaded.learn(20).num_timesteps == 20
    with pytest.raises(gym.error.NameNotFound):
        TD3X.load(tmp_path / "model", env="Pendulm-v1")


def test_a_name_with_dots_needs_no_suffix_and_a_file_object_no_name(algorithm, tmp_path):
    algorithm.save(tmp_path / "td3_v1.0_60_steps.zip")
    assert TD3X.load(tmp_path / "td3_v1.0_60_steps").num_timesteps == 60
    memory = io.BytesIO()
    algorithm.save(memory)
    assert largest_difference(weights(TD3X.load(memory)), weights(algorithm)) == 0
    with tempfile.NamedTemporaryFile() as file:  # not of a class of `io`
        algorithm.save(file)
        assert TD3X.load(file).num_timesteps == 60


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.5), ("policy_delay", 3)])
def test_attributes_can_be_changed_at_load(saved, name, value):
    assert getattr(TD3X.load(saved, **{name: value}), name) == value


def test_random_steps_that_replace_the_files_are_those_of_the_next_run(saved):
    loaded = TD3X.load(saved, env=LineEnv(), custom_objects={"learning_starts": 15})
    assert loaded.learn(20).learning_starts == 15


def test_an_attribute_that_there_is_not_is_refused_at_load(saved):
    class Own(TD3X):
        def __init__(self, *args, scale=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale

    with pytest.raises(TypeError, match=r"no 'batchsize' to load with: did you mean batch_size"):
        TD3X.load(saved, batchsize=64)
    assert TD3X.load(saved, num_timesteps=7, custom_objects={"clip_range": 0.2}).num_timesteps == 7  # rl-zoo3 gives such
    assert Own.load(saved, scale=2.0, gamma=0.5).scale == 2


def test_what_is_no_setting_cannot_be_given_to_load(saved):
    for name in ("predict", "logger", "monitor_wrapper", "policy", "lr_schedule"):
        with pytest.raises(TypeError, match=f"no '{name}' to load with"):
            TD3X.load(saved, **{name: 5})


INVALID = {"gamma": -1, "action_noise": -3, "learning_starts": None, "batch_size": 0, "stats_window_size": 0, "seed": 0.5}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_value_given_to_load_is_no_fault_of_the_file(saved, name):
    with pytest.raises(ValueError, match=f"^{name} must be .* not {INVALID[name]}") as raised:
        TD3X.load(saved, **{name: INVALID[name]})
    assert not isinstance(raised.value, ModelFileError)  # a script that discards damaged files keeps this one


def test_the_averages_are_over_the_episodes_that_load_is_told(saved):
    loaded = TD3X.load(saved, env=LineEnv(), stats_window_size=2)
    for begins_anew in (False, True):
        assert len(loaded.learn(80, reset_num_timesteps=begins_anew).ep_info_buffer) == 2


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_what_an_environment_tells_of_its_episodes_keeps_no_model_from_being_loaded(is_checkpoint, tmp_path):
    class Named(gym.Wrapper):
        def step(self, action):
            *outcome, info = super().step(action)
            return *outcome, {**info, "room": {"the hall"}}  # a set is nothing that an untrusted file may hold

    env = Monitor(Named(LineEnv()), info_keywords=("room",))
    algorithm = model(env).learn(60, TD3XCheckpointCallback(60, tmp_path) if is_checkpoint else None)
    assert [episode["room"] for episode in algorithm.ep_info_buffer][-1] == {"the hall"}
    algorithm.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="averages begin anew, for ep_info_buffer holds"):
        again = resume_run(tmp_path, env) if is_checkpoint else TD3X.load(tmp_path / "model", env=env)
    assert largest_difference(weights(again), weights(algorithm)) == 0
    if is_checkpoint:
        again.learn(90, resume=True)
    else:
        again.learn(30, reset_num_timesteps=False)
    assert again.num_timesteps == 90
    assert again.ep_info_buffer[-1]["room"] == {"the hall"}


def test_what_the_constructor_takes_for_nothing_load_takes_too(saved):
    loaded = TD3X.load(saved, env=LineEnv(), replay_buffer_kwargs=None, seed=1e2)
    assert (loaded.replay_buffer_kwargs, loaded.seed) == ({}, 100)


def test_tensors_of_a_subclass_beside_the_networks_come_back_with_trust():
    class Own(TD3X):
        def _setup_model(self):
            super()._setup_model()
            self.scale = th.ones(1)

        def _get_torch_save_params(self):
            return super()._get_torch_save_params()[0], ["scale"]

    learner = model(cls=Own)
    learner.scale.fill_(7)
    assert reloaded(learner, cls=Own, trust=True).scale == 7


def test_hindsight_replay_without_its_environment_is_refused(tmp_path):
    kwargs = {"policy": "MultiInputPolicy", "replay_buffer_class": HerReplayBuffer}
    model(BitFlippingEnv(n_bits=4, continuous=True), **kwargs).save(tmp_path / "model")
    with pytest.raises(ValueError, match="You must pass an environment when using `HerReplayBuffer`"):
        TD3X.load(tmp_path / "model")
    assert TD3X.load(tmp_path / "model", replay_buffer_class=None).replay_buffer_class is not HerReplayBuffer


@pytest.mark.parametrize(
    "options",
    [
        {"tensorboard_log": Path("logs")},
        {"policy_kwargs": {"net_arch": [8], "optimizer_kwargs": {"eps": np.float64(1e-4), "betas": (np.float64(0.5), 0.9)}}},
    ],
)
def test_a_folder_or_a_number_of_another_kind_does_not_keep_a_model_from_being_loaded(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    algorithm = model(**options)
    algorithm.learn(20, TD3XCheckpointCallback(20, tmp_path / "run"))
    algorithm.save(tmp_path / "model")
    for loaded in (TD3X.load(tmp_path / "model"), resume_run(tmp_path / "run", LineEnv())):
        assert largest_difference(weights(loaded), weights(algorithm)) == 0
        assert loaded.tensorboard_log == options.get("tensorboard_log")
        assert loaded.actor.optimizer.param_groups[0]["betas"] == algorithm.actor.optimizer.param_groups[0]["betas"]


def test_an_optimizer_whose_state_has_other_shapes_comes_back_with_trust():
    algorithm = model(policy_kwargs={"net_arch": [8], "optimizer_class": th.optim.Adafactor}).learn(60)
    loaded = reloaded(algorithm, trust=True)
    states = [each.critic.optimizer.state_dict()["state"][0]["row_var"] for each in (algorithm, loaded)]
    assert states[0].shape != algorithm.critic.optimizer.param_groups[0]["params"][0].shape
    assert th.equal(*states)


def test_how_an_optimizer_steps_is_this_models():
    algorithm = model(policy_kwargs={"net_arch": [16, 12], "optimizer_kwargs": {"foreach": False}})
    algorithm.set_parameters(model().learn(20).get_parameters())
    assert algorithm.actor.optimizer.param_groups[0]["foreach"] is False


def test_the_critics_own_rate_comes_back_and_can_be_changed_at_load(tmp_path):
    model(qf_learning_rate=LinearSchedule(4e-3, 0.0, 1.0)).learn(20).save(tmp_path / "model")
    assert TD3X.load(tmp_path / "model").qf_learning_rate(0.5) == 2e-3
    assert TD3X.load(tmp_path / "model", qf_learning_rate=None).qf_learning_rate is None
    TD3.load(tmp_path / "model").predict(LineEnv().reset(seed=0)[0])  # SB3 reads the file all the same


@pytest.mark.parametrize(("setting", "sb3s"), [("action_noise", None), ("learning_starts", 100)])
def test_a_setting_that_an_sb3_zip_lacks_is_sb3s(setting, sb3s, tmp_path):
    TD3("MlpPolicy", LineEnv(), policy_kwargs={"net_arch": [8]}).save(tmp_path / "model", exclude=[setting])
    algorithm = TD3X.load(tmp_path / "model", env=LineEnv())
    algorithm._setup_learn(500_000)  # when TD3X's own would be chosen by the length
    assert getattr(algorithm, setting) == sb3s


def test_a_zip_of_ours_without_the_noise_explores_as_by_default(algorithm, tmp_path):
    algorithm.save(tmp_path / "model", exclude=["action_noise"])
    assert TD3X.load(tmp_path / "model", env=LineEnv()).action_noise._sigma == 0.1


def test_what_was_included_or_left_out_on_request(algorithm, tmp_path):
    algorithm.save(tmp_path / "more", include=["replay_buffer"])
    with pytest.raises(ModelFileError, match=r"saved with include=, load it with trust=True"):
        TD3X.load(tmp_path / "more")
    assert TD3X.load(tmp_path / "more", trust=True).replay_buffer.size() == algorithm.replay_buffer.size()
    algorithm.save(tmp_path / "less", exclude=["learning_starts", "_learning_starts_request"])
    for trust in (False, True):
        assert TD3X.load(tmp_path / "less", env=LineEnv(), learning_starts=5, trust=trust).learning_starts == 5
        assert TD3X.load(tmp_path / "less", env=LineEnv(), trust=trust).learn(20).learning_starts == 100


def test_the_parameters_and_the_policy_alone(algorithm, saved, tmp_path):
    other = model(seed=1)
    other.set_parameters(algorithm.get_parameters())
    assert largest_difference(weights(other), weights(algorithm)) == 0
    moments = algorithm.get_parameters()["critic.optimizer"]["state"][0]
    before = copy.deepcopy(moments)
    other.learn(30)
    assert all(th.equal(moments[name], before[name]) for name in moments)  # SB3's models share them from then on
    algorithm.policy.save(tmp_path / "policy.pth")
    with pytest.raises(ModelFileError, match=r"model\.zip cannot be loaded: it is an archive of something else"):
        TD3XPolicy.load(saved)
    policy = TD3XPolicy.load(tmp_path / "policy.pth")
    np.testing.assert_array_equal(policy.predict(OBSERVATIONS)[0], algorithm.predict(OBSERVATIONS)[0])


@pytest.mark.parametrize("content", [None, b"import math\n", b""])
def test_another_file_than_a_replay_buffer_is_told_from_an_untrusted_one(algorithm, saved, tmp_path, content):
    (tmp_path / "buffer.pkl").write_bytes(saved.read_bytes() if content is None else content)
    with pytest.raises(ModelFileError, match="it is not a pickle") as refused:
        algorithm.load_replay_buffer(tmp_path / "buffer.pkl")
    assert "trust" not in str(refused.value)


def test_an_error_names_a_file_whose_name_is_also_a_word_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pickle").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"^pickle cannot be loaded: it is not a pickle$"):
        model().load_replay_buffer("pickle")


@pytest.mark.parametrize("name", ["sb3_td3_2.9.2", "td3x_1"])
def test_files_of_earlier_versions_act_as_they_did_and_train_on(name):
    path = Path(__file__).parent / "golden" / f"{name}.zip"
    expected = json.loads(path.with_suffix(".json").read_text())
    loaded = TD3X.load(path, env=LineEnv())
    np.testing.assert_allclose(loaded.predict(OBSERVATIONS)[0].flatten(), expected["actions"], rtol=1e-5)
    assert loaded.num_timesteps == expected["num_timesteps"]
    updates = loaded._n_updates
    loaded.learn(30, reset_num_timesteps=False)
    assert loaded._n_updates > updates


class TestRefused:
    def test_a_file_that_is_not_there_or_something_else(self, tmp_path):
        for name in ("nowhere", "nowhere.zip"):
            with pytest.raises(FileNotFoundError, match=f"{name}'$"):
                TD3X.load(tmp_path / name)
        (tmp_path / "text.zip").write_text("not a zip")
        with pytest.raises(ModelFileError, match=r"text\.zip cannot be loaded: .*not a zip file"):
            TD3X.load(tmp_path / "text.zip")

    def test_a_file_whose_name_has_a_direction_mark(self, tmp_path):
        model(learning_rate=lambda remaining: 1e-3).save(tmp_path / "mod\u200fel")
        with pytest.raises(UntrustedModelError):
            TD3X.load(tmp_path / "mod\u200fel")

    def test_another_algorithms_model(self, tmp_path):
        PPO("MlpPolicy", LineEnv(), n_steps=8, batch_size=8).save(tmp_path / "ppo")
        with pytest.raises(ModelFileError, match="not saved by TD3X or SB3's TD3"):
            TD3X.load(tmp_path / "ppo")

    def test_a_newer_format(self, saved, tmp_path):
        newer = with_attributes(saved.read_bytes(), format_version=FORMAT_VERSION + 1)
        (tmp_path / "newer.zip").write_bytes(newer)
        with pytest.raises(ModelFileError, match="please upgrade"):
            TD3X.load(tmp_path / "newer.zip")

    def test_an_environment_with_other_spaces(self, saved):
        for env in (LineEnv(spaces.Box(-1, 1, (5,))), LineEnv(action_space=spaces.Box(-1, 1, (2,)))):
            with pytest.raises(ValueError, match="spaces do not match") as raised:
                TD3X.load(saved, env=env)
            assert not isinstance(raised.value, ModelFileError)


def test_arguments_that_are_changed_for_the_next_model_leave_what_a_model_saves():
    arguments = {"net_arch": [8]}
    first = model(policy_kwargs=arguments)
    arguments["net_arch"] = [16]
    assert model(policy_kwargs=arguments).actor.mu[0].out_features == 16
    assert reloaded(first).actor.mu[0].out_features == 8


def test_a_model_can_be_saved_as_training_is_set_up(tmp_path):
    saves = Calls(_init_callback=lambda callback: callback.model.save(tmp_path / "model"))
    noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1))
    algorithm = model(action_noise=noise).learn(15)
    before = noise.noise_prev
    algorithm.learn(1, saves, reset_num_timesteps=False)
    assert "reset" not in vars(noise)
    assert np.array_equal(TD3X.load(tmp_path / "model").action_noise.noise_prev, before)


def test_another_thread_can_save_while_the_model_trains(tmp_path):
    algorithm = model()
    is_over = threading.Event()

    def save_again_and_again():
        while not is_over.is_set():
            algorithm.save(tmp_path / "model")

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save_again_and_again)
        try:
            algorithm.learn(200)
        finally:
            is_over.set()
    saving.result()
    assert isinstance(algorithm.noise_generator, th.Generator)
    assert isinstance(TD3X.load(tmp_path / "model"), TD3X)
