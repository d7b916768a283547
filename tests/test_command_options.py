"""What the options of ``td3x train`` do, and that errors come early, name what to change, and obey no file's contents."""

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from gymnasium import spaces
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_td3x import CnnPolicy, MultiInputPolicy, cli
from sb3_td3x.cli import progress, train
from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import environments, experiment, play
from tests.commands import FAST, QUICK, prepared, saved_run, wait_until
from tests.tools import LineEnv, model

PENDULUM = ["train", "--env", "Pendulum-v1", "--no-video", *QUICK]


@pytest.fixture
def heard(tmp_path, heard):
    """Also says where runs are to be."""
    return lambda *arguments: heard(*arguments, "--out", tmp_path)


class TestOptions:
    def test_arguments_of_the_environment_reach_it_and_are_kept(self, heard, tmp_path):
        printed = heard(*PENDULUM, "--steps", 60, "--env-kwargs", "g:5", "--n-envs", 2)
        folder = RunDir.open(tmp_path / "td3x" / "Pendulum-v1_1")
        assert f"watch it: td3x enjoy {folder.path} --trust\n" in printed
        assert folder.arguments()["env_kwargs"] == {"g": 5}
        env = play.open_evaluation_env(folder, seed=0, trust=True)
        assert env.get_attr("g") == [5]
        for act in (lambda: play.evaluate(folder, 1, seed=0), lambda: experiment.resume(folder, steps=90)):
            with pytest.raises(ValueError, match=r"passes \{'g': 5\} to its environment: if you trust the run"):
                act()
        run = experiment.resume(folder, steps=90, trust=True)
        assert run.model.env.get_attr("g") == [5, 5]
        assert experiment.train(run)

    def test_what_is_printed_for_a_run_that_holds_a_link_can_be_run(self, called_and_heard, heard, tmp_path):
        heard(*PENDULUM, "--steps", 60)
        run, elsewhere = tmp_path / "td3x" / "Pendulum-v1_1", tmp_path / "elsewhere"
        (run / "checkpoint").rename(elsewhere)
        (run / "checkpoint").symlink_to(elsewhere)
        code, printed = called_and_heard("train", "--resume", run, "--steps", 90, "--trust", "--no-video")
        assert (code, f"read about it: td3x report {run} --trust\n" in printed.out) == (0, True)
        assert called_and_heard("report", run, "--trust")[0] == 0

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("g=5", "needs name:value, not 'g=5'"),
            ("a.b:5", "needs name:value, not 'a.b:5'"),
            ("weight:5", "cannot be made with env_kwargs {'weight': 5}"),
        ],
    )
    def test_arguments_that_it_does_not_take_are_refused(self, text, complaint, tmp_path, refused):
        assert complaint in refused(*PENDULUM, "--env-kwargs", text, "--out", tmp_path)

    def test_an_argument_render_mode_hinders_no_video(self):
        with closing(environments.open_env("Pendulum-v1", 0, environments.AFTERWARDS, render_mode="rgb_array",
                                           env_kwargs={"render_mode": "human"})) as env:  # fmt: skip
            assert env.get_attr("render_mode") == ["rgb_array"]

    def test_a_preset_may_be_a_users_file(self, heard, tmp_path):
        (tmp_path / "mine.yml").write_text("Pendulum-v1: {n_timesteps: 60, gamma: 0.9}")
        printed = heard(*PENDULUM, "--preset", tmp_path / "mine.yml")
        assert f"preset {tmp_path / 'mine.yml'}, seed 0, 60 steps" in printed
        assert RunDir.open(tmp_path / "td3x" / "Pendulum-v1_1").config()["gamma"] == 0.9

    def test_without_a_terminal_a_line_says_how_far_the_run_is(self, heard, monkeypatch):
        monkeypatch.setattr(progress, "LIFE_SECONDS", 0)
        lines = [line for line in heard(*PENDULUM, "--steps", 600).splitlines() if " left" in line]
        assert any("no episode has ended yet" in line for line in lines)
        assert any("steps/s  mean episode return -1" in line for line in lines)

    def test_lines_are_redrawn_on_terminals_that_can(self, monkeypatch):
        terminal = Mock(spec=["isatty"], isatty=lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        assert PlainConsole(file=terminal).is_interactive
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert not PlainConsole(file=StringIO()).is_interactive
        monkeypatch.setenv("TERM", "dumb")
        assert not PlainConsole(file=terminal).is_interactive

    def test_a_terminal_of_80_letters_shows_all_of_the_bars_numbers(self):
        run, console = Mock(total=500_000), PlainConsole(width=80, file=StringIO())
        run.folder.scores.return_value = np.array([495_000]), np.array([[-1234.0]])
        bar = progress.ShowProgress(console, run, has_bar=True).bar
        bar.update(bar.task_ids[0], completed=123_456, rate=1234.0)
        console.print(bar.get_renderable(), soft_wrap=False)
        shown = console.file.getvalue().split()
        assert shown[0] == "123456/500000"
        assert " ".join(shown[2:]) == "1234 steps/s, left -:--:-- score -1234, best -1234 at 495,000 steps"

    def test_what_is_left_out_is_named_with_the_command_that_brings_it(self, heard, monkeypatch):
        installed = train.find_spec
        monkeypatch.setattr(
            train, "find_spec", lambda name: None if name in ("matplotlib", "tensorboard") else installed(name)
        )
        printed = heard(*PENDULUM, "--steps", 30)
        assert "no plot of the scores: pip install matplotlib\nno TensorBoard events: pip install tensorboard\n" in printed

    def test_weights_and_biases_gets_the_log(self, heard, monkeypatch, tmp_path):
        monkeypatch.setenv("WANDB_SERVICE", "")  # wandb sets it for child processes; later tests do not inherit it
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("WANDB_PROJECT", "thesis")
        heard(*PENDULUM, "--steps", 100, "--track", "wandb")
        (log,) = (tmp_path / "td3x" / "wandb").glob("offline-run-*/*.wandb")
        wait_until(lambda: b"eval/mean_reward" in log.read_bytes())  # wandb's own process writes it
        assert all(name in log.read_bytes() for name in (b"learning_starts", b"env_kwargs", b"command"))
        assert b"thesis" in log.read_bytes()
        RunDir.open(tmp_path / "td3x" / "Pendulum-v1_1").require_no_links()  # so that it can be resumed

    def test_wandb_without_a_login_is_an_error_of_one_line(self, monkeypatch, tmp_path, refused):
        import wandb

        monkeypatch.setattr(wandb, "init", Mock(side_effect=wandb.errors.UsageError("No API key configured")))
        said = "error: wandb cannot begin to log (WANDB_MODE=offline needs no connection): No API key configured\n"
        assert refused(*PENDULUM, "--track", "wandb", "--out", tmp_path).endswith(said)
        assert list((tmp_path / "td3x").iterdir()) == []
        assert not list(tmp_path.rglob("lock*"))

    def test_wandb_whose_process_a_signal_has_ended_is_no_error(self, monkeypatch, tmp_path, called):
        import wandb

        run = Mock(**{"finish.side_effect": BrokenPipeError})
        monkeypatch.setattr(wandb, "init", lambda **kwargs: run)
        code, _ = called(*PENDULUM, "--steps", 100, "--track", "wandb", "--out", tmp_path)
        assert code == 0
        assert run.log.call_args.kwargs == {"step": 100}  # of the environment
        run.finish.assert_called_once()

    @pytest.mark.parametrize("error", [None, ValueError("no luck")])
    def test_wandb_is_told_whether_the_run_has_failed(self, error, monkeypatch, called, tmp_path):
        import wandb

        monkeypatch.setattr(wandb, "init", lambda **kwargs: run)
        monkeypatch.setattr("sb3_td3x.TD3X.train", Mock(side_effect=error))
        run = Mock()
        called(*PENDULUM, "--steps", 150, "--track", "wandb", "--out", tmp_path)
        run.finish.assert_called_once_with(exit_code=int(error is not None))

    def test_wandb_that_is_not_installed_is_named_before_the_run(self, monkeypatch, tmp_path, called):
        monkeypatch.setitem(sys.modules, "wandb", None)
        code, printed = called(*PENDULUM, "--track", "wandb", "--out", tmp_path)
        assert (code, printed.count("\n")) == (2, 1)
        assert printed.endswith(": pip install wandb\n")
        assert not list(tmp_path.iterdir())


class TestThePolicy:
    def test_is_chosen_by_the_observations(self, tmp_path, registered, called_and_heard):
        registered("Bits-v0", BitFlippingEnv, kwargs={"n_bits": 4, "continuous": True})
        registered("Pixels-v0", lambda: LineEnv(spaces.Box(0, 255, (36, 36, 3), np.uint8)))
        small = ("buffer_size=100", *FAST)
        bits, pixels = (prepared(tmp_path, name, small, steps=30) for name in ("Bits-v0", "Pixels-v0"))
        assert isinstance(bits.model.policy, MultiInputPolicy)
        assert isinstance(pixels.model.policy, CnnPolicy)
        assert pixels.folder.config()["policy"] == "CnnPolicy"
        assert experiment.train(bits)
        assert re.search(
            r"return -?[\d.]+ .*, success \d+%\n", called_and_heard("eval", bits.folder.path, "--episodes", 3)[1].out
        )

    @pytest.mark.parametrize("space", [spaces.Box(0, 255, (4, 36, 36, 1), np.uint8), spaces.Box(0, 1, (36, 36, 3))])
    def test_is_asked_for_where_pictures_are_no_images_for_sb3(self, space, tmp_path, registered):
        registered("Pixels-v0", lambda: LineEnv(space))
        with pytest.raises(ValueError, match=r"CnnPolicy takes images of three axes and uint8 .*, not Box.*policy=MlpPolicy"):
            prepared(tmp_path, "Pixels-v0", ("buffer_size=100", *FAST), steps=30)
        run = prepared(tmp_path, "Pixels-v0", ("buffer_size=100", "policy=MlpPolicy", *FAST), steps=30)
        assert run.model.policy.features_extractor_class is FlattenExtractor


class TestEndlessEnvironments:
    def test_have_evaluations_that_end_and_warn(self, tmp_path, monkeypatch, registered):
        monkeypatch.setattr(environments, "LONGEST_EVALUATION", 30)
        registered("Endless-v0", lambda: LineEnv(length=10**9), max_episode_steps=None)
        with pytest.warns(UserWarning, match="Endless-v0 declares no time limit"):
            run = prepared(tmp_path, "Endless-v0", steps=120, eval_freq=60, eval_episodes=2)
        assert experiment.train(run)
        with np.load(run.folder.evaluations) as evaluations:
            assert evaluations["ep_lengths"].tolist() == [[30, 30], [30, 30]]

    @pytest.mark.filterwarnings("ignore:Endless-v0 declares")
    def test_show_wrappers_no_limit_that_training_has_not(self, registered):
        registered("Endless-v0", lambda: LineEnv(length=200), max_episode_steps=None)
        wrapped = {"env_wrapper": {"sb3_contrib.common.wrappers.TimeFeatureWrapper": {"max_steps": 200}}}
        for stream in (environments.TRAINING, environments.EVALUATION):
            assert environments.open_env("Endless-v0", 0, stream, wrapped).get_attr("_max_steps") == [200]


class TestEnvironmentNames:
    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("Pendulm-v1", "did you mean Pendulum-v1 or .*`Pendulum`"),
            ("Pendulum-v9", "did you mean Pendulum-v1 or .*`v1`"),
            ("CarRacing", r"did you mean CarRacing-v3\?"),
            ("Nonsense-v0", "one that a module of your own registers is my_module:Nonsense-v0"),
        ],
    )
    def test_that_are_unknown_are_refused_with_the_nearest_known_ones(self, name, hint):
        with pytest.raises(ValueError, match=f"there is no environment '{name}': {hint}"):
            environments.require_registered(name)

    def test_of_tasks_that_were_removed_are_an_error_of_the_user(self):
        # Gymnasium 1.0 asks for MuJoCo before it says that it has no such task
        said = r"Walker2d-v2 cannot be made: |MuJoCo is not installed"
        with pytest.raises((ValueError, gym.error.DependencyNotInstalled), match=said):
            environments.open_env("Walker2d-v2", 0, environments.EVALUATION)

    @pytest.mark.parametrize(
        ("name", "package"), [("FetchReach-v4", "gymnasium-robotics"), ("HopperBulletEnv-v0", "pybullet-envs-gymnasium")]
    )
    def test_the_package_that_registers_a_known_one_is_named(self, name, package, monkeypatch):
        monkeypatch.setattr(environments, "find_spec", lambda module: None)
        monkeypatch.delitem(gym.registry, name, raising=False)
        with pytest.raises(ValueError, match=rf"pip install {package}"):
            environments.require_registered(name)

    def test_packages_that_are_installed_need_no_import_by_the_user(self):
        code = "from sb3_td3x.runs import environments; [environments.require_registered(n) for n in {!r}]"
        names = ["Walker2DBulletEnv-v0"]
        if environments.find_spec("panda_gym"):
            names.append("PandaReach-v3")
        subprocess.run([sys.executable, "-c", code.format(names)], check=True)

    def test_a_package_that_is_broken_hinders_only_its_own(self, monkeypatch):
        def broken(package):
            raise AttributeError(package)

        monkeypatch.setattr(environments, "find_spec", lambda module: True)
        monkeypatch.setattr(environments, "import_module", broken)
        environments.require_registered("Pendulum-v1")
        with pytest.raises(AttributeError, match="panda_gym"):
            environments.require_registered("PandaReach-v3")


