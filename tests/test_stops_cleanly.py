"""A run that is asked to stop says so at once, ends after its step, and is resumed as if it had not been stopped."""

import multiprocessing
import os
import signal
import subprocess
import time
from itertools import count
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from gymnasium.wrappers import NormalizeObservation

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common.signals import stop_signals, stopping_on_signal
from sb3_td3x.common.vec_envs import close_env
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.environments import TRAINING, open_env
from tests.commands import FAST, start, wait_until
from tests.resuming import OpenLineEnv, assert_same_run, scoring, seeded
from tests.tools import Calls, LineEnv, at, model


class TestAnEvaluation:
    """Two episodes of 20 steps each, after every 20 steps of training."""

    def callbacks(self, folder, stop_at=None):
        """:param stop_at: number of the look at the flag, over all evaluations, at which the run is asked to stop."""
        saving, looks = TD3XCheckpointCallback(20, folder / "checkpoint"), count()

        def is_stopping():
            if next(looks) == stop_at:
                saving.save_and_stop()
            return saving.is_stopping

        (folder / "Line").mkdir(parents=True, exist_ok=True)
        env = seeded(wrapper=NormalizeObservation)
        return [scoring(folder, env, n_eval_episodes=2, is_stopping=is_stopping), saving]

    @pytest.mark.filterwarnings("error:not restored exactly")
    @pytest.mark.parametrize(("stop_at", "steps"), [(0, 20), (25, 20), (41, 40), (140, 80)])
    def test_that_a_stop_prevents_or_interrupts_is_made_first_on_resume_with_the_same_scores(self, tmp_path, stop_at, steps):
        whole = self.callbacks(tmp_path / "whole")
        uninterrupted = model(seeded(), seed=1).learn(80, whole)
        stopped = self.callbacks(tmp_path / "stopped", stop_at)
        assert model(seeded(), seed=1).learn(80, stopped).num_timesteps == steps
        assert stopped[0].evaluations_timesteps == [*range(20, steps, 20)]
        resumed = self.callbacks(tmp_path / "stopped")
        run = resume_run(tmp_path / "stopped" / "checkpoint", seeded()).learn(80, resumed, resume=True)
        assert resumed[0].evaluations_timesteps == [20, 40, 60, 80]
        assert resumed[0].evaluations_results == whole[0].evaluations_results
        assert_same_run(uninterrupted, run)
        tables = [np.loadtxt(folder / "scores.csv", delimiter=",", skiprows=1) for folder in tmp_path.iterdir()]
        assert np.array_equal(tables[0][:, :3], tables[1][:, :3])


def test_a_signal_during_a_save_stops_the_run_there(tmp_path, monkeypatch):
    saving = TD3XCheckpointCallback(20, tmp_path)

    def interrupted(*args, **kwargs):
        saving.save_and_stop()
        return save_run(*args, **kwargs)

    monkeypatch.setattr("sb3_td3x.checkpoint.callback.save_run", interrupted)
    learner = model(LineEnv(length=20), train_freq=(1, "episode")).learn(200, saving)
    assert (learner.num_timesteps, learner._stopped_in_rollout) == (0, False)


@pytest.mark.filterwarnings("ignore:not restored exactly")
@pytest.mark.parametrize(("starts", "are_due"), [(10, True), (50, False)])
def test_updates_that_are_due_where_a_run_was_saved_are_named(starts, are_due, tmp_path):
    saves = Calls(_on_rollout_end=lambda callback: callback.num_timesteps == 40 and save_run(callback.model, tmp_path))
    assert not model(OpenLineEnv(length=20), learning_starts=starts).learn(60, saves)._stopped_in_rollout
    run = resume_run(tmp_path, OpenLineEnv(length=20)).learn(60, resume=True)
    assert [problem.startswith("the updates") for problem in run.resumptions[-1]["not_restored"]] == [True] * are_due


