"""What is stored is what the environment gave: also where arrays are used again; and what cannot be learned from is named."""

import copy
import gc
import multiprocessing
import os
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import SAC, HerReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnvWrapper, VecNormalize

from sb3_td3x import TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common import vec_envs
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.common.transitions import check_rewards
from sb3_td3x.errors import EnvironmentDiedError, NonFiniteError
from sb3_td3x.runs import environments
from sb3_td3x.runs.environments import EpisodeSeeds
from tests.tools import Calls, LineEnv, Samples, Spoilt, at, model

DICT = spaces.Dict({"position": spaces.Box(-10, 10, (2,))})
LENGTH = 7


@pytest.mark.parametrize("name", ["step", "reset"])
def test_a_method_that_is_edited_between_two_calls_of_learn_is_used(name, monkeypatch):
    class Edited(LineEnv):
        def step(self, action):
            return super().step(action)

        def reset(self, **kwargs):
            return super().reset(**kwargs)

    learner, calls, before = model(Edited()).learn(20), [], getattr(Edited, name)
    monkeypatch.setattr(Edited, name, lambda self, *args, **kwargs: calls.append(1) or before(self, *args, **kwargs))
    learner.learn(20)
    assert calls


def test_an_environment_need_not_take_attributes():
    class Refuses(LineEnv):
        def __setattr__(self, name, value):
            if name in ("step", "reset"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    class PassesOn(gym.Wrapper):
        def __setattr__(self, name, value):
            is_here = name in vars(self) or name.startswith("_") or name == "env"
            object.__setattr__(self if is_here else self.env, name, value)

    for env in (Refuses(), DummyVecEnv([lambda: PassesOn(LineEnv())])):
        assert model(env).learn(25)._episode_num == 1


def test_a_shallow_copy_of_an_environment_is_another_one():
    env = LineEnv()
    model(env).learn(25)
    before, other = env.time, copy.copy(env)
    other.step(np.zeros(1))
    assert (env.time, other.time) == (before, before + 1)
    assert not {"step", "reset", "__getstate__"} & vars(other).keys()


def test_the_state_of_an_environment_may_be_its_attributes(tmp_path):
    class GivesAttributes(LineEnv):
        def get_run_state(self):
            return {name: vars(self)[name] for name in vars(self) if not name.startswith("_") and "space" not in name}

        def set_run_state(self, state):
            vars(self).update(state)

    learner = model(DummyVecEnv([GivesAttributes])).learn(25, TD3XCheckpointCallback(100, tmp_path))
    resumed = resume_run(tmp_path, DummyVecEnv([GivesAttributes])).learn(30, resume=True)
    assert resumed.resumptions[-1]["not_restored"] == []
    assert (learner.env.envs[0].time, resumed.env.envs[0].time) == (5, 10)


def test_an_environment_that_gives_one_dict_at_every_step_has_each_episode_once():
    info = {}

    class OneInfo(LineEnv):
        def step(self, action):
            return *super().step(action)[:4], info

    learner = model(Monitor(OneInfo(length=5))).learn(43)
    assert [episode["l"] for episode in learner.ep_info_buffer] == [5] * 8


def test_episodes_inside_a_wrapper_that_does_not_end_with_them_are_counted():
    class Endless(gym.Wrapper):
        def step(self, action):
            observation, reward, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                observation, _ = self.env.reset()
            return observation, reward, False, False, info

    learner = model(Endless(Monitor(LineEnv(length=5)))).learn(40)
    assert [episode["l"] for episode in learner.ep_info_buffer][:8] == [5] * 8


class Simulator:
    """What ``unwrapped`` may be with another library; ``reset`` is no method, ``step`` not of the class."""

    resets = 0

    @staticmethod
    def reset():
        Simulator.resets += 1

    def __getattr__(self, name):
        if name != "step":
            raise AttributeError(name)
        return lambda: "stepped"


def test_a_wrapper_may_adapt_what_is_no_environment():
    class Adapts(gym.Wrapper):
        unwrapped, metadata, spec, render_mode = property(lambda self: self), {}, None, None

        def __init__(self):
            self.env, self.line = SimpleNamespace(), LineEnv()
            self.observation_space, self.action_space = self.line.observation_space, self.line.action_space

        def reset(self, **kwargs):
            return self.line.reset(**kwargs)

        def step(self, action):
            return self.line.step(action)

    assert model(Monitor(Adapts())).learn(40).replay_buffer.size() == 40


@pytest.mark.parametrize("flags", [np.array, torch.tensor])
def test_a_wrapper_may_make_one_agent_of_several(flags):
    class Team(LineEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, flags([terminated] * 2), flags([truncated] * 2), info

    class One(gym.Wrapper):
        def step(self, action):
            observation, reward, terminated, truncated, info = self.env.step(action)
            return observation, reward, bool(terminated[0]), bool(truncated[0]), info

    assert model(One(Team())).learn(40).replay_buffer.size() == 40


def test_an_innermost_environment_may_be_anything():
    class Around(LineEnv):
        simulator = Simulator()
        unwrapped = property(lambda self: self.simulator)

        def reset(self, **kwargs):
            self.simulator.reset()
            return super().reset(**kwargs)

        def step(self, action):
            assert self.simulator.step() == "stepped"
            return super().step(action)

    env = DummyVecEnv([lambda: Monitor(Around())])
    with pytest.warns(UserWarning, match="used the training environments inside a step, which is not learned from"):
        buffer = model(env).learn(40, at(30, lambda _: env.envs[0].env.reset())).replay_buffer
    assert Simulator.resets >= 3
    assert buffer.size() == 39  # the step during which it was used is not stored


def test_environments_that_were_interrupted_inside_a_step_are_not_learned_from():
    def interrupt(callback):
        callback.training_env.step_async(np.zeros((2, 1)))
        raise KeyboardInterrupt

    env = SubprocVecEnv([LineEnv] * 2)
    learner = model(env)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(20, Calls(_on_rollout_start=interrupt))
    with pytest.raises(ValueError, match="interrupted inside a step: give the model new environments"):
        learner.learn(20)
    env.close()
    learner.set_env(DummyVecEnv([LineEnv] * 2))
    assert learner.learn(20).num_timesteps == 20


class OneArray(LineEnv):
    """Writes every observation into one array per space."""

    def __init__(self, observation_space=None):
        super().__init__(observation_space, length=LENGTH)
        self.arrays = {}

    def _observe(self, space):
        if isinstance(space, spaces.Dict):
            return super()._observe(space)
        array = self.arrays.setdefault(id(space), np.zeros(space.shape, space.dtype))
        array[:] = self.position
        return array


class OneVecArray(VecEnvWrapper):
    """Writes the observations of all environments into one array."""

    def reset(self):
        self.array = self.venv.reset()
        return self.array

    def step_wait(self):
        observations, *rest = self.venv.step_wait()
        for array, new in zip(*map(parts, (self.array, observations)), strict=True):
            array[:] = new
        return self.array, *rest


def parts(observations):
    return list(observations.values()) if isinstance(observations, dict) else [observations]


VEC_ENVS = {
    "one environment": lambda space: DummyVecEnv([partial(OneArray, space)]),
    "with a Monitor": lambda space: DummyVecEnv([lambda: Monitor(OneArray(space))]),
    "as td3x train wraps it": lambda space: DummyVecEnv([lambda: Monitor(EpisodeSeeds(OneArray(space), 0))]),
    "processes": lambda space: SubprocVecEnv([lambda: Monitor(OneArray(space))] * 2, start_method="fork"),
    "one array of all environments": lambda space: OneVecArray(DummyVecEnv([partial(LineEnv, space, length=LENGTH)] * 2)),
    "normalized": lambda space: VecNormalize(OneVecArray(DummyVecEnv([partial(OneArray, space)] * 2))),
}


class TestArraysThatAreUsedAgain:
    @pytest.mark.parametrize(
        ("kind", "space"), [*((kind, None) for kind in VEC_ENVS), ("one array of all environments", DICT), ("processes", DICT)]
    )
    def test_each_transition_moves_by_its_action(self, kind, space):
        env = VEC_ENVS[kind](space)
        buffer = model(env, "MultiInputPolicy" if space else "MlpPolicy", gradient_steps=0).learn(5 * LENGTH).replay_buffer
        moved = [
            (after - before)[: buffer.size(), ..., 0]
            for before, after in zip(parts(buffer.observations), parts(buffer.next_observations), strict=True)
        ]
        for movement in moved:
            np.testing.assert_allclose(movement, 0.2 * buffer.actions[: buffer.size(), :, 0], atol=1e-5)
        env.close()


class Kept(LineEnv):
    """Keeps the last observation of each episode."""

    def step(self, action):
        observation, *rest = super().step(action)
        if rest[2]:
            self.ends.append(observation)
        return observation, *rest

    def _observe(self, space):
        if isinstance(space, spaces.Dict) or space.dtype.kind == "f":
            return super()._observe(space)
        return (100 * np.array([self.position, 2 * self.position, 0.5])).astype(int).astype(space.dtype)


WHOLE = spaces.Box(0, 255, (3,), np.int64)


@pytest.mark.parametrize(
    "space", [WHOLE, spaces.Box(0, 255, (3,), np.uint8), spaces.Dict({"whole": WHOLE, "real": spaces.Box(-10, 10, (2,))})]
)
def test_the_last_observation_of_an_episode_is_stored_under_vecnormalize_also_if_it_is_of_whole_numbers(space):
    (env := Kept(space)).ends = []
    policy = "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"
    learner = model(VecNormalize(DummyVecEnv([lambda: env]), clip_obs=1e6), policy, gradient_steps=0).learn(60)
    ends = zip(*map(parts, env.ends), strict=True)
    for stored, expected in zip(parts(learner.replay_buffer.next_observations), ends, strict=True):
        np.testing.assert_allclose(stored[[19, 39, 59], 0], np.array(expected, stored.dtype), rtol=1e-5)


def test_each_of_equal_episodes_counts_where_an_environment_writes_them_without_the_time():
    class WritesItself(LineEnv):
        def step(self, action):
            *result, info = super().step(action)
            return *result, {**info, "episode": {"r": 1.0, "l": 20} if result[3] else None}

    learner = model(DummyVecEnv([WritesItself])).learn(100)
    assert [episode["r"] for episode in learner.ep_info_buffer] == [1.0] * 5


@pytest.mark.parametrize("episode", [3, None, {"number": 3}])
def test_an_environments_own_number_of_the_episode_is_not_taken_for_a_monitors(episode):
    class Counts(LineEnv):
        def step(self, action):
            *result, info = super().step(action)
            return *result, {**info, "episode": episode}

    learner = model(Counts()).learn(100)
    assert [episode["l"] for episode in learner.ep_info_buffer] == [20] * 5
    assert not model(DummyVecEnv([Counts])).learn(100).ep_info_buffer  # without a monitor


class Adapter(VecEnvWrapper):
    """As SuperSuit's, around a vector environment that is none of SB3's; it does not call the constructor of SB3's wrapper."""

    def __init__(self, count):
        inner = DummyVecEnv([LineEnv] * count)
        self.num_envs, self.render_mode, self.reset_infos = count, None, []
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.venv = SimpleNamespace(**{name: getattr(inner, name) for name in ("reset", "seed", "step_async", "step_wait")})

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        return self.venv.step_wait()

    def getattr_depth_check(self, name, already_found):
        return None

    def getattr_recursive(self, name):
        raise AttributeError(name)


@pytest.mark.parametrize("wrapper", [lambda env: env, VecNormalize])
@pytest.mark.filterwarnings("ignore:not restored exactly", "ignore:The `render_mode` attribute")
def test_an_adapter_of_another_librarys_vector_environments_is_a_vec_env(wrapper, tmp_path):
    model(wrapper(Adapter(2))).learn(40, TD3XCheckpointCallback(10, tmp_path))
    assert resume_run(tmp_path, wrapper(Adapter(2))).learn(60, resume=True).num_timesteps == 60


def test_what_an_environment_says_to_be_inside_it_need_not_be_one():
    class Simulated(LineEnv):
        unwrapped = SimpleNamespace()

    assert model(Simulated()).learn(30).num_timesteps == 30


class TestWhatCannotBeLearnedFrom:
    def learn(self, spoil, env=DummyVecEnv):
        return model(env([lambda: Spoilt(15, spoil)])).learn(30)

    @pytest.mark.parametrize("env", [DummyVecEnv, partial(SubprocVecEnv, start_method="fork")], ids=["here", "in processes"])
    def test_a_time_limit_of_none(self, env):
        with pytest.raises(ValueError, match=r"truncated .* is None, not True or False, at environment step 15"):
            self.learn(lambda o, r, terminated, _, info: (o, r, terminated, None, info), env)

    def test_an_infinite_reward_of_few_bits(self):
        with pytest.raises(NonFiniteError, match="reward is not finite"):
            check_rewards(np.array([np.inf], np.float16), "reward", "now")

    def test_discrete_observations_in_vecnormalize(self):
        env = VecNormalize(DummyVecEnv([lambda: Samples(spaces.Discrete(4))]), norm_obs=False)
        with pytest.raises(ValueError, match=r"Discrete observations .*FlattenObservation"):
            model(env).learn(25)

    def test_noise_that_is_not_finite(self):
        with pytest.raises(NonFiniteError, match=r"action \(the exploration noise .* is not finite at environment step 1\."):
            model(action_noise=NormalActionNoise(np.full(1, np.nan), np.ones(1))).learn(5)

    def test_a_reward_whose_square_would_overflow(self):
        reward = -1.1e15
        with pytest.raises(NonFiniteError, match=r"reward is beyond 1e\+15 at environment step 15"):
            self.learn(lambda o, _, *rest: (o, reward, *rest))
        assert self.learn(lambda o, _, *rest: (o, 0.9 * reward, *rest))._n_updates == 20

    def test_such_a_reward_is_taken_where_it_is_normalized(self):
        env = VecNormalize(DummyVecEnv([lambda: Spoilt(15, lambda o, _, *rest: (o, 1e30, *rest))]))
        assert model(env).learn(30)._n_updates == 20

    @pytest.mark.parametrize(
        ("reward", "said"),
        [
            (
                lambda achieved: np.full(len(achieved), 1e38),
                r"hindsight goal \(compute_reward\) is beyond 1e\+15 at update 1\.",
            ),
            (np.linalg.norm, "compute_reward has to take arrays of goals, one in each row"),  # without `axis`
        ],
    )
    def test_a_reward_of_a_hindsight_goal(self, reward, said):
        class Goals(LineEnv):
            def __init__(self):
                super().__init__(spaces.Dict({key: spaces.Box(-10, 10, (1,)) for key in GOAL_KEYS}))

            def compute_reward(self, achieved, desired, info):
                return reward(achieved)

        learner = model(Goals(), "MultiInputPolicy", replay_buffer_class=HerReplayBuffer, learning_starts=25)
        with pytest.raises(ValueError, match=said):
            learner.learn(60)

    def test_a_loss_names_the_way_back_too(self):
        learner = model().learn(20)
        learner.replay_buffer.rewards[:] = 1e38
        with pytest.raises(NonFiniteError, match=r"loss.*td3x train --resume RUN --checkpoint STEPS"):
            learner.learn(60, reset_num_timesteps=False)


GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")


ENDING = partial(Spoilt, spoil=lambda *_: os._exit(3))


@pytest.mark.timeout(120)
class TestProcessesOfEnvironments:
    def test_that_end_are_all_named(self, monkeypatch):
        monkeypatch.setattr(vec_envs, "NOTICE_SECONDS", 60)  # which a busy machine may need; both end
        env = SubprocVecEnv([partial(ENDING, 15)] * 2)
        with pytest.raises(EnvironmentDiedError, match=r"environment 0, 1 ended with exit code 3, 3") as caught:
            model(env, gradient_steps=0).learn(100)
        assert caught.value.which == [0, 1]
        env.close()

    @pytest.mark.parametrize("at", ["a step", "a reset", "a save"])
    def test_that_are_killed_are_named_and_none_stays(self, at, tmp_path):
        env = SubprocVecEnv([LineEnv] * 2)
        learner = model(env, gradient_steps=0).learn(30)
        env.processes[1].kill()
        continued = {
            "a step": lambda: learner.learn(30, reset_num_timesteps=False),
            "a reset": lambda: learner.learn(30),
            "a save": lambda: save_run(learner, tmp_path),
        }
        with pytest.raises(EnvironmentDiedError, match=r"environment 1 ended with exit code -9"):
            continued[at]()
        assert not any(process.is_alive() for process in env.processes)
        env.close()
        gc.collect()  # may not crash

    def test_of_sb3s_algorithms_are_named_too(self):
        learner = type("Ours", (Resumable, SAC), {})("MlpPolicy", SubprocVecEnv([partial(ENDING, 15)]), buffer_size=100)
        with pytest.raises(EnvironmentDiedError, match=r"environment 0 ended with exit code 3"):
            learner.learn(100)

    def test_that_end_while_they_start_are_told_with_the_likely_reason(self, monkeypatch):
        monkeypatch.setattr(environments, "SubprocVecEnv", Mock(side_effect=BrokenPipeError))  # typer says nothing of it
        with pytest.raises(ValueError, match=r"one of the 2 processes of Pendulum-v1 ended while it started: .*memory"):
            environments.open_env("Pendulum-v1", 0, environments.TRAINING, {"n_envs": 2})

    def test_leave_a_run_to_resume(self, tmp_path):
        env = SubprocVecEnv([LineEnv, partial(ENDING, 25)])
        with pytest.raises(EnvironmentDiedError):
            model(env).learn(200, TD3XCheckpointCallback(10, tmp_path))
        with pytest.warns(UserWarning, match="not restored exactly"):
            learner = resume_run(tmp_path, DummyVecEnv([LineEnv, LineEnv])).learn(200, resume=True)
        assert learner.num_timesteps == 200

    def test_that_hang_do_not_keep_the_run_from_closing(self, monkeypatch):
        monkeypatch.setattr(vec_envs, "CLOSE_TIMEOUT", 0.3)
        env = SubprocVecEnv([LineEnv, partial(Spoilt, 1, lambda *_: time.sleep(1000))])
        env.reset()
        env.step_async(np.zeros((2, 1)))
        vec_envs.close_env(env)
        assert not any(process.is_alive() for process in env.processes)
        assert not {process.pid for process in env.processes} & {child.pid for child in multiprocessing.active_children()}
