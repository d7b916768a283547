"""The td3x command that trains, as a user types it: what it leaves behind, how it ends, what it says to bad input."""

import csv
import os
import shlex
import signal
import subprocess
from functools import partial

import imageio.v2 as imageio
import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from typer.testing import CliRunner

from sb3_td3x import TD3X, NonFiniteError, __version__, cli, load_vecnormalize
from sb3_td3x.cli import train
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment, play
from tests.commands import FAST, QUICK, prepared, start, td3x, wait_until
from tests.resuming import saved_steps
from tests.studies import study
from tests.tools import LineEnv, Spoilt, without_observation


def test_tells_its_version():
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"{__version__}\n"


class TestTrain:
    def test_leaves_models_scores_curve_video_and_settings(self, walker_run):
        folder, printed = walker_run
        run = RunDir.open(folder)
        written = ("best_model.zip", "0.monitor.csv", "progress.csv", "Walker2DBulletEnv-v0/args.yml")
        assert all((folder / name).stat().st_size for name in written)
        steps, results = run.scores()
        assert steps.tolist() == [100, 200, 300]
        assert results.shape == (3, 2)
        last = TD3X.load(folder / "Walker2DBulletEnv-v0.zip")
        assert (last.num_timesteps, last._n_updates) == (300, 250)
        config = run.config()
        assert (config["learning_rate"], config["n_timesteps"]) == ("hold0.6_7e-4", 300)
        assert config["policy_kwargs"] == {"net_arch": [16, 16]}
        assert run.command() == shlex.join(["td3x", "train", "--env", "Walker2DBulletEnv-v0", "--steps", "300", *QUICK])
        assert str(folder.parent.parent) not in run.args_file.read_text()
        curve = imageio.imread(folder / "curve.png")
        assert curve.shape[0] > 300
        assert curve.std() > 10
        frames = imageio.mimread(folder / "video" / "best_model.mp4", memtest=False)
        assert len(frames) > 5
        assert np.stack(frames).std(axis=0).max() > 10  # something moves
        assert printed.startswith("Walker2DBulletEnv-v0, preset default, seed 0, 300 steps")
        for said in (
            " 100 steps  ",
            " 200 steps  ",
            " steps/s  score ",
            ", best ",
            str(folder / "curve.png"),
            "best_model.mp4",
        ):
            assert said in printed
        assert "pybullet build time" not in printed

    def test_the_same_seed_gives_the_same_scores_in_another_process(self, walker_run, tmp_path, called):
        options = "--steps", 300, "--out", tmp_path, "--no-video", *QUICK
        called("train", "--env", "Walker2DBulletEnv-v0", *options)
        runs = walker_run[0], tmp_path / "td3x" / "Walker2DBulletEnv-v0_1"
        first, second = (np.load(run / "evaluations.npz")["results"] for run in runs)
        np.testing.assert_array_equal(first, second)

    def test_a_run_that_a_callback_ends_has_not_reached_its_end(self, tmp_path):
        assert not experiment.train(prepared(tmp_path, "Pendulum-v1", steps=1000), [StopTrainingOnMaxEpisodes(1)])

    def test_a_new_run_never_touches_an_old_one(self, tmp_path):
        first, second = (prepared(tmp_path, "Pendulum-v1", steps=60).folder.path for _ in range(2))
        assert [first.name, second.name] == ["Pendulum-v1_1", "Pendulum-v1_2"]

    def test_a_run_without_any_learning_says_so(self, tmp_path):
        with pytest.warns(UserWarning, match=r"learning begins after 100 steps \(learning_starts\), and this run has 60"):
            experiment.train(prepared(tmp_path, "Pendulum-v1", FAST[:1], steps=60, eval_freq=1000))

    def test_a_run_shorter_than_eval_freq_is_evaluated_at_its_end_over_fresh_episodes(self, tmp_path):
        run = prepared(tmp_path, "Pendulum-v1", steps=60, eval_freq=1000)
        assert experiment.train(run)
        steps, results = run.folder.scores()
        assert steps.tolist() == [60]
        (line,) = csv.DictReader((run.folder.path / "scores.csv").read_text().splitlines())
        assert float(line["mean_return"]) == pytest.approx(results.mean(), rel=1e-8)  # rewards may be small numbers
        assert float(line["std_return"]) == pytest.approx(results.std(), rel=1e-8)  # over the episodes
        again = play.evaluate(run.folder, results.size, run.experiment.seed)
        assert not set(again) & set(results.ravel())  # fresh episodes although the seed is the run's
        assert run.folder.best_model.exists()
        assert run.folder.curve.exists()

    def test_a_nan_never_gets_into_the_normalization_and_the_best_models_is_kept(self, tmp_path, registered):
        registered("Bad-v0", partial(Spoilt, 95, without_observation))
        normalize = "normalize={norm_obs: true, norm_reward: false}"
        run = prepared(tmp_path, "Bad-v0", steps=200, eval_freq=40, eval_episodes=1, overrides=(normalize, *FAST))
        with pytest.raises(NonFiniteError, match="environment step 95"):
            experiment.train(run)
        last = load_vecnormalize(run.folder.normalization, DummyVecEnv([LineEnv]))
        assert np.isfinite([*last.obs_rms.mean, *last.obs_rms.var]).all()
        assert last.obs_rms.count == pytest.approx(1 + 94, abs=1e-3)  # the reset and the steps before
        steps, results = run.folder.scores()
        env = play.open_evaluation_env(run.folder, seed=1)
        assert isinstance(env, VecNormalize)
        assert np.isfinite(env.obs_rms.mean).all()
        assert env.obs_rms.count == pytest.approx(1 + steps[results.mean(axis=1).argmax()], abs=1)  # the best model's
        env.close()

    def test_an_infinite_reward_in_an_evaluation_is_never_the_best(self, tmp_path, registered):
        registered("Bad-v0", partial(Spoilt, 30, lambda *step: (step[0], np.inf, *step[2:])))
        run = prepared(tmp_path, "Bad-v0", steps=200, eval_freq=20, eval_episodes=5, overrides=FAST)
        with pytest.raises(NonFiniteError, match="reward in the evaluation is not finite at environment step 20"):
            experiment.train(run)
        assert not run.folder.best_model.exists()

    def test_several_environments_normalized_with_the_texts_wrapper(self, tmp_path, called):
        wrapper = "sb3_contrib.common.wrappers.TimeFeatureWrapper"
        called("train",
            "--env", "Pendulum-v1", "--steps", 400, "--n-envs", 2, "--out", tmp_path, "--no-video", *QUICK,
            "--set", "normalize={norm_obs: true, norm_reward: false}", "--set", f"env_wrapper={wrapper}",
        )  # fmt: skip
        run = tmp_path / "td3x" / "Pendulum-v1_1"
        assert {"0.monitor.csv", "1.monitor.csv"} <= {path.name for path in run.iterdir()}
        assert (run / "Pendulum-v1" / "vecnormalize.pkl").exists()
        loaded = TD3X.load(run / "Pendulum-v1.zip")
        assert loaded._n_updates == 350  # as many as steps
        assert loaded.observation_space.shape == (4,)  # with the time left
        assert len(play.evaluate(RunDir.open(run), 2, seed=1)) == 2

    def test_a_signal_to_all_its_processes_keeps_model_scores_and_curve(self, tmp_path):
        arguments = ["--env", "Pendulum-v1", "--steps", 1_000_000, "--out", tmp_path, "--n-envs", 2, *QUICK]
        arguments += ["--set", "accelerate=plain"]
        process = start("train", *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        run = tmp_path / "td3x" / "Pendulum-v1_1"
        wait_until((run / "curve.png").exists, process)
        os.killpg(process.pid, signal.SIGTERM)  # as Slurm does: to the environments' processes too
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 1, printed
        assert "Traceback" not in printed
        assert "not of the same type" not in printed  # of environments in processes and the evaluation's
        assert "of 1,000,000 steps; what was learned is saved" in printed
        assert not (run / "video").exists()
        assert TD3X.load(run / "Pendulum-v1.zip").num_timesteps >= 100
        assert (run / "evaluations.npz").exists()
        assert (run / "best_model.zip").exists()

    def test_whose_terminal_is_gone_without_a_signal_goes_on(self, tmp_path):
        """As after ``td3x train ... & disown; exit``."""
        ours, its = os.openpty()
        arguments = ("train", "--env", "Pendulum-v1", "--steps", 600, "--out", tmp_path, *QUICK)
        process = start(*arguments, stdout=its, stderr=its, start_new_session=True)
        os.close(its)
        wait_until((tmp_path / "td3x" / "Pendulum-v1_1" / "scores.csv").exists, process)
        os.close(ours)
        assert process.wait(timeout=120) == 0
        assert (tmp_path / "td3x" / "Pendulum-v1_1" / "video").exists()

    def test_whose_output_nobody_reads_any_more_ends_it_with_a_checkpoint(self, tmp_path):
        """As ``| head -1`` does, or a connection that breaks."""
        arguments = ["--env", "Pendulum-v1", "--steps", 1_000_000, "--save-freq", 1_000_000, "--out", tmp_path, *QUICK]
        process = start("train", *arguments, "--set", "accelerate=plain", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert "1,000,000 steps" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert "Traceback" not in process.stderr.read()
        assert max(saved_steps(tmp_path / "td3x" / "Pendulum-v1_1" / "checkpoint")) >= 100


@pytest.mark.parametrize("kind", [ValueError, OSError, EOFError, SystemExit])
def test_an_error_inside_of_an_environment_has_an_exit_code_of_its_own(kind, tmp_path, called, registered):
    """A job's script resumes a run that ended with 1; this one would end there again."""

    class Broken(LineEnv):
        def step(self, action):
            raise kind("the simulator is broken")

    registered("Broken-v0", Broken)
    code, printed = called("train", "--env", "Broken-v0", "--steps", 60, "--out", tmp_path, *QUICK)
    assert code == 3
    assert "Traceback" in printed
    assert "the simulator is broken" in printed


class TestCustomEnvironments:
    """Where the script ``td3x`` is started, as pip installs it: Python looks for modules beside the script, not there."""

    def test_a_module_is_found_by_the_runs_of_a_study_and_their_environments_processes(self, tmp_path):
        (tmp_path / "work").mkdir()
        (tmp_path / "td3x").write_text("from sb3_td3x.cli import main\n\nif __name__ == '__main__':\n    main()\n")
        made = 'gymnasium.register("Own-v0", "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=50)'
        (tmp_path / "work" / "my_module.py").write_text(f"import gymnasium\n\n{made}\n")
        study(tmp_path / "work" / "own.yml", envs=["my_module:Own-v0"], seeds=[0], steps=60, n_envs=2)
        printed = td3x("study", "own.yml", "--jobs", 1, program=[str(tmp_path / "td3x")], cwd=tmp_path / "work")
        assert "1 of 1 runs are done" in printed

    def test_nobody_is_told_to_trust_a_run_who_did_not(self, tmp_path):
        folder = RunDir.create(tmp_path, "gymnasium:Pendulum-v1")
        folder.write_settings({}, {"env_kwargs": {"g": 5}})
        assert train._words(folder, trusts=True).endswith(" --trust")
        assert train._words(folder, trusts=False) == str(folder.path)
        of_a_module = RunDir.create(tmp_path, "my_module:Own-v0")
        of_a_module.write_settings({}, {})
        assert train._words(of_a_module, trusts=True).endswith(" --trust")
        two_words = RunDir.create(tmp_path / "two words", "Own-v0")
        two_words.write_settings({}, {})
        assert train._words(two_words, trusts=True) == f"'{two_words.path}'"


RESCALE = "gymnasium.wrappers.RescaleAction"
BAD_TRAINING = {
    "an unknown environment": (["--env", "Walker2DBullet-v0"], "there is no environment 'Walker2DBullet-v0'"),
    "one of a module": (["--env", "gymnasium:Pendulun-v1"], "there is no environment 'gymnasium:Pendulun-v1'"),
    "one of nobody knows which module": (["--env", "qqqqqq-v0"], "your own registers is my_module:qqqqqq-v0"),
    "a path for a module": (["--env", "./mine:Own-v0"], "the module ./mine cannot be imported"),
    "discrete actions": (["--env", "CartPole-v1"], "only supports"),
    "an unknown preset": (["--preset", "best"], "choose from default, sb3, t3d"),
    "tau above 1": (["--set", "tau=2"], "tau must be a number between 0 and 1"),
    "half a step": (["--steps", "10.5"], "steps must be a whole number"),
    "episodes of several environments": (["--preset", "t3d", "--n-envs", "2"], "needs n_envs=1"),
    "an unknown device": (["--device", "tpu"], "device on this machine must be one of auto, cpu"),
    "a device SB3 does not know": (["--device", "meta"], "device on this machine must be one of auto, cpu"),
    "more memory than there is": (["--set", "buffer_size=1e13"], "Unable to allocate"),
    "hindsight replay without goals": (["--set", "replay_buffer_class=HerReplayBuffer"], "used with Dict obs space only"),
    "images where there are none": (["--set", "policy=CnnPolicy"], "You should use NatureCNN only with images"),
    "a wrapper without its arguments": (
        ["--set", f"env_wrapper={RESCALE}"],
        f"{RESCALE} does not take this environment or {{}}",
    ),
    "an unknown argument of the buffer": (["--set", "replay_buffer_kwargs.goals=4"], "unexpected keyword argument 'goals'"),
    "a module that is not there": (["--env", "no_such_module:Env-v0"], "no_such_module cannot be imported"),
    **({} if th.cuda.is_available() else {"a device that is not there": (["--device", "cuda"], "of auto, cpu, not 'cuda'")}),
}


@pytest.mark.parametrize("case", BAD_TRAINING)
def test_bad_input_is_one_line_and_leaves_nothing_behind(case, tmp_path, refused):
    arguments, message = BAD_TRAINING[case]
    if "--env" not in arguments:
        arguments = ["--env", "Pendulum-v1", *arguments]
    printed = refused("train", "--out", tmp_path / "logs", *arguments)
    assert message in printed
    assert printed.startswith("error: ")
    assert len(printed.strip().splitlines()) == 1
    assert not list(tmp_path.glob("logs/td3x/*"))


def test_usage_errors_end_with_2():
    for arguments in (["train"], ["nonsense"], ["train", "Pendulum-v1"]):
        assert CliRunner().invoke(cli.app, arguments).exit_code == 2


def test_frequencies_count_the_steps_of_all_environments(tmp_path):
    run = prepared(tmp_path, "Pendulum-v1", steps=80, n_envs=2, eval_freq=20, save_freq=20, eval_episodes=1)
    assert experiment.train(run)
    assert run.folder.scores()[0].tolist() == [20, 40, 60, 80]
    assert saved_steps(run.folder.checkpoints) == [60, 80]
