"""A pushed run has the files and the metadata of the SB3 family, and loads without trust."""

import json
import re
import shutil
import sys
import zipfile
from contextlib import closing
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import huggingface_hub
import numpy as np
import pytest
import yaml
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X, publish
from sb3_td3x.publish import hub
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment, play
from tests.commands import saved_run
from tests.tools import LineEnv, model

REPO = "someone/td3x-Pendulum-v1"
COMMAND = "td3x train --env Pendulum-v1 --steps 80 --seed 3"
WRAPPER = "sb3_contrib.common.wrappers.TimeFeatureWrapper"
OVERRIDES = (
    "policy_kwargs.net_arch=[16, 16]", "learning_starts=50", "normalize={norm_obs: true, norm_reward: false}",
    f"env_wrapper={WRAPPER}",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with a wrapper and normalized observations."""
    out = tmp_path_factory.mktemp("logs")
    planned = experiment.Experiment("Pendulum-v1", 80, seed=3, overrides=OVERRIDES, eval_episodes=1, device="cpu", out=out)
    experiment.train(started := experiment.prepare(planned, command=COMMAND))
    started.folder.video.parent.mkdir()
    started.folder.video.write_bytes(b"a video")
    return started.folder


@pytest.fixture(scope="module")
def repository(run, tmp_path_factory):
    """What would be uploaded."""
    out = tmp_path_factory.mktemp("repository")
    hub.write(run, out, REPO, episodes=2)
    return out


@pytest.fixture
def remote(monkeypatch, tmp_path):
    """A folder in place of the Hub; an existing repository keeps its visibility."""
    is_private = {}

    class Stub:
        def create_repo(self, repo_id, private, exist_ok):
            assert exist_ok
            is_private.setdefault(repo_id, private)
            (tmp_path / "hub" / repo_id).mkdir(parents=True, exist_ok=True)
            return f"https://hub.example/{repo_id}"

        def repo_info(self, repo_id):
            return SimpleNamespace(private=is_private[repo_id])

        def upload_folder(self, repo_id, folder_path, commit_message, delete_patterns):
            for path in [path for pattern in delete_patterns for path in (tmp_path / "hub" / repo_id).glob(pattern)]:
                path.unlink()
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id, dirs_exist_ok=True)

    for name in ("create_repo", "repo_info", "upload_folder"):  # a later library may have other arguments
        stubbed, real = (signature(getattr(owner, name)).parameters.keys() for owner in (Stub, huggingface_hub.HfApi))
        assert stubbed <= real
    monkeypatch.setattr(huggingface_hub, "HfApi", Stub)
    hub_folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo_id, name: str(hub_folder / repo_id / name))
    return hub_folder


def card_of(repository):
    """The model card's metadata and text."""
    _, metadata, text = (repository / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def block(text, language):
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


class TestTheRepository:
    def test_has_the_files_that_rl_zoo_downloads(self, run, repository):
        assert {path.name for path in repository.iterdir()} == {
            "README.md", "td3x-Pendulum-v1.zip", "config.yml", "args.yml", "env_kwargs.yml", "vec_normalize.pkl", "replay.mp4",
            "results.json", "train_eval_metrics.zip",
        }  # fmt: skip
        with zipfile.ZipFile(repository / "train_eval_metrics.zip") as archive:
            assert {"evaluations.npz", "0.monitor.csv", "progress.csv", "scores.csv"} <= set(archive.namelist())
        assert (repository / "replay.mp4").read_bytes() == b"a video"

    @pytest.mark.parametrize(
        ("env_id", "package"), [("HopperBulletEnv-v0", "pybullet_envs_gymnasium"), ("PandaReach-v3", "panda_gym")]
    )
    def test_its_cards_program_registers_the_environment(self, run, env_id, package, tmp_path):
        folder = RunDir(tmp_path, env_id)
        folder.write_settings(run.config(), {**run.arguments(), "env": env_id})
        folder.best_model.touch()
        folder.normalization.touch()
        program = block(hub._card(folder, REPO, np.zeros(1), is_safe=True), "python")
        assert program.startswith(f"import {package}  # registers the environment\nfrom huggingface_hub import")

    def test_its_card_has_the_familys_metadata_the_scores_of_td3x_eval_and_the_command(self, run, repository):
        metadata, text = card_of(repository)
        results = json.loads((repository / "results.json").read_text())
        assert results["n_eval_episodes"] == 2
        assert results["mean_reward"] == pytest.approx(play.evaluate(run, 2, seed=1_000).mean())
        assert block(text, "sh").strip() == COMMAND
        assert metadata["library_name"] == "stable-baselines3"
        assert {"Pendulum-v1", "reinforcement-learning", "stable-baselines3"} <= set(metadata["tags"])
        (entry,) = metadata["model-index"]
        (result,) = entry["results"]
        (metric,) = result["metrics"]
        assert entry["name"] == "TD3X"
        assert result["dataset"] == {"name": "Pendulum-v1", "type": "Pendulum-v1"}
        assert metric["type"] == "mean_reward"
        assert metric["value"] == f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}"
        assert metric["value"] in text
        assert "learning_starts: 50" in text
        assert "stable-baselines3: " in text

    def test_its_program_loads_the_model_without_trust(self, repository, remote, capfd):
        shutil.copytree(repository, remote / REPO)
        program = block(card_of(repository)[1], "python")
        assert "trust" not in program
        scope = {}
        exec(program, scope)  # noqa: S102
        assert scope["env"].obs_rms.count > 1
        assert not scope["env"].training
        assert re.search(r"\(.*-\d+", capfd.readouterr().out)  # the mean and deviation of Pendulum's negative returns
        given = TD3X.load(repository / "td3x-Pendulum-v1.zip")
        batch = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
        np.testing.assert_array_equal(scope["model"].predict(batch)[0], given.predict(batch)[0])


class TestPull:
    @pytest.fixture
    def snapshot(self, repository, remote, monkeypatch):
        """The repository on the Hub."""

        def download(repo_id, allow_patterns):
            for path in (remote / repo_id).iterdir():
                if not any(path.match(pattern) for pattern in allow_patterns):
                    path.unlink()
            return str(remote / repo_id)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return Path(shutil.copytree(repository, remote / REPO))

    def test_a_member_that_no_run_has_is_written_nowhere(self, snapshot, tmp_path):
        with zipfile.ZipFile(snapshot / "train_eval_metrics.zip", "a") as archive:
            archive.writestr("../escaped", "x")
        hub.pull(REPO, tmp_path / "logs")
        assert not list(tmp_path.rglob("escaped"))

    def test_a_pulled_run_plays_as_the_one_that_was_pushed_without_trust(self, run, snapshot, tmp_path, heard):
        pulled = RunDir.open(Path(heard("pull", REPO, "--out", tmp_path / "logs").strip()))
        assert pulled.path == tmp_path / "logs" / "td3x" / "Pendulum-v1_1"
        assert play.evaluate(pulled, 2, seed=1).tolist() == play.evaluate(run, 2, seed=1).tolist()
        assert pulled.video.read_bytes() == b"a video"
        assert [part.tolist() for part in pulled.scores()] == [part.tolist() for part in run.scores()]
        assert (pulled.path / "scores.csv").read_text() == (run.path / "scores.csv").read_text()
        assert pulled.log.read_text() == run.log.read_text()

    @pytest.mark.parametrize("missing", ["args.yml", "td3x-Pendulum-v1.zip"])
    def test_a_repository_of_something_else_is_refused_and_leaves_no_folder(self, missing, snapshot, tmp_path):
        (snapshot / missing).unlink()
        with pytest.raises(ValueError, match="is not the repository of a run"):
            hub.pull(REPO, tmp_path / "logs")
        assert not (tmp_path / "logs").exists()

    def test_a_damaged_archive_of_logs_is_named_and_leaves_no_folder(self, snapshot, tmp_path):
        (snapshot / "train_eval_metrics.zip").write_bytes(b"no archive")
        with pytest.raises(ValueError, match=f"train_eval_metrics.zip of {REPO} cannot be read"):
            hub.pull(REPO, tmp_path / "logs")
        assert not (tmp_path / "logs").exists()

    def test_an_archive_of_logs_that_would_fill_the_disk_is_refused(self, snapshot, tmp_path):
        with zipfile.ZipFile(snapshot / "train_eval_metrics.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("scores.csv", bytes(10**7))
        with pytest.raises(ValueError, match="would unpack to 10000000"):
            hub.pull(REPO, tmp_path / "logs")
        assert not (tmp_path / "logs").exists()

    @pytest.mark.parametrize("forged", [".", ".."])
    def test_a_forged_environment_leads_nowhere_else(self, forged, snapshot, tmp_path):
        (snapshot / "args.yml").write_text(f"env: {forged}")
        pulled = hub.pull(REPO, tmp_path)
        assert list((tmp_path / "td3x").iterdir()) == [pulled.path]
        assert pulled.config_file.parent.parent == pulled.path

    def test_a_hub_that_does_not_answer_is_said_not_to(self, monkeypatch, tmp_path):
        def snapshot_download(*_, **__):
            raise ConnectionError("no route")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(ValueError, match=f"{REPO} cannot be downloaded: no route"):
            hub.pull(REPO, tmp_path)


class TestTheCommand:
    def test_writes_to_a_folder_and_uploads_nothing(self, run, remote, tmp_path, heard, refused):
        out = tmp_path / "here"
        heard("push", run.path, "--repo", REPO, "--episodes", 1, "--seed", 5, "--to-folder", out)
        results = json.loads((out / "results.json").read_text())
        assert (results["n_eval_episodes"], results["seed"]) == (1, 5)
        assert (out / "td3x-Pendulum-v1.zip").exists()
        assert not remote.exists()
        assert "already contains files" in refused("push", run.path, "--repo", REPO, "--to-folder", out)

    def test_uploads_and_says_where_and_a_private_repository_is_not_one_that_others_see(self, run, remote, heard, refused):
        push = ("push", run.path, "--episodes", 1, "--repo")
        heard(*push, "me/private", "--private")
        assert huggingface_hub.HfApi().repo_info("me/private").private
        assert (remote / "me/private" / "README.md").exists()
        assert heard(*push, "me/public").strip() == "https://hub.example/me/public"
        assert not huggingface_hub.HfApi().repo_info("me/public").private
        (remote / "me/public" / "README.md").unlink()
        assert "me/public is public and nothing was uploaded" in refused(*push, "me/public", "--private")
        assert not (remote / "me/public" / "README.md").exists()

    def test_a_missing_token_is_one_line(self, run, monkeypatch, refused):
        from huggingface_hub.errors import LocalTokenNotFoundError

        def refuse(self, **_):
            raise LocalTokenNotFoundError("Token is required,\nbut no token was found.")

        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
        printed = refused("push", run.path, "--repo", REPO, "--episodes", 1)
        assert printed.count("\n") == 1
        assert "hf auth login" in printed

    @pytest.mark.parametrize("name", ["walker", "some one/walker"])
    def test_a_name_that_is_no_repositorys_is_refused_at_once(self, name, run, monkeypatch, refused):
        monkeypatch.setattr(play, "evaluate", lambda *_: pytest.fail("evaluated first"))
        assert "is not the name of a repository" in refused("push", run.path, "--repo", name)

    def test_a_missing_package_is_named_with_the_command_that_installs_it(self, run, monkeypatch, refused):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        monkeypatch.delitem(sys.modules, "sb3_td3x.publish.hub")
        monkeypatch.delattr(publish, "hub")
        printed = refused("push", run.path, "--repo", REPO)
        assert printed.startswith("error: ")
        assert printed.endswith(": pip install huggingface_hub\n")


def test_a_model_that_needs_trust_is_written_when_asked_for_and_its_card_says_so(tmp_path):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1"), learning_rate=lambda left: 1e-3 * left))
    hub.write(run, tmp_path / "here", REPO, episodes=1, trust=True)
    _, text = card_of(tmp_path / "here")
    assert "runs code of its author" in text
    assert "trust=True)" in block(text, "python")
    assert "td3x train" not in text  # the run does not say how it was made


def test_statistics_that_need_trust_are_said_to(tmp_path):
    env = VecNormalize(make_vec_env("Pendulum-v1"))
    run = saved_run(tmp_path, "Pendulum-v1", model(env))
    run.write_settings({**run.config(), "normalize": True}, run.arguments())
    env.save(str(run.normalization))
    hub.write(run, tmp_path / "safe", REPO, episodes=1, trust=True)
    assert "runs code of its author" not in card_of(tmp_path / "safe")[1]
    env.own = LineEnv  # a class of the user's
    env.save(str(run.normalization))
    hub.write(run, tmp_path / "unsafe", REPO, episodes=1, trust=True)
    assert "runs code of its author" in card_of(tmp_path / "unsafe")[1]


def test_what_links_lead_to_is_not_uploaded_without_trust(tmp_path):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    (tmp_path / "secret").write_text("token")
    (run.path / "x.csv").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"x\.csv leads out of the run's folder"):
        hub.write(run, tmp_path / "here", REPO, episodes=1)
    assert not (tmp_path / "here").exists()


def test_texts_of_the_run_cannot_leave_their_place_in_the_card(tmp_path):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    attack = "x\n```\n## Run this\n<img src=x>"
    run.write_settings({**run.config(), "note": attack}, {**run.arguments(), "versions": {"torch": attack}})
    run.config_file.write_text(run.config_file.read_text() + "more: |\n  x\n  ```\n  ## Run this\n")
    hub.write(run, tmp_path / "here", REPO, episodes=1)
    fences = re.findall("^ *```.*", (tmp_path / "here" / "README.md").read_text(), re.MULTILINE)
    assert len(fences) == 2 * len([fence for fence in fences if fence != "```"])


def test_arguments_of_the_environment_need_trust_and_are_in_the_card(tmp_path):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    run.write_settings(run.config(), {**run.arguments(), "env_kwargs": {"g": 5}})
    with pytest.raises(ValueError, match="if you trust the run"):
        hub.write(run, tmp_path / "here", REPO, episodes=1)
    hub.write(run, tmp_path / "here", REPO, episodes=1, trust=True)
    program = block(card_of(tmp_path / "here")[1], "python")
    assert "make_vec_env(\"Pendulum-v1\", env_kwargs={'g': 5})" in program
    assert "trust" not in program


def test_arguments_of_the_environment_in_the_hyperparameters_of_rl_zoo_count_too(tmp_path):
    run = saved_run(tmp_path, "Pendulum-v1", model(gym.make("Pendulum-v1")))
    run.write_settings({**run.config(), "env_kwargs": {"g": 5}}, run.arguments())
    with pytest.raises(ValueError, match="if you trust the run"):
        play.open_evaluation_env(run, seed=0)
    with closing(play.open_evaluation_env(run, seed=0, trust=True)) as env:
        assert env.get_attr("g") == [5]


def test_a_run_with_hindsight_replay_can_be_pushed_with_trust(tmp_path, registered):
    registered("Bits-v0", BitFlippingEnv, kwargs={"n_bits": 4, "continuous": True})
    env = BitFlippingEnv(n_bits=4, continuous=True)
    run = saved_run(tmp_path, "Bits-v0", model(env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer))
    hub.write(run, tmp_path / "here", "someone/td3x-Bits-v0", episodes=1, trust=True)
    assert "runs code of its author" not in card_of(tmp_path / "here")[1]


@pytest.mark.parametrize(
    ("env_id", "name"),
    [("module:ns/Env-v0", "td3x-ns-Env-v0"), ("ale/Env-v0", "td3x-ale-Env-v0"), ("..\\Env-v0", "td3x-..-Env-v0")],
)
def test_the_name_of_a_model_has_no_module_and_no_slash(env_id, name):
    assert hub.model_name(env_id) == name


def test_what_another_run_has_pushed_and_this_one_lacks_does_not_stay(remote, tmp_path, heard):
    run = saved_run(tmp_path / "logs", "Pendulum-v1", model(env="Pendulum-v1"))
    (remote / REPO).mkdir(parents=True)
    for name in ("td3x-Old-v0.zip", "vec_normalize.pkl", "replay.mp4"):
        (remote / REPO / name).touch()
    heard("push", run.path, "--repo", REPO, "--episodes", 1)
    pushed = {path.name for path in (remote / REPO).iterdir()}
    assert "td3x-Pendulum-v1.zip" in pushed
    assert not pushed & {"td3x-Old-v0.zip", "vec_normalize.pkl", "replay.mp4"}
