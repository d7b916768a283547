"""
An episode that is cut ends in the replay buffer too, as at a time limit.

Environments are reset where ``learn`` begins anew or continues with a loaded model; SB3's buffers do not see that.
"""

import contextlib
import copy
import itertools
import warnings
from functools import partial
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.common.transitions import truncate_episodes
from tests.tools import Calls, LineEnv, at, filled, model, moved, reloaded


class CountingEnv(LineEnv):
    """Observes which episode of all this is and its step in it; the reward is the step's number."""

    episodes = itertools.count()

    def __init__(self, observation_space=None, **kwargs):
        super().__init__(observation_space or spaces.Box(0, 1e6, (2,)), **kwargs)

    def reset(self, **kwargs):
        self.episode = next(self.episodes)
        return super().reset(**kwargs)

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float(self.time), terminated, truncated, info

    def _observe(self, space):
        return np.array([self.episode, self.time], np.float32)


class CountingGoalEnv(CountingEnv):
    def __init__(self, **kwargs):
        keys = ("observation", "achieved_goal", "desired_goal")
        super().__init__(spaces.Dict({key: spaces.Box(0, 1e6, (2,)) for key in keys}), **kwargs)

    def _observe(self, space):
        return dict.fromkeys(space, super()._observe(space))

    def compute_reward(self, achieved, desired, info):
        return np.zeros(len(achieved))


HINDSIGHT = {"replay_buffer_class": HerReplayBuffer, "policy": "MultiInputPolicy"}


def stays_in_its_episodes(buffer, size):
    """Whether each of so many transitions is one step of a ``CountingEnv``."""
    return moved(buffer)[..., -2:].tolist() == [[[0, 1]] * buffer.n_envs] * size


def evaluates_on_the_training_environment(method, steps):
    """In one of a callback's methods, when so many steps have been made."""

    def evaluate(callback):
        if callback.model.num_timesteps == steps:
            evaluate_policy(callback.model, callback.training_env, n_eval_episodes=1)

    return Calls(**{method: evaluate})


