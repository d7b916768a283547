"""The td3x commands that read a run: scores, videos and plots, and what they do not do with an untrusted run."""

import shutil
import sys
from collections import OrderedDict
from functools import partial
from hashlib import sha256
from unittest.mock import Mock

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker
import pytest
import yaml
from gymnasium import spaces

import agents
from sb3_td3x import TD3X, save_run
from sb3_td3x.results import scores
from sb3_td3x.results.plots import draw
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import play
from tests.commands import saved_run, td3x
from tests.tools import LineEnv, model


class Rendered(LineEnv):
    metadata = {"render_modes": ["human", "rgb_array"]}  # noqa: RUF012

    def __init__(self, render_mode=None, observation_space=None):
        super().__init__(observation_space)
        self.render_mode = render_mode


class TestReading:
    def test_eval_scores_the_same_episodes_in_every_process(self, walker_run, heard):
        arguments = ("eval", walker_run[0], "--episodes", 2)
        printed = heard(*arguments)
        assert "Walker2DBulletEnv-v0, best_model.zip: return" in printed
        assert td3x(*arguments) == printed

    def test_enjoy_makes_a_video_where_there_is_no_display(self, tmp_path, monkeypatch, heard):
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        monkeypatch.setattr(play, "record_video", partial(play.record_video, max_steps=10))
        run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
        printed = heard("enjoy", run.path)
        assert "there is no display: making a video" in printed
        assert f"{run.video} (the first 10 steps of one, return" in printed
        assert run.video.stat().st_size > 1000

    def test_enjoy_shows_the_episodes_that_eval_scores_where_there_is_a_display(
        self, tmp_path, monkeypatch, heard, registered
    ):
        shown = []

        class Windowed(Rendered):
            def step(self, action):
                shown.append(self.render_mode)
                return super().step(action)

        registered("Windowed-v0", Windowed)
        run = saved_run(tmp_path, "Windowed-v0", model(Windowed()))
        seen = play.evaluate(run, 2, seed=5, render_mode="human")
        assert shown == ["human"] * 40
        assert seen == pytest.approx(play.evaluate(run, 2, seed=5))
        shown.clear()
        monkeypatch.setenv("DISPLAY", ":0")
        assert heard("enjoy", run.path, "--episodes", 2).count("return ") == 2
        assert shown == ["human"] * 40

    @pytest.mark.parametrize(("env_id", "renders"), [("Walker2DBulletEnv-v0", True), ("Pendulum-v1", False)])
    def test_only_pybullets_windows_need_render_to_follow_the_robot_and_keep_time(
        self, env_id, renders, tmp_path, monkeypatch
    ):
        run, asked = saved_run(tmp_path, env_id, model(gym.make(env_id))), []
        opened = play.open_evaluation_env
        monkeypatch.setattr(play, "open_evaluation_env", lambda run, seed, mode, trust: opened(run, seed, None, trust))
        monkeypatch.setattr(play, "evaluate_policy", lambda *_, render, **__: (asked.append(render), ([0.0], [1]))[1])
        play.evaluate(run, 1, seed=0, render_mode="human")
        play.evaluate(run, 1, seed=0)
        assert asked == [renders, False]

    def test_a_picture_of_other_integers_is_not_stretched(self, tmp_path, registered):
        class Dim(Rendered):
            def render(self):
                return np.full((16, 16, 3), [[[10, 20, 30]]], np.int64)

        registered("Dim-v0", Dim)
        run = saved_run(tmp_path, "Dim-v0", model(Dim()))
        play.record_video(run, run.video, max_steps=3)
        frame = imageio.get_reader(run.video).get_data(0)
        assert np.abs(frame.astype(int) - [10, 20, 30]).max() < 10

    def test_an_environment_that_cannot_draw_is_named_and_leaves_no_video(self, tmp_path, registered):
        class Blind(Rendered):
            problem = RuntimeError("no [GL] context")

            def render(self):
                raise self.problem

        registered("Blind-v0", Blind)
        run = saved_run(tmp_path, "Blind-v0", model(Blind()))
        with pytest.raises(ValueError, match=r"no video of Blind-v0: no \[GL\] context"):
            play.record_video(run, run.video)
        assert not list(run.video.parent.iterdir())
        run.video.write_text("an older video")
        Blind.problem = NotImplementedError()
        with pytest.raises(ValueError, match=r"no video of Blind-v0: NotImplementedError\(\)"):
            play.record_video(run, run.video)
        assert run.video.read_text() == "an older video"

    def test_a_video_has_the_pictures_as_they_are_drawn_and_is_made_in_silence(self, tmp_path, monkeypatch, capfd):
        monkeypatch.delenv("DISPLAY", raising=False)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        env = gym.make("Pendulum-v1", render_mode="rgb_array")
        run = saved_run(tmp_path, "Pendulum-v1", model(env))
        play.record_video(run, run.video, max_steps=3)
        assert imageio.get_reader(run.video).get_meta_data()["size"] == (500, 500)
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize(
        ("command", "name"),
        [("enjoy RUN --video", "walk.mp4"), ("export RUN --onnx", "walk.onnx"), ("train --env Pendulum-v1 --out", "logs")],
    )
    def test_a_place_that_cannot_be_written_is_named(self, command, name, walker_run, tmp_path, refused):
        (tmp_path / "file").write_text("")
        printed = refused(*command.replace("RUN", str(walker_run[0])).split(), tmp_path / "file" / name)
        assert printed.startswith("error: ")
        assert str(tmp_path / "file") in printed

    def test_another_format_is_refused(self, walker_run, tmp_path, refused):
        printed = refused("enjoy", walker_run[0], "--video", tmp_path / "walk.avi")
        assert printed == "error: a video is written as .mp4, not as walk.avi\n"
        assert not (tmp_path / "walk.avi").exists()

    @pytest.mark.parametrize(("max_steps", "said"), [(100, "one episode, return"), (7, "the first 7 steps of one, return")])
    def test_a_video_that_ends_before_its_episode_says_so(self, tmp_path, max_steps, said, registered):
        class Drawn(Rendered):
            metadata = {**Rendered.metadata, "render_fps": 12}  # noqa: RUF012

            def __init__(self, render_mode=None):
                super().__init__(render_mode, spaces.Box(0, 255, (36, 36, 3), np.uint8))

            def render(self):
                return np.zeros((16, 16, 3), dtype=np.uint8)

        registered("Drawn-v0", Drawn)
        run = saved_run(tmp_path, "Drawn-v0", model(Drawn(), "CnnPolicy"))
        recorded = play.record_video(run, run.video, max_steps=max_steps)
        assert said in recorded
        video = imageio.get_reader(run.video)
        assert video.count_frames() == min(20, max_steps)
        assert video.get_meta_data()["fps"] == 12

    def test_a_shipped_agent_plays_as_the_model_that_it_was_taken_from_and_without_trust(
        self, walker_run, tmp_path, monkeypatch
    ):
        run = RunDir.open(walker_run[0])
        readme = (agents.AGENTS / "README.md").read_text()
        monkeypatch.setattr(agents, "AGENTS", tmp_path)
        monkeypatch.setattr("sys.argv", ["agents.py", str(run.path), "--episodes", "2"])
        (tmp_path / "README.md").write_text(readme)
        agents.main()
        written = (tmp_path / "README.md").read_text()
        shipped = RunDir.open(tmp_path / "Walker2DBulletEnv-v0")
        assert play.evaluate(shipped, 2, seed=5).tolist() == play.evaluate(run, 2, seed=5).tolist()
        assert shipped.best_model.stat().st_size < run.best_model.stat().st_size / 3
        assert sha256(shipped.best_model.read_bytes()).hexdigest() in written
        changed = [new for new, old in zip(written.splitlines(), readme.splitlines(), strict=True) if new != old]
        assert [row.split()[1] for row in changed] == [run.env_id]  # all else stays as it is

    def test_plot_reads_runs_of_rl_zoo(self, walker_run, tmp_path):
        run = tmp_path / "td3" / "Walker2DBulletEnv-v0_1"
        shutil.copytree(walker_run[0], run)
        content = OrderedDict([("algo", "td3"), ("env", "Walker2DBulletEnv-v0")])
        (run / "Walker2DBulletEnv-v0" / "args.yml").write_text(yaml.dump(content))
        assert RunDir.open(run).arguments() == dict(content)
        draw(scores.read([run, walker_run[0]]), tmp_path / "both.png")
        assert (tmp_path / "both.png").stat().st_size > 1000


