"""rl-zoo3's scripts take TD3X for one of their algorithms, and its plots read our runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from stable_baselines3.common.buffers import NStepReplayBuffer
from typer.testing import CliRunner

from sb3_td3x import TD3X, cli
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.zoo import hyperparams, main, with_our_preset
from tests import commands

ROOT = Path(__file__).parent.parent
SCHEDULE = "learning_rate:'lin_1e-3'"
BUFFER = "replay_buffer_class:'NStepReplayBuffer'"
HOPPER = ["--algo", "td3x", "--env", "HopperBulletEnv-v0"]
SHORT = ["--eval-freq", "100", "--eval-episodes", "2", "--seed", "1", "--num-threads", "1"]
SEARCH = ["--storage", "study.log", "--study-name", "line"]


def start(folder, *arguments):
    return commands.start(*arguments, program=["-m"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finished(process):
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a user works, with the file that the docs show."""
    folder = tmp_path_factory.mktemp("zoo")
    shown = re.search(
        r"```\{code-block\} python\n:caption: custom_envs.py\n\n(.*?)```", (ROOT / "docs/zoo.md").read_text(), re.S
    )
    (folder / "custom_envs.py").write_text(shown.group(1))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """A run of rl-zoo3 with two environments in processes of their own, and beside it one of ``td3x train``."""
    many = ["--vec-env", "subproc", "-params", "n_envs:2", SCHEDULE, "--save-replay-buffer"]
    process = start(folder, "sb3_td3x.zoo", "train", *HOPPER, *SHORT, "-n", "300", *many)
    ours = ["--steps", "300", "--eval-freq", "100", "--eval-episodes", "2", "--no-video", "--out", str(folder / "ours")]
    assert CliRunner().invoke(cli.app, ["train", *HOPPER[2:], *ours]).exit_code == 0
    return folder / "logs/td3x/HopperBulletEnv-v0_1", finished(process)


@pytest.fixture(scope="module")
def searched(folder):
    """Two processes at work on one study; the first trial of each meets a NaN."""
    one = ["train", "--algo", "td3x", "--env", "DivergesOnce-v0", "--gym-packages", "tests.zoo_session", "-optimize", *SEARCH]
    few = ["-n", "120", "--n-trials", "2", "--n-evaluations", "1", "--eval-episodes", "1", "--no-optim-plots"]
    processes = [start(folder, "sb3_td3x.zoo", *one, *few, "--num-threads", "1", "--seed", seed) for seed in "12"]
    printed = [finished(process) for process in processes]
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.log")))
    return optuna.load_study(study_name="line", storage=storage), printed


@pytest.fixture(scope="module")
def session(folder, trained, searched):
    """What several commands printed, by name; they share a process, as each would spend seconds on imports."""
    quiet, plotted = ["--no-render", "-n", "400"], ["-a", "td3x", "-e", "HopperBulletEnv-v0"]
    last = str(searched[0].trials[-1].number)
    line = ["--algo", "td3x", "--env", "Line-v0", "--gym-packages", "tests.zoo_session"]
    calls = {
        "presets": ["presets_agree"],
        "samples": ["samples_are_accepted"],
        "enjoy": ["enjoy", *HOPPER, "-f", "logs", *quiet, "--load-best"],
        "enjoy ours": ["enjoy", *HOPPER, "-f", "ours", *quiet],
        "video": ["record_video", *HOPPER, "-f", "logs", "-n", "30", "-o", str(folder / "video")],
        "all_plots": ["all_plots", *plotted, "-f", "both", "-o", "scores", "-print", "-max", "1000"],
        "plot_from_file": ["plot_from_file", "-i", "scores.pkl", "--no-million", "-o", "scores.svg"],
        "plot_train": ["plot_train", *plotted, "-f", "both", "-w", "2"],
        "trial": ["train", *line, *SEARCH, "--trial-id", last, "-n", "110", *SHORT, "-params", BUFFER],
        "unknown option": ["enjoy", "--nonsense"],
    }
    for number, logs in enumerate(("logs", "ours"), start=1):
        shutil.copytree(folder / logs / "td3x/HopperBulletEnv-v0_1", folder / f"both/td3x/HopperBulletEnv-v0_{number}")
    (folder / "session").mkdir()
    file = folder / "session" / "commands.json"
    file.write_text(json.dumps(list(calls.values())))
    finished(start(folder, "tests.zoo_session", str(file)))
    failed = json.loads(file.read_text())
    printed = {name: file.with_name(f"{number}.txt").read_text() for number, name in enumerate(calls)}
    return printed, {name for number, name in enumerate(calls) if number in failed}


def of(session, name):
    printed, failed = session
    assert name not in failed, printed[name]
    return printed[name]


