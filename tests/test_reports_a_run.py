"""``td3x report`` writes one page with everything about a run; the page loads nothing and runs nothing."""

import base64
import csv
import html
import os
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import gymnasium as gym
import numpy as np
import pytest
import yaml
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes

from sb3_td3x.cli.progress import scores_text
from sb3_td3x.publish import report
from sb3_td3x.results import scores
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment
from tests.commands import FAST
from tests.tools import LineEnv

STEPS = 400
COMMAND = "td3x train --env Line-v0 --steps 400 --set 'policy_kwargs.net_arch=[16,16]'"
VIDEO = b"\0\0\0\x18ftypmp42 a very short video"


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A run that stopped at 260 of 400 steps, with a checkpoint at 200."""
    gym.registry["Line-v0"] = gym.envs.registration.EnvSpec("Line-v0", LineEnv)
    planned = experiment.Experiment(
        "Line-v0", STEPS, seed=3, overrides=FAST, eval_freq=100, eval_episodes=2,
        save_freq=100, device="cpu", out=tmp_path_factory.mktemp("logs"),
    )  # fmt: skip
    run = experiment.prepare(planned, command=COMMAND)
    experiment.train(run, [StopTrainingOnMaxEpisodes(13)])
    run.folder.video.parent.mkdir()
    run.folder.video.write_bytes(VIDEO)
    yield run.folder
    del gym.registry["Line-v0"]


@pytest.fixture
def copied(unfinished, tmp_path):
    """Its folder, to be changed."""
    return RunDir.open(Path(shutil.copytree(unfinished.path, tmp_path / "run")))


@pytest.fixture
def without_pictures(monkeypatch):
    """They take most of the time."""
    monkeypatch.setattr(report, "_picture", lambda figure: "data:image/svg+xml;base64,")


@pytest.fixture(scope="module")
def page(unfinished):
    return report.render(unfinished)


class Parts(HTMLParser):
    """What a page consists of: tags with their attributes, and text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += f" {data}"

    def urls(self):
        return [attrs[name] for _, attrs in self.tags for name in ("src", "srcset", "href", "action", "data") if name in attrs]


def commands(page):
    return [shlex.split(html.unescape(command)) for command in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]


