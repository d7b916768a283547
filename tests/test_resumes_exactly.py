"""N steps, a checkpoint, a new process and N more steps are 2N steps at once, bit for bit."""

import csv
import json
import random
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    ConvertCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecMonitor, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableEnv, Store, TD3XCheckpointCallback, logs, resume_run, save_run
from sb3_td3x.environments import EpisodeSeeds
from sb3_td3x.replay import DeviceReplayBuffer
from tests.tools import LineEnv, model, weights

STEPS = 120


class OpenLineEnv(LineEnv):
    """A ``LineEnv`` that gives and takes its state."""

    def get_run_state(self):
        return {"position": self.position, "time": self.time}

    def set_run_state(self, state):
        self.position, self.time = state["position"], state["time"]


class NoisyExtractor(FlattenExtractor):
    """With running statistics and random numbers of torch's."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.layers = th.nn.Sequential(th.nn.BatchNorm1d(self.features_dim), th.nn.Dropout(0.1))

    def forward(self, observations):
        return self.layers(super().forward(observations))


def seeded(env=LineEnv, count=1, vec=DummyVecEnv, **kwargs):
    def maker(index):
        return lambda: ResumableEnv(Monitor(EpisodeSeeds(env(**kwargs), 7, index)))

    return vec([maker(index) for index in range(count)])


def poison_generators():
    """What a new process would do to the global generators."""
    random.seed(123), np.random.seed(456), th.manual_seed(789)


def assert_same_run(left, right):
    for name, value in weights(left).items():
        assert th.equal(value, weights(right)[name]), name
    for one, other in ((left.actor, right.actor), (left.critic, right.critic)):
        for own, theirs in zip(one.parameters(), other.parameters(), strict=True):
            for key, value in one.optimizer.state[own].items():
                assert th.equal(value, other.optimizer.state[theirs][key]), key
    assert left.replay_buffer.pos == right.replay_buffer.pos
    assert left.replay_buffer.full == right.replay_buffer.full
    for name in ("actions", "rewards", "dones", "timeouts"):
        assert np.array_equal(getattr(left.replay_buffer, name), getattr(right.replay_buffer, name)), name
    for name in ("num_timesteps", "_n_updates", "_episode_num"):
        assert getattr(left, name) == getattr(right, name), name
    assert [(one["r"], one["l"]) for one in left.ep_info_buffer] == [(one["r"], one["l"]) for one in right.ep_info_buffer]


def run_twice(tmp_path, make_env, save_freq=50, trust=False, **kwargs):
    """A run at once, and one that goes on from its last checkpoint but one; both save at the same steps."""
    arguments = {"seed": 1, "learning_starts": 20, "batch_size": 8, **kwargs}
    whole = model(make_env(), **arguments)
    whole.learn(STEPS, TD3XCheckpointCallback(save_freq, tmp_path, keep_last=10))
    middle = [one.steps for one in Store(tmp_path).checkpoints() if 0 < one.steps < STEPS][-1]
    poison_generators()
    resumed = resume_run(tmp_path, make_env(), checkpoint=middle, trust=trust)
    poison_generators()
    assert resumed.num_timesteps == middle
    resumed.learn(STEPS, TD3XCheckpointCallback(save_freq, tmp_path, keep_last=10), resume=True)
    return whole, resumed


OWN_CLASS = "three critics with batch norm and dropout"
SETTINGS = {
    "plain": {},
    "correlated noise": {"action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), np.full(1, 0.3))},
    "a full buffer": {"buffer_size": 45},
    "one array of observations": {
        "optimize_memory_usage": True,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "buffer_size": 45,
    },
    "n-step returns": {"n_steps": 3},
    "a buffer on the device": {"replay_buffer_class": DeviceReplayBuffer},
    "prioritised replay": {"prioritization": "lap", "buffer_size": 45},
    "episodes": {"train_freq": (1, "episode"), "gradient_steps": -1},
    "a schedule": {"learning_rate": LinearSchedule(1e-3, 0, 1), "policy_delay": 3},
    "during the warm-up": {"learning_starts": 110},
    OWN_CLASS: {
        "policy_kwargs": {"net_arch": [8], "n_critics": 3, "features_extractor_class": NoisyExtractor},
    },
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

    def test_with_normalised_observations_and_rewards(self, tmp_path):
        whole, resumed = run_twice(tmp_path, lambda: VecNormalize(seeded()))
        assert_same_run(whole, resumed)
        for one in (lambda env: env.obs_rms.mean, lambda env: env.ret_rms.var, lambda env: env.returns):
            assert np.array_equal(one(whole.get_vec_normalize_env()), one(resumed.get_vec_normalize_env()))

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

    @pytest.mark.parametrize("vec", [DummyVecEnv, SubprocVecEnv])
    def test_inside_episodes_of_several_environments_that_give_their_state(self, tmp_path, vec):
        whole, resumed = run_twice(
            tmp_path, lambda: seeded(OpenLineEnv, 2, vec), save_freq=13, gradient_steps=-1, action_noise=0.3
        )
        assert_same_run(whole, resumed)
        for one in (whole, resumed):
            one.env.close()

    def test_while_updates_overlap_with_stepping(self, tmp_path):
        whole, resumed = run_twice(tmp_path, lambda: seeded(OpenLineEnv, 2, SubprocVecEnv), save_freq=13, overlap=True)
        assert_same_run(whole, resumed)
        for one in (whole, resumed):
            one.env.close()

    def test_twice_in_a_row(self, tmp_path):
        whole = model(seeded(), seed=1)
        whole.learn(100, TD3XCheckpointCallback(30, tmp_path / "whole"))
        first = model(seeded(), seed=1)
        first.learn(40, TD3XCheckpointCallback(30, tmp_path))
        second = resume_run(tmp_path, seeded()).learn(80, TD3XCheckpointCallback(30, tmp_path), resume=True)
        assert second.num_timesteps == 80
        third = resume_run(tmp_path, seeded()).learn(100, TD3XCheckpointCallback(30, tmp_path), resume=True)
        assert_same_run(whole, third)
        assert [one["steps"] for one in third.resumptions] == [40, 80]

    def test_in_another_process(self, tmp_path):
        whole = model(seeded(), seed=1)
        whole.learn(STEPS, TD3XCheckpointCallback(50, tmp_path, keep_last=5))
        code = (
            "import sys, torch; torch.set_num_threads(1)\n"
            "from sb3_td3x.checkpoint import resume_run\n"
            "from tests.test_resumes_exactly import seeded\n"
            f"resume_run(sys.argv[1], seeded(), checkpoint=60).learn({STEPS}, resume=True).save(sys.argv[2])"
        )
        subprocess.run([sys.executable, "-c", code, tmp_path, tmp_path / "end.zip"], check=True)
        end = TD3X.load(tmp_path / "end.zip")
        for name, value in weights(whole).items():
            assert th.equal(value, weights(end)[name]), name


class TestCallbacks:
    def callbacks(self, tmp_path):
        evaluation = EvalCallback(
            seeded(), n_eval_episodes=2, eval_freq=25, log_path=tmp_path, best_model_save_path=tmp_path, verbose=0, warn=False
        )
        every = EveryNTimesteps(35, EvalCallback(seeded(), n_eval_episodes=1, eval_freq=1, verbose=0, warn=False))
        return [
            evaluation,
            every,
            StopTrainingOnMaxEpisodes(1000),
            TD3XCheckpointCallback(50, tmp_path / "checkpoint", keep_last=9),
        ]

    @pytest.mark.filterwarnings("error:not restored exactly")
    def test_scores_counters_and_the_best_model_go_on(self, tmp_path):
        whole = self.callbacks(tmp_path / "whole")
        model(seeded(), seed=1).learn(STEPS, whole)
        cut = self.callbacks(tmp_path / "cut")
        model(seeded(), seed=1).learn(STEPS, cut)
        resumed = self.callbacks(tmp_path / "cut")
        run = resume_run(tmp_path / "cut" / "checkpoint", seeded(), checkpoint=60)
        seen = []

        def look(local, _):
            with np.load(tmp_path / "cut" / "evaluations.npz") as archive:
                seen.append(archive["timesteps"].tolist())
            return True

        run.learn(STEPS, [*resumed, ConvertCallback(look)], resume=True)
        assert seen[0] == [25, 50]  # not what came after the checkpoint
        for one, other in zip(whole, resumed, strict=True):
            assert one.n_calls == other.n_calls
        assert resumed[0].evaluations_timesteps == [25, 50, 75, 100]
        assert resumed[0].evaluations_results == whole[0].evaluations_results
        assert resumed[0].best_mean_reward == whole[0].best_mean_reward
        assert resumed[1].last_time_trigger == whole[1].last_time_trigger > 0
        assert resumed[2].n_episodes == whole[2].n_episodes == STEPS // 20

    def test_a_csv_whose_header_has_grown_since_goes_on_at_the_right_line(self, tmp_path):
        def grow(local, _):
            logger = local["self"].logger
            logger.record("early", 1)
            if local["self"].num_timesteps > 65:
                logger.record("late", 2)
            return True

        def learner(run):
            run.set_logger(logs.configure(tmp_path, ["csv"]))
            return run

        def rows():
            return list(csv.DictReader((tmp_path / "progress.csv").read_text().splitlines()))

        saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", keep_last=9)
        learner(model(seeded())).learn(100, [ConvertCallback(grow), saving], log_interval=1)
        before = rows()
        run = learner(resume_run(tmp_path / "checkpoint", seeded(), checkpoint=40))
        run.learn(100, [ConvertCallback(grow)], log_interval=1, resume=True)
        assert "late" in before[0]
        assert before[0].keys() == rows()[0].keys()
        for name in ("time/episodes", "time/total_timesteps", "early", "late"):
            assert [row[name] for row in rows()] == [row[name] for row in before], name

    def test_a_callback_of_unknown_state_is_named(self, tmp_path):
        class Mine(EveryNTimesteps):
            pass

        def mine():
            return Mine(10, StopTrainingOnMaxEpisodes(1000))

        model(seeded()).learn(40, [mine(), TD3XCheckpointCallback(20, tmp_path)])
        assert "callback Mine[0]" in Store(tmp_path).checkpoints()[-1].manifest["not_exact"]
        with pytest.warns(UserWarning, match=r"not restored exactly: callback Mine\[0\]"):
            resume_run(tmp_path, seeded()).learn(60, [mine()], resume=True)

    def test_a_callback_that_is_not_given_again_is_named(self, tmp_path):
        evaluation = EvalCallback(seeded(), eval_freq=10, verbose=0, warn=False)
        model(seeded()).learn(40, [evaluation, TD3XCheckpointCallback(20, tmp_path)])
        with pytest.warns(UserWarning, match=r"callback EvalCallback\[0\] \(it was not given\)"):
            resume_run(tmp_path, seeded()).learn(60, resume=True)


class TestSaysWhatIsNotExact:
    def test_open_episodes_are_cut_and_counted(self, tmp_path):
        env = DummyVecEnv([lambda: Monitor(LineEnv())] * 2)
        model(env, gradient_steps=-1).learn(60, TD3XCheckpointCallback(7, tmp_path, keep_last=9))
        saved = Store(tmp_path).checkpoints()[1]
        assert "episodes under way" in str(saved.manifest["not_exact"])
        first = saved.steps
        resumed = resume_run(tmp_path, DummyVecEnv([lambda: Monitor(LineEnv())] * 2), checkpoint=first)
        with pytest.warns(UserWarning, match="episodes that were under way"):
            resumed.learn(80, TD3XCheckpointCallback(15, tmp_path), resume=True)
        assert resumed.num_timesteps == 80
        written = Store(tmp_path).checkpoints()[-1].manifest["resumed"]
        assert written[0]["steps"] == first
        assert "cut" in written[0]["not_restored"][0]

    def test_n_step_returns_do_not_cross_the_cut(self, tmp_path):
        learner = model(DummyVecEnv([LineEnv]), n_steps=3)
        learner.learn(25)
        save_run(learner, tmp_path)
        resumed = resume_run(tmp_path, DummyVecEnv([LineEnv]))
        with pytest.warns(UserWarning, match="under way"):
            resumed.learn(30, resume=True)
        assert resumed.replay_buffer.timeouts[24, 0] == 1
        assert resumed.replay_buffer.dones[24, 0] == 0

    def test_layers_around_the_environments_begin_new_episodes_where_they_are_cut(self, tmp_path):
        def layered():
            return VecNormalize(VecMonitor(DummyVecEnv([LineEnv] * 2)))

        save_run(model(layered(), gradient_steps=-1).learn(50), tmp_path)  # episodes of 20 steps
        ended = []

        class Look(BaseCallback):
            resumable = ()

            def _on_rollout_start(self):
                assert np.array_equal(self.model._last_original_obs, self.training_env.get_original_obs())

            def _on_step(self):
                ended.extend(info["episode"]["l"] for info in self.locals["infos"] if "episode" in info)
                return True

        with pytest.warns(UserWarning, match="under way"):
            resume_run(tmp_path, layered()).learn(100, Look(), resume=True)
        assert ended == [20, 20]

    def test_wrappers_in_another_order_are_found_out(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        other = DummyVecEnv([lambda: EpisodeSeeds(Monitor(LineEnv()), 7, 0)])
        with pytest.warns(UserWarning, match="not restored exactly"):
            assert resume_run(tmp_path, other).learn(60, resume=True).num_timesteps == 60

    def test_a_callback_that_was_not_saved_is_named(self, tmp_path):
        save_run(model(seeded()).learn(40), tmp_path)
        with pytest.warns(UserWarning, match=r"callback StopTrainingOnMaxEpisodes\[0\] \(it was not saved\)"):
            resume_run(tmp_path, seeded()).learn(60, StopTrainingOnMaxEpisodes(1000), resume=True)

    def test_a_model_that_has_not_learned_yet_has_nothing_to_cut(self, tmp_path):
        checkpoint = save_run(model(seeded()), tmp_path)
        assert checkpoint.manifest["not_exact"] == []
        assert not checkpoint.is_finished

    def test_an_environment_whose_reset_differs_is_found_out(self, tmp_path):
        model(DummyVecEnv([lambda: Monitor(LineEnv())])).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resumed = resume_run(tmp_path, DummyVecEnv([lambda: Monitor(LineEnv())]))
        with pytest.warns(UserWarning, match="their reset gives another observation"):
            resumed.learn(60, resume=True)

    def test_another_version_is_named(self, tmp_path, monkeypatch):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        monkeypatch.setattr("sb3_td3x.checkpoint.run.version", lambda name: "0.0" if name == "torch" else version(name))
        with pytest.warns(UserWarning, match="torch was .*, is 0.0"):
            resume_run(tmp_path, seeded()).learn(60, resume=True)

    def test_an_exact_run_says_so(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        manifest = Store(tmp_path).checkpoints()[-1].manifest
        assert manifest["not_exact"] == []
        assert json.loads(json.dumps(manifest)) == manifest
        assert {"model.zip", "state.json"} <= manifest["files"].keys()
        assert manifest["versions"]["torch"] == th.__version__


class TestTheReplayBuffer:
    """Its transitions are written once, so a save has to know which of them it still holds."""

    def assert_saved(self, learner, tmp_path):
        buffer, saved = learner.replay_buffer, resume_run(tmp_path, seeded()).replay_buffer
        assert (buffer.pos, buffer.full) == (saved.pos, saved.full)
        for name in ("observations", "actions", "rewards"):
            assert np.array_equal(getattr(buffer, name)[: buffer.size()], getattr(saved, name)[: buffer.size()]), name

    @pytest.mark.parametrize("more", [30, 100, 130, 150, 300])
    def test_is_saved_whole_however_much_of_it_is_new(self, more, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(150)
        save_run(learner, tmp_path)
        learner.learn(more, reset_num_timesteps=False)
        save_run(learner, tmp_path)
        self.assert_saved(learner, tmp_path)

    @pytest.mark.parametrize("steps", [110, 150, 180, 200, 280])
    def test_holds_nothing_of_an_abandoned_future(self, steps, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(100)
        save_run(learner, tmp_path)
        save_run(learner.learn(80, reset_num_timesteps=False), tmp_path)
        again = resume_run(tmp_path, seeded(), checkpoint=100)
        again.action_noise = NormalActionNoise(np.zeros(1), np.full(1, 0.7))  # another future
        again.learn(steps, resume=True)
        save_run(again, tmp_path)
        self.assert_saved(again, tmp_path)

    def test_that_a_user_has_filled_is_saved_as_it_is(self, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(100)
        save_run(learner, tmp_path)
        learner.replay_buffer.rewards[:] = 7
        learner.learn(100, reset_num_timesteps=True)
        learner.replay_buffer.rewards[:] = 8
        save_run(learner, tmp_path)
        self.assert_saved(learner, tmp_path)


class TestWhenItSaves:
    def steps(self, tmp_path):
        return [one.steps for one in Store(tmp_path).checkpoints()]

    def test_waits_for_the_end_of_the_episode_but_not_for_ever(self, tmp_path):
        model(seeded()).learn(50, TD3XCheckpointCallback(15, tmp_path / "short", keep_last=9))
        assert self.steps(tmp_path / "short") == [0, 20, 40, 50]
        model(seeded(length=1000)).learn(50, TD3XCheckpointCallback(15, tmp_path / "long", keep_last=9))
        assert self.steps(tmp_path / "long") == [0, 30, 50]

    def test_inside_an_event_callback_it_says_that_it_could_not(self, tmp_path):
        with pytest.raises(ValueError, match="inside EveryNTimesteps: give TD3XCheckpointCallback to learn itself"):
            model(seeded()).learn(50, EveryNTimesteps(10, TD3XCheckpointCallback(1, tmp_path)))

    @pytest.mark.parametrize("number", [0, -1, 1.5])
    def test_refuses_to_keep_none(self, number, tmp_path):
        with pytest.raises(ValueError, match="keep_last"):
            save_run(model(seeded()), tmp_path, keep_last=number)
        with pytest.raises(ValueError, match="keep_last"):
            TD3XCheckpointCallback(1, tmp_path, keep_last=number)

    def test_keeps_the_last_ones(self, tmp_path):
        model(seeded()).learn(100, TD3XCheckpointCallback(20, tmp_path))
        assert self.steps(tmp_path) == [80, 100]

    def test_a_callback_that_ends_training_leaves_the_last_whole_state(self, tmp_path):
        model(seeded()).learn(100, [StopTrainingOnMaxEpisodes(3), TD3XCheckpointCallback(20, tmp_path)])
        assert self.steps(tmp_path) == [20, 40]

    def test_saving_does_not_change_the_run(self, tmp_path):
        saved = model(seeded(), seed=1).learn(STEPS, TD3XCheckpointCallback(20, tmp_path))
        assert_same_run(saved, model(seeded(), seed=1).learn(STEPS))

    def test_without_a_buffer_learning_waits_until_there_is_one_again(self, tmp_path):
        model(seeded(), learning_starts=30).learn(60, TD3XCheckpointCallback(20, tmp_path, save_replay_buffer=False))
        resumed = resume_run(tmp_path, seeded())
        with pytest.warns(UserWarning, match="the replay buffer"):
            resumed.learn(80, resume=True)
        assert resumed._n_updates == 30  # none since

    def test_a_finished_run_can_be_extended(self, tmp_path):
        model(seeded()).learn(60, TD3XCheckpointCallback(20, tmp_path))
        assert Store(tmp_path).checkpoints()[-1].is_finished
        assert resume_run(tmp_path, seeded()).learn(90, resume=True).num_timesteps == 90
