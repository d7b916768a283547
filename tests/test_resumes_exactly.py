"""N steps, a checkpoint and N more steps are 2N steps at once, bit for bit. In a new process: ``test_survives_faults``."""

import random
import warnings
from functools import partial
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces, wrappers
from stable_baselines3 import SAC, TD3, HerReplayBuffer
from stable_baselines3.common import vec_env
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecCheckNan, VecMonitor, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, env_state, resume_run, save_run
from sb3_td3x.checkpoint.run import versions
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.errors import CheckpointError, UntrustedModelError
from sb3_td3x.runs.environments import EpisodeSeeds
from sb3_td3x.td3x import compiled
from tests.resuming import OpenLineEnv, assert_same_run, evaluating, run_twice, saved_steps, seeded
from tests.tools import Calls, LineEnv, at, largest_difference, model, moved, weights


class NoisyExtractor(FlattenExtractor):
    """With running statistics and random numbers of torch's."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layers = th.nn.Sequential(th.nn.BatchNorm1d(self.features_dim), th.nn.Dropout(0.1))

    def forward(self, observations):
        return self.layers(super().forward(observations))


class OwnNStep(NStepReplayBuffer):
    """Of a class that is saved whole."""


class OwnBuffer(ReplayBuffer):
    """Of a class whose parts nobody knows."""


OWN_CLASS = "three critics with batch norm and dropout"
SETTINGS = {
    "correlated noise": {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.full(1, 0.3))},
    "a full buffer": {"buffer_size": 45},
    "one array of observations": {
        "optimize_memory_usage": True,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "buffer_size": 45,
    },
    "n-step returns": {"n_steps": 3},
    "episodes": {"train_freq": (1, "episode"), "gradient_steps": -1},
    "a schedule": {"learning_rate": LinearSchedule(1e-3, 0, 1), "policy_delay": 3},
    "during the warm-up": {"learning_starts": 110},
    OWN_CLASS: {"policy_kwargs": {"net_arch": [8], "n_critics": 3, "features_extractor_class": NoisyExtractor}},
}


@pytest.mark.filterwarnings("error:not restored exactly")
class TestBitForBit:
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_from_the_start_of_an_episode(self, tmp_path, setting):
        arguments = SETTINGS[setting]
        whole, resumed = run_twice(tmp_path, seeded, trust=setting == OWN_CLASS, **arguments)
        assert_same_run(whole, resumed)

    def test_on_every_path(self, tmp_path, path):
        assert_same_run(*run_twice(tmp_path, seeded, accelerate=path))

    def test_with_normalized_observations_and_rewards(self, tmp_path):
        whole, resumed = run_twice(tmp_path, lambda: VecNormalize(seeded()))
        assert_same_run(whole, resumed)
        left, right = whole.get_vec_normalize_env(), resumed.get_vec_normalize_env()
        assert np.array_equal(left.obs_rms.mean, right.obs_rms.mean)
        assert np.array_equal(left.ret_rms.var, right.ret_rms.var)
        assert np.array_equal(left.returns, right.returns)

    def test_rewards_and_observations_that_are_normalized_in_two_layers(self, tmp_path):
        def twice():
            return VecNormalize(VecNormalize(seeded(), norm_obs=False), norm_reward=False)

        whole, resumed = run_twice(tmp_path, twice)
        assert_same_run(whole, resumed)
        assert np.array_equal(whole.env.obs_rms.mean, resumed.env.obs_rms.mean)
        assert whole.env.venv.ret_rms.var == resumed.env.venv.ret_rms.var

    def test_prioritized_replay(self, tmp_path):
        def scaled():
            return seeded(wrapper=lambda env: wrappers.TransformReward(env, lambda reward: 100 * reward))

        whole, resumed = run_twice(tmp_path, scaled, prioritization="lap", buffer_size=45)
        assert_same_run(whole, resumed)
        assert whole.replay_buffer.priorities.max() > 1
        assert np.array_equal(whole.replay_buffer.priorities, resumed.replay_buffer.priorities)

    def test_hindsight_replay(self, tmp_path):
        whole, resumed = run_twice(
            tmp_path,
            lambda: seeded(BitFlippingEnv, n_bits=3, continuous=True, max_steps=5),
            policy="MultiInputPolicy",
            replay_buffer_class=HerReplayBuffer,
            buffer_size=60,
        )
        assert_same_run(whole, resumed)
        assert np.array_equal(whole.replay_buffer.ep_length, resumed.replay_buffer.ep_length)

    def test_dict_observations(self, tmp_path):
        space = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "b/c": spaces.Box(0, 255, (3,), np.uint8)})
        whole, resumed = run_twice(tmp_path, lambda: seeded(observation_space=space), policy="MultiInputPolicy")
        assert_same_run(whole, resumed)
        for key in space.spaces:
            assert np.array_equal(whole.replay_buffer.observations[key], resumed.replay_buffer.observations[key])

    def test_updates_that_began_with_less_than_learning_starts_go_on(self, tmp_path):
        uses = [at(step, lambda learner: learner.env.reset()) for step in (20, 40)]
        whole = model(seeded(OpenLineEnv), learning_starts=45).learn(60, [TD3XCheckpointCallback(42, tmp_path), *uses])
        resumed = resume_run(tmp_path, seeded(OpenLineEnv), checkpoint=42).learn(60, uses, resume=True)
        assert_same_run(whole, resumed)

    def test_normalization_that_was_switched_off_stays_off(self, tmp_path):
        switches_off = at(30, lambda learner: setattr(learner.env, "training", False))
        whole = model(VecNormalize(seeded())).learn(60, [switches_off, TD3XCheckpointCallback(40, tmp_path, keep_last=9)])
        resumed = resume_run(tmp_path, VecNormalize(seeded()), checkpoint=40)
        assert_same_run(whole, resumed.learn(60, switches_off, resume=True))

    def test_an_environment_that_draws_from_pythons_generator(self, tmp_path):
        class Draws(LineEnv):
            def step(self, action):
                observation, reward, *rest = super().step(action)
                return observation, reward + random.random(), *rest

        assert_same_run(*run_twice(tmp_path, lambda: seeded(Draws)))

    @pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
    def test_an_environment_with_a_generator_of_its_own(self, tmp_path, kind):
        class OwnGeneratorEnv(LineEnv):
            def reset(self, *, seed=None, options=None):
                self.np_random = np.random.Generator(kind(seed))
                return super().reset(options=options)

        assert_same_run(*run_twice(tmp_path, lambda: seeded(OwnGeneratorEnv)))

    def test_an_environment_whose_generator_is_numpys_older_kind(self, tmp_path):
        """As those of dm_control in shimmy; another kind may have it only until the first reset."""

        class OldGeneratorEnv(LineEnv):
            np_random = property(lambda env: env.generator)

            def __init__(self):
                super().__init__()
                self._np_random = np.random.RandomState(0)

            def reset(self, *, seed=None, options=None):
                self.generator = np.random.RandomState(seed % 2**32)
                return super().reset(seed=seed, options=options)

        assert_same_run(*run_twice(tmp_path, lambda: seeded(OldGeneratorEnv)))

    def test_a_state_without_that_of_numpys_older_generator_is_not_complete(self):
        class Old(OpenLineEnv):
            np_random = property(lambda env: env._np_random)

            def __init__(self):
                super().__init__()
                self._np_random = np.random.RandomState(0)

            def reset(self, **kwargs):
                self.position, self.time = self.np_random.uniform(-1, 1), 0
                return self._observe(self.observation_space), {}

        env = DummyVecEnv([Old])
        env.reset()
        assert not env_state.get(env)["complete"]

    def test_inside_episodes_of_an_environment_whose_state_is_an_array(self, tmp_path):
        class ArrayLineEnv(LineEnv):
            def get_run_state(self):
                return np.array([self.position, self.time])

            def set_run_state(self, state):
                self.position, self.time = float(state[0]), int(state[1])

        assert_same_run(*run_twice(tmp_path, lambda: seeded(ArrayLineEnv), save_freq=7))

    @pytest.mark.parametrize("vec", [DummyVecEnv, SubprocVecEnv])
    def test_inside_episodes_of_several_environments_that_give_their_state(self, tmp_path, vec):
        whole, resumed = run_twice(
            tmp_path, lambda: seeded(OpenLineEnv, 2, vec), save_freq=13, gradient_steps=-1, action_noise=0.3
        )
        assert_same_run(whole, resumed)
        for learner in (whole, resumed):
            learner.env.close()

    def test_inside_episodes_under_layers_around_the_environments(self, tmp_path):
        whole, resumed = run_twice(tmp_path, lambda: VecNormalize(VecMonitor(seeded(OpenLineEnv))), save_freq=7)
        assert_same_run(whole, resumed)  # with the scores of ``VecMonitor``
        assert np.array_equal(whole.env.ret_rms.var, resumed.env.ret_rms.var)

    def test_a_buffer_that_is_saved_whole_goes_on_inside_an_episode(self, tmp_path):
        own = {"replay_buffer_class": OwnNStep, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.99}}
        assert_same_run(*run_twice(tmp_path, lambda: seeded(OpenLineEnv), save_freq=7, trust=True, **own))

    def test_frozen_layers_stay_frozen(self, tmp_path):
        def begun():
            algorithm = model(seeded())
            algorithm.actor.mu[0].requires_grad_(False)
            return algorithm

        whole = begun().learn(120)
        begun().learn(60, TD3XCheckpointCallback(60, tmp_path))
        assert_same_run(whole, resume_run(tmp_path, seeded()).learn(120, resume=True))

    def test_frozen_layers_of_a_wrapped_policy_stay_frozen(self, tmp_path):
        algorithm = model(seeded()).learn(20)
        algorithm.actor.mu[0].weight.requires_grad_(False)
        algorithm.policy = th.compile(algorithm.policy)
        save_run(algorithm, tmp_path)
        resumed = resume_run(tmp_path, seeded())
        assert not resumed.actor.mu[0].weight.requires_grad
        assert resumed.actor.mu[0].bias.requires_grad

    def test_an_episode_that_begins_because_a_callback_used_the_environment(self, tmp_path):
        uses = at(25, lambda learner: learner.env.reset())
        whole = model(seeded()).learn(40, [uses, TD3XCheckpointCallback(25, tmp_path, keep_last=9)])
        assert saved_steps(tmp_path) == [0, 25, 40]
        assert_same_run(whole, resume_run(tmp_path, seeded(), checkpoint=25).learn(40, uses, resume=True))

    def test_twice_in_a_row(self, tmp_path):
        whole = model(seeded(), seed=1)
        whole.learn(100, TD3XCheckpointCallback(30, tmp_path / "whole"))
        first = model(seeded(), seed=1)
        first.learn(40, TD3XCheckpointCallback(30, tmp_path))
        second = resume_run(tmp_path, seeded()).learn(80, TD3XCheckpointCallback(30, tmp_path), resume=True)
        assert second.num_timesteps == 80
        third = resume_run(tmp_path, seeded()).learn(100, TD3XCheckpointCallback(30, tmp_path), resume=True)
        assert_same_run(whole, third)
        assert [resumption["steps"] for resumption in third.resumptions] == [40, 80]


def wrapped(env):
    """In every wrapper of Gymnasium's whose state is known."""
    env = wrappers.RescaleObservation(wrappers.FlattenObservation(wrappers.FilterObservation(env, ["a"])), -1.0, 1.0)
    env = wrappers.NormalizeObservation(wrappers.TransformObservation(env, lambda obs: obs / 2, env.observation_space))
    env = wrappers.RescaleAction(env, -2.0, 2.0)
    env = wrappers.TransformAction(wrappers.ClipAction(env), lambda action: 2 * action, env.action_space)
    env = wrappers.DtypeObservation(wrappers.ReshapeObservation(env, (3, 1)), np.float64)
    return wrappers.NormalizeReward(wrappers.ClipReward(wrappers.TransformReward(env, lambda reward: reward / 2), -9.0, 9.0))


