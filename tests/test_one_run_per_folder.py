"""A folder belongs to one run and to one process that writes it, whatever becomes of that process."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common import lock
from sb3_td3x.common.lock import RunLock
from sb3_td3x.errors import CheckpointError, LockLostError, RunLockedError
from sb3_td3x.runs.evaluation import Evaluation
from sb3_td3x.runs.experiment import Experiment, prepare
from tests.resuming import seeded
from tests.tools import model


class TestOneRunPerFolder:
    def test_another_run_is_refused_and_changes_nothing(self, tmp_path):
        model(seeded(), seed=1).learn(40, TD3XCheckpointCallback(20, tmp_path))
        with pytest.raises(CheckpointError, match="holds td3x_40_steps, which this run did not save"):
            model(seeded(), seed=2).learn(40, TD3XCheckpointCallback(20, tmp_path))
        assert [one.steps for one in Store(tmp_path).checkpoints()] == [20, 40]

    def test_a_process_that_slept_while_another_took_its_run_over_stops(self, tmp_path):
        sleeper = model(seeded())
        sleeper.learn(40, TD3XCheckpointCallback(20, tmp_path))
        resume_run(tmp_path, seeded()).learn(60, TD3XCheckpointCallback(20, tmp_path), resume=True)
        with pytest.raises(CheckpointError, match="which this run did not save"):
            sleeper.learn(100, TD3XCheckpointCallback(20, tmp_path), resume=True)
        assert Store(tmp_path).find().steps == 60

    def test_nobody_else_saves_meanwhile(self, tmp_path):
        with Store(tmp_path).writing(), pytest.raises(RunLockedError):
            save_run(model(seeded()).learn(20), tmp_path)

    def test_one_model_may_learn_twice(self, tmp_path):
        saving = TD3XCheckpointCallback(20, tmp_path)
        learner = model(seeded())
        for updates in (50, 100):
            learner.learn(60, saving)
            assert Store(tmp_path).find().manifest["updates"] == learner._n_updates == updates


class TestOneWriter:
    def test_the_second_is_refused_with_the_firsts_process(self, tmp_path):
        with RunLock(tmp_path), pytest.raises(RunLockedError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
            pass
        with RunLock(tmp_path):
            pass  # the first has left

    def test_a_lock_of_a_dead_process_is_taken_over(self, tmp_path):
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        self.leave_lock(tmp_path, pid=process.pid)
        with RunLock(tmp_path):
            pass

    def test_a_lock_of_a_process_that_nobody_has_waited_for_is_taken_over(self, tmp_path):
        process = subprocess.Popen([sys.executable, "-c", ""])
        deadline = time.monotonic() + 20
        while not lock._is_zombie(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.leave_lock(tmp_path, pid=process.pid)
        with RunLock(tmp_path):
            pass
        process.wait()

    def test_a_lock_of_an_earlier_boot_is_taken_over(self, tmp_path):
        self.leave_lock(tmp_path, boot="another")
        with RunLock(tmp_path):
            pass

    def test_a_lock_of_a_dead_process_whose_number_is_in_use_again_is_taken_over(self, tmp_path):
        """As the first process of a container that is started again."""
        self.leave_lock(tmp_path, started=1)
        with RunLock(tmp_path):
            pass

    def test_a_lock_of_a_process_that_cannot_be_seen_from_this_container_is_held_while_its_heart_beats(self, tmp_path):
        self.leave_lock(tmp_path, pid=2**22 + 1, pid_namespace="pid:[1]")
        self.is_held_while_its_heart_beats(tmp_path, f"process {2**22 + 1} on")

    def test_a_process_that_slept_while_another_came_and_left_saves_no_more(self, tmp_path):
        with RunLock(tmp_path) as ours:
            saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", lock=ours)
            learner = model(seeded()).learn(40, saving)
            (tmp_path / "lock").unlink()
            with pytest.raises(LockLostError, match="the lock of this process is gone"):
                learner.learn(40, saving, reset_num_timesteps=False)
        assert [one.steps for one in Store(tmp_path / "checkpoint").checkpoints()] == [20, 40]

    def test_a_process_that_has_lost_it_saves_no_more(self, tmp_path):
        with RunLock(tmp_path) as ours:
            saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", lock=ours)
            learner = model(seeded()).learn(40, saving)
            (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "token": "another"}))
            with pytest.raises(RunLockedError, match="process 7 on elsewhere"):
                learner.learn(40, saving, reset_num_timesteps=False)
        assert [one.steps for one in Store(tmp_path / "checkpoint").checkpoints()] == [20, 40]
        assert (tmp_path / "lock").exists()  # the other's

    def test_a_process_that_has_lost_it_writes_no_more_scores_and_models(self, tmp_path):
        with RunLock(tmp_path) as ours:
            scored = Evaluation(
                seeded(), eval_freq=20, n_eval_episodes=1, log_path=str(tmp_path), best_model_save_path=str(tmp_path),
                verbose=0, warn=False, lock=ours,
            )  # fmt: skip
            learner = model(seeded()).learn(40, scored)
            (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "token": "another"}))
            before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
            scored.best_mean_reward = -np.inf
            with pytest.raises(RunLockedError, match="process 7 on elsewhere"):
                learner.learn(40, scored, reset_num_timesteps=False)
        assert {"best_model.zip", "evaluations.npz", "scores.csv"} < before.keys()
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_lock_that_cannot_be_taken_leaves_nothing(self, tmp_path, monkeypatch):
        def full(path, text):
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(lock.Path, "write_text", full)
            with pytest.raises(OSError, match="No space left"):
                prepare(Experiment("Pendulum-v1", steps=10, device="cpu", out=tmp_path))
        assert list((tmp_path / "td3x").iterdir()) == []

    def test_what_is_left_of_one_that_was_being_taken_does_not_keep_a_run_from_starting(self, tmp_path):
        (tmp_path / ".lock.0123").touch()
        run = prepare(Experiment("Pendulum-v1", steps=10, device="cpu"), tmp_path)
        run.resources.close()
        assert run.total == 10

    def test_a_lock_of_another_machine_is_held_while_its_heart_beats(self, tmp_path):
        self.leave_lock(tmp_path, host="elsewhere", pid=1)
        self.is_held_while_its_heart_beats(tmp_path, "process 1 on elsewhere")

    def test_a_killed_container_that_is_started_again_waits_and_goes_on(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(lock, "STALE_SECONDS", 1)
        self.leave_lock(tmp_path, pid=1, pid_namespace="pid:[1]")
        with RunLock(tmp_path) as ours:
            assert ours.is_ours()
        assert "waiting up to a minute for a sign of process 1 on" in caplog.text

    def test_a_silent_lock_falls_although_clocks_disagree(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "STALE_SECONDS", 0.6)
        self.leave_lock(tmp_path, host="elsewhere")
        os.utime(tmp_path / "lock", times=(time.time() + 3600,) * 2)
        with RunLock(tmp_path) as ours:
            assert ours.is_ours()

    def test_a_disk_without_hard_links_will_do(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
        for _ in range(2):
            with RunLock(tmp_path), pytest.raises(RunLockedError, match=f"process {os.getpid()} on"), RunLock(tmp_path):
                pass
        self.leave_lock(tmp_path, boot="another")
        with RunLock(tmp_path):
            pass

    def test_its_heart_beats(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
        with RunLock(tmp_path):
            os.utime(tmp_path / "lock", times=(0, 0))
            deadline = time.monotonic() + 20
            while (tmp_path / "lock").stat().st_mtime < 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_its_heart_beats_on_after_an_error_of_the_disk(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
        beats = []

        def failing(path):
            beats.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os, "utime", failing)
        with RunLock(tmp_path):
            deadline = time.monotonic() + 20
            while len(beats) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_a_writer_that_was_replaced_knows_it_and_leaves_the_lock_alone(self, tmp_path):
        with RunLock(tmp_path) as first:
            self.leave_lock(tmp_path, token="another")  # noqa: S106  # no password
            assert not first.is_ours()
        assert (tmp_path / "lock").exists()

    def leave_lock(self, folder, **changes):
        (folder / "lock").write_text(json.dumps({**lock._this_process(), "token": "left", **changes}))

    def is_held_while_its_heart_beats(self, folder, by):
        """Of a lock whose process cannot be seen from here."""
        stop = threading.Event()

        def beat():
            while not stop.wait(0.2):
                os.utime(folder / "lock")

        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        with pytest.raises(RunLockedError, match=by), RunLock(folder):
            pass
        stop.set()
        beating.join()
        os.utime(folder / "lock", times=(time.time() - 61,) * 2)
        with RunLock(folder):
            pass
