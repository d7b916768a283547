"""What the tests of studies share: a short study, and a runner that makes runs in this process."""

import os
import signal
import time
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import yaml
from ray.cluster_utils import Cluster

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback
from sb3_td3x.errors import EnvironmentDiedError
from sb3_td3x.runs import runners
from sb3_td3x.runs.study import StudyFolder, StudyRun, attempt, read, train_td3x
from tests import resuming

SHORT = {
    "steps": 450,
    "eval_freq": 200,
    "eval_episodes": 1,
    "save_freq": 100,
    "envs": ["Pendulum-v1"],
    "seeds": [0, 1],
    "overrides": {"policy_kwargs": {"net_arch": [8]}, "learning_starts": 50, "batch_size": 8, "buffer_size": 1000},
    "runs": [{"setting": "default"}],
}


def study(path, **changes):
    """Write a study file and read it."""
    path.write_text(yaml.safe_dump({**SHORT, **changes}))
    return read(path)


def here(train, folder, runs):
    """A runner without processes."""
    for run in runs:
        try:
            attempt(train, folder, run)
        except Exception as error:
            yield run, str(error)
        else:
            yield run, ""


class Outcome(NamedTuple):
    run: StudyRun
    is_finished: bool
    error: str


def made(runs, path, runner=here, train=train_td3x):
    """Make the runs of a study in ``path``; its outcomes by name."""
    folder = StudyFolder.at(path)
    ended = runners.drive(runs, folder, train, runner)
    return {run.name: Outcome(run, folder.is_finished(run), error) for run, error in ended}


def saved_steps(path, run):
    """Steps of a run's checkpoints."""
    return resuming.saved_steps(StudyFolder.at(path).run(run) / "checkpoint")


def resumed_at(path, run):
    """Where a run was resumed, according to its last checkpoint."""
    last = Store(StudyFolder.at(path).run(run) / "checkpoint").checkpoints()[-1]
    return [resumption["steps"] for resumption in last.manifest["resumed"]]


def tables(path):
    """Every run's scores without the seconds."""
    return {
        table.name: [line.rpartition(",")[0] for line in table.read_text().splitlines()]
        for table in (path / "returns").iterdir()
    }


@contextmanager
def after_200_steps(act):
    """Inside, the first checkpoint that is made 200 steps or more after a run has begun is followed by ``act``."""
    save = TD3XCheckpointCallback._save

    def save_and_act(callback):
        save(callback)
        if callback.model.num_timesteps >= callback._began_at + 200:
            TD3XCheckpointCallback._save = save
            act(callback)

    TD3XCheckpointCallback._save = save_and_act
    try:
        yield
    finally:
        TD3XCheckpointCallback._save = save


def train_and_be_lost_once(run, path):
    """Trains, but after the first checkpoint of 200 steps seed 0 is killed, and the process of seed 1's environment ends."""

    def lose(_):
        if run.seed == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise EnvironmentDiedError([3], "ended for once")

    with nullcontext() if (path / "checkpoint").exists() else after_200_steps(lose):
        return train_td3x(run, path)


def train_until_asked_to_stop(run, path):
    """Trains, and waits after the checkpoint that comes 200 steps after its beginning."""

    def wait(callback):
        deadline = time.monotonic() + 120  # where a test has failed, nobody asks
        while not callback.is_stopping and time.monotonic() < deadline:
            time.sleep(0.02)

    with after_200_steps(wait):
        return train_td3x(run, path)


@contextmanager
def nodes(*cores):
    """A Ray cluster on this machine with a node of so many cores each; gives the cluster and its nodes."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # other tests run beside it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster, [cluster.add_node(num_cpus=number) for number in cores]
    finally:
        cluster.shutdown()