EPISODIC = """
AddRenderObservation AddWhiteNoise ArrayConversion AtariPreprocessing Autoreset DelayObservation DiscretizeAction
DiscretizeObservation FrameStackObservation GrayscaleObservation HumanRendering JaxToNumpy JaxToTorch MaxAndSkipObservation
NumpyToTorch ObstructView RecordEpisodeStatistics RecordVideo RenderCollection RepeatAction ResizeObservation StickyAction
TimeAwareObservation VecFrameStack VecVideoRecorder
"""


def test_of_every_wrapper_it_is_known_whether_it_keeps_something_beyond_an_episode():
    """One that a later Gymnasium or SB3 adds belongs into ``WRAPPER_ATTRIBUTES``, or here if it keeps nothing."""
    no_wrappers = "CloudpickleWrapper StackedObservations DummyVecEnv SubprocVecEnv VecEnv VecEnvWrapper"
    offered = {name for name in (*wrappers.__all__, *vec_env.__all__) if name[0].isupper()}
    known = {layer.__name__ for layer in env_state.WRAPPER_ATTRIBUTES}
    assert offered <= {*known, *EPISODIC.split(), *no_wrappers.split()}


@pytest.mark.filterwarnings("error:not restored exactly")
@pytest.mark.filterwarnings("ignore:.*precision lowered")
class TestInsideEpisodesOfGymMake:
    """Its ``PassiveEnvChecker`` compares the first steps of a process with a reset, which a resumed one does not make."""

    @pytest.fixture
    def make(self, registered):
        entry = partial(OpenLineEnv, spaces.Dict({"a": spaces.Box(-10, 10, (3,)), "b": spaces.Box(-10, 10, (2,))}))
        registered("Open-v0", entry, max_episode_steps=16)
        return lambda: DummyVecEnv([lambda: Monitor(EpisodeSeeds(wrapped(gym.make("Open-v0")), 7))])

    def test_in_every_wrapper_whose_state_is_known(self, tmp_path, make):
        env, around = make().envs[0], set()
        while isinstance(env, gym.Wrapper):
            around.add(type(env).__name__)
            env = env.env
        assert {layer.__name__ for layer in env_state.WRAPPER_ATTRIBUTES if issubclass(layer, gym.Wrapper)} <= around
        whole, resumed = run_twice(tmp_path, make, save_freq=7)
        assert_same_run(whole, resumed)
        assert resumed.resumptions[0]["steps"] % 16 != 0

    def test_right_after_the_first_step(self, tmp_path, make):
        whole = model(make()).learn(40, TD3XCheckpointCallback(1, tmp_path, keep_last=99))
        assert_same_run(whole, resume_run(tmp_path, make(), checkpoint=1).learn(40, resume=True))