SIDE = spaces.Box(-1, 1, (1,))


class TestErrors:
    def test_a_bug_of_the_environment_keeps_its_traceback(self, tmp_path, called, registered):
        class Broken(LineEnv):
            def __init__(self):
                super().__init__()
                raise KeyError("a bug")

        registered("Broken-v0", Broken)
        code, printed = called("train", "--env", "Broken-v0", "--out", tmp_path)
        assert code == 3
        assert "Traceback" in printed
        assert "KeyError: 'a bug'" in printed
        assert not list(tmp_path.glob("td3x/*"))

    @pytest.mark.parametrize(
        ("space", "line"),
        [
            (spaces.Dict(a=spaces.Dict(b=SIDE)), "Nested observation spaces are not supported"),
            (spaces.Tuple([SIDE, SIDE]), "observation space is not supported"),
        ],
    )
    def test_observations_that_cannot_be_used_are_an_error_of_one_line(self, space, line, tmp_path, refused, registered):
        registered("Odd-v0", lambda: LineEnv(space))
        printed = refused("train", "--env", "Odd-v0", "--out", tmp_path)
        assert (line in printed, printed.count("\n")) == (True, 1)

    def test_characters_that_the_terminal_does_not_know_are_replaced(self, tmp_path, monkeypatch):
        run = saved_run(tmp_path, "Pendulum-v1", model())
        monkeypatch.setattr(sys, "argv", ["td3x", "report", str(run.path), "--out", str(tmp_path / "\u2192.html")])
        monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding="latin-1"))
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        sys.stdout.flush()
        assert b"/?.html (" in sys.stdout.buffer.getvalue()

    def test_control_characters_from_files_do_not_reach_the_terminal(self, tmp_path, called_and_heard):
        title = "\x1b]0;owned\x07\x9b2J"
        run = RunDir.create(tmp_path, title)
        run.write_settings({"policy": "MlpPolicy"}, {"algo": "td3x", "env": title, "overrides": []})
        for command in (["eval"], ["report"], ["enjoy"], ["train", "--resume"]):
            code, printed = called_and_heard(*command, run.path)
            shown = printed.out + printed.err
            assert code in (0, 2)
            assert "owned" in shown
            assert not set(shown) & {"\x1b", "\x07", "\x9b"}

    @pytest.mark.parametrize("name", ["evaluations.npz", "Pendulum-v1/args.yml"])
    def test_a_named_pipe_in_a_run_stops_neither_eval_nor_plot(self, name, tmp_path, refused):
        run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
        run.last_model.unlink()
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)
        for command in ("eval", "plot"):
            assert refused(command, run.path).startswith("error: ")


