"""A run that is killed, out of disk or failed by its environment can be resumed, and its files are never worse than before."""

import errno
import multiprocessing
import os
import random
import signal
import stat
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

import psutil
import pytest
import torch as th
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common import files
from sb3_td3x.errors import CheckpointError, NonFiniteError
from sb3_td3x.results.run_dir import RunDir
from tests import killable
from tests.commands import td3x
from tests.resuming import assert_same_run, seeded
from tests.tools import SOAK, Calls, Spoilt, model, weights, without_observation

KILLS = 500 if SOAK else 6


@pytest.fixture(scope="module")
def processes():
    """Processes that have imported everything already."""
    return multiprocessing.get_context("forkserver")


def start(processes, folder, out, kill_at=None):
    process = processes.Process(target=killable.child, args=(str(folder), kill_at, str(out)))
    process.start()
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, processes):
    """The final parameters of a run that nobody kills, and its seconds."""
    base = tmp_path_factory.mktemp("uninterrupted")
    began = time.monotonic()
    process = start(processes, base / "run", base / "out")
    process.join()
    return (base / "out").read_text(), time.monotonic() - began


class TestKilled:
    @pytest.mark.timeout(3600 if SOAK else 300)
    def test_at_any_moment_ends_with_the_same_weights(self, tmp_path, processes, uninterrupted):
        expected, seconds = uninterrupted
        chance = random.Random(0)
        kills = runs = 0
        while kills < KILLS:
            runs += 1
            folder, out = tmp_path / f"run{runs}", tmp_path / f"out{runs}"
            while not out.exists():
                # Half of the kills fall on a file operation, most of them inside a save; after the last the run may end
                at_operation = chance.randint(1, 60) if chance.random() < 0.5 and kills < KILLS else None
                process = start(processes, folder, out, at_operation)
                process.join(timeout=chance.uniform(0.05, seconds) if kills < KILLS and at_operation is None else None)
                if process.is_alive():
                    process.kill()
                    process.join()
                kills += process.exitcode == -signal.SIGKILL
                assert process.exitcode in (0, -signal.SIGKILL)
                seen = folder.with_suffix(".seen")
                if seen.exists():  # a checkpoint was complete: there is one that is at least as far, and whole
                    assert Store(folder).find().steps >= int(seen.read_text() or 0)
            assert out.read_text() == expected
        print(f"{kills} kills in {runs} runs: all ended with the weights of the uninterrupted one")


class TestFullDisk:
    def test_names_the_place_and_keeps_the_last_checkpoint(self, tmp_path, monkeypatch):
        folder = tmp_path / "run"
        learner = model(seeded(), seed=1)
        learner.learn(40, TD3XCheckpointCallback(20, folder))
        before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        learner.learn(20, reset_num_timesteps=False)
        for number in range(1, 10):  # model, its folder, transitions, theirs, model, state, manifest, its folder, the name
            fail_after(monkeypatch, number)
            with pytest.raises(CheckpointError, match="No space left") as raised:
                save_run(learner, folder)
            assert str(folder) in str(raised.value)
            monkeypatch.undo()
            assert Store(folder).find().steps == (40 if number < 9 else 60)
        save_run(learner, folder)
        assert Store(folder).find().steps == 60
        after = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        assert len(after) == len(before)  # nothing half-written is left

    def test_the_run_is_resumed_when_there_is_space_again(self, tmp_path, monkeypatch):
        whole = model(seeded(), seed=1).learn(100, TD3XCheckpointCallback(20, tmp_path / "whole"))
        learner = model(seeded(), seed=1)
        learner.learn(60, TD3XCheckpointCallback(20, tmp_path / "cut"))
        resumed = resume_run(tmp_path / "cut", seeded())
        fail_after(monkeypatch, 1)
        with pytest.raises(CheckpointError):
            resumed.learn(100, TD3XCheckpointCallback(20, tmp_path / "cut"), resume=True)
        monkeypatch.undo()
        again = resume_run(tmp_path / "cut", seeded()).learn(100, TD3XCheckpointCallback(20, tmp_path / "cut"), resume=True)
        assert_same_run(whole, again)


def fail_after(monkeypatch, number):
    """From the n-th flush on the disk is full: each file of a checkpoint is flushed, and each folder that gets a new name."""
    count = 0
    flush = files.flush

    def failing(path):
        nonlocal count
        count += 1
        if count >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        flush(path)

    monkeypatch.setattr(files, "flush", failing)


