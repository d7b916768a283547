"""What would fail late, or in silence, is said at once: in a warning, or in an error that names the way out."""

import copy
import pickle
import warnings
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x import TD3X, TD3XCheckpointCallback, errors
from tests.tools import Calls, LineEnv, at, filled, largest_difference, line_envs, model, moved, reloaded, train_each, weights


class TestLoadOnAnObject:
    def test_of_a_model_or_a_policy_warns_that_it_is_not_changed(self, trained, tmp_path):
        trained.save(tmp_path / "model")
        with pytest.warns(UserWarning, match="load returns a new TD3X and does not change this one"):
            loaded = model(seed=1).load(tmp_path / "model")
        assert largest_difference(weights(loaded), weights(trained)) == 0
        trained.policy.save(tmp_path / "policy")
        with pytest.warns(UserWarning, match="load returns a new TD3XPolicy"):
            trained.policy.load(tmp_path / "policy")

    @pytest.mark.filterwarnings("error::UserWarning")
    def test_of_the_class_or_only_looked_at_does_not(self, trained, tmp_path):
        trained.save(tmp_path / "model")
        TD3X.load(tmp_path / "model")
        type(trained).load(tmp_path / "model")
        assert hasattr(trained, "load")


def test_a_vector_environment_of_gymnasium_is_told_to_be_one_of_sb3s():
    with pytest.raises(ValueError, match=r"vector environment of Gymnasium \(gym.make_vec\).*make_vec_env"):
        TD3X("MlpPolicy", gym.make_vec("Pendulum-v1", num_envs=2))


class Returns(BaseCallback):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def _on_step(self):
        return self.result


class TestACallbackThatReturnsNothing:
    @pytest.mark.parametrize("callback", [lambda *_: None, Returns(None), CallbackList([Returns(True), Returns(None)])])
    def test_ends_the_training_with_a_warning(self, callback):
        with pytest.warns(UserWarning, match="training ends after 1 steps, because a callback returned None") as warned:
            assert model().learn(40, callback).num_timesteps == 1
        assert warned[0].filename == __file__

    @pytest.mark.filterwarnings("error::UserWarning")
    @pytest.mark.parametrize(("result", "steps"), [(False, 1), (True, 40)])
    def test_but_true_and_false_do_not_warn(self, result, steps):
        assert model().learn(40, Returns(result)).num_timesteps == steps


@pytest.mark.parametrize("force_reset", [True, False])
@pytest.mark.parametrize("hook", ["_on_step", "_on_rollout_start", "_on_rollout_end"])
def test_other_environments_inside_a_rollout_are_refused_and_taken_afterwards(hook, force_reset):
    algorithm = model()
    with pytest.raises(ValueError, match="set_env inside a rollout"):
        algorithm.learn(20, Calls(**{hook: lambda _: algorithm.set_env(line_envs(1), force_reset)}))
    algorithm.set_env(line_envs(1))
    algorithm.learn(40)
    buffer = algorithm.replay_buffer
    np.testing.assert_allclose(moved(buffer)[..., 0], 0.2 * buffer.actions[: buffer.size(), :, 0], atol=1e-6)


def test_other_environments_may_come_when_training_starts(tmp_path):
    exchanges = Calls(_on_training_start=lambda callback: callback.model.set_env(line_envs(1)))
    resets = at(25, lambda learner: learner.env.reset())
    buffer = model().learn(40, [TD3XCheckpointCallback(20, tmp_path), exchanges, resets]).replay_buffer
    np.testing.assert_allclose(moved(buffer)[..., 0], 0.2 * buffer.actions[: buffer.size(), :, 0], atol=1e-6)


def test_updates_from_a_buffer_that_was_filled_by_hand_need_no_call_of_learn():
    algorithm = model()
    algorithm.replay_buffer = filled(ReplayBuffer, transitions=16, n_envs=1)
    algorithm.train(gradient_steps=4, batch_size=8)
    assert algorithm._n_updates == 4
    assert algorithm.logger.name_to_value["train/n_updates"] == 4


