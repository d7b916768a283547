"""Damage to a checkpoint is found and named, and the run is resumed from what is whole."""

import errno
import json
import os
import random
import re
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, replay, resume_run, save_run, store
from sb3_td3x.errors import CheckpointError
from tests.resuming import assert_same_run, saved_steps, seeded
from tests.tools import SOAK, model

DAMAGES = 500 if SOAK else 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints at 80 and 100 steps."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    model(seeded(), seed=1, buffer_size=50).learn(100, TD3XCheckpointCallback(20, folder))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of them, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


def _fail_once(patch, number):
    """Let the call of this number, of those that read a file or list a folder, fail; return the counter of the calls."""
    calls = count()

    def failing(original):
        def fails(*args):
            if next(calls) == number:
                raise OSError(errno.ESTALE, "Stale file handle", str(args[0]))
            return original(*args)

        return fails

    for owner, name in ((Path, "read_bytes"), (os, "listdir"), (os, "scandir")):
        patch.setattr(owner, name, failing(getattr(owner, name)))
    return calls


class TestDamaged:
    @pytest.mark.timeout(3600 if SOAK else 300)
    def test_any_cut_and_any_flipped_bit_is_found_and_named(self, folder):
        chance = random.Random(1)
        newest = Store(folder).checkpoints()[-1]
        chunks = [folder / "replay" / chunk["file"] for chunk in newest.manifest["replay"]["chunks"]]
        victims = [*newest.path.iterdir(), *chunks]
        for number in range(DAMAGES):
            victim = victims[number % len(victims)]
            content = victim.read_bytes()
            victim.write_bytes(content[:-1] if number < len(victims) else damaged(content, chance))
            with pytest.raises(CheckpointError) as raised:
                resume_run(folder, seeded())
            assert victim.name in str(raised.value)
            assert raised.value.last_good == 80
            assert "checkpoint=80" in str(raised.value)
            victim.write_bytes(content)
        assert resume_run(folder, seeded()).num_timesteps == 100

    def test_the_last_good_checkpoint_is_resumed_on_request(self, folder, saved):
        (folder / "td3x_100_steps" / "model.zip").write_bytes(b"")
        whole = resume_run(saved, seeded()).learn(120, resume=True)
        assert_same_run(whole, resume_run(folder, seeded(), checkpoint=80).learn(120, resume=True))

    def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match=r"no checkpoint \(there: none\)"):
            resume_run(tmp_path, seeded())
        with pytest.raises(CheckpointError, match=r"no checkpoint \(there: no such folder\)"):
            resume_run(tmp_path / "elsewhere", seeded())
        with pytest.raises(CheckpointError, match=r"no checkpoint of 70 steps \(there: 80, 100\)"):
            resume_run(saved, seeded(), checkpoint=70)
        with pytest.raises(CheckpointError, match=r"no checkpoint of '80' steps \(there: 80, 100\)"):
            resume_run(saved, seeded(), checkpoint="80")
        with pytest.raises(CheckpointError, match=rf"it is one: give {re.escape(str(saved))} and checkpoint=80"):
            resume_run(saved / "td3x_80_steps", seeded())

    def test_a_save_removes_checkpoints_whose_manifest_is_damaged_and_what_is_left_of_others(self, folder):
        (folder / "td3x_100_steps" / "manifest.json").write_bytes(b"{}")
        for leftover in (".td3x_20_steps.removed", ".td3x_90_steps.partial"):
            (folder / leftover).mkdir()
        save_run(resume_run(folder, seeded(), checkpoint=80).learn(120, resume=True), folder)
        assert sorted(path.name for path in folder.iterdir()) == ["replay", "td3x_120_steps", "td3x_80_steps"]

    @pytest.mark.parametrize("use", [lambda store: store.prune(keep_last=2), Store.find], ids=["prune", "find"])
    def test_what_cannot_be_read_or_listed_for_a_moment_is_no_damage(self, folder, monkeypatch, use):
        files, problems = sorted(folder.rglob("*")), []
        for number in range(100):
            with monkeypatch.context() as patch:
                calls = _fail_once(patch, number)
                try:
                    found = use(Store(folder))
                    assert getattr(found, "steps", 100) == 100  # never an older one
                except (CheckpointError, OSError) as error:
                    problems.append(str(error))
            assert sorted(folder.rglob("*")) == files
            if next(calls) <= number:
                break
        assert all("Stale file handle" in problem for problem in problems)
        assert len(problems) >= 4  # both manifests, and the folder

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("is_pipe", [False, True])
    def test_a_missing_manifest_or_a_pipe_in_its_place_is_damage_and_is_not_waited_for(self, folder, is_pipe):
        manifest = folder / "td3x_100_steps" / "manifest.json"
        manifest.unlink()
        if is_pipe:
            os.mkfifo(manifest)
        with pytest.raises(CheckpointError, match=r"td3x_100_steps.manifest\.json is missing.*checkpoint=80"):
            resume_run(folder, seeded())
        with pytest.raises(CheckpointError, match=r"td3x_100_steps.manifest\.json is missing.*checkpoint=80"):
            resume_run(folder, seeded(), checkpoint=100)
        assert resume_run(folder, seeded(), checkpoint=80).num_timesteps == 80

    @pytest.mark.timeout(60)
    def test_a_pipe_that_a_forged_manifest_does_not_list_is_not_waited_for(self, folder):
        newest = folder / "td3x_100_steps"
        manifest = json.loads((newest / "manifest.json").read_text().partition("\n")[2])
        del manifest["files"]["state.pkl"]
        (newest / "manifest.json").write_bytes(store._sealed(manifest))
        (newest / "state.pkl").unlink()
        os.mkfifo(newest / "state.pkl")
        with pytest.raises(CheckpointError, match=r"td3x_100_steps.state\.pkl is not a file.*checkpoint=80"):
            resume_run(folder, seeded())

    def test_of_two_with_as_many_steps_the_whole_one_is_resumed(self, folder):
        stopped_at_once = TD3XCheckpointCallback(20, folder)
        stopped_at_once.save_and_stop()
        resume_run(folder, seeded()).learn(120, stopped_at_once, resume=True)
        (folder / "td3x_100_steps_again" / "model.zip").write_bytes(b"")
        with pytest.raises(CheckpointError, match="checkpoint=100"):
            resume_run(folder, seeded())
        assert resume_run(folder, seeded(), checkpoint=100).num_timesteps == 100

    def test_a_folder_that_a_file_browser_left_in_a_checkpoint_is_no_damage(self, folder):
        (folder / "td3x_100_steps" / ".ipynb_checkpoints").mkdir()
        assert resume_run(folder, seeded()).num_timesteps == 100

    @pytest.mark.parametrize("name", ["before_td3x_80_steps_of_monday", "td3x_80_steps (copy)", "good", "best_80_steps"])
    def test_a_copy_that_its_owner_named_is_never_removed_and_can_be_resumed_from(self, folder, tmp_path, name):
        shutil.copytree(folder / "td3x_80_steps", folder / name)
        save_run(resume_run(folder, seeded()).learn(120, resume=True), folder, keep_last=1)
        assert saved_steps(folder) == [120]
        (folder / "td3x_120_steps").rename(tmp_path / "elsewhere")
        (folder / name).rename(folder / "td3x_80_steps")
        assert resume_run(folder, seeded()).num_timesteps == 80

    def test_a_folder_that_is_only_named_like_a_checkpoint_is_left_alone(self, folder):
        (folder / "videos_100_steps").mkdir()
        (folder / "videos_100_steps" / "walk.mp4").write_bytes(b"mine")
        save_run(resume_run(folder, seeded()).learn(120, resume=True), folder, keep_last=1)
        assert (folder / "videos_100_steps" / "walk.mp4").read_bytes() == b"mine"
        assert saved_steps(folder) == [120]

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_transitions_that_were_cleaned_away_or_cut_off_are_written_again_by_the_next_save(
        self, tmp_path, is_gone, monkeypatch
    ):
        monkeypatch.setattr(replay, "CHUNK_SIZE", 20)
        learner = model(seeded(), seed=1).learn(60)
        save_run(learner, tmp_path)
        for chunk in (tmp_path / "replay").iterdir():
            chunk.unlink() if is_gone else chunk.write_bytes(chunk.read_bytes()[:-1])
        save_run(learner.learn(40, reset_num_timesteps=False), tmp_path, keep_last=1)
        resumed = resume_run(tmp_path, seeded())
        assert np.array_equal(resumed.replay_buffer.observations, learner.replay_buffer.observations)

    @pytest.mark.parametrize("prefix", ["", "a b_80_steps"])
    def test_whatever_the_prefix_is_checkpoints_are_found_and_old_ones_removed(self, tmp_path, prefix):
        model(seeded(), seed=1).learn(60, TD3XCheckpointCallback(20, tmp_path, name_prefix=prefix, keep_last=1))
        assert [saved.path.name for saved in Store(tmp_path).checkpoints()] == [f"{prefix}_60_steps"]

    def test_which_is_the_newest_does_not_depend_on_the_files_times(self, folder):
        os.utime(folder / "td3x_80_steps" / "manifest.json", (2e9, 2e9))
        assert Store(folder).find().steps == 100


def damaged(content, chance):
    if chance.random() < 0.5:
        return content[: chance.randrange(len(content))]
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