def test_a_save_that_failed_is_still_due(tmp_path, monkeypatch):
    saving = TD3XCheckpointCallback(20, tmp_path)
    learner = model(seeded()).learn(20, saving)
    with monkeypatch.context() as patch:
        fail_after(patch, 1)
        with pytest.raises(CheckpointError, match="No space left"):
            learner.learn(20, saving, reset_num_timesteps=False)
    learner.learn(1, saving, reset_num_timesteps=False)
    assert 40 in [checkpoint.steps for checkpoint in Store(tmp_path).checkpoints()]


def test_a_power_failure_takes_no_name_of_a_new_folder(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files, "flush", lambda path, really=files.flush: flushed.append(path) or really(path))
    folder = RunDir.create(tmp_path / "logs" / "mine", "Line-v0")
    save_run(model(seeded()).learn(20), folder.checkpoints)
    named = [tmp_path, tmp_path / "logs", tmp_path / "logs" / "mine", folder.path.parent, folder.path, folder.checkpoints]
    assert set(named) <= set(flushed)


def test_learning_without_a_log_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    learner = model(seeded())
    for _ in range(3):
        learner.learn(1, reset_num_timesteps=False)
    assert list(tmp_path.iterdir()) == []
    assert learner.logger.dir is None


def test_a_disk_that_cannot_flush_folders_holds_models_and_checkpoints(tmp_path, monkeypatch):
    """As a folder that is shared with a virtual machine; of a file the same answer is an error."""

    def fsync(handle, really=os.fsync):
        if stat.S_ISDIR(os.fstat(handle).st_mode) or answers == [errno.EIO]:
            raise OSError(answers[0], os.strerror(answers[0]))
        really(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    learner, answers = model(seeded()).learn(20), [errno.EINVAL]
    learner.save(tmp_path / "model")
    save_run(learner, tmp_path)
    assert resume_run(tmp_path, seeded()).num_timesteps == 20
    answers[0] = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        learner.save(tmp_path / "model")


def test_a_file_that_is_replaced_can_be_read_by_whoever_could_before(tmp_path):
    files.write(tmp_path / "file", b"1")
    (tmp_path / "file").chmod(0o664)
    files.write(tmp_path / "file", b"2")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o664


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save_run(model(seeded()).learn(20), tmp_path / "file" / "run")


class TestTheEnvironment:
    def test_a_value_that_is_not_finite_leaves_a_run_to_resume(self, tmp_path):
        learner = model(DummyVecEnv([lambda: Monitor(Spoilt(50, without_observation))]))
        with pytest.raises(NonFiniteError, match="environment step 50"):
            learner.learn(100, TD3XCheckpointCallback(20, tmp_path))
        assert all(th.isfinite(value).all() for value in weights(learner).values())
        assert resume_run(tmp_path, seeded()).num_timesteps == 40

    def test_sigterm_is_for_the_main_process_whose_end_does_not_wait_for_the_others(self):
        code = """
import os, signal
from sb3_td3x.runs import environments
signal.signal(signal.SIGHUP, signal.SIG_DFL)
env = environments.open_env("Pendulum-v1", 0, environments.TRAINING, {"n_envs": 2})
for process in env.processes:
    os.kill(process.pid, signal.SIGTERM), os.kill(process.pid, signal.SIGHUP)
print(env.reset().shape, [process.is_alive() for process in env.processes])
"""
        assert td3x(program=("-c", code)) == "(2, 3) [True, True]\n"


class TestLongRuns:
    UPDATES = 200_000 if SOAK else 3_000

    @pytest.mark.timeout(7200 if SOAK else 300)
    def test_memory_stays_flat(self, tmp_path, processes):
        """Updates, episodes (one per 100 updates) and saves: the last quarter takes at most 1 % more than the second."""
        with ProcessPoolExecutor(1, processes) as alone:  # beside the threads of other tests
            updates, episodes, used = alone.submit(memory_of_a_run, self.UPDATES, tmp_path).result()
        assert updates > 0.99 * self.UPDATES
        assert episodes == self.UPDATES // 100
        quarter = len(used) // 4
        growth = max(used[-quarter:]) / max(used[quarter : 2 * quarter]) - 1
        print(f"{updates:,} updates, {episodes:,} episodes: {used[-1] / 2**20:.0f} MB, growth {growth:.2%}")
        assert growth < 0.01


def memory_of_a_run(steps, folder):
    """The updates and the episodes that it has made, and the bytes that its process took after every 200 steps."""
    th.set_num_threads(1)
    small = {"buffer_size": 5_000, "batch_size": 4, "policy_kwargs": {"net_arch": [4]}, "accelerate": "plain"}
    used = []
    watch = Calls(lambda callback: callback.n_calls % 200 or used.append(psutil.Process().memory_info().rss))
    learner = model(seeded(length=100), **small)
    learner.learn(steps, [watch, TD3XCheckpointCallback(steps // 50, folder)])
    return learner._n_updates, learner._episode_num, used