@pytest.mark.parametrize("error", [OSError("the disk is full"), KeyboardInterrupt()], ids=["full", "ctrl-c"])
def test_a_stop_whose_save_fails_is_no_stop_of_the_next_run(error, tmp_path, monkeypatch):
    saving, learner = TD3XCheckpointCallback(1000, tmp_path), model(seeded())
    stop = at(20, lambda _: saving.save_and_stop())

    def fails(saved, *args, **kwargs):
        if saved.num_timesteps == 20:
            raise error
        return save_run(saved, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr("sb3_td3x.checkpoint.callback.save_run", fails)
        with pytest.raises(type(error)):
            learner.learn(40, [stop, saving])
    assert learner.learn(30, saving, reset_num_timesteps=False).num_timesteps == 50


@pytest.mark.parametrize(("env", "reason"), [(LineEnv, "current episodes"), (OpenLineEnv, "inside a rollout")])
def test_with_a_train_freq_in_episodes_a_run_stops_after_the_step_and_says_that_it_is_not_exact(tmp_path, env, reason):
    saving = TD3XCheckpointCallback(1000, tmp_path)
    learner = model(seeded(env), train_freq=(1, "episode"), gradient_steps=-1)
    learner.learn(100, [at(25, lambda _: saving.save_and_stop()), saving])
    assert learner.num_timesteps == learner.replay_buffer.size() == 25
    with pytest.warns(UserWarning, match=f"not restored exactly: .*{reason}"):
        assert resume_run(tmp_path, seeded(env)).learn(60, resume=True).num_timesteps >= 60


def test_what_is_saved_after_a_ctrl_c_in_the_updates_says_that_it_lacks_some(tmp_path, monkeypatch):
    learner = model(seeded(), train_freq=4, gradient_steps=-1).learn(40)
    with monkeypatch.context() as patch:
        patch.setattr(learner, "_draw_noise", Mock(side_effect=[learner._draw_noise(learner._last_batch), KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            learner.learn(40, reset_num_timesteps=False)
    save_run(learner, tmp_path)
    with pytest.warns(UserWarning, match="not restored exactly: the updates"):
        resume_run(tmp_path, seeded()).learn(60, resume=True)


def begun(tmp_path, env_id, *arguments):
    """The command on one of the environments of ``stoppable``, with a file for what it prints."""
    printed = (tmp_path / "printed").open("w+")
    options = ["--set", FAST[0], "--set", FAST[1], "--eval-episodes", 1, "--out", tmp_path, "--no-video", *arguments]
    process = start("train", "--env", f"tests.stoppable:{env_id}", "--steps", 10**6, *options, stdout=printed,
                    stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    return process, lambda: (tmp_path / "printed").read_text()


def test_a_signal_inside_a_rollout_without_an_end_stops_the_run(tmp_path):
    process, printed = begun(tmp_path, "Endless-v0", "--set", "train_freq=[1, episode]")
    folder = RunDir(tmp_path / "td3x" / "tests.stoppable-Endless-v0_1", "tests.stoppable:Endless-v0")
    wait_until(lambda: "the 100th step" in printed(), process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping; Ctrl-C again aborts" in printed(), process)
    assert process.wait(timeout=60) == 1
    assert Store(folder.checkpoints).find().steps >= 100


def test_a_second_ctrl_c_aborts_while_a_worker_hangs_and_leaves_no_process(tmp_path):
    process, printed = begun(tmp_path, "Hanging-v0", "--n-envs", 2)
    wait_until(lambda: printed().count("no way back") == 2, process)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: "stopping; Ctrl-C again aborts" in printed(), process)
    time.sleep(1)
    assert process.poll() is None, "it waits for the worker"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_program_that_an_environment_started_ends_with_it(n_envs):
    with stopping_on_signal(lambda: None):
        env = open_env("tests.stoppable:Simulating-v0", 0, TRAINING, {"n_envs": n_envs})
        programs = [process for process in psutil.Process().children(recursive=True) if process.name() == "sleep"]
        assert len(programs) == n_envs
        close_env(env)
    assert psutil.wait_procs(programs, timeout=10)[1] == []


def test_a_process_that_an_environment_forked_ends_when_it_is_told_to_and_not_at_a_terminals_ctrl_c():
    with stopping_on_signal(lambda: None):
        (process := multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))).start()
        os.kill(process.pid, signal.SIGINT)
        process.join(0.5)
        assert process.is_alive()
        process.terminate()
        process.join(60)
        assert process.exitcode == -signal.SIGTERM


def test_nohup_lets_a_closed_terminal_be_ignored(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    assert stop_signals() == [signal.SIGTERM]


def test_signals_mean_what_they_did_after_a_run():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with stopping_on_signal(lambda: None):
        pass
    assert [signal.getsignal(number) for number in numbers] == before