def in_folder(folder, overrides=FAST):
    """A run that was prepared in it and given up."""
    run = experiment.prepare(experiment.Experiment("Pendulum-v1", steps=60, overrides=overrides), folder)
    run.resources.close()
    return run


class TestAChosenFolder:
    def test_keeps_every_file_that_the_run_has_not_written(self, tmp_path):
        mine = {"thesis.txt": "years", "Pendulum-v1/notes.md": "thoughts", "video/holiday.mp4": "sun"}
        run = prepared(tmp_path / "first", "Pendulum-v1", steps=60)
        run.resources.close()
        for name, text in mine.items():
            (run.folder.path / name).parent.mkdir(exist_ok=True)
            (run.folder.path / name).write_text(text)
        in_folder(run.folder.path)
        with pytest.raises(ValueError, match="policy_kwargs"):
            in_folder(run.folder.path, ("policy_kwargs=3",))
        assert {name: (run.folder.path / name).read_text() for name in mine} == mine

    def test_in_which_no_run_could_be_made_can_be_taken_again(self, tmp_path):
        with pytest.raises(ValueError, match="NatureCNN only with images"):
            in_folder(tmp_path, ("policy=CnnPolicy",))
        assert in_folder(tmp_path).folder.config()["policy"] == "MlpPolicy"

    def test_shows_no_model_of_a_run_that_failed_before_its_first_step(self, tmp_path, monkeypatch):
        run = prepared(tmp_path, "Pendulum-v1", steps=60, overrides=(*FAST, "normalize=true"))
        monkeypatch.setattr(type(run.model), "learn", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            experiment.train(run)
        assert run.folder.model_normalization() == run.folder.normalization
        statistics = run.folder.normalization.rename(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=r"lacks the statistics of VecNormalize \(vecnormalize.pkl\)"):
            run.folder.model_normalization()
        statistics.rename(run.folder.normalization)
        in_folder(run.folder.path)
        assert not run.folder.normalization.exists()  # with which td3x eval would show the new run's model
        with pytest.raises(ValueError, match="holds no model yet"):
            run.folder.model()

    def test_with_the_scores_of_a_run_whose_checkpoints_were_removed_is_refused(self, tmp_path):
        run = prepared(tmp_path, "Pendulum-v1", steps=60)
        run.resources.close()
        run.folder.evaluations.touch()
        with pytest.raises(ValueError, match="holds a run already"):
            experiment.prepare(run.experiment, run.folder.path)

    def test_that_was_killed_before_its_first_file_starts_again(self, tmp_path):
        (tmp_path / "Pendulum-v1").mkdir()
        (tmp_path / "Pendulum-v1" / ".args.yml.partial").touch()
        (tmp_path / "output.log").touch()
        assert in_folder(tmp_path).folder.arguments()["algo"] == "td3x"

    @pytest.mark.parametrize("name", ["Pendulum-v1/notes.md", "best_model.zip", "Pendulum-v1/args.yml"])
    def test_that_holds_other_files_is_refused_untouched(self, name, tmp_path):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(yaml.safe_dump({"algo": "another"}))
        with pytest.raises(ValueError, match="holds other files than a run's"):
            in_folder(tmp_path)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / Path(name)]