@pytest.mark.parametrize("command", ["eval", "enjoy", "plot"])
def test_a_folder_that_is_no_run_is_refused(command, tmp_path, refused, monkeypatch):
    printed = refused(command, tmp_path)
    assert "is not a run" in printed
    assert "Traceback" not in printed
    monkeypatch.setenv("TD3X_DEBUG", "1")
    assert "Traceback" in refused(command, tmp_path)


@pytest.mark.parametrize(("command", "missing"), [("eval", "folder"), ("report", "folder"), ("plot", "folder or file")])
def test_a_folder_that_does_not_exist_is_said_not_to(command, missing, tmp_path, called):
    nope = tmp_path / "nope"
    assert called(command, nope) == (2, f"error: there is no {missing} {nope}\n")


@pytest.mark.parametrize("command", [["eval"], ["enjoy"], ["train", "--resume"]])
def test_a_simulator_that_is_not_installed_is_named_in_one_line(command, tmp_path, called, registered):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")).learn(30))
    run.write_settings({**run.config(), "n_timesteps": 100}, {**run.arguments(), "overrides": []})
    loaded = TD3X.load(run.last_model, gym.make("Pendulum-v1"))
    save_run(loaded.learn(1, reset_num_timesteps=False), run.checkpoints)

    def make(**_):
        raise gym.error.DependencyNotInstalled("Box2D is not installed, run `pip install swig`")

    registered("Pendulum-v1", make)
    code, printed = called(*command, run.path)
    assert (code, printed.count("\n")) == (2, 1)
    assert "Box2D is not installed" in printed