class TestCopiesOfAModel:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_with_vecnormalize_say_that_they_need_an_environment(self, copied):
        algorithm = model(VecNormalize(DummyVecEnv([LineEnv]))).learn(20)
        twin = copied(algorithm)
        observation = np.ones((1, 3), np.float32)
        assert np.array_equal(twin.predict(observation)[0], algorithm.predict(observation)[0])
        with pytest.raises(ValueError, match=r"no environment to learn in: use set_env, or set_venv of a copied"):
            twin.learn(20)
        count = twin.get_vec_normalize_env().obs_rms.count
        twin.get_vec_normalize_env().set_venv(DummyVecEnv([LineEnv]))
        assert twin.learn(20).num_timesteps == 20
        assert twin.get_vec_normalize_env().obs_rms.count > count
        algorithm.learn(20)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_that_a_callback_makes_inside_a_step_begin_a_new_episode(self, copied):
        twins = []
        copies = Calls(lambda callback: twins.append(copied(callback.model)))
        model(VecNormalize(DummyVecEnv([LineEnv])), verbose=1).learn(25, copies)
        twins[-1].set_env(other := VecNormalize(DummyVecEnv([LineEnv])))
        other.seed(3)
        twin = twins[-1].learn(20, reset_num_timesteps=False)
        buffer = twin.replay_buffer
        assert (twin.num_timesteps, buffer.pos) == (45, 44)
        assert np.array_equal(buffer.observations[24, 0], LineEnv().reset(seed=3)[0])

    def test_with_hindsight_replay_ask_their_own_environment(self):
        env = BitFlippingEnv(n_bits=4, continuous=True)
        algorithm = model(env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer).learn(40)
        twin = copy.deepcopy(algorithm)
        assert twin.learn(20, reset_num_timesteps=False).num_timesteps == 60
        assert twin.replay_buffer.env is twin.env is not algorithm.env
        assert largest_difference(weights(twin), weights(algorithm)) > 0


def test_updates_go_on_after_memory_ran_out_in_the_first_one(monkeypatch):
    failed, whole = (model(accelerate="plain", learning_starts=20).learn(20) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(th, "zeros_like", Mock(side_effect=RuntimeError("DefaultCPUAllocator: not enough memory")))
        with pytest.raises(RuntimeError, match="not enough memory"):
            failed.train(1, 8)
    train_each((failed, whole), range(2))
    assert largest_difference(weights(failed), weights(whole)) == 0


@pytest.mark.parametrize("switch", [th.no_grad, th.inference_mode])
def test_a_program_that_has_switched_gradients_off_learns_all_the_same(switch, path):
    expected = weights(model(accelerate=path).learn(30))
    with switch():
        algorithm = model(accelerate=path).learn(30)
    assert largest_difference(weights(algorithm), expected) == 0
    with switch():
        algorithm.set_parameters(algorithm.get_parameters())
    assert algorithm.learn(30)._n_updates == 40


def test_a_program_with_another_default_device_learns_on_that_of_the_model():
    expected = weights(model().learn(100))
    algorithm = model()
    with th.device("meta"):  # as ``set_default_device("cuda")`` does, where nothing needs a GPU
        algorithm.learn(100)
    assert largest_difference(weights(algorithm), expected) == 0


@pytest.mark.parametrize(
    "settings", [{}, {"n_quantiles": 5}, {"policy_kwargs": {"net_arch": [8], "normalize_observations": True}}]
)
def test_networks_are_float32_whatever_torchs_default_is(settings, tmp_path):
    expected = weights(model(**settings).learn(30))
    th.set_default_dtype(th.float64)
    try:
        algorithm = model(**settings).learn(30)
        loaded = reloaded(algorithm)
        algorithm.policy.save(tmp_path / "policy")
        assert type(algorithm.policy).load(tmp_path / "policy").predict(np.zeros(3))[0].shape == (1,)
        assert th.get_default_dtype() is th.float64
    finally:
        th.set_default_dtype(th.float32)
    assert largest_difference(weights(algorithm), expected) == 0
    assert largest_difference(weights(loaded), expected) == 0


@pytest.mark.parametrize(
    "error",
    [
        errors.NonFiniteError("reward", "environment step 3", "is beyond 1e+15"),
        errors.UntrustedModelError("learning_rate", "a function", "model.zip"),
        errors.CheckpointError(Path("run"), "is missing", last_good=40),
        errors.RunLockedError(Path("run"), "here", 7),
        errors.EnvironmentDiedError([1, 3], "ended"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_from_another_process_arrives_whole(error):
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))


def test_nothing_is_said_in_a_usual_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().learn(40)
