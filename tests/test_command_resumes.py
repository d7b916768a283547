"""``td3x train`` after a kill, a Ctrl-C or the end: what ``--resume`` continues, and what it refuses."""

import errno
import os
import re
import shutil
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import ConvertCallback

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common.lock import RunLock
from sb3_td3x.errors import CheckpointError, NonFiniteError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment, play
from tests.commands import FAST, prepared, start, stop_after
from tests.resuming import board_steps, rows, saved_steps, seeded
from tests.tools import largest_difference, model, weights

STEPS = 600
SETTINGS = [
    "--env", "Pendulum-v1", "--steps", STEPS, "--eval-freq", 150, "--eval-episodes", 1, "--save-freq", 100, "--no-video",
    "--set", FAST[0], "--set", FAST[1],
]  # fmt: skip


# The command, killed between an evaluation and the next checkpoint
KILLED = """
import signal
import pytest
from sb3_td3x.cli import main
from tests.commands import stop_after
stop_after(pytest.MonkeyPatch(), 470, signal.SIGKILL)
main()
"""


def short_run(out, steps=300, **kwargs):
    """A finished run of this process."""
    run = prepared(out, "Pendulum-v1", steps=steps, eval_freq=200, eval_episodes=1, save_freq=100, **kwargs)
    experiment.train(run)
    return run.folder


def test_a_killed_run_ends_with_the_weights_scores_and_logs_of_one_that_was_not_killed(tmp_path, called, called_and_heard):
    assert called("train", "--out", tmp_path / "whole", *SETTINGS)[0] == 0
    process = start("train", "--out", tmp_path / "killed", *SETTINGS, program=("-c", KILLED))
    assert process.wait(timeout=120) == -signal.SIGKILL
    whole, killed = (tmp_path / name / "td3x" / "Pendulum-v1_1" for name in ("whole", "killed"))
    code, printed = called_and_heard("train", "--resume", killed)
    assert code == 0
    assert "steps 400 to 600" in printed.out
    assert "not restored" not in printed.out + printed.err

    whole, killed = RunDir.open(whole), RunDir.open(killed)
    left, right = (TD3X.load(run.last_model) for run in (whole, killed))
    assert left.num_timesteps == right.num_timesteps == STEPS
    assert largest_difference(weights(left), weights(right)) == 0
    for left, right in zip(whole.scores(), killed.scores(), strict=True):
        assert np.array_equal(left, right)
    assert rows(whole.path / "0.monitor.csv") == rows(killed.path / "0.monitor.csv")
    assert rows(whole.path / "progress.csv") == rows(killed.path / "progress.csv")
    times = [float(line.split(",")[2]) for line in (killed.path / "0.monitor.csv").read_text().splitlines()[2:]]
    assert times == sorted(times)
    evaluated = [board_steps(run.path, "eval/mean_reward") for run in (whole, killed)]
    assert evaluated == [[150, 300, 450, STEPS]] * 2
    assert not (killed.path / "lock").exists()
    assert Store(killed.checkpoints).checkpoints()[-1].steps == STEPS


def test_ctrl_c_names_the_command_that_resumes(tmp_path, monkeypatch, called_and_heard, heard):
    folder = tmp_path / "td3x" / "Pendulum-v1_1"
    with monkeypatch.context() as patch:
        stop_after(patch, 320)
        code, printed = called_and_heard("train", "--out", tmp_path, *SETTINGS)
    assert code == 1
    assert f"td3x train --resume {folder}" in printed.out
    assert "what was learned is saved" in printed.out
    assert "steps 320 to 600" in heard("train", "--resume", folder)
    assert RunDir.open(folder).scores()[0][-1] == STEPS