class TestUntrustedRuns:
    """They are read without running their author's code, unless the user says that he trusts them."""

    @pytest.mark.parametrize("command", [["eval"], ["enjoy"], ["export"], ["push", "--repo", "me/it"]])
    def test_a_model_that_needs_trust_is_refused_with_the_switch_that_loads_it(self, command, tmp_path, refused):
        run = self.scheduled(tmp_path)
        before = set(run.path.rglob("*"))
        printed = refused(*command, run.path)
        assert "learning_rate holds " in printed
        assert "--trust" in printed
        assert set(run.path.rglob("*")) == before

    @pytest.mark.parametrize("name", ["args.yml", "config.yml", "vecnormalize.pkl"])
    def test_their_settings_and_statistics_run_no_code(self, name, tmp_path, refused):
        run, canary = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1"))), tmp_path / "canary"
        in_yaml = f"env: Pendulum-v1\nmore: !!python/object/apply:os.system ['touch {canary}']\n".encode()
        in_pickle = b"\x80\x02cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
        (run.settings / name).write_bytes(in_pickle if name.endswith(".pkl") else in_yaml)
        assert str(run.settings / name) in refused("eval", run.path)
        assert not canary.exists()

    def test_eval_trusts_when_told(self, tmp_path, heard):
        assert "return" in heard("eval", self.scheduled(tmp_path).path, "--episodes", 1, "--trust")

    @pytest.mark.parametrize("command", [["eval"], ["enjoy"], ["export"], ["push", "--repo", "me/it"], ["train", "--resume"]])
    def test_the_module_that_names_their_environment_is_not_imported(self, command, tmp_path, monkeypatch, refused):
        run = self.of_a_module(tmp_path, monkeypatch)
        assert "importing their_module runs its code" in refused(*command, run.path)
        assert "their_module" not in sys.modules

    def test_no_video_is_written_through_their_links(self, tmp_path, monkeypatch, refused):
        monkeypatch.setattr(play, "has_display", lambda: False)
        run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
        (tmp_path / "elsewhere").mkdir()
        run.video.parent.symlink_to(tmp_path / "elsewhere")
        assert "leads out of the run's folder" in refused("enjoy", run.path)
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_module_of_the_runs_is_imported_when_told(self, tmp_path, monkeypatch):
        run = self.of_a_module(tmp_path, monkeypatch)
        assert len(play.evaluate(run, 1, seed=0, device="cpu", trust=True)) == 1
        assert sys.modules.pop("their_module")

    @staticmethod
    def of_a_module(tmp_path, monkeypatch):
        (tmp_path / "their_module.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        run = saved_run(tmp_path, "their_module:Pendulum-v1", model(gym.make("Pendulum-v1")))
        run.write_settings(run.config(), {**run.arguments(), "overrides": []})
        return run

    @staticmethod
    def scheduled(tmp_path):
        return saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1"), learning_rate=lambda left: 1e-3 * left))


def test_another_seed_shows_other_episodes(tmp_path, called_and_heard):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    printed = {called_and_heard("eval", run.path, "--episodes", 1, "--seed", seed)[1].out for seed in (1, 2)}
    assert len(printed) == 2


def test_enjoy_shows_the_episodes_of_its_seed(tmp_path, monkeypatch, called_and_heard):
    monkeypatch.setattr(play, "evaluate", shown := Mock(return_value=[0.0]))
    monkeypatch.setattr(play, "has_display", lambda: True)
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    called_and_heard("enjoy", run.path, "--episodes", 1, "--seed", 7)
    assert shown.call_args.args[1:3] == (1, 7)
