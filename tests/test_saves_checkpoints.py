"""Checkpoints are made when promised, and hold all of the run."""

import inspect
import warnings

import numpy as np
import pytest
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import CheckpointCallback, StopTrainingOnMaxEpisodes
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import TD3XCheckpointCallback, replay, resume_run, save_run
from sb3_td3x.errors import CheckpointError
from tests.resuming import STEPS, assert_same_run, saved_steps, seeded
from tests.tools import SPACES, LineEnv, model


class TestTheReplayBuffer:
    """Its transitions are written once, so a save has to know which of them it still holds."""

    @pytest.fixture(autouse=True)
    def small_chunks(self, monkeypatch):
        monkeypatch.setattr(replay, "CHUNK_SIZE", 20)

    def assert_is_saved(self, learner, tmp_path):
        """Now, whatever was saved before."""
        save_run(learner, tmp_path)
        buffer, saved = learner.replay_buffer, resume_run(tmp_path, seeded()).replay_buffer
        assert (buffer.pos, buffer.full) == (saved.pos, saved.full)
        arrays = {name: array[: buffer.size()] for name, array in vars(buffer).items() if isinstance(array, np.ndarray)}
        assert {"observations", "next_observations", "actions", "rewards", "dones", "timeouts"} <= {*arrays}
        for name, array in arrays.items():
            assert np.array_equal(array, getattr(saved, name)[: buffer.size()]), name

    @pytest.mark.parametrize("more", [30, 100, 130])
    @pytest.mark.parametrize(
        "cls", [TD3X, type("StoresInItsOwnWay", (TD3X,), {"_store_transition": OffPolicyAlgorithm._store_transition})]
    )
    def test_is_saved_whole_however_much_of_it_is_new(self, cls, more, tmp_path):
        learner = model(seeded(), cls=cls, buffer_size=100).learn(150)
        save_run(learner, tmp_path)
        self.assert_is_saved(learner.learn(more, reset_num_timesteps=False), tmp_path)

    def test_with_shared_memory_is_not_written_again_at_any_step_either(self, tmp_path):
        kwargs = {"handle_timeout_termination": False}
        learner = model(seeded(), buffer_size=100, optimize_memory_usage=True, replay_buffer_kwargs=kwargs)
        for _ in range(60):
            before = set(tmp_path.glob("replay/*"))
            save_run(learner.learn(3, reset_num_timesteps=False), tmp_path)
            assert len(set(tmp_path.glob("replay/*")) - before) <= 2
        assert np.array_equal(resume_run(tmp_path, seeded()).replay_buffer.actions, learner.replay_buffer.actions)

    @pytest.mark.parametrize(
        ("kwargs", "steps", "reward"),
        [
            ({"optimize_memory_usage": True, "handle_timeout_termination": False}, lambda step: 0, lambda step: 0),
            ({}, lambda step: step, lambda step: step * (step % 20 != 18)),  # the last of each file is as before
        ],
    )
    def test_is_told_from_an_older_one_by_its_observations_or_by_the_steps_since(self, kwargs, steps, reward, tmp_path):
        buffer, loaded = (ReplayBuffer(40, *SPACES, **kwargs) for _ in range(2))
        for step in range(120):
            seen = np.full(3, step) if kwargs else np.zeros(3)
            buffer.add(seen, seen + 1, np.ones(1), np.full(1, reward(step)), np.zeros(1), [{}])
            if step in (59, 119):
                saved = replay.save(buffer, tmp_path, steps(step))
        replay.load(loaded, tmp_path, saved)
        assert np.array_equal(loaded.observations, buffer.observations)
        assert np.array_equal(loaded.rewards, buffer.rewards)

    def test_that_was_loaded_and_takes_time_limits_for_ends_or_not_stays_so(self, tmp_path):
        model(seeded(), buffer_size=100).learn(30).save_replay_buffer(tmp_path / "buffer")
        learner = model(seeded(), buffer_size=100, replay_buffer_kwargs={"handle_timeout_termination": False})
        learner.load_replay_buffer(tmp_path / "buffer")
        save_run(learner.learn(20, reset_num_timesteps=False), tmp_path)
        assert resume_run(tmp_path, seeded()).replay_buffer.handle_timeout_termination

    def test_of_many_environments_is_not_written_again_either(self, tmp_path):
        learner = model(seeded(count=5), buffer_size=500)
        save_run(learner.learn(50), tmp_path)
        before = set(tmp_path.glob("replay/*"))
        save_run(learner.learn(25, reset_num_timesteps=False), tmp_path)
        new = [np.load(path)["rewards"].shape for path in set(tmp_path.glob("replay/*")) - before]
        assert all(shape in [(rows, 5) for rows in range(1, 5)] for shape in new)
        assert sum(steps for steps, _ in new) <= 5 + 4

    @pytest.mark.parametrize("steps", [110, 180, 280])
    def test_holds_nothing_of_an_abandoned_future(self, steps, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(100)
        save_run(learner, tmp_path)
        save_run(learner.learn(80, reset_num_timesteps=False), tmp_path)
        again = resume_run(tmp_path, seeded(), checkpoint=100)
        again.action_noise = NormalActionNoise(np.zeros(1), np.full(1, 0.7))  # another future
        self.assert_is_saved(again.learn(steps, resume=True), tmp_path)

    def test_of_a_new_run_or_that_a_user_puts_in_its_place_is_saved_too(self, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(100)
        learner.save_replay_buffer(tmp_path / "other")
        self.assert_is_saved(learner.learn(140), tmp_path)  # begun anew
        learner.load_replay_buffer(tmp_path / "other")
        self.assert_is_saved(learner, tmp_path)

    def test_that_was_emptied_is_saved_as_what_has_been_stored_since(self, tmp_path):
        learner = model(seeded(), buffer_size=100).learn(200)
        save_run(learner, tmp_path)
        learner.replay_buffer.reset()
        self.assert_is_saved(learner.learn(40, reset_num_timesteps=False), tmp_path)

    def test_is_not_written_again_where_it_has_not_changed(self, tmp_path):
        learner = model(seeded()).learn(100)
        before = save_run(learner, tmp_path).manifest["replay"]["chunks"]
        after = save_run(learner.learn(60, reset_num_timesteps=False), tmp_path).manifest["replay"]["chunks"]
        spans = [(0, 19), *[(first, first + 20) for first in range(19, 159, 20)], (159, 160)]
        assert [(chunk["first"], chunk["last"]) for chunk in after] == spans
        assert after[:5] == before[:5]

    @pytest.mark.parametrize(
        "other", [{"buffer_size": 50}, {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 1}}]
    )
    def test_that_was_loaded_and_is_not_the_models_own_is_saved_too(self, other, tmp_path):
        model(seeded(), **{"buffer_size": 100, **other}).learn(40).save_replay_buffer(tmp_path / "buffer")
        learner = model(seeded(), buffer_size=100)
        learner.load_replay_buffer(tmp_path / "buffer")
        self.assert_is_saved(learner.learn(80), tmp_path)
        resumed = resume_run(tmp_path, seeded())
        assert type(resumed.replay_buffer) is type(learner.replay_buffer)
        assert resumed.replay_buffer.buffer_size == learner.replay_buffer.buffer_size
        assert resumed.learn(100, resume=True).num_timesteps == 100

    def test_that_does_not_fit_is_refused_with_what_differs(self, tmp_path):
        save_run(model(seeded(count=2), gradient_steps=-1).learn(40), tmp_path)
        with pytest.raises(CheckpointError, match="n_envs was 2, is 1"):
            resume_run(tmp_path, seeded())


def test_the_callback_takes_the_arguments_of_sb3s_in_their_order():
    ours, theirs = (list(inspect.signature(cls).parameters) for cls in (TD3XCheckpointCallback, CheckpointCallback))
    assert ours[: len(theirs)] == theirs


class TestWhenItSaves:
    def test_waits_for_the_end_of_the_episode_but_not_forever(self, tmp_path):
        model(seeded()).learn(50, TD3XCheckpointCallback(15, tmp_path / "short", keep_last=9))
        assert saved_steps(tmp_path / "short") == [0, 20, 40, 50]
        model(seeded(length=1000)).learn(50, TD3XCheckpointCallback(15, tmp_path / "long", keep_last=9))
        assert saved_steps(tmp_path / "long") == [0, 29, 44, 50]

    def test_saves_as_often_as_asked_however_long_episodes_and_rollouts_are(self, tmp_path):
        model(seeded(length=1000), train_freq=8).learn(96, TD3XCheckpointCallback(15, tmp_path, keep_last=9))
        assert saved_steps(tmp_path) == [0, 24, 40, 56, 72, 88, 96]

    def test_several_environments_are_not_waited_for(self, tmp_path):
        env = DummyVecEnv([lambda length=length: LineEnv(length=length) for length in (7, 11)])
        model(env).learn(100, TD3XCheckpointCallback(10, tmp_path, keep_last=9))
        assert saved_steps(tmp_path) == [0, 20, 40, 60, 80, 100]

    @pytest.mark.parametrize(
        ("name", "value"), [("keep_last", 0), ("keep_last", 1.5), ("name_prefix", ".run"), ("name_prefix", "a/b")]
    )
    def test_refuses_to_keep_none_and_names_that_it_would_not_find_again(self, name, value, tmp_path):
        with pytest.raises(ValueError, match=name):
            save_run(model(seeded()), tmp_path, **{name: value})
        with pytest.raises(ValueError, match=name):
            TD3XCheckpointCallback(1, tmp_path, **{name: value})
        assert list(tmp_path.iterdir()) == []

    def test_takes_a_whole_number_as_a_float(self, tmp_path):
        learner = model(seeded())
        for _ in range(3):
            save_run(learner.learn(20, reset_num_timesteps=False), tmp_path, keep_last=2.0)
        assert saved_steps(tmp_path) == [40, 60]

    def test_leaves_what_others_keep_in_its_folder(self, tmp_path):
        theirs = ["replay/expert.pkl", "dashboard/manifest.json", ".video.partial/frame.png", "notes.txt"]
        for name in theirs:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("{}")
        model(seeded()).learn(60, TD3XCheckpointCallback(20, tmp_path))
        assert saved_steps(tmp_path) == [40, 60]
        assert all((tmp_path / name).read_text() == "{}" for name in theirs)

    def test_inside_a_step_it_is_refused(self, tmp_path):
        def save(local, _):
            save_run(local["self"], tmp_path)

        with pytest.raises(ValueError, match="_on_rollout_start"):
            model(seeded()).learn(50, save)
        assert saved_steps(tmp_path) == []

    @pytest.mark.parametrize(("value", "named"), [(LineEnv(), "LineEnv"), ({1}, "a set")])
    def test_names_the_class_whose_state_it_cannot_hold(self, value, named, tmp_path):
        class Own(StopTrainingOnMaxEpisodes):
            resumable = ("held",)
            held = value

        with pytest.raises(CheckpointError, match=f"the state of the run: .*{named}"):
            model(seeded()).learn(50, [Own(5), TD3XCheckpointCallback(20, tmp_path)])
        assert saved_steps(tmp_path) == []

    def test_a_callback_may_name_one_attribute_without_a_comma(self, tmp_path):
        class Own(StopTrainingOnMaxEpisodes):
            resumable = "held"
            held = 0

        kept, anew = Own(50), Own(50)
        kept.held = 7
        model(seeded()).learn(40, [kept, TD3XCheckpointCallback(20, tmp_path)])
        resume_run(tmp_path, seeded()).learn(60, [anew, TD3XCheckpointCallback(20, tmp_path)], resume=True)
        assert anew.held == 7

    def test_a_callback_that_ends_training_leaves_the_last_whole_state(self, tmp_path):
        model(seeded()).learn(100, [StopTrainingOnMaxEpisodes(3), TD3XCheckpointCallback(20, tmp_path)])
        assert saved_steps(tmp_path) == [20, 40]

    def test_a_request_to_stop_that_comes_while_learn_begins_stops_it_once(self, tmp_path):
        saving = TD3XCheckpointCallback(20, tmp_path)
        saving.save_and_stop()
        algorithm = model(seeded()).learn(100, saving)
        assert algorithm.num_timesteps == 0
        assert algorithm.learn(100, saving).num_timesteps == 100

    def test_the_newest_checkpoint_is_not_made_again_by_a_resumed_run(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        resume_run(tmp_path, seeded()).learn(50, TD3XCheckpointCallback(20, tmp_path, keep_last=9), resume=True)
        assert saved_steps(tmp_path) == [20, 40, 50]

    def test_saving_does_not_change_the_run(self, tmp_path):
        saved = model(seeded(), seed=1).learn(STEPS, TD3XCheckpointCallback(20, tmp_path))
        assert_same_run(saved, model(seeded(), seed=1).learn(STEPS))

    def test_without_a_buffer_learning_waits_until_there_is_one_again(self, tmp_path):
        model(seeded(), learning_starts=30).learn(60, TD3XCheckpointCallback(20, tmp_path, save_replay_buffer=False))
        resumed = resume_run(tmp_path, seeded())
        with pytest.warns(UserWarning, match="the replay buffer"):
            resumed.learn(80, resume=True)
        assert resumed._n_updates == 30  # none since

    def test_resuming_to_where_the_run_has_been_says_so_and_saves_nothing(self, tmp_path):
        model(seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path))
        before = sorted(tmp_path.iterdir())
        resumed = resume_run(tmp_path, seeded())
        with pytest.warns(UserWarning, match=r"nothing to do: 40 steps have been made, .* \(30\) counts from") as warned:
            resumed.learn(30, TD3XCheckpointCallback(20, tmp_path), resume=True)
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resume_run(tmp_path, seeded()).learn(40, TD3XCheckpointCallback(20, tmp_path), resume=True)
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.parametrize("often", [0, 0.5])
    def test_an_invalid_frequency_is_refused(self, often, tmp_path):
        with pytest.raises(ValueError, match="save_freq must be"):
            TD3XCheckpointCallback(often, tmp_path)


class Closed(VecEnv):
    """As libraries write them whose environments are not Python objects."""

    reset = step_async = step_wait = close = None

    def __init__(self):
        inner = DummyVecEnv([LineEnv])
        super().__init__(1, inner.observation_space, inner.action_space)
        self.reset, self.step_async, self.step_wait, self.close = inner.reset, inner.step_async, inner.step_wait, inner.close

    def get_attr(self, attr_name, indices=None):
        return [None]

    def env_method(self, *args, **kwargs):
        raise NotImplementedError

    set_attr = env_method

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False]


def test_a_run_is_saved_whose_environments_take_no_calls(tmp_path):
    save_run(model(Closed()).learn(20), tmp_path)
    with pytest.warns(UserWarning, match="not restored exactly: the current episodes|not restored exactly: the environments"):
        assert resume_run(tmp_path, Closed()).learn(40, resume=True).num_timesteps == 40


class NamedAlike(LineEnv):
    """As the hands of Gymnasium-Robotics, whose states have these names too."""

    def get_env_state(self):
        return {}

    def set_env_state(self, state_dict):
        raise AssertionError("it was not asked for")


def test_environments_may_have_methods_named_as_those_of_checkpoints(tmp_path):
    env = SubprocVecEnv([NamedAlike, NamedAlike], "fork")
    model(env).learn(40, TD3XCheckpointCallback(10, tmp_path))
    with pytest.warns(UserWarning, match="not restored exactly"):
        assert resume_run(tmp_path, env).learn(60, resume=True).num_timesteps == 60
    env.close()
