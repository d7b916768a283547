"""Replacing SB3's TD3 with TD3X keeps everything: keywords, updates, files."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO, SAC, TD3

from sb3_td3x import TD3X, CnnPolicy, MultiInputPolicy, TD3XPolicy
from tests.paths import ready
from tests.tools import SMALL, LineEnv, feed, largest_difference, model, random_batch, reloaded, weights, without_output


def parameters(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items() if name != "self"}


def test_every_keyword_of_sb3_in_its_order_with_its_default():
    ours, theirs = parameters(TD3X.__init__), parameters(TD3.__init__)
    assert list(ours)[: len(theirs)] == list(theirs)
    changed = {name for name in theirs if ours[name] != theirs[name]}
    assert changed == {"learning_starts", "action_noise"}


def test_keywords_of_our_own_are_keyword_only():
    own = [p for name, p in inspect.signature(TD3X.__init__).parameters.items() if name not in parameters(TD3.__init__)]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in own if parameter.name != "self")


def test_methods_take_the_same_arguments():
    for method in ("learn", "train", "save", "load", "load_replay_buffer", "set_env", "set_parameters"):
        ours, theirs = parameters(getattr(TD3X, method)), parameters(getattr(TD3, method))
        ours.pop("tb_log_name", None), theirs.pop("tb_log_name", None)  # named after the algorithm
        ours.pop("resume", None), ours.pop("trust", None)  # ours, keyword-only
        assert list(ours.items()) == list(theirs.items()), method


@pytest.mark.parametrize(("n_critics", "accelerate"), [(1, "plain"), (2, "plain"), (3, "plain"), (2, "compiled")])
def test_same_updates_as_sb3_from_equal_weights_noise_and_batches(monkeypatch, optimized, n_critics, accelerate):
    kwargs = {"policy_kwargs": {**SMALL, "n_critics": n_critics}, "tau": 0.01, "gamma": 0.95}
    theirs = without_output(model(cls=TD3, **kwargs))
    ours = ready(accelerate, **kwargs)
    ours.set_parameters(theirs.get_parameters())
    batches = [random_batch(seed) for seed in range(20)]
    noises = [th.randn(8, 1, generator=th.Generator().manual_seed(seed)) for seed in range(20)]

    feed(ours, batches, noises)
    ours.train(gradient_steps=20)
    feed(theirs, batches, [])
    draws = iter(noises)  # SB3 draws into a copy of the actions
    monkeypatch.setattr(th.Tensor, "normal_", lambda self, mean, std: self.copy_(next(draws) * std))
    theirs.train(gradient_steps=20)

    assert largest_difference(weights(ours), weights(theirs)) < 1e-5
    for key in ("train/critic_loss", "train/actor_loss", "train/n_updates", "train/learning_rate"):
        assert ours.logger.name_to_value[key] == pytest.approx(theirs.logger.name_to_value[key], rel=1e-5)


def test_same_seed_starts_from_the_same_weights_as_sb3():
    assert largest_difference(weights(model(cls=TD3)), weights(model(cls=TD3X))) == 0


def test_a_saved_model_of_sb3_loads_and_trains_on():
    theirs = model(cls=TD3).learn(100)
    ours = reloaded(theirs, env=LineEnv())

    observation = np.ones((4, 3), dtype=np.float32)
    np.testing.assert_array_equal(ours.predict(observation)[0], theirs.predict(observation)[0])
    assert ours.policy_class is TD3XPolicy
    # What SB3's program did, not today's defaults
    assert ours.action_noise is None
    assert ours.learning_starts == 10
    before = weights(ours)
    optimizer_steps = ours.critic.optimizer.state_dict()["state"][0]["step"].item()
    ours.learn(50, reset_num_timesteps=False)
    assert ours.num_timesteps == 150
    assert ours.critic.optimizer.state_dict()["state"][0]["step"].item() > optimizer_steps > 0
    assert largest_difference(before, weights(ours)) > 0


@pytest.mark.parametrize(
    ("name", "default", "in_sb3"),
    [("n_quantiles", 25, 1), ("qf_learning_rate", 1.0, None), ("max_grad_norm", 1.0, None), ("prioritization", "lap", None)],
)
def test_a_saved_model_of_sb3_has_sb3s_settings_whatever_the_defaults_are(name, default, in_sb3, monkeypatch):
    monkeypatch.setitem(TD3X.__init__.__kwdefaults__, name, default)
    assert getattr(TD3X.load(Path(__file__).parent / "golden" / "sb3_td3_2.9.2.zip"), name) == in_sb3


def test_our_saved_model_loads_in_sb3_and_trains_on():
    ours = model().learn(100)
    theirs = reloaded(ours, cls=TD3, env=LineEnv())
    observation = np.ones((4, 3), dtype=np.float32)
    np.testing.assert_array_equal(ours.predict(observation)[0], theirs.predict(observation)[0])
    theirs.learn(50, reset_num_timesteps=False)
    assert theirs.num_timesteps == 150


def test_sb3_reads_our_saved_model_where_this_package_is_not_installed(tmp_path):
    algorithm = model(action_noise=0.2).learn(60)
    algorithm.save(tmp_path / "td3x")
    assert algorithm.policy_class is TD3XPolicy
    without = (
        "import sys, numpy; sys.modules['sb3_td3x'] = None\n"
        "from stable_baselines3 import TD3\n"
        "loaded = TD3.load(sys.argv[1])\n"
        "step = loaded.critic.optimizer.state_dict()['state'][0]['step'].item()\n"
        "print(loaded.policy_class.__module__, loaded.num_timesteps, step)\n"
        "print(*loaded.predict(numpy.zeros(3, 'float32'))[0])"
    )
    command = [sys.executable, "-c", without, str(tmp_path / "td3x")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    step = algorithm.critic.optimizer.state_dict()["state"][0]["step"].item()
    action = algorithm.predict(np.zeros(3, "float32"))[0]
    assert printed.splitlines()[0] == f"stable_baselines3.td3.policies 60 {step}"
    assert float(printed.splitlines()[1]) == pytest.approx(float(action[0]), rel=1e-6)
    assert TD3X.load(tmp_path / "td3x").policy_class is TD3XPolicy


@pytest.mark.parametrize(
    ("name", "space", "ours"),
    [
        ("MlpPolicy", spaces.Box(-10, 10, (3,)), TD3XPolicy),
        ("CnnPolicy", spaces.Box(0, 255, (36, 36, 1), np.uint8), CnnPolicy),
        ("MultiInputPolicy", spaces.Dict({"a": spaces.Box(-10, 10, (3,))}), MultiInputPolicy),
    ],
)
def test_policy_classes_of_sb3_become_ours(name, space, ours):
    algorithm = model(LineEnv(space), TD3.policy_aliases[name], buffer_size=10)
    assert algorithm.policy_class is type(algorithm.policy) is ours


def test_arguments_of_the_policy_that_are_no_dict_are_refused():
    with pytest.raises(ValueError, match=r"policy_kwargs has no 5$"):
        TD3X("MlpPolicy", LineEnv(), policy_kwargs={5: 1})
    with pytest.raises(ValueError, match=r"policy_kwargs must be a dict, not \[64, 64\]"):
        model(policy_kwargs=[64, 64])


def test_a_model_without_its_environment_and_a_policy_for_other_observations_are_refused():
    with pytest.raises(ValueError, match="for an environment"):
        TD3X("MlpPolicy", None)
    with pytest.raises(ValueError, match=r"CombinedExtractor is for Dict observations, not for Box.*use MlpPolicy"):
        model(policy="MultiInputPolicy")
    for policy in (TD3XPolicy, CnnPolicy):
        with pytest.raises(ValueError, match=r"not for Dict observations.*use MultiInputPolicy"):
            model(LineEnv(spaces.Dict({"a": spaces.Box(-10, 10, (3,))})), policy)


@pytest.mark.parametrize("algorithm", [SAC, PPO])
def test_a_policy_of_another_algorithm_is_refused_before_the_random_steps(algorithm):
    with pytest.raises(ValueError, match="Policy is no policy of TD3: give a name such as MlpPolicy"):
        model(policy=algorithm.policy_aliases["MlpPolicy"])


def test_a_replay_buffer_that_is_no_class_is_refused():
    with pytest.raises(ValueError, match=r"must be a subclass of SB3's ReplayBuffer or None, not 'HerReplayBuffer'"):
        model(replay_buffer_class="HerReplayBuffer")