class TestContent:
    def test_says_what_the_run_is_and_how_it_went(self, unfinished, page):
        text = " ".join(Parts(page).text.split())
        assert "Line-v0 TD3X, preset default with changes, seed 3" in text
        assert "steps 240 of 400, unfinished" in text  # by the last line of the log
        steps, results = unfinished.scores()
        shown = re.search(r"best score (\S+) at (\S+) steps last score (\S+)", text)
        means = results.mean(axis=1)
        assert [float(number) for number in shown.groups()] == pytest.approx(
            [means.max(), steps[means.argmax()], means[-1]], abs=0.06
        )
        last = list(csv.DictReader((unfinished.path / "scores.csv").open()))[-1]
        rate = float(last["timesteps"]) / float(last["wall_seconds"])
        assert f"to the evaluation at {last['timesteps']} steps, {rate:,.0f} steps per second" in text
        for heading in ("Learning curve", "Video of the best model", "Hyperparameters", "Versions", "stable-baselines3"):
            assert heading in text
        assert "net_arch: [16, 16]" in text

    @pytest.mark.usefixtures("without_pictures")
    def test_no_score_that_is_not_a_number_is_the_best(self, copied):
        with np.load(copied.evaluations) as archive:
            arrays = dict(archive)
        arrays["results"][0], arrays["results"][1:] = np.nan, np.full_like(arrays["results"][1:], -5.0)
        np.savez(copied.evaluations, **arrays)
        (copied.path / "scores.csv").unlink()
        assert "best -5" in scores_text(copied)
        assert "best score -5" in " ".join(Parts(report.render(copied)).text.split())

    def test_has_a_chart_of_every_diagnostic(self, page):
        titles = [title for title, *_ in report.CHARTS if title not in ("Success rate",)]
        text = Parts(page).text
        assert not [title for title in titles if title not in text]
        assert "built-in" not in page

    def test_pictures_and_video_are_in_the_page(self, page):
        urls = Parts(page).urls()
        videos = [url for url in urls if url.startswith("data:video/mp4;base64,")]
        assert [base64.b64decode(url.partition(",")[2]) for url in videos] == [VIDEO]
        pictures = [url for url in urls if url not in videos]
        assert len(pictures) >= 12
        for url in pictures:
            assert url.startswith("data:image/svg+xml;base64,")
            root = ElementTree.fromstring(base64.b64decode(url.partition(",")[2]))  # noqa: S314  # matplotlib's
            assert root.tag.endswith("}svg")

    def test_shows_the_command_that_made_the_run(self, page):
        assert commands(page)[0] == shlex.split(COMMAND)

    @pytest.mark.parametrize(
        "command",
        [
            "rm -rf /",
            "td3x train --env 'a",
            None,
            ["td3x", "train"],
            "td3x train --env logs.evil:A-v0",
            "td3x train --env=logs.evil-:A-v0",
            "td3x train --env logs.evil:",
            "td3x train --seed '1\n2'",
        ],
    )
    @pytest.mark.usefixtures("without_pictures")
    def test_shows_no_other_command_for_it(self, command, copied):
        copied.write_settings(copied.config(), {**copied.arguments(), "command": command})
        assert "Repeat it" not in report.render(copied)
        copied.write_settings(copied.config(), {**copied.arguments(), "command": "td3x train --env $(reboot); reboot"})
        assert commands(report.render(copied))[0] == ["td3x", "train", "--env", "$(reboot);", "reboot"]  # quoted

    @pytest.mark.filterwarnings("ignore:not restored exactly")  # the callback that stopped it
    @pytest.mark.usefixtures("without_pictures")
    def test_the_command_resumes_the_run(self, unfinished, page, tmp_path):
        assert commands(page)[1] == ["td3x", "train", "--resume", str(unfinished.path)]
        assert "Resume from step 200" in page
        copy = tmp_path / "td3x" / "Line-v0_1"
        shutil.copytree(unfinished.path, copy)
        experiment.train(experiment.resume(RunDir.open(copy)))
        finished = report.render(RunDir.open(copy))
        assert commands(finished)[1] == ["td3x", "train", "--resume", str(copy), "--steps", "800"]
        assert "unfinished" not in finished

    def test_a_run_that_has_just_begun_has_a_page_too(self, unfinished, tmp_path, heard):
        (tmp_path / "run").mkdir()
        shutil.copytree(unfinished.settings, tmp_path / "run" / "Line-v0")
        heard("report", tmp_path / "run")
        text = (tmp_path / "run" / "report.html").read_text()
        assert "has no evaluations yet" in text
        assert "no training diagnostics" in text
        video = tmp_path / "run" / "video" / "best_model.mp4"  # with a display, enjoy alone makes none
        assert f"There is no video yet. To make one: td3x enjoy {tmp_path / 'run'} --video {video}" in text
        assert "--resume" not in text

    @pytest.mark.timeout(60)  # a pipe that nobody writes to blocks the process that opens it
    @pytest.mark.usefixtures("without_pictures")
    def test_pipes_in_place_of_files_are_left_out(self, copied):
        for name in ("progress.csv", "evaluations.npz", "video/best_model.mp4", "Line-v0/config.yml"):
            (copied.path / name).unlink()
            os.mkfifo(copied.path / name)
        assert "no training diagnostics" in report.render(copied)

    @pytest.mark.usefixtures("without_pictures")
    def test_a_damaged_run_is_explained(self, copied, unfinished, called):
        run = copied.path
        (run / "evaluations.npz").write_bytes(b"PK\x03\x04 no archive")
        (run / "progress.csv").write_bytes(b"time/total_timesteps,train/q_mean\n100,1\n200\n\xff,\x00")
        assert "evaluations.npz cannot be read" in html.unescape(report.render(copied))
        (run / "Line-v0" / "args.yml").write_text("algo: td3\nenv: Line-v0\n")  # rl-zoo3's
        assert commands(report.render(copied)) == []
        (run / "Line-v0" / "args.yml").write_text("env: [1, 2]\n")
        assert "names no environment" in called("report", run)[1]
        assert "an .html" in called("report", unfinished.path, "--out", run / "r.pdf")[1]