@pytest.fixture(scope="module")
def of_300_steps(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def finished(of_300_steps, tmp_path):
    """The folder of a finished run, to be changed."""
    return RunDir.open(shutil.copytree(of_300_steps.path, tmp_path / "td3x" / "Pendulum-v1_1"))


class TestFinished:
    def test_nothing_is_left_to_do_unless_more_steps_extend_it(self, finished, refused):
        said = "has made 300 steps, and 300 were asked for: --steps extends it"
        assert said in refused("train", "--resume", finished.path)
        said = "has made 300 steps, and 5 were asked for: --steps extends it and counts from the beginning"
        assert said in refused("train", "--resume", finished.path, "--steps", 5)
        # An extension that is stopped at once is still planned, and one that is refused is not
        planned = finished.config(), finished.arguments()
        experiment.resume(finished, steps=400).resources.close()
        assert (finished.config(), finished.arguments()) == planned
        experiment.train(experiment.resume(finished, steps=500), [ConvertCallback(lambda *_: False)])
        extended = experiment.resume(finished)
        assert extended.total == 500
        assert experiment.train(extended)
        assert RunDir.open(finished.path).scores()[0].tolist() == [200, 300, 400, 500]
        assert TD3X.load(finished.last_model).num_timesteps == 500
        assert finished.config()["n_timesteps"] == finished.arguments()["n_timesteps"] == 500
        assert finished.command() is None  # no one command makes this run

    def test_one_that_is_stopped_later_cannot_be_planned_to_end_before_that(self, finished, refused, monkeypatch):
        with monkeypatch.context() as patch:
            stop_after(patch, 350)
            experiment.train(experiment.resume(finished, steps=500))
        (*_, stopped) = saved_steps(finished.checkpoints)
        said = f"has made {stopped} steps, and 340 were asked for: --steps extends it"
        assert said in refused("train", "--resume", finished.path, "--steps", 340)
        assert RunDir.open(finished.path).config()["n_timesteps"] == 500
        experiment.resume(finished, steps=400).resources.close()  # fewer than planned, and more than made

    def test_its_video_is_made_with_the_trust_that_it_is_given_or_not_at_all(self, tmp_path, monkeypatch, called):
        def record_video(folder, out, seed, trust=False):
            videos.append(trust)
            return "one episode"

        videos = []
        monkeypatch.setattr(play, "record_video", record_video)
        folder, without = short_run(tmp_path, steps=60), short_run(tmp_path, steps=60, video=False)
        for run, steps, options in (
            (folder, 70, ["--trust"]),
            (folder, 80, []),
            (folder, 90, ["--no-video"]),
            (without, 70, []),  # as the run was begun
            (without, 80, ["--video"]),
        ):
            called("train", "--resume", run.path, "--steps", steps, *options)
        assert videos == [True, False, False]

    def test_its_last_model_was_there_before_its_last_checkpoint(self, tmp_path, monkeypatch):
        save, there = TD3XCheckpointCallback._save, []

        def saved(callback):
            there.append((callback.model.num_timesteps, any(tmp_path.glob("td3x/*/Pendulum-v1.zip"))))
            save(callback)

        monkeypatch.setattr(TD3XCheckpointCallback, "_save", saved)
        short_run(tmp_path)
        assert [steps for steps, is_there in there if is_there] == [300]

    def test_an_evaluation_after_the_only_checkpoint_is_not_shown_before_it_is_made_again(self, tmp_path, monkeypatch):
        run = prepared(tmp_path, "Pendulum-v1", steps=300, eval_freq=100, eval_episodes=1, save_freq=1000)
        folder = run.folder
        files = (folder.evaluations, folder.curve, folder.best_model)
        monkeypatch.setattr(TD3X, "train", Mock(side_effect=[None] * 110 + [OSError("killed")] + [None] * 300))
        with pytest.raises(OSError, match="killed"):
            experiment.train(run)
        assert saved_steps(folder.checkpoints) == [0]
        assert [path.exists() for path in files] == [True] * 3
        stop_after(monkeypatch, 50)
        assert not experiment.train(experiment.resume(folder))
        assert [path.exists() for path in files] == [False] * 3

    def test_a_checkpoint_can_be_chosen(self, finished, heard):
        assert saved_steps(finished.checkpoints) == [200, 300]
        lines = len(finished.path.joinpath("0.monitor.csv").read_text().splitlines())
        assert "steps 200 to 300" in heard("train", "--resume", finished.path, "--checkpoint", 200, "--no-video")
        assert finished.scores()[0].tolist() == [200, 300]
        assert len(finished.path.joinpath("0.monitor.csv").read_text().splitlines()) == lines  # no episode twice
        assert saved_steps(finished.checkpoints) == [200, 300]

    def test_the_checkpoint_that_was_chosen_stays_so_after_a_kill(self, finished, monkeypatch):
        monkeypatch.setattr(TD3X, "train", Mock(side_effect=OSError("killed")))
        for checkpoint in (200, None):
            run = experiment.resume(finished, checkpoint=checkpoint)
            assert run.model.num_timesteps == 200
            with pytest.raises(OSError, match="killed"):
                experiment.train(run)
        assert saved_steps(finished.checkpoints) == [300, 200]  # the newer one goes with the next save

    def test_the_device_and_the_number_of_threads_may_be_others(self, finished, refused, called_and_heard, heard, monkeypatch):
        finished.write_settings(finished.config(), {**finished.arguments(), "device": "cuda:7", "num_threads": 64})
        arguments = ("train", "--resume", finished.path, "--steps", 350)
        assert "not 'cuda:7'" in refused(*arguments)
        with monkeypatch.context() as patch:
            stop_after(patch, 320)
            code, printed = called_and_heard(*arguments, "--device", "cpu", "--threads", 1)
        assert (code, f"--resume {finished.path} --device cpu --threads 1\n" in printed.out) == (1, True)
        heard("train", "--resume", finished.path, "--device", "cpu", "--threads", 1)
        assert TD3X.load(finished.last_model).num_timesteps == 350


def test_what_ended_a_run_is_told_even_if_its_model_cannot_be_saved_then(tmp_path, monkeypatch):
    run = prepared(tmp_path, "Pendulum-v1", steps=300)

    def fill_the_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        monkeypatch.setattr(type(run.model), "save", fill_the_disk)
        raise NonFiniteError("reward", "environment step 1")

    monkeypatch.setattr(run.model, "learn", fail)
    with pytest.raises(NonFiniteError):
        experiment.train(run)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError),
        (OSError(errno.ENOSPC, "No space left on device", ".last_model.0123.partial.zip"), CheckpointError),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "terrain.png"), FileNotFoundError),
    ],
    ids=["no file", "a hidden file", "the environment's own file"],
)
def test_a_full_disk_is_reported_with_the_run_and_an_environments_own_missing_file_is_not(
    error, reported, tmp_path, monkeypatch
):
    run = prepared(tmp_path, "Pendulum-v1", steps=300)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(run.model, "learn", fail)
    monkeypatch.setattr(run.model.logger.output_formats[0], "close", fail)  # writes what was not flushed
    about_the_run = f"{re.escape(str(run.folder.path))} cannot be read or written: No space left"
    with pytest.raises(reported, match=about_the_run if reported is CheckpointError else r"terrain\.png"):
        experiment.train(run)


