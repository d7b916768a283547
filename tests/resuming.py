"""Runs that are saved and resumed, and what makes two of them the same."""

import csv
import os
import random
from unittest.mock import Mock

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_td3x.checkpoint import ResumableEnv, Store, TD3XCheckpointCallback, resume_run
from sb3_td3x.common import lock
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.environments import EpisodeSeeds
from sb3_td3x.runs.evaluation import Evaluation
from tests.paths import optimizer_states
from tests.tools import LineEnv, largest_difference, model, weights

STEPS = 120


class OpenLineEnv(LineEnv):
    """A ``LineEnv`` that gives and takes its state."""

    def get_run_state(self):
        return {"position": self.position, "time": self.time}

    def set_run_state(self, state):
        self.position, self.time = state["position"], state["time"]


def leave_lock(folder, **changes):
    """A lock as another process has left it there; by default one of this host with this process's number."""
    fields = {"pid": os.getpid(), "host": lock._this_host(folder), "mode": "lease", "token": "left", "start": None}
    fields = {**fields, "duration": lock.LEASE_SECONDS, **changes}
    lines = ["filelock/2", *(f"{name}={value}" for name, value in fields.items() if value is not None)]
    (folder / "lock").write_text("\n".join([*lines, ""]))


def seeded(env=LineEnv, count=1, vec=DummyVecEnv, wrapper=lambda env: env, **kwargs):
    def maker(index):
        return lambda: ResumableEnv(Monitor(wrapper(EpisodeSeeds(env(**kwargs), 7, index))))

    return vec([maker(index) for index in range(count)])


def evaluating(eval_freq=20, env=None, **kwargs):
    """SB3's evaluation, of one episode."""
    return EvalCallback(env or seeded(), eval_freq=eval_freq, **{"n_eval_episodes": 1, "verbose": 0, "warn": False, **kwargs})


def scoring(folder, env=None, **kwargs):
    """The command's evaluation, of one episode after every 20 steps, for a run in ``folder``."""
    kwargs = {"eval_freq": 20, "n_eval_episodes": 1, "lock": Mock(), **kwargs}
    return Evaluation(env or seeded(), folder=RunDir(folder, "Line"), warn=False, **kwargs)


def saved_steps(folder):
    """The steps of the checkpoints in a folder."""
    return [saved.steps for saved in Store(folder).checkpoints()]


def rows(path):
    """A CSV's rows without the columns of wall-clock time, whatever the order of its columns."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    timed = {"t", "time/fps", "time/time_elapsed", "time/updates_per_second"}
    return [{key: value for key, value in row.items() if key not in timed} for row in csv.DictReader(lines)]


def board_steps(folder, name="rollout/ep_rew_mean"):
    """The steps at which TensorBoard shows this value."""
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars(name)]


def poison_generators():
    """What a new process would do to the global generators."""
    random.seed(123), np.random.seed(456), th.manual_seed(789)


def assert_same_run(left, right):
    assert largest_difference(weights(left), weights(right)) == 0
    assert largest_difference(optimizer_states(left), optimizer_states(right)) == 0
    assert left.replay_buffer.pos == right.replay_buffer.pos
    assert left.replay_buffer.full == right.replay_buffer.full
    for name in ("actions", "rewards", "dones", "timeouts"):
        assert np.array_equal(getattr(left.replay_buffer, name), getattr(right.replay_buffer, name)), name
    for name in ("num_timesteps", "_n_updates", "_episode_num"):
        assert getattr(left, name) == getattr(right, name), name
    episodes, theirs = ([(each["r"], each["l"]) for each in run.ep_info_buffer] for run in (left, right))
    assert episodes == theirs


def run_twice(tmp_path, make_env, save_freq=50, trust=False, **kwargs):
    """A run at once, and one that is resumed from its last checkpoint but one; both save at the same steps."""
    arguments = {"seed": 1, "learning_starts": 20, "batch_size": 8, **kwargs}
    whole = model(make_env(), **arguments)
    whole.learn(STEPS, TD3XCheckpointCallback(save_freq, tmp_path, keep_last=10))
    middle = [steps for steps in saved_steps(tmp_path) if 0 < steps < STEPS][-1]
    poison_generators()
    resumed = resume_run(tmp_path, make_env(), checkpoint=middle, trust=trust)
    poison_generators()
    assert resumed.num_timesteps == middle
    resumed.learn(STEPS, TD3XCheckpointCallback(save_freq, tmp_path, keep_last=10), resume=True)
    return whole, resumed
