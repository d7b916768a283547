"""Callbacks, evaluations and TensorBoard around a run that goes on; their counters and scores: ``test_resumes_exactly``."""

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_td3x.checkpoint import ResumableEnv, Store, TD3XCheckpointCallback, resume_run
from tests.resuming import OpenLineEnv, seeded
from tests.tools import LineEnv, model


@pytest.mark.parametrize("around", [lambda saving: saving, lambda saving: CallbackList([saving])])
@pytest.mark.parametrize("outer", ["every", "evaluation"])
def test_a_checkpoint_inside_another_callback_is_refused(outer, around, tmp_path):
    inner = around(TD3XCheckpointCallback(20, tmp_path))
    callback = EveryNTimesteps(20, inner) if outer == "every" else EvalCallback(seeded(), callback_after_eval=inner)
    with pytest.raises(ValueError, match="a checkpoint cannot be made inside"):
        model(seeded()).learn(60, callback)


def test_another_number_of_episodes_is_refused_before_a_step_is_made(tmp_path):
    def evaluation(episodes):
        return EvalCallback(seeded(), eval_freq=20, n_eval_episodes=episodes, log_path=str(tmp_path / "scores"), verbose=0)

    model(seeded()).learn(40, [evaluation(2), TD3XCheckpointCallback(20, tmp_path / "run")])
    resumed = resume_run(tmp_path / "run", seeded())
    with pytest.raises(ValueError, match=r"has evaluated over 2 episodes so far, not 3: give it n_eval_episodes=2"):
        resumed.learn(80, [evaluation(3), TD3XCheckpointCallback(20, tmp_path / "run")], resume=True)
    assert resumed.num_timesteps == 40
    again = resume_run(tmp_path / "run", seeded())
    again.learn(80, [evaluation(2), TD3XCheckpointCallback(20, tmp_path / "run")], resume=True)
    assert np.load(tmp_path / "scores" / "evaluations.npz")["timesteps"].tolist() == [20, 40, 60, 80]


def test_an_evaluations_environment_need_not_have_a_state_before_it_was_reset(tmp_path):
    callbacks = [EvalCallback(DummyVecEnv([lambda: ResumableEnv(OpenLineEnv())]), eval_freq=20, verbose=0)]
    learned = model(seeded()).learn(40, [*callbacks, TD3XCheckpointCallback(20, tmp_path)])
    assert learned.num_timesteps == 40
    assert [one.steps for one in Store(tmp_path).checkpoints()] == [20, 40]


def test_one_that_only_shows_may_come_and_go(tmp_path):
    class Shows(BaseCallback):
        resumable, only_shows, score = ("score",), True, 0

        def _on_step(self):
            return True

    for steps, callbacks in ((40, [Shows()]), (80, []), (120, [Shows()])):
        learner = resume_run(tmp_path, seeded()) if steps > 40 else model(seeded())
        learner.learn(steps, [*callbacks, TD3XCheckpointCallback(20, tmp_path)], resume=steps > 40)
    assert [one["not_restored"] for one in learner.resumptions] == [[], []]


def test_tensorboard_goes_on_in_the_runs_own_folder(tmp_path):
    """SB3 goes on in the newest one, which may be another run's."""
    board = str(tmp_path / "board")
    for number in (1, 2):
        learner = model(seeded(), seed=number, tensorboard_log=board)
        learner.learn(80, TD3XCheckpointCallback(20, tmp_path / f"run{number}", keep_last=9), log_interval=1)
    resumed = resume_run(tmp_path / "run1", seeded(), checkpoint=40)
    resumed.learn(160, TD3XCheckpointCallback(20, tmp_path / "run1", keep_last=9), log_interval=1, resume=True)

    def steps(name):
        events = EventAccumulator(str(tmp_path / "board" / name)).Reload()
        return [event.step for event in events.Scalars("rollout/ep_rew_mean")]

    assert steps("TD3X_1") == [20, 40, 60, 80, 100, 120, 140, 160]
    assert steps("TD3X_2") == [20, 40, 60, 80]


def test_another_number_of_environments_goes_on_with_the_best_actor_too(tmp_path):
    saving = TD3XCheckpointCallback(40, tmp_path, save_replay_buffer=False)
    model(DummyVecEnv([LineEnv] * 2), best_actor_window=2).learn(80, saving)
    resumed = resume_run(tmp_path, DummyVecEnv([LineEnv] * 3))
    resumed.learn(140, TD3XCheckpointCallback(40, tmp_path, save_replay_buffer=False), resume=True)
    assert resumed.num_timesteps >= 140
    assert resumed.best_actor is not None
