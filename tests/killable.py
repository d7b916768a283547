"""A short run in a process of its own that can be killed at any of its file operations. Used by the tests of faults."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import gymnasium as gym
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run
from sb3_td3x.runs.environments import EpisodeSeeds
from tests.tools import Calls, model

STEPS = 200
WRITING = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.rmtree", "os.truncate"}


def environment():
    return DummyVecEnv([lambda: EpisodeSeeds(gym.make("Pendulum-v1", max_episode_steps=20), 3)])


def run(folder, kill_at=None):
    """
    Begin the run in ``folder``, or resume it, to its end.

    :param kill_at: number of the file operation in ``folder`` at which the process is killed
    :return: SHA-256 of the final parameters
    """
    folder = Path(folder)
    if kill_at is not None:
        killed_at_operation(folder, kill_at)
    saving = TD3XCheckpointCallback(30, folder)
    if is_begun := bool(Store(folder).checkpoints()):
        learner = resume_run(folder, environment())
    else:
        learner = model(environment(), buffer_size=90, batch_size=8, policy_kwargs={"net_arch": [8]})
    learner.learn(STEPS, [saving, witness(saving, folder.with_suffix(".seen"))], resume=is_begun)
    return digest(learner)


def witness(saving, path):
    """Writes down, outside the run's folder, which checkpoint was complete."""
    return Calls(lambda _: saving.last and path.write_text(str(saving.last.steps)))


def digest(learner):
    found = hashlib.sha256()
    for value in learner.policy.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def killed_at_operation(folder, number):
    """Let this process be killed at the n-th operation that changes something in ``folder``."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event not in WRITING or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def child(folder, kill_at, out):
    """What a process runs: the digest goes to a file, so that its absence tells of the kill."""
    th.set_num_threads(1)
    Path(out).write_text(run(folder, kill_at))