class TestItsModel:
    def test_continues_only_with_resume_true(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, seeded(), learning_starts="auto")
        with pytest.raises(ValueError, match="resume=True"):
            resumed.learn(9_000, TD3XCheckpointCallback(20, tmp_path))
        assert saved_steps(tmp_path) == [20, 40]
        assert resumed.learning_starts == 100  # not yet 2 % of those 9,000

    @pytest.mark.parametrize("env", [LineEnv, OpenLineEnv])  # the second has no state to offer before its first reset
    def test_is_saved_once_learn_has_begun(self, tmp_path, env):
        """Before that environments and generators are not those of the run."""
        new = model(seeded(env))
        new.set_logger(configure(str(tmp_path), ["csv"]))
        trained = model(seeded(env)).learn(40, TD3XCheckpointCallback(20, tmp_path / "run"))
        trained.save(tmp_path / "model")
        loaded = [TD3X.load(tmp_path / "model", env=seeded(env), force_reset=reset) for reset in (True, False)]
        resumed = resume_run(tmp_path / "run", seeded(env))
        trained.set_env(seeded(env))
        for learner in (new, *loaded, resumed, trained):
            with pytest.raises(ValueError, match="learn has not begun with these environments"):
                save_run(learner, tmp_path / "branch")
        assert save_run(resumed.learn(60, resume=True), tmp_path / "branch").steps == 60

    @pytest.mark.parametrize(("name", "was", "now"), [("buffer_size", 45, 50), ("optimize_memory_usage", True, False)])
    def test_names_how_a_replay_buffer_differs(self, tmp_path, name, was, now):
        save_run(model(seeded(), **SETTINGS["one array of observations"]).learn(20), tmp_path)
        with pytest.raises(CheckpointError, match=f"replay buffer: {name} was {was}, is {now}$"):
            resume_run(tmp_path, seeded(), **{name: now})

    def test_keeps_what_belongs_to_a_run_and_not_to_a_saved_model(self, tmp_path):
        class Counting(TD3X):
            only_in_checkpoints = ("counted",)
            counted = 0

        learner = model(seeded(), cls=Counting)
        learner.learn(20).counted = 7
        save_run(learner, tmp_path / "run")
        learner.save(tmp_path / "model")
        assert resume_run(tmp_path / "run", seeded(), algorithm=Counting).counted == 7
        assert Counting.load(tmp_path / "model").counted == 0