class TestTrain:
    def test_takes_our_preset_and_leaves_a_run_folder(self, trained):
        run, printed = trained
        assert "Loading hyperparameters from: sb3_td3x.zoo" in printed
        for name in ("evaluations.npz", "best_model.zip", "HopperBulletEnv-v0.zip", "0.monitor.csv", "1.monitor.csv"):
            assert (run / name).exists(), name
        preset = hyperparams["HopperBulletEnv-v0"]
        assert RunDir.open(run).config() == {**preset, "n_envs": 2, "learning_rate": "lin_1e-3"}
        model = TD3X.load(run / "HopperBulletEnv-v0.zip")
        assert (model.n_envs, model.num_timesteps, model.gamma) == (2, 300, preset["gamma"])
        assert model._n_updates > 0

    def test_makes_the_models_that_td3x_train_makes(self, session):
        of(session, "presets")

    def test_plain_rl_zoo_resumes_a_run(self, folder, trained):
        """``-i``, started as rl-zoo3's own script, with the replay buffer beside the model."""
        model = trained[0] / "HopperBulletEnv-v0.zip"
        more = ["-params", "n_envs:2", SCHEDULE, "-i", str(model), "-conf", "sb3_td3x.zoo", "-f", "continued"]
        printed = finished(start(folder, "rl_zoo3.train", *HOPPER, *SHORT, "-n", "150", *more))
        assert "Loading pretrained agent" in printed
        assert "Loading replay buffer" in printed
        (zipped,) = (folder / "continued").rglob("HopperBulletEnv-v0.zip")
        assert TD3X.load(zipped)._n_updates > TD3X.load(model)._n_updates > 0


class TestSearch:
    def test_two_processes_share_a_study(self, searched):
        study, _ = searched
        assert len(study.trials) == 4
        assert all(set(trial.params) >= {"n_quantiles", "top_quantiles_to_drop_per_net", "tau"} for trial in study.trials)

    def test_a_diverging_trial_is_pruned_and_the_search_continues(self, searched):
        study, printed = searched
        states = [trial.state.name for trial in study.trials]
        assert sorted(states) == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
        assert all("reward is not finite" in text for text in printed)

    def test_all_that_is_drawn_is_accepted(self, session):
        of(session, "samples")

    def test_a_trial_can_be_trained(self, folder, session, searched):
        of(session, "trial")
        drawn = searched[0].trials[-1].params
        model = TD3X.load(folder / "logs/td3x/Line-v0_1/Line-v0.zip")
        for name in ("n_quantiles", "policy_delay", "tau", "train_freq"):
            value = model.train_freq.frequency if name == "train_freq" else getattr(model, name)
            assert value == drawn[name], name
        assert model.replay_buffer_class is NStepReplayBuffer  # which rl-zoo3 was told by name


class TestPlay:
    def test_enjoy(self, session):
        assert "Mean reward" in of(session, "enjoy")

    def test_enjoy_reads_runs_of_td3x_train(self, session):
        assert "Mean reward" in of(session, "enjoy ours")

    def test_record_video(self, session, folder):
        of(session, "video")
        (video,) = (folder / "video").glob("*.mp4")
        assert video.stat().st_size > 1000


class TestPlots:
    """Of a folder that holds a run of rl-zoo3 and one of ``td3x train``."""

    def test_all_plots(self, session):
        printed = of(session, "all_plots")
        assert "HopperBulletEnv-v0-TD3X-both: 2" in printed
        assert re.search(r"\|HopperBulletEnv-v0\| *-?\d+ \+/- \d+ *\|", printed), printed
        assert points(printed) == [3]

    def test_plot_from_file(self, session, folder):
        assert points(of(session, "plot_from_file"))[0] == 3
        assert (folder / "scores.svg").stat().st_size > 1000

    def test_plot_train(self, session):
        drawn = points(of(session, "plot_train"))
        assert len(drawn) == 2
        assert min(drawn) > 2


def points(printed):
    """How many points each curve has."""
    return [int(number) for number in re.search(r"points drawn: (.*)", printed).group(1).split()]


class TestLauncher:
    def test_without_rl_zoo_it_says_what_to_install(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "rl_zoo3", None)
        monkeypatch.setattr(sys, "argv", ["zoo", "train"])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "pip install 'rl_zoo3[plots]' requests moviepy" in capsys.readouterr().err

    def test_an_unknown_option_is_rl_zoos_to_refuse(self, session):
        assert "unknown option" in session[1]
        assert "rl_zoo3" in session[0]["unknown option"]

    @pytest.mark.parametrize(
        ("arguments", "is_ours"),
        [
            (["--algo", "td3x", "-params", "n_envs:2"], True),
            (["--env", "Pendulum-v1", "--algo=td3x"], True),
            (["--algo", "td3x", "-conf", "mine.yml"], True),  # the last file wins
            (["--algo", "td3"], False),
        ],
    )
    def test_our_preset_is_for_td3x(self, arguments, is_ours):
        added = ["--conf-file", "sb3_td3x.zoo"] if is_ours else []
        assert with_our_preset(arguments) == [*added, *arguments]