def test_a_new_run_has_its_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(th, "set_num_threads", started := Mock())
    prepared(tmp_path, "Pendulum-v1", steps=60, threads=10**6).resources.close()
    started.assert_called_once_with(os.cpu_count())


def test_a_run_is_on_its_device(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "TD3X", made := Mock())
    prepared(tmp_path, "Pendulum-v1", steps=60).resources.close()
    assert made.call_args.kwargs["device"] == "cpu"


def test_the_rate_is_that_of_this_process():
    learner = Mock(num_timesteps=150, _num_timesteps_at_start=100, start_time=time.time_ns() - 10 * 10**9)
    shown = progress.ShowProgress.__new__(progress.ShowProgress)
    shown.run = Mock(model=learner)
    assert shown._rate() == pytest.approx(5, rel=0.5)  # 15 with the steps before


def test_the_time_left_is_for_the_steps_left(monkeypatch):
    run, console = Mock(total=500), PlainConsole(width=100, file=StringIO())
    run.model.ep_info_buffer = None
    run.folder.scores.side_effect = ValueError
    monkeypatch.setattr(progress, "LIFE_SECONDS", -1)
    shown = progress.ShowProgress(console, run, has_bar=False)
    shown._rate, shown.num_timesteps = lambda: 10.0, 400
    shown._on_step()
    assert console.file.getvalue().endswith("0:00:10 left\n")
