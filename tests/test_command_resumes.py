"""``td3x train`` after a kill, a Ctrl-C or the end: what ``--resume`` goes on with, and what it refuses."""

import csv
import errno
import re
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch as th
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, save_run
from sb3_td3x.common import files
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.errors import CheckpointError, NonFiniteError, UntrustedModelError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment, play
from tests.commands import FAST, called, prepared, start, td3x
from tests.resuming import seeded
from tests.tools import LineEnv, model, weights

STEPS = 1200
SETTINGS = [
    "--env", "Pendulum-v1", "--steps", STEPS, "--eval-freq", 250, "--eval-episodes", 2, "--save-freq", 150, "--no-video",
    "--set", FAST[0], "--set", FAST[1],
]  # fmt: skip


def run_of(out, number=1):
    return RunDir.open(out / "td3x" / f"Pendulum-v1_{number}")


def short_run(out, steps=300, **kwargs):
    """A finished run of this process."""
    wanted = experiment.Experiment(
        "Pendulum-v1", steps, overrides=FAST, eval_freq=200, eval_episodes=1, save_freq=100, device="cpu", out=out, **kwargs
    )
    run = experiment.prepare(wanted)
    experiment.train(run)
    return run.folder


def rows(path):
    """A CSV's rows without the columns of wall-clock time, whatever the order of its columns."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    timed = {"t", "time/fps", "time/time_elapsed", "time/updates_per_second"}
    return [{key: value for key, value in row.items() if key not in timed} for row in csv.DictReader(lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole")
    td3x("train", "--out", out, *SETTINGS)
    return run_of(out)


class TestKilled:
    @pytest.fixture(scope="class")
    def resumed(self, tmp_path_factory):
        """A run that is killed after its second checkpoint, and what ``--resume`` printed."""
        out = tmp_path_factory.mktemp("killed")
        process = start("train", "--out", out, *SETTINGS)
        folder = out / "td3x" / "Pendulum-v1_1"
        deadline = time.monotonic() + 120
        while [one.steps for one in Store(folder / "checkpoint").checkpoints()][-1:] not in ([400], [600], [800]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode == -signal.SIGKILL
        return run_of(out), td3x("train", "--resume", folder)

    def test_ends_with_the_same_weights(self, whole, resumed):
        left, right = (TD3X.load(run.last_model) for run in (whole, resumed[0]))
        assert left.num_timesteps == right.num_timesteps == STEPS
        for name, value in weights(left).items():
            assert th.equal(value, weights(right)[name]), name

    def test_scores_logs_and_episodes_go_on_without_gap_or_repeat(self, whole, resumed):
        run, printed = resumed
        for left, right in zip(whole.scores(), run.scores(), strict=True):
            assert np.array_equal(left, right)
        assert rows(whole.path / "0.monitor.csv") == rows(run.path / "0.monitor.csv")
        assert rows(whole.path / "progress.csv") == rows(run.path / "progress.csv")
        times = [float(line.split(",")[2]) for line in (run.path / "0.monitor.csv").read_text().splitlines()[2:]]
        assert times == sorted(times)
        assert re.search(r"steps [468]00 to 1,200", printed)
        assert "not restored" not in printed

    def test_tensorboard_shows_each_step_once(self, whole, resumed):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

        def steps(run):
            events = accumulator.EventAccumulator(str(run.path)).Reload()
            return [event.step for event in events.Scalars("eval/mean_reward")]

        assert steps(whole) == steps(resumed[0]) == [250, 500, 750, 1000, STEPS]

    def test_the_lock_is_gone_and_the_run_is_finished(self, resumed):
        run, _ = resumed
        assert not (run.path / "lock").exists()
        assert Store(run.checkpoints).checkpoints()[-1].is_finished
        assert experiment.unfinished(experiment.Experiment.of_arguments(run)) == []


class TestInterrupted:
    def test_ctrl_c_names_the_command_that_goes_on_and_a_new_run_does_too(self, tmp_path):
        process = start("train", "--out", tmp_path, *SETTINGS, stdout=-1, stderr=-2)
        folder = tmp_path / "td3x" / "Pendulum-v1_1"
        deadline = time.monotonic() + 120
        while not (folder / "evaluations.npz").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
        assert f"td3x train --resume {folder}" in printed
        assert "what was learned is saved" in printed
        stopped_at = Store(folder / "checkpoint").checkpoints()[-1].steps
        assert stopped_at < STEPS

        printed = td3x("train", "--out", tmp_path, *SETTINGS, "--steps", STEPS)
        assert f"to resume an unfinished run of these settings: td3x train --resume {folder}" in printed
        printed = td3x("train", "--out", tmp_path, *SETTINGS, "--resume")  # the newest that is unfinished
        assert f"steps {stopped_at:,} to 1,200" in printed
        assert run_of(tmp_path).scores()[0][-1] == STEPS


class TestFinished:
    @pytest.fixture(scope="class")
    def finished(self, tmp_path_factory):
        return short_run(tmp_path_factory.mktemp("finished"))

    def test_nothing_is_left_to_do(self, finished, monkeypatch, capfd):
        code, printed = called(monkeypatch, capfd, "train", "--resume", finished.path)
        assert code == 2
        assert "has made 300 steps of 300: --steps extends it" in printed
        code, printed = called(monkeypatch, capfd, "train", "--resume", finished.path, "--steps", 5)
        assert code == 2
        assert "has made 300 steps: --steps counts from the beginning and must be above that, not 5" in printed

    def test_more_steps_extend_it(self, tmp_path):
        folder = short_run(tmp_path)
        run = experiment.resume(folder, steps=500)
        assert experiment.train(run)
        assert RunDir.open(folder.path).scores()[0].tolist() == [200, 300, 400, 500]
        assert TD3X.load(folder.last_model).num_timesteps == 500
        assert folder.config()["n_timesteps"] == folder.arguments()["n_timesteps"] == 500

    def test_its_video_is_made_with_the_trust_that_it_is_given_or_not_at_all(self, tmp_path, monkeypatch, capfd):
        def record_video(folder, out, seed, trust=False):
            videos.append(trust)
            return "one episode"

        videos = []
        monkeypatch.setattr(play, "record_video", record_video)
        folder = short_run(tmp_path)
        for steps, options in ((400, ["--trust"]), (500, []), (600, ["--no-video"])):
            called(monkeypatch, capfd, "train", "--resume", folder.path, "--steps", steps, *options)
        assert videos == [True, False]
        without = short_run(tmp_path, video=False)
        called(monkeypatch, capfd, "train", "--resume", without.path, "--steps", 400)
        assert videos == [True, False]  # as the run was begun
        called(monkeypatch, capfd, "train", "--resume", without.path, "--steps", 500, "--video")
        assert videos == [True, False, False]

    def test_an_extension_that_was_killed_at_once_is_still_planned(self, tmp_path):
        folder = short_run(tmp_path)
        run = experiment.resume(folder, steps=500)
        run.resources.close()
        assert [one.path for one in experiment.unfinished(replace(run.experiment, steps=500))] == [folder.path]
        assert experiment.resume(folder).total == 500

    def test_its_last_model_was_there_before_its_last_checkpoint(self, tmp_path, monkeypatch):
        save, there = TD3XCheckpointCallback._save, []

        def saved(callback):
            there.append((callback.model.num_timesteps, any(tmp_path.glob("td3x/*/Pendulum-v1.zip"))))
            save(callback)

        monkeypatch.setattr(TD3XCheckpointCallback, "_save", saved)
        short_run(tmp_path)
        assert [steps for steps, is_there in there if is_there] == [300]

    def test_a_checkpoint_can_be_chosen(self, tmp_path):
        folder = short_run(tmp_path)
        assert [one.steps for one in Store(folder.checkpoints).checkpoints()] == [200, 300]
        run = experiment.resume(folder, checkpoint=200)
        assert run.model.num_timesteps == 200
        lines = len(folder.path.joinpath("0.monitor.csv").read_text().splitlines())
        assert experiment.train(run)
        assert run.folder.scores()[0].tolist() == [200, 300]
        assert len(folder.path.joinpath("0.monitor.csv").read_text().splitlines()) == lines  # no episode twice


def test_what_ended_a_run_is_told_even_if_its_model_cannot_be_saved_then(tmp_path, monkeypatch):
    run = prepared(tmp_path, "Pendulum-v1", steps=300)

    def fill_the_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(*_, **__):
        monkeypatch.setattr(type(run.model), "save", fill_the_disk)
        raise NonFiniteError("reward", "environment step 1")

    monkeypatch.setattr(run.model, "learn", fail)
    with pytest.raises(NonFiniteError) as raised:
        experiment.train(run)
    assert isinstance(raised.value.__cause__, CheckpointError)
    assert str(run.folder.last_model) in str(raised.value.__cause__)


@pytest.mark.parametrize("file", [(), (".last_model.0123.partial.zip",)], ids=["no file", "a hidden file"])
def test_a_full_disk_is_reported_with_the_run(file, tmp_path, monkeypatch):
    run = prepared(tmp_path, "Pendulum-v1", steps=300)

    def fill_the_disk(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", *file)

    monkeypatch.setattr(run.model, "learn", fill_the_disk)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(run.folder.path))} cannot be read or written: No space left"):
        experiment.train(run)


def test_an_environments_own_missing_file_is_not_the_runs(tmp_path, monkeypatch):
    run = prepared(tmp_path, "Pendulum-v1", steps=300)

    def fail(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "terrain.png")

    monkeypatch.setattr(run.model, "learn", fail)
    with pytest.raises(FileNotFoundError, match=r"terrain\.png"):
        experiment.train(run)


class TestUnreadable:
    def test_settings_that_cannot_be_written_leave_the_old_ones(self, tmp_path, monkeypatch):
        folder = RunDir.create(tmp_path, "Pendulum-v1")
        folder.write_settings({"tau": 0.1}, {"env": "Pendulum-v1"})
        monkeypatch.setattr(files, "flush", lambda path: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(ValueError, match="No space left"):
            folder.write_settings({"tau": 0.2}, {"env": "Pendulum-v1"})
        assert folder.config() == {"tau": 0.1}
        assert sorted(path.name for path in folder.settings.iterdir()) == ["args.yml", "config.yml"]

    def test_a_run_without_readable_settings_does_not_keep_others_from_starting(self, tmp_path):
        folder = short_run(tmp_path)
        (Store(folder.checkpoints).checkpoints()[-1].path / "manifest.json").unlink()  # the newest is now at 200 steps
        wanted = experiment.Experiment.of_arguments(folder)
        assert [found.path for found in experiment.unfinished(wanted)] == [folder.path]
        folder.args_file.write_text("")
        assert experiment.unfinished(wanted) == []
        assert experiment.differing_settings(wanted) == {}


class TestRefused:
    def refusal(self, monkeypatch, capfd, *arguments):
        code, printed = called(monkeypatch, capfd, "train", *arguments)
        assert code == 2
        return " ".join(printed.replace("│", " ").split())

    def test_a_run_that_another_process_writes(self, tmp_path, monkeypatch, capfd):
        folder = short_run(tmp_path)
        with RunLock(folder.path):
            printed = self.refusal(monkeypatch, capfd, "--resume", folder.path, "--steps", 400)
        assert "is being written by process" in printed

    def test_other_settings_beside_a_run(self, tmp_path, monkeypatch, capfd):
        printed = self.refusal(monkeypatch, capfd, "--resume", tmp_path, "--seed", 1, "--set", "tau=0.1")
        assert "--seed, --set cannot be changed with --resume RUN" in printed

    def test_settings_of_no_unfinished_run_with_what_differs(self, tmp_path, monkeypatch, capfd):
        folder = short_run(tmp_path, steps=300)
        folder.write_settings(folder.config(), {**folder.arguments(), "n_timesteps": 300})
        manifest = Store(folder.checkpoints).checkpoints()[-1]
        (manifest.path / "manifest.json").unlink()  # the newest is now at 200 steps
        printed = self.refusal(
            monkeypatch, capfd, "--resume", "--env", "Pendulum-v1", "--steps", 300, "--seed", 5, "--out", tmp_path,
            "--set", FAST[0], "--set", FAST[1], "--eval-freq", 200, "--eval-episodes", 1, "--save-freq", 100,
            "--device", "cpu",
        )  # fmt: skip
        assert "no unfinished run with these settings" in printed
        assert "Pendulum-v1_1 has seed: 0, not 5" in printed

    @pytest.mark.parametrize("option", [["--checkpoint", 5], ["--trust"], ["logs/run"]])
    def test_options_of_resume_without_it(self, option, monkeypatch, capfd):
        assert "is for --resume" in self.refusal(monkeypatch, capfd, "--env", "Pendulum-v1", *option)

    @pytest.mark.parametrize("name", ["progress.csv", "checkpoint", "Pendulum-v1/config.yml"])
    def test_a_run_with_links_to_elsewhere(self, name, tmp_path, monkeypatch, capfd):
        folder = short_run(tmp_path)
        moved = (folder.path / name).rename(tmp_path / "elsewhere")
        (folder.path / name).symlink_to(moved)
        before = moved.stat()
        printed = self.refusal(monkeypatch, capfd, "--resume", folder.path, "--steps", 400)
        assert "leads out of the run's folder" in printed
        assert moved.stat().st_mtime_ns == before.st_mtime_ns

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"overrides": None}, "no list of overrides"),
            ({"num_threads": "x"}, "threads must be"),
            ({"seed": []}, "seed must be"),
        ],
    )
    def test_settings_that_are_none(self, changed, said, tmp_path, monkeypatch, capfd):
        folder = RunDir.create(tmp_path, "Pendulum-v1")
        folder.write_settings({}, {"algo": "td3x", "env": "Pendulum-v1", "overrides": [], "device": "cpu", **changed})
        assert said in self.refusal(monkeypatch, capfd, "--resume", folder.path)

    @pytest.mark.parametrize(
        ("file", "name", "said"),
        [("config", "n_envs", "n_envs 1,000,000"), ("arguments", "num_threads", "num_threads 1,000,000")],
    )
    def test_counts_that_are_not_the_checkpoints_before_anything_starts(self, file, name, said, tmp_path, monkeypatch, capfd):
        folder = short_run(tmp_path)
        settings = {"config": folder.config(), "arguments": folder.arguments()}
        settings[file][name] = 1_000_000
        folder.write_settings(**settings)
        monkeypatch.setattr(experiment, "open_env", None)
        monkeypatch.setattr(th, "set_num_threads", None)
        printed = self.refusal(monkeypatch, capfd, "--resume", folder.path, "--steps", 400)
        assert f"ask for {said}, but its checkpoint was made with 1" in printed

    def test_a_folder_without_a_run(self, tmp_path, monkeypatch, capfd):
        assert "is not a run" in self.refusal(monkeypatch, capfd, "--resume", tmp_path)

    def test_a_folder_beside_the_right_one_is_told_which_that_is(self, tmp_path, monkeypatch, capfd):
        folder = RunDir.create(tmp_path, "Pendulum-v1")
        folder.write_settings({}, {"algo": "td3x", "env": "Pendulum-v1", "overrides": [], "device": "cpu"})
        save_run(model(seeded()).learn(20), folder.checkpoints)
        assert f"; its run is {folder.path}" in self.refusal(monkeypatch, capfd, "--resume", folder.checkpoints)
        assert "; runs in it: Pendulum-v1_1" in self.refusal(monkeypatch, capfd, "--resume", folder.path.parent)
        with pytest.raises(CheckpointError, match="its folder checkpoint does"):
            resume_run(folder.path, seeded())
        folder.config_file.unlink()
        assert "a part of the run is missing: " in self.refusal(monkeypatch, capfd, "--resume", folder.path)


class TestOtherAlgorithms:
    @pytest.mark.parametrize("algorithm", [TD3, SAC])
    def test_sb3s_go_on_exactly_with_resumable_before_them(self, algorithm, tmp_path):
        class Ours(Resumable, algorithm):
            pass

        settings = {"learning_starts": 20, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}, "seed": 1, "buffer_size": 500}
        plain = algorithm("MlpPolicy", seeded(), **settings).learn(120)
        whole = Ours("MlpPolicy", seeded(), **settings).learn(120, TD3XCheckpointCallback(30, tmp_path, keep_last=9))
        with pytest.raises(UntrustedModelError, match="trust=True"):
            resume_run(tmp_path, seeded(), algorithm=Ours)
        resumed = resume_run(tmp_path, seeded(), checkpoint=60, trust=True, algorithm=Ours).learn(120, resume=True)
        for name, value in weights(plain).items():
            assert th.equal(value, weights(whole)[name]), name
            assert th.equal(value, weights(resumed)[name]), name

    def test_resume_needs_no_checkpoint_callback(self, tmp_path):
        learner = TD3X("MlpPolicy", DummyVecEnv([LineEnv]), buffer_size=100, learning_starts=5, batch_size=4)
        learner.learn(20)
        assert learner.learn(50, resume=True).num_timesteps == 50