class TestUntrustedRuns:
    ATTACK = "'\"><script>alert(1)</script><img src=http://example.org/x onerror=alert(1)>{{ 7*7 }}$(touch canary)\n`id`"

    @pytest.fixture
    def hostile(self, unfinished, tmp_path):
        run = tmp_path / f"x<b>&'{'y' * 5}"
        shutil.copytree(unfinished.path, run)
        name = "attack"
        (run / "Line-v0").rename(run / name)
        arguments = yaml.safe_load((run / name / "args.yml").read_text())
        attacks = dict.fromkeys(("preset", "setting", "seed", "device"), self.ATTACK)
        arguments |= {
            **attacks,
            "env": name,
            "overrides": [self.ATTACK],
            "command": shlex.join(["td3x", "train", "--preset", self.ATTACK.replace("\n", " ")]),
            "versions": {self.ATTACK: self.ATTACK},
            self.ATTACK: [1],
        }
        (run / name / "args.yml").write_text(yaml.safe_dump(arguments))
        (run / name / "config.yml").write_text(
            yaml.safe_dump({self.ATTACK: {self.ATTACK: self.ATTACK}, "n_timesteps": "many"})
        )
        header = ["time/total_timesteps", "<svg onload=alert(1)>", "javascript:alert(1)", "</title><script>"]
        rows = ["100,1,2,3", "200,inf,nan,<script>", "300,1e308,1,1", "400,-1e308,1,1"]
        (run / "progress.csv").write_text("\n".join([",".join(header), *rows, ""]))
        return RunDir.open(run)

    def test_their_text_stays_text(self, hostile):
        page = report.render(hostile)
        parts = Parts(page)
        known = {
            "html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3", "p", "dl", "div", "dt", "dd",
            "section", "figure", "figcaption", "img", "video", "pre", "table", "tr", "th", "td",
        }  # fmt: skip
        assert {tag for tag, _ in parts.tags} <= known
        assert not [name for _, attrs in parts.tags for name in attrs if name.startswith("on")]
        assert all(url.startswith(("data:image/svg+xml;base64,", "data:video/mp4;base64,")) for url in parts.urls())
        assert "{{ 7*7 }}" in parts.text
        assert "<svg onload=alert(1)>" in parts.text  # the chart of a diagnostic that nobody knows
        assert "default-src 'none'" in page
        for picture in parts.urls():
            assert b"<script" not in base64.b64decode(picture.partition(",")[2])

    @pytest.mark.usefixtures("without_pictures")
    @pytest.mark.parametrize("seconds", ["inf", "1e300"])
    def test_their_times_without_end_are_not_shown(self, seconds, hostile):
        steps = hostile.scores()[0]
        lines = [f"{step},0,0,{seconds}" for step in steps]
        (hostile.path / "scores.csv").write_text("\n".join(["timesteps,mean_return,std_return,wall_seconds", *lines, ""]))
        assert "steps per second" not in report.render(hostile).partition("<img")[0]

    @pytest.mark.usefixtures("without_pictures")
    def test_their_numbers_without_end_are_not_shown(self, hostile):
        hostile.config_file.write_text(f"n_timesteps: {10**400}")
        assert "unfinished" not in report.render(hostile)
        hostile.config_file.write_text(f"n_timesteps: 1{250 * ':0'}:0.5")
        with pytest.raises(ValueError, match="cannot be read"):
            report.render(hostile)

    @pytest.mark.usefixtures("without_pictures")
    def test_their_commands_are_harmless_when_pasted(self, hostile):
        for command in commands(report.render(hostile)):
            assert command[:2] in (["td3x", "train"], ["td3x", "eval"])
            assert not set(command) & {"touch", "id"}  # the attack is one word, quoted
        assert self.ATTACK.replace("\n", " ") in commands(report.render(hostile))[0]
        arguments = {**hostile.arguments(), "command": f"td3x train --resume {hostile.path} --trust"}
        hostile.args_file.write_text(yaml.safe_dump(arguments))
        assert not any("--trust" in command for command in commands(report.render(hostile)))

    def test_their_links_show_nothing_else(self, hostile, tmp_path):
        hostile.video.unlink(missing_ok=True)
        (tmp_path / "secret").write_text("token")
        hostile.video.parent.mkdir(exist_ok=True)
        hostile.video.symlink_to(tmp_path / "secret")
        with pytest.raises(ValueError, match="leads out of the run's folder"):
            report.write(hostile, tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()
        report.write(hostile, tmp_path / "page.html", trust=True)

    @pytest.mark.parametrize("steps", [["a", "b"], [1.0, np.inf]], ids=["text", "inf"])
    @pytest.mark.usefixtures("without_pictures")
    def test_invalid_scores_are_named(self, steps, copied):
        (copied.path / "scores.csv").write_text("timesteps\n1\n")
        assert "has no column" in report.render(copied)
        np.savez(copied.evaluations, timesteps=steps, results=np.zeros((2, 3)))
        assert "holds no evaluations" in report.render(copied)


def test_the_time_is_in_seconds(tmp_path):
    one = scores.Scores("x", "E-v0", 0, tmp_path, *np.array([[100.0], [1], [0.5], [3725]]))
    assert ("time", "1:02:05") in [fact[:2] for fact in report._facts([], 0, one, {})]
