"""A folder belongs to one run and to one process that writes it, whatever becomes of that process."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common import lock
from sb3_td3x.common.lock import RunLock
from sb3_td3x.errors import CheckpointError, RunLockedError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.evaluation import save_last
from sb3_td3x.runs.experiment import Experiment, prepare
from tests.commands import wait_until
from tests.resuming import leave_lock, saved_steps, scoring, seeded
from tests.tools import model

FULL = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


def assert_refused(folder, said=None):
    with pytest.raises(RunLockedError, match=said), RunLock(folder):
        pass


def take(folder):
    with RunLock(folder) as ours:
        ours.require_ours()


class TestOneRunPerFolder:
    def test_another_run_is_refused_and_changes_nothing(self, tmp_path):
        model(seeded(), seed=1).learn(40, TD3XCheckpointCallback(20, tmp_path))
        with pytest.raises(CheckpointError, match="holds td3x_40_steps, which this run did not save"):
            model(seeded(), seed=2).learn(40, TD3XCheckpointCallback(20, tmp_path))
        assert saved_steps(tmp_path) == [20, 40]

    def test_another_run_is_refused_too_where_no_manifest_can_be_read(self, tmp_path):
        """They may be of a newer version, or not readable for now."""
        save_run(model(seeded(), seed=1).learn(40), tmp_path)
        (tmp_path / "td3x_40_steps" / "manifest.json").write_text("{}")
        with pytest.raises(CheckpointError, match="holds td3x_40_steps, which this run did not save"):
            save_run(model(seeded(), seed=2).learn(20), tmp_path)
        assert (tmp_path / "td3x_40_steps" / "model.zip").exists()

    def test_a_process_that_slept_while_another_took_its_run_over_stops(self, tmp_path):
        sleeper = model(seeded())
        sleeper.learn(40, TD3XCheckpointCallback(20, tmp_path))
        resume_run(tmp_path, seeded()).learn(60, TD3XCheckpointCallback(20, tmp_path), resume=True)
        with pytest.raises(CheckpointError, match="which this run did not save"):
            sleeper.learn(100, TD3XCheckpointCallback(20, tmp_path), resume=True)
        assert Store(tmp_path).find().steps == 60

    def test_a_run_that_saves_while_another_process_resumes_it_goes_on(self, tmp_path):
        saving = TD3XCheckpointCallback(20, tmp_path)
        living = model(seeded()).learn(40, saving)

        class Slow(TD3X):
            @classmethod
            def load(cls, *args, **kwargs):
                living.learn(20, saving, reset_num_timesteps=False)
                return super().load(*args, **kwargs)

        resumed = resume_run(tmp_path, seeded(), algorithm=Slow)
        with pytest.raises(CheckpointError, match="which this run did not save"):
            resumed.learn(60, TD3XCheckpointCallback(20, tmp_path), resume=True)
        assert living.learn(20, saving, reset_num_timesteps=False).num_timesteps == Store(tmp_path).find().steps == 80

    def test_nobody_else_saves_meanwhile(self, tmp_path):
        with Store(tmp_path).adding("other", 0, 0), pytest.raises(RunLockedError):
            save_run(model(seeded()).learn(20), tmp_path)

    def test_one_model_may_learn_twice(self, tmp_path):
        saving = TD3XCheckpointCallback(20, tmp_path)
        learner = model(seeded())
        for updates in (50, 100):
            learner.learn(60, saving)
            assert learner._n_updates == updates
            assert Store(tmp_path).find().steps == 60


class TestOneWriter:
    @pytest.fixture(autouse=True)
    def short_lease(self, monkeypatch, caplog):
        monkeypatch.setattr(lock, "LEASE_SECONDS", 1.5)
        caplog.set_level("WARNING")

    def test_a_second_one_is_refused_at_once_with_the_process_of_the_first(self, tmp_path, caplog):
        with RunLock(tmp_path):
            assert_refused(tmp_path, rf"process {os.getpid()} on {socket.gethostname()}")
        assert RunLock(tmp_path).patience == 0
        assert caplog.text == ""  # it says so when it waits
        take(tmp_path)  # the first has left
        assert list(tmp_path.iterdir()) == []

    def test_a_killed_one_is_taken_over_at_once(self, tmp_path, caplog):
        code = "import os, sys, pathlib, sb3_td3x.common.lock as lock; lock.LEASE_SECONDS = 1.5\n"
        code += "held = lock.RunLock(pathlib.Path(sys.argv[1])).__enter__(); os.kill(os.getpid(), 9)"
        subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
        assert (tmp_path / "lock").exists()
        take(tmp_path)
        assert caplog.text == ""

    def test_on_nfs_a_dead_one_is_taken_over_after_the_lease(self, tmp_path, monkeypatch):
        """filelock exchanges the names of two files, which NFS refuses."""
        monkeypatch.setattr(lock.SoftFileLease, "_try_break_stale_lock", lambda *_: None)
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()

        def take_over(differing):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            leave_lock(folder, **{"pid": process.pid, **differing})
            take(folder)
            return list(folder.iterdir())

        with ThreadPoolExecutor() as pool:  # each waits for a lease
            assert list(pool.map(take_over, [{}, {"host": "elsewhere"}, {"pid": os.getpid(), "start": 1}])) == [[]] * 3

    def test_on_nfs_a_living_one_is_not(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock.SoftFileLease, "_try_break_stale_lock", lambda *_: None)
        monkeypatch.setattr(lock, "_has_ended", lambda *_: True)  # as it looks from another host
        with RunLock(tmp_path) as first:
            assert_refused(tmp_path)
            first.require_ours()

    def test_one_killed_before_it_wrote_into_its_lock_is_taken_over(self, tmp_path):
        (tmp_path / "lock").touch()
        take(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_living_one_whose_lock_seems_empty_is_not(self, tmp_path, monkeypatch):
        """As on a folder of a network, where what was written may take a while to be seen."""
        monkeypatch.setattr(lock, "LEASE_SECONDS", 3)  # the timer may come late
        with RunLock(tmp_path):
            os.truncate(tmp_path / "lock", 0)
            threading.Timer(1, os.utime, [tmp_path / "lock"]).start()
            assert_refused(tmp_path)

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="filelock for Python 3.10 removes an empty lock after 2 seconds")
    def test_one_that_is_about_to_write_into_its_lock_is_not(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "LEASE_SECONDS", 3)  # longer than what is left of the wait when it writes
        (tmp_path / "lock").touch()
        threading.Timer(3.5, leave_lock, [tmp_path]).start()
        assert_refused(tmp_path, f"process {os.getpid()} on ")

    def test_one_whose_process_number_is_in_use_again_is_taken_over_at_once(self, tmp_path, caplog):
        """As the first process of a container that is started again."""
        leave_lock(tmp_path, start=1)
        take(tmp_path)
        assert caplog.text == ""

    def test_one_whose_parent_does_not_ask_how_it_ended_is_taken_over(self, tmp_path):
        process = subprocess.Popen([sys.executable, "-c", ""])
        wait_until(lambda: lock._has_ended(process.pid))
        leave_lock(tmp_path, pid=process.pid, start=None)
        take(tmp_path)
        process.wait()

    @pytest.mark.parametrize("host", [f"{socket.gethostname()}?pidns-f1234567", "evil\x1b]0;title"])
    def test_one_that_cannot_be_seen_is_waited_for_and_taken_over_without_a_heartbeat(self, host, tmp_path, caplog):
        """On another host, or in another container of this one; their clocks may differ."""
        leave_lock(tmp_path, host=host)
        os.utime(tmp_path / "lock", times=(time.time() + 3600,) * 2)
        began = time.monotonic()
        take(tmp_path)
        assert time.monotonic() - began > 1.5
        assert (
            f"waiting up to 1 seconds for a sign of process {os.getpid()} on {ascii(host.partition('?')[0])[1:-1]}"
            in caplog.text
        )

    def test_one_that_cannot_be_seen_is_refused_while_its_heart_beats(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock, "LEASE_SECONDS", 3)  # a beat may come late
        leave_lock(tmp_path, host="elsewhere", pid=1)
        stop = threading.Event()

        def beat():
            while not stop.wait(0.2):
                os.utime(tmp_path / "lock")

        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        assert_refused(tmp_path, "process 1 on elsewhere")
        stop.set()
        beating.join()

    def test_a_suspended_process_whose_lock_was_taken_and_released_saves_no_more(self, tmp_path):
        with RunLock(tmp_path) as ours:
            saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", lock=ours)
            learner = model(seeded()).learn(40, saving)
            (tmp_path / "lock").unlink()
            with pytest.raises(CheckpointError, match="is no longer locked by this process"):
                learner.learn(40, saving, reset_num_timesteps=False)
        assert saved_steps(tmp_path / "checkpoint") == [20, 40]

    def test_a_process_that_has_lost_its_lock_writes_no_more_checkpoints_scores_and_models(self, tmp_path):
        with RunLock(tmp_path) as ours:
            saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", lock=ours)
            scored = scoring(tmp_path, lock=ours)
            learner = model(seeded()).learn(40, [scored, saving])
            (tmp_path / "lock").unlink()
            leave_lock(tmp_path, host="elsewhere", pid=7)
            before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            scored.best_mean_reward = -np.inf
            for callback in (scored, saving):
                with pytest.raises(RunLockedError, match="process 7 on elsewhere"):
                    learner.learn(40, callback, reset_num_timesteps=False)
        assert {"best_model.zip", "evaluations.npz", "scores.csv"} < {path.name for path in before}
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def test_a_lock_that_cannot_be_taken_leaves_nothing(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(lock.SoftFileLease, "acquire", FULL)
            with pytest.raises(CheckpointError, match=r"Pendulum-v1_1 .* No space left on device"):
                prepare(Experiment("Pendulum-v1", steps=10, device="cpu", out=tmp_path))
        assert list((tmp_path / "td3x").iterdir()) == []

    def test_a_full_disk_is_named_with_the_folder_of_checkpoints(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lock.SoftFileLease, "acquire", FULL)
        with pytest.raises(CheckpointError, match=f"{tmp_path.name}.* No space left on device"):
            save_run(model(seeded()).learn(20), tmp_path)

    def test_its_heart_beats(self, tmp_path):
        with RunLock(tmp_path):
            os.utime(tmp_path / "lock", times=(0, 0))
            wait_until(lambda: (tmp_path / "lock").stat().st_mtime > 1)


def test_a_last_model_is_not_written_without_the_lock(tmp_path):
    with RunLock(tmp_path) as ours:
        (tmp_path / "lock").unlink()
        leave_lock(tmp_path, host="elsewhere", pid=7)
        with pytest.raises(RunLockedError, match="process 7 on elsewhere"):
            save_last(model(), folder := RunDir(tmp_path, "Line"), ours)
    assert not folder.last_model.exists()
