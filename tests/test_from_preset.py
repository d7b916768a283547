"""``TD3X.from_preset`` makes the model that ``td3x train`` makes, and its environments; one that is given is used as it is."""

import gymnasium as gym
import numpy as np
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker
import pytest
from gymnasium import spaces, wrappers
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X, presets
from sb3_td3x.runs.experiment import Experiment
from tests.tools import LineEnv, WithoutSpec

SMALL = {"policy_kwargs": {"net_arch": [8]}, "buffer_size": 1000, "device": "cpu"}
FILE = """
default:
  policy: MlpPolicy
Pendulum-v1:
  policy: MlpPolicy
  n_envs: 2
  gamma: 0.9
  normalize: {norm_reward: false}
  env_wrapper:
    - gymnasium.wrappers.RescaleAction: {min_action: -1, max_action: 1}
    - gymnasium.wrappers.FlattenObservation
  policy_kwargs: {net_arch: [8]}
"""


@pytest.fixture
def own(tmp_path):
    """A preset in a file of the user's, which asks for environments, a wrapper and normalization."""
    (tmp_path / "own.yml").write_text(FILE)
    return str(tmp_path / "own.yml")


def rescaled():
    return gym.wrappers.FlattenObservation(gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), -1, 1))


def test_an_environment_without_a_name_needs_an_entry_named_default(tmp_path):
    (tmp_path / "own.yml").write_text("Pendulum-v1: {gamma: 0.9}")
    with pytest.raises(ValueError, match=r"no entry for an environment without a name and none named default"):
        TD3X.from_preset(LineEnv(), str(tmp_path / "own.yml"))


def test_a_name_takes_the_hyperparameters_of_its_entry():
    model = TD3X.from_preset("MountainCarContinuous-v0", **SMALL)
    assert isinstance(model.action_noise, OrnsteinUhlenbeckActionNoise)
    assert model.env.num_envs == 1
    assert model.n_quantiles == 25
    assert model.learn(200).num_timesteps == 200


def test_the_entry_of_the_walker_is_what_the_benchmarks_measured():
    model = TD3X.from_preset("Walker2DBulletEnv-v0", **SMALL)
    entry = presets.load("default", "Walker2DBulletEnv-v0")
    assert (model.learning_rate.rate, model.learning_rate.held, entry["buffer_size"]) == (7e-4, 0.6, 200_000)
    assert (
        (model.gamma, model.batch_size, model.tau) == (entry["gamma"], entry["batch_size"], entry["tau"]) == (0.98, 128, 0.02)
    )


def test_a_name_builds_what_the_preset_asks_for(own):
    model = TD3X.from_preset("Pendulum-v1", own, seed=0, buffer_size=1000, device="cpu")
    assert isinstance(model.env, VecNormalize)
    assert (model.env.num_envs, model.env.norm_reward, model.env.gamma, model.gamma) == (2, False, 0.9, 0.9)
    assert model.action_space.high == 1
    assert model.gradient_steps == -1  # one update per environment step, as with one environment
    assert model.learn(300)._n_updates > 100


def test_wrappers_are_put_around_in_their_order():
    named = [
        {"gymnasium.wrappers.RescaleAction": {"min_action": -1, "max_action": 1}},
        "gymnasium.wrappers.FlattenObservation",
    ]
    env = presets.wrap(gym.make("Pendulum-v1"), named)
    assert (type(env), type(env.env)) == (wrappers.FlattenObservation, wrappers.RescaleAction)


def test_updates_that_a_file_gives_for_its_number_of_environments_are_made(tmp_path):
    (file := tmp_path / "own.yml").write_text("default: {n_envs: 4, gradient_steps: 2}")
    assert TD3X.from_preset("Pendulum-v1", file, **SMALL).gradient_steps == 2
    assert Experiment("Pendulum-v1", preset=str(file)).hyperparameters()["gradient_steps"] == 2
    for other in (1, 3):
        assert TD3X.from_preset("Pendulum-v1", file, n_envs=other, **SMALL).gradient_steps == -1
        assert Experiment("Pendulum-v1", preset=str(file), n_envs=other).hyperparameters()["gradient_steps"] == -1


def test_changes_replace_the_values_of_the_preset(own):
    model = TD3X.from_preset("Pendulum-v1", own, n_envs=1, normalize=False, gamma=0.5, learning_rate=1e-4, verbose=0, **SMALL)
    assert (type(model.env), model.gamma, model.learning_rate) == (DummyVecEnv, 0.5, 1e-4)
    model = TD3X.from_preset("Pendulum-v1", own, gamma=0.5, **SMALL)
    assert (model.env.gamma, model.gamma) == (0.5, 0.5)
    with pytest.raises(TypeError, match="learning_rat"):
        TD3X.from_preset("Pendulum-v1", learning_rat=1e-4)
    with pytest.raises(TypeError, match="n_timesteps"):
        TD3X.from_preset("Pendulum-v1", n_timesteps=1_000)  # `learn` takes it
    with pytest.raises(ValueError, match="n_envs must be a whole number of at least 1"):
        TD3X.from_preset("Pendulum-v1", n_envs=0)
    assert TD3X.from_preset("Pendulum-v1", n_envs=2.0, **SMALL).n_envs == 2


def test_an_environment_is_used_as_it_is_and_names_its_entry(own):
    env = VecNormalize(DummyVecEnv([rescaled]), norm_reward=False)
    model = TD3X.from_preset(env, own, **SMALL)
    assert (model.env, model.gamma) == (env, 0.9)
    made = gym.make("MountainCarContinuous-v0")
    assert isinstance(TD3X.from_preset(made, **SMALL).action_noise, OrnsteinUhlenbeckActionNoise)
    with pytest.raises(ValueError, match="n_envs is for the name of an environment"):
        TD3X.from_preset(made, n_envs=2, **SMALL)


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        (lambda: gym.make("Pendulum-v1"), "asks for the wrapper gymnasium.wrappers.RescaleAction: put it around"),
        (rescaled, "asks for VecNormalize: put it around the environment, or set normalize=False"),
    ],
)
def test_what_the_preset_asks_for_and_is_missing_is_an_error_that_says_so(own, env, problem):
    with pytest.raises(ValueError, match=problem):
        TD3X.from_preset(env(), own, **SMALL)
    TD3X.from_preset(env(), own, env_wrapper=None, normalize=False, **SMALL)


@pytest.mark.parametrize(
    ("space", "policy"),
    [
        (spaces.Dict({"a": spaces.Box(-1, 1, (2,))}), "MultiInputPolicy"),
        (spaces.Box(0, 255, (36, 36, 1), np.uint8), "CnnPolicy"),
        (spaces.Box(-1, 1, (2,)), "TD3XPolicy"),
    ],
)
def test_an_environment_without_a_name_has_the_default_entry_and_the_policy_for_its_observations(space, policy):
    assert type(TD3X.from_preset(LineEnv(space), **SMALL).policy).__name__ == policy


def test_a_vec_env_that_gives_no_spec_has_the_default_entry():
    assert TD3X.from_preset(WithoutSpec([LineEnv]), "sb3", **SMALL).n_quantiles == 1


def test_a_subclass_makes_its_own_kind():
    class Own(TD3X):
        pass

    assert type(Own.from_preset("Pendulum-v1", **SMALL)) is Own