@pytest.mark.filterwarnings("ignore:not restored exactly")  # LineEnv does not offer its state, so its episodes are cut
@pytest.mark.parametrize("env", [LineEnv, OpenLineEnv])
def test_learn_can_be_called_again_after_an_error_before_the_first_step(tmp_path, env):
    def scored():
        return evaluating(n_eval_episodes=2, log_path=str(tmp_path))

    save_run(model(seeded(env)).learn(50, expected := scored()), tmp_path, expected)
    resume_run(tmp_path, seeded(env)).learn(80, expected := scored(), resume=True)
    resumed = resume_run(tmp_path, seeded(env))
    unready = Calls(_on_training_start=Mock(side_effect=OSError))
    for callback in ([scored(), unready], unready):
        with pytest.raises(OSError):  # noqa: PT011  # its own
            resumed.learn(80, callback, resume=True)
    resumed.learn(80, evaluated := scored(), resume=True)
    assert evaluated.evaluations_timesteps == expected.evaluations_timesteps == [20, 40, 60, 80]
    assert evaluated.evaluations_results == expected.evaluations_results
    assert [resumption["steps"] for resumption in resumed.resumptions] == [50]
    assert_same_run(expected.model, resumed)


class TestSaysWhatIsNotExact:
    def test_open_episodes_are_cut_and_counted(self, tmp_path):
        env = DummyVecEnv([lambda: Monitor(LineEnv())] * 2)
        model(env, gradient_steps=-1).learn(60, TD3XCheckpointCallback(7, tmp_path, keep_last=9))
        first = Store(tmp_path).checkpoints()[1].steps
        resumed = resume_run(tmp_path, DummyVecEnv([lambda: Monitor(LineEnv())] * 2), checkpoint=first)
        with pytest.warns(UserWarning, match="current episodes, which are cut"):
            resumed.learn(80, TD3XCheckpointCallback(15, tmp_path), resume=True)
        assert resumed.num_timesteps == 80
        written = Store(tmp_path).checkpoints()[-1].manifest["resumed"]
        assert written[0]["steps"] == first
        assert "cut" in written[0]["not_restored"][0]

    @pytest.mark.filterwarnings("ignore:not restored exactly")
    def test_correlated_noise_begins_anew_with_an_episode_that_is_cut(self, tmp_path):
        save_run(model(action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), np.full(1, 0.3))).learn(50), tmp_path)
        resumed = resume_run(tmp_path, LineEnv())
        assert resumed.action_noise.noise_prev != 0
        resumed.learn(50, resume=True)
        assert resumed.action_noise.noise_prev == 0

    @pytest.mark.parametrize("env", [LineEnv, OpenLineEnv])
    def test_an_episode_that_a_callback_ended_inside_a_step_is_cut(self, tmp_path, env):
        save_run(model(seeded(env)).learn(1000, StopTrainingOnMaxEpisodes(2)), tmp_path)  # SB3 does not store that step
        with pytest.warns(UserWarning, match="not restored exactly"):
            buffer = resume_run(tmp_path, seeded(env)).learn(100, resume=True).replay_buffer
        assert np.abs(moved(buffer)).max() < 0.21  # an action moves by 0.2 at most, a new episode begins up to 1 away

    @pytest.mark.filterwarnings("ignore:not restored exactly")
    def test_an_episode_that_is_cut_costs_one_reset(self, tmp_path):
        """Of a robot, somebody makes it by hand."""
        save_run(model(seeded()).learn(1000, StopTrainingOnMaxEpisodes(2)), tmp_path)
        resumed = resume_run(tmp_path, env := seeded())
        reset = env.reset = Mock(wraps=env.reset)
        resumed.learn(resumed.num_timesteps + 1, resume=True)
        reset.assert_called_once()

    def test_n_step_returns_do_not_cross_the_cut(self, tmp_path):
        learner = model(DummyVecEnv([LineEnv]), n_steps=3)
        learner.learn(25)
        save_run(learner, tmp_path)
        resumed = resume_run(tmp_path, DummyVecEnv([LineEnv]))
        with pytest.warns(UserWarning, match="current episodes"):
            resumed.learn(30, resume=True)
        assert resumed.replay_buffer.timeouts[24, 0] == 1
        assert resumed.replay_buffer.dones[24, 0] == 0

    def test_layers_around_the_environments_begin_new_episodes_where_they_are_cut(self, tmp_path):
        def layered():
            return VecNormalize(VecMonitor(DummyVecEnv([LineEnv] * 2)))

        save_run(model(layered(), gradient_steps=-1).learn(50), tmp_path)  # episodes of 20 steps
        ended, sums = [], []

        def look(callback):
            env = callback.training_env
            assert np.array_equal(callback.model._last_original_obs, env.get_original_obs())
            sums.append([*env.returns, *env.venv.episode_returns])

        def look_for_ends(callback):
            ended.extend(info["episode"]["l"] for info in callback.locals["infos"] if "episode" in info)

        with pytest.warns(UserWarning, match="current episodes"):
            resume_run(tmp_path, layered()).learn(100, Calls(look_for_ends, _on_rollout_start=look), resume=True)
        assert ended == [20, 20]
        assert sums[0] == [0, 0, 0, 0]

    def test_wrappers_in_another_order_are_found_out(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        other = DummyVecEnv([lambda: EpisodeSeeds(Monitor(LineEnv()), 7, 0)])
        with pytest.warns(UserWarning, match="not restored exactly"):
            assert resume_run(tmp_path, other).learn(60, resume=True).num_timesteps == 60

    def test_layers_around_the_environments_are_known_by_their_class_and_a_missing_one_is_named(self, tmp_path):
        model(VecNormalize(seeded(OpenLineEnv))).learn(40, TD3XCheckpointCallback(20, tmp_path, keep_last=9))
        moved = resume_run(tmp_path, VecCheckNan(VecNormalize(seeded(OpenLineEnv))), checkpoint=20)
        assert moved.get_vec_normalize_env().obs_rms.count == pytest.approx(21, abs=0.01)
        assert moved.learn(30, resume=True).resumptions[-1]["not_restored"] == []
        with pytest.warns(UserWarning, match="not restored exactly: the state of VecNormalize, which is not around"):
            resume_run(tmp_path, seeded(OpenLineEnv), checkpoint=20).learn(30, resume=True)

    @pytest.mark.parametrize("env", [LineEnv, OpenLineEnv])
    def test_an_episode_that_others_went_on_with_before_the_save_is_cut(self, tmp_path, env):
        used = model(seeded(env)).learn(30)
        for _ in range(7):
            used.get_env().step(np.ones((1, 1)))
        save_run(used, tmp_path)
        with pytest.warns(UserWarning, match="current episodes, which are cut"):
            buffer = resume_run(tmp_path, seeded(env)).learn(40, resume=True).replay_buffer
        assert np.abs(moved(buffer)).max() < 0.21

    def test_a_wrapper_whose_state_is_not_known_is_named(self, tmp_path):
        class Curriculum(gym.Wrapper):
            pass

        model(seeded(wrapper=Curriculum)).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, seeded(wrapper=Curriculum))
        with pytest.warns(UserWarning, match="not restored exactly: what Curriculum may keep"):
            resumed.learn(60, resume=True)
        assert "Curriculum" in str(resumed.resumptions[-1]["not_restored"])

    def test_a_buffer_that_is_not_saved_is_named_and_one_that_is_saved_whole_is_not(self, tmp_path):
        whole = save_run(model(seeded(), replay_buffer_class=OwnBuffer).learn(40), tmp_path / "whole")
        assert (whole.path / "replay_buffer.pkl").exists()
        save_run(model(seeded()).learn(40), tmp_path / "without", save_replay_buffer=False)
        for name, problems in (("whole", []), ("without", ["the replay buffer (it was not saved)"])):
            with warnings.catch_warnings(record=True) as warned:
                resumed = resume_run(tmp_path / name, seeded(), trust=name == "whole").learn(60, resume=True)
            assert resumed.resumptions == [{"steps": 40, "not_restored": problems}]
            told = [str(warning.message) for warning in warned]
            assert told[: len(problems)] == [f"not restored exactly: {problem}" for problem in problems]
            assert all(text.startswith("no updates yet") for text in told[len(problems) :])

    @pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 2)])
    def test_without_its_buffer_a_run_may_have_another_number_of_environments(self, tmp_path, before, now):
        save_run(model(seeded(count=before)).learn(60), tmp_path, save_replay_buffer=False)
        with pytest.warns(UserWarning, match="not restored exactly"):
            assert resume_run(tmp_path, seeded(count=now)).learn(90, resume=True).num_timesteps == 90

    def test_a_machine_without_what_the_run_asks_for_is_no_damage(self, tmp_path, monkeypatch):
        algorithm = model(seeded(), accelerate="plain").learn(40)
        algorithm.accelerate = "compiled"
        save_run(algorithm, tmp_path)
        monkeypatch.setattr(compiled, "has_compiler", lambda: False)
        with pytest.raises(compiled.CannotAccelerate, match="there is no C"):
            resume_run(tmp_path, seeded())

    def test_an_environment_whose_reset_differs_is_found_out(self, tmp_path):
        model(DummyVecEnv([lambda: Monitor(LineEnv())])).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, DummyVecEnv([lambda: Monitor(LineEnv())]))
        with pytest.warns(UserWarning, match="their reset gives another episode"):
            resumed.learn(60, resume=True)

    @pytest.mark.parametrize("vec", [partial(SubprocVecEnv, start_method="fork"), DummyVecEnv])
    def test_an_environment_whose_episodes_differ_only_later_is_found_out(self, tmp_path, vec):
        """Its episodes begin alike; in a process it cannot be reached without ``ResumableEnv``, here its seeds are missing."""

        class Alike(LineEnv):
            def reset(self, **kwargs):
                super().reset(**kwargs)
                self.position = 0.0
                return self._observe(self.observation_space), {}

        def make():
            return vec([lambda: Monitor(EpisodeSeeds(Alike(), 7) if vec is not DummyVecEnv else Alike())])

        model(make(), seed=1).learn(40, TD3XCheckpointCallback(20, tmp_path))
        with pytest.warns(UserWarning, match="their reset gives another episode"):
            resume_run(tmp_path, make()).learn(60, resume=True)

    def test_another_version_processor_or_number_of_threads_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sb3_td3x.td3x.precision.choose_matrix_kernels", lambda: "default")  # as the processor may not
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        monkeypatch.setitem(versions(), "torch", "0.0")
        monkeypatch.setattr("sb3_td3x.td3x.precision.processor", lambda: "an abacus")
        monkeypatch.setattr(th, "get_num_threads", lambda: 64)
        with pytest.warns(UserWarning, match="not restored exactly") as warned:
            resumed = resume_run(tmp_path, seeded()).learn(60, resume=True)
        said = " ".join(str(warning.message) for warning in warned)
        assert all(change in said for change in ("is 0.0", "is an abacus)", "is 64)"))
        assert len(resumed.resumptions[0]["not_restored"]) == 3

    def test_matrix_kernels_that_have_become_inaccurate_are_not_used_and_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sb3_td3x.td3x.precision.choose_matrix_kernels", lambda: "onednn")
        save_run(model(seeded()).learn(20), tmp_path)
        monkeypatch.setattr("sb3_td3x.td3x.precision.is_accurate", lambda kernels: kernels == "default")
        with pytest.warns(UserWarning, match="not restored exactly: .*matrix kernels was onednn, is default"):
            assert resume_run(tmp_path, seeded()).learn(40, resume=True)._get_updater().kernels == "default"

    def test_another_simulator_is_named(self, tmp_path, monkeypatch):
        save_run(model(seeded()).learn(20), tmp_path)
        monkeypatch.setitem(versions(), "pybullet", "0.0")
        with pytest.warns(UserWarning, match=r"not restored exactly: .*pybullet was [\d.]+, is 0\.0"):
            resume_run(tmp_path, seeded()).learn(40, resume=True)

    def test_another_path_of_the_updates_is_named(self, tmp_path, monkeypatch):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        monkeypatch.setattr(compiled, "SWITCH_AFTER", 5)
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)
        resumed = resume_run(tmp_path, seeded())
        with pytest.warns(UserWarning, match="update path was plain, is compiled"):
            resumed._setup_learn(20, None, reset_num_timesteps=False)

    def test_another_kind_of_device_is_named(self, tmp_path):
        algorithm = model(seeded()).learn(20)
        algorithm.device = th.device("mps")
        save_run(algorithm, tmp_path)
        with pytest.warns(UserWarning, match=r"not restored exactly: .*device was mps, is cpu"):
            resume_run(tmp_path, seeded()).learn(40, resume=True)

    def test_another_class_of_the_model_is_named(self, tmp_path):
        save_run(model(seeded(), cls=type("Own", (TD3X,), {})).learn(20), tmp_path)
        with pytest.warns(UserWarning, match=r"not restored exactly: .*algorithm was Own, is TD3X"):
            resume_run(tmp_path, seeded()).learn(40, resume=True)

    def test_updates_that_no_program_can_be_made_of_are_no_difference(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compiled, "SWITCH_AFTER", 5)
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)
        random_layers = {"policy_kwargs": {"net_arch": [8], "activation_fn": th.nn.RReLU}}
        declining = model(seeded(), accelerate="auto", **random_layers).learn(40, TD3XCheckpointCallback(20, tmp_path))
        assert declining._get_updater().declined
        assert resume_run(tmp_path, seeded()).learn(60, resume=True).resumptions == [{"steps": 40, "not_restored": []}]

    def test_updates_that_a_hook_has_kept_plain_stay_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr(compiled, "SWITCH_AFTER", 5)
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)

        def begun(*callbacks):
            learner = model(seeded(), accelerate="auto")
            hook = learner.critic.qf0.register_forward_hook(lambda *_: None)
            learner.learn(40, [*callbacks])
            hook.remove()
            return learner

        begun(TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, seeded()).learn(80, resume=True)
        assert resumed._updater.declined == begun()._updater.declined is not None
        assert resumed._updater.programs_made == 0

    def test_a_run_on_the_cpu_goes_on_there_and_has_nothing_of_the_gpus_that_are_there(self, tmp_path, monkeypatch):
        monkeypatch.setattr(th.cuda, "is_available", lambda: True)
        monkeypatch.setattr(th.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(th.cuda, "get_rng_state_all", lambda: pytest.fail("it sets every GPU up"))
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, seeded(), device="auto")
        monkeypatch.undo()
        assert resumed.learn(60, resume=True).resumptions == [{"steps": 40, "not_restored": []}]

    def test_a_seed_would_have_no_effect_and_is_refused(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        with pytest.raises(ValueError, match="it takes no seed"):
            resume_run(tmp_path, seeded(), seed=5)


class TestOtherAlgorithms:
    @pytest.mark.parametrize("algorithm", [TD3, SAC])
    def test_sb3s_resume_exactly_with_resumable_before_them(self, algorithm, tmp_path):
        class Ours(Resumable, algorithm):
            pass

        settings = {"learning_starts": 20, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}, "seed": 1, "buffer_size": 500}
        plain = algorithm("MlpPolicy", seeded(), **settings).learn(120)
        whole = Ours("MlpPolicy", seeded(), **settings).learn(120, TD3XCheckpointCallback(30, tmp_path, keep_last=9))
        with pytest.raises(UntrustedModelError, match="trust=True"):
            resume_run(tmp_path, seeded(), algorithm=Ours)
        with pytest.raises(ValueError, match=f"algorithm={algorithm.__name__} is not the saved model's class"):
            resume_run(tmp_path, seeded(), trust=True, algorithm=algorithm)
        resumed = resume_run(tmp_path, seeded(), checkpoint=60, trust=True, algorithm=Ours).learn(120, resume=True)
        assert largest_difference(weights(plain), weights(whole)) == largest_difference(weights(plain), weights(resumed)) == 0

    def test_one_that_is_not_resumable_is_told_how_to_be(self, tmp_path):
        with pytest.raises(ValueError, match=r"SAC cannot be resumed: .*Resumable, SAC"):
            SAC("MlpPolicy", seeded(), buffer_size=100).learn(10, TD3XCheckpointCallback(5, tmp_path))

    def test_gsdes_noise_is_named_as_not_exact(self, tmp_path):
        class Ours(Resumable, SAC):
            pass

        settings = {"learning_starts": 20, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}, "use_sde": True}
        Ours("MlpPolicy", seeded(), **settings).learn(40, TD3XCheckpointCallback(30, tmp_path))
        with pytest.warns(UserWarning, match="not restored exactly: .*gSDE"):
            resume_run(tmp_path, seeded(), trust=True, algorithm=Ours).learn(50, resume=True)

    def test_resume_needs_no_checkpoint_callback(self, tmp_path):
        learner = TD3X("MlpPolicy", DummyVecEnv([LineEnv]), buffer_size=100, learning_starts=5, batch_size=4)
        learner.learn(20)
        assert learner.learn(50, resume=True).num_timesteps == 50