class TestRefused:
    @pytest.fixture
    def refusal(self, refused):
        """Calls ``td3x train``, which must refuse, and gives what it said."""
        return lambda *arguments: " ".join(refused("train", *arguments).replace("│", " ").split())

    def test_a_run_that_another_process_writes(self, finished, refusal):
        with RunLock(finished.path):
            printed = refusal("--resume", finished.path, "--steps", 400)
        assert "is being written by process" in printed

    def test_other_settings_beside_a_run(self, tmp_path, refusal):
        printed = refusal("--resume", tmp_path, "--seed", 1, "--set", "tau=0.1")
        assert "--seed, --set cannot be changed with --resume RUN" in printed

    @pytest.mark.parametrize("option", [["--checkpoint", 5], ["--trust"]])
    def test_options_of_resume_without_it(self, option, refusal):
        assert "is for --resume" in refusal("--env", "Pendulum-v1", *option)

    def test_a_run_with_links_to_elsewhere(self, finished, tmp_path, refusal):
        for name in ("progress.csv", "checkpoint", "Pendulum-v1/config.yml"):
            moved = (finished.path / name).rename(tmp_path / "elsewhere")
            (finished.path / name).symlink_to(moved)
            before = moved.stat()
            printed = refusal("--resume", finished.path, "--steps", 400)
            assert "leads out of the run's folder" in printed
            assert moved.stat().st_mtime_ns == before.st_mtime_ns
            (finished.path / name).unlink()
            moved.rename(finished.path / name)

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"overrides": None}, "no list of overrides"),
            ({"num_threads": "x"}, "threads must be"),
            ({"seed": []}, "seed must be"),
        ],
    )
    def test_invalid_settings(self, changed, said, tmp_path, refusal):
        folder = RunDir.create(tmp_path, "Pendulum-v1")
        folder.write_settings({}, {"algo": "td3x", "env": "Pendulum-v1", "overrides": [], "device": "cpu", **changed})
        assert said in refusal("--resume", folder.path)

    def test_an_invalid_number_of_environments(self, finished, refusal):
        finished.write_settings({**finished.config(), "n_envs": "two"}, finished.arguments())
        assert "n_envs must be a whole number" in refusal("--resume", finished.path, "--steps", 400)

    def test_a_number_of_environments_that_is_not_the_checkpoints_before_any_starts(self, finished, refusal, monkeypatch):
        finished.write_settings({**finished.config(), "n_envs": 1_000_000}, finished.arguments())
        monkeypatch.setattr(experiment, "open_env", None)
        printed = refusal("--resume", finished.path, "--steps", 400)
        assert "ask for n_envs 1,000,000, but its checkpoint was made with 1" in printed

    def test_more_threads_than_cores_are_not_started(self, finished, monkeypatch):
        finished.write_settings(finished.config(), {**finished.arguments(), "num_threads": 10**6})
        monkeypatch.setattr(th, "set_num_threads", started := Mock())
        experiment.resume(finished, 400).resources.close()
        started.assert_called_once_with(os.cpu_count())

    def test_another_number_of_threads_is_a_warning(self, finished):
        finished.write_settings(finished.config(), {**finished.arguments(), "num_threads": 2})
        try:
            with pytest.warns(UserWarning, match="rounding or random numbers .torch threads was 1, is 2"):
                experiment.train(experiment.resume(finished, 400))
        finally:
            th.set_num_threads(1)

    def test_a_folder_beside_the_right_one_is_told_which_that_is(self, tmp_path, refusal):
        folder = RunDir.create(tmp_path, "Pendulum-v1")
        folder.write_settings({}, {"algo": "td3x", "env": "Pendulum-v1", "overrides": [], "device": "cpu"})
        save_run(model(seeded()).learn(20), folder.checkpoints)
        assert f"; its run is {folder.path}" in refusal("--resume", folder.checkpoints)
        assert "; runs in it: Pendulum-v1_1" in refusal("--resume", folder.path.parent)
        with pytest.raises(CheckpointError, match="its folder checkpoint does"):
            resume_run(folder.path, seeded())
        folder.config_file.unlink()
        assert "a part of the run is missing: " in refusal("--resume", folder.path)