class TestAnEpisodeThatIsCut:
    def again(self, algorithm, tmp_path):
        return algorithm.learn(25)

    def with_other_environments(self, algorithm, tmp_path):
        algorithm.set_env(type(algorithm.env.envs[0].unwrapped)())
        return algorithm.learn(25, reset_num_timesteps=False)

    def after_an_evaluation(self, algorithm, tmp_path):
        evaluate_policy(algorithm, algorithm.get_env(), n_eval_episodes=1)
        return algorithm.learn(25, reset_num_timesteps=False)

    def after_a_few_steps_by_hand(self, algorithm, tmp_path):
        for _ in range(3):
            algorithm.get_env().step(np.zeros((1, 1)))
        return algorithm.learn(25, reset_num_timesteps=False)

    def after_an_evaluation_of_the_environment_alone(self, algorithm, tmp_path):
        """As it was given to the constructor, which wraps it."""
        evaluate_policy(algorithm, algorithm.get_env().envs[0].env, n_eval_episodes=1)
        return algorithm.learn(25, reset_num_timesteps=False)

    def used_by_a_callback_at_the_next_rollout(self, algorithm, tmp_path):
        return algorithm.learn(25, evaluates_on_the_training_environment("_on_rollout_start", 15), reset_num_timesteps=False)

    def loaded(self, algorithm, tmp_path):
        algorithm.save(tmp_path / "model"), algorithm.save_replay_buffer(tmp_path / "buffer")
        loaded = TD3X.load(tmp_path / "model", env=type(algorithm.env.envs[0].unwrapped)())
        loaded.load_replay_buffer(tmp_path / "buffer")
        return loaded.learn(25, reset_num_timesteps=False)

    @pytest.fixture(
        params=[
            again,
            with_other_environments,
            loaded,
            after_an_evaluation,
            after_a_few_steps_by_hand,
            after_an_evaluation_of_the_environment_alone,
            used_by_a_callback_at_the_next_rollout,
        ]
    )
    def continued(self, request, tmp_path):
        return lambda algorithm: request.param(self, algorithm, tmp_path)

    def test_ends_n_step_returns(self, continued):
        buffer = continued(model(CountingEnv(), n_steps=3, gamma=1.0).learn(15)).replay_buffer
        batch = buffer._get_samples(np.array([11, 13, 14]), env=None)
        assert batch.rewards.flatten().tolist() == [12 + 13 + 14, 14 + 15, 15]
        assert batch.next_observations[:, 1].tolist() == [14, 15, 15]
        assert batch.dones.flatten().tolist() == [0, 0, 0]  # as a time limit: the value of what comes next counts

    @pytest.mark.parametrize("continued", [again, loaded], indirect=True)
    def test_without_time_limits_in_the_buffer_its_mark_is_overwritten(self, continued):
        """A buffer that handles no time limits never writes its ``timeouts`` again."""
        kwargs = {"handle_timeout_termination": False}
        algorithm = continued(
            model(CountingEnv(), n_steps=3, gamma=1.0, buffer_size=43, replay_buffer_kwargs=kwargs).learn(15)
        )
        assert algorithm.replay_buffer._get_samples(np.array([13])).rewards.item() == 14 + 15
        algorithm.learn(20, reset_num_timesteps=False)
        rewards = algorithm.replay_buffer.rewards[:, 0]
        summed = algorithm.replay_buffer._get_samples(np.array([13])).rewards.item()
        assert summed == rewards[13] + rewards[14] + rewards[15]

    @pytest.mark.parametrize("continued", [again, loaded, used_by_a_callback_at_the_next_rollout], indirect=True)
    def test_gives_no_goals_to_the_next_one(self, continued):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SB3's, of what `learn` can do without a complete episode
            algorithm = continued(model(CountingGoalEnv(), **HINDSIGHT, learning_starts=25).learn(30))
        batch = algorithm.replay_buffer.sample(500)
        same = batch.observations["desired_goal"][:, 0] == batch.observations["achieved_goal"][:, 0]
        assert same.all()

    def test_is_marked_where_one_array_holds_all_observations(self):
        one_array = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
        algorithm = model(CountingEnv(), **one_array).learn(15)
        algorithm.set_env(CountingEnv())
        buffer = algorithm.learn(5, reset_num_timesteps=False).replay_buffer
        assert buffer._get_samples(np.array([13, 14])).dones.flatten().tolist() == [0, 1]  # the next is of another episode

    @pytest.mark.parametrize("layer", [list, VecNormalize, partial(VecFrameStack, n_stack=2)])
    def test_is_one_during_which_a_callback_used_the_environment(self, layer):
        """Between two rollouts and inside a step, whose observation ``VecNormalize`` and ``VecFrameStack`` no longer have."""
        env = DummyVecEnv([CountingEnv] * 2)
        algorithm = model(env if layer is list else layer(env), gradient_steps=0, learning_starts=1000)
        uses = map(evaluates_on_the_training_environment, ("_on_rollout_start", "_on_step"), (10, 24))
        assert stays_in_its_episodes(algorithm.learn(80, [*uses]).replay_buffer, 39)

    def test_is_waited_for_where_nothing_else_is_stored(self):
        algorithm = model(CountingEnv(), learning_starts=0)
        assert algorithm.learn(20, evaluates_on_the_training_environment("_on_step", 1))._n_updates == 19

    def test_is_one_before_a_callback_used_the_environment_as_training_was_set_up(self):
        algorithm = model(CountingEnv(), learning_starts=1000).learn(15)
        used = evaluates_on_the_training_environment("_init_callback", 15)
        assert stays_in_its_episodes(algorithm.learn(15, used, reset_num_timesteps=False).replay_buffer, 30)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: cloudpickle.loads(cloudpickle.dumps(made))])
    def test_is_one_during_which_the_environment_of_a_copy_was_used(self, copied):
        algorithm = copied(model(CountingEnv(), learning_starts=1000).learn(30))
        algorithm.get_env().reset()
        assert stays_in_its_episodes(algorithm.learn(15, reset_num_timesteps=False).replay_buffer, 45)

    def test_is_none_in_a_loop_of_the_users_own(self):
        """As where an expert acts, in SB3's own parts, after ``learn``."""
        algorithm = model(CountingEnv(), learning_starts=1000).learn(30)
        env = algorithm.get_env()
        algorithm._last_obs = env.reset()
        for _ in range(5):
            action, scaled = algorithm._sample_action(1000, None, 1)
            algorithm._store_transition(algorithm.replay_buffer, scaled, *env.step(action))
        assert stays_in_its_episodes(algorithm.learn(5, reset_num_timesteps=False).replay_buffer, 40)

    @pytest.mark.parametrize(
        "end", [lambda: StopTrainingOnMaxEpisodes(2), lambda: at(40, Mock(side_effect=KeyboardInterrupt))]
    )
    def test_is_one_that_ended_inside_a_step(self, end):
        """SB3 has not stored that step, here the last of an episode."""
        algorithm = model(CountingEnv(), learning_starts=1000)
        with contextlib.suppress(KeyboardInterrupt):
            algorithm.learn(1000, end())
        assert stays_in_its_episodes(algorithm.learn(5, reset_num_timesteps=False).replay_buffer, 44)

    def test_and_its_goals_are_judged_by_the_environments_that_are_there(self):
        class OtherGoalEnv(CountingGoalEnv):
            def compute_reward(self, achieved, desired, info):
                return np.full(len(achieved), -7.0)

        algorithm = model(CountingGoalEnv(), **HINDSIGHT, learning_starts=25).learn(60)
        algorithm.set_env(OtherGoalEnv())
        algorithm.train(1, 8)
        rewards = algorithm.replay_buffer.sample(500).rewards
        assert (rewards == -7).any()
        assert not (rewards == 0).any()

    def test_or_by_those_that_the_users_own_buffer_has(self):
        class OtherGoalEnv(CountingGoalEnv):
            def compute_reward(self, achieved, desired, info):
                return np.full(len(achieved), -7.0)

        algorithm = model(CountingGoalEnv(), **HINDSIGHT, learning_starts=25)
        algorithm.replay_buffer.env = DummyVecEnv([OtherGoalEnv])
        algorithm.learn(60)
        assert (algorithm.replay_buffer.sample(500).rewards == -7).any()

    @pytest.mark.parametrize("learning_starts", [25, 60])
    def test_a_loaded_model_waits_for_a_goal_to_draw(self, learning_starts):
        """SB3 stops with an error if no episode has ended when training begins."""
        saved = model(CountingGoalEnv(), **HINDSIGHT, learning_starts=learning_starts).learn(30)
        algorithm = reloaded(saved, env=CountingGoalEnv(length=61))
        updates = algorithm._n_updates
        assert algorithm.learn(60, reset_num_timesteps=False)._n_updates == updates
        assert algorithm.learn(10, reset_num_timesteps=False)._n_updates == updates + 10

    @pytest.mark.parametrize("learning_starts", ["auto", 100])
    def test_random_actions_end_with_an_episode(self, learning_starts):
        env = DummyVecEnv([CountingGoalEnv] * 8)  # 100 steps are 12 of each, an episode is 20
        assert model(env, **HINDSIGHT, learning_starts=learning_starts).learn(240)._n_updates == 11

    def test_a_buffer_that_overwrites_its_only_episode_waits_for_the_next(self):
        with pytest.warns(UserWarning, match="buffer_size room for several episodes"):
            algorithm = model(CountingGoalEnv(), **HINDSIGHT, learning_starts=20, buffer_size=25).learn(130)
        assert 20 < algorithm._n_updates < 80

    def test_episodes_that_never_end_warn(self):
        settings = {**HINDSIGHT, "learning_starts": "auto"}
        with pytest.warns(UserWarning, match=r"nothing is learned now.*Give the environment a time limit"):
            assert model(CountingGoalEnv(length=10**9), **settings, buffer_size=2000).learn(1010)._n_updates == 0
        with pytest.warns(UserWarning, match="buffer_size room for several episodes"):  # none can be as long as it takes
            model(CountingGoalEnv(length=10**9), **{**settings, "learning_starts": 300}, buffer_size=200).learn(310)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(CountingGoalEnv(length=10**9), **settings, buffer_size=2000).learn(990)
            algorithm = model(CountingGoalEnv(), **settings).learn(110)
            loaded = reloaded(algorithm, env=CountingGoalEnv(), learning_starts=0)
            assert loaded.learn(30, reset_num_timesteps=False)._n_updates > algorithm._n_updates

    def test_continues_where_nothing_was_reset(self):
        algorithm = model(CountingEnv(), n_steps=3, gamma=1.0).learn(15).learn(5, reset_num_timesteps=False)
        assert algorithm.replay_buffer._get_samples(np.array([13])).rewards.item() == 14 + 15 + 16


def test_any_buffer_that_sums_rewards_ends_its_episodes():
    """SB3 has none for Dict observations yet."""
    buffer = filled(type("Summing", (ReplayBuffer,), {"n_steps": 3}), 5)
    truncate_episodes(buffer)
    assert buffer.timeouts[4].tolist() == [1, 1]
    with pytest.raises(AssertionError, match="not supported for Dict"):
        model(LineEnv(spaces.Dict({"a": spaces.Box(-1, 1)})), "MultiInputPolicy", n_steps=3)
