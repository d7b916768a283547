"""Damage to a checkpoint is found and named, and the run goes on from what is whole."""

import hashlib
import os
import random
import shutil
from functools import partial

import numpy as np
import pytest
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, replay, resume_run, save_run
from sb3_td3x.errors import CheckpointError
from tests.resuming import assert_same_run, seeded
from tests.tools import model

SOAK = os.environ.get("TD3X_SOAK") == "1"
DAMAGES = 500 if SOAK else 40
SHARED_MEMORY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints at 80 and 100 steps."""
    folder = tmp_path_factory.mktemp("damaged") / "run"
    model(seeded(), seed=1, buffer_size=50).learn(100, TD3XCheckpointCallback(20, folder))
    return folder


class TestDamaged:
    def copy(self, saved, tmp_path):
        shutil.copytree(saved, tmp_path / "run")
        return tmp_path / "run"

    @pytest.mark.timeout(3600 if SOAK else 300)
    def test_any_cut_and_any_flipped_bit_is_found_and_named(self, saved, tmp_path):
        chance = random.Random(1)
        folder = self.copy(saved, tmp_path)
        newest = Store(folder).checkpoints()[-1]
        segments = [folder / "replay" / one["file"] for one in newest.manifest["replay"]["segments"]]
        victims = [*newest.path.iterdir(), *segments]
        for number in range(DAMAGES):
            victim = victims[number % len(victims)]
            content = victim.read_bytes()
            victim.write_bytes(damaged(content, chance))
            with pytest.raises(CheckpointError) as raised:
                resume_run(folder, seeded())
            assert victim.name in str(raised.value)
            if victim.parent == newest.path:
                assert raised.value.last_good == 80
                assert "checkpoint=80" in str(raised.value)
            victim.write_bytes(content)
        assert resume_run(folder, seeded()).num_timesteps == 100

    def test_the_last_good_checkpoint_goes_on_when_asked_for(self, saved, tmp_path):
        folder = self.copy(saved, tmp_path)
        (folder / "td3x_100_steps" / "model.zip").write_bytes(b"")
        whole = resume_run(saved, seeded()).learn(120, resume=True)
        assert_same_run(whole, resume_run(folder, seeded(), checkpoint=80).learn(120, resume=True))

    def test_without_damaged_transitions_when_asked_for(self, tmp_path, monkeypatch):
        monkeypatch.setattr(replay, "SMALL_ROWS", 1)
        folder = tmp_path / "run"
        learner = model(seeded(), learning_starts=1)
        learner.learn(40)
        save_run(learner, folder)
        learner.learn(60, reset_num_timesteps=False)
        checkpoint = save_run(learner, folder)
        first = checkpoint.manifest["replay"]["segments"][0]
        assert (first["first"], first["last"]) == (0, 40)
        (folder / "replay" / first["file"]).unlink()
        with pytest.raises(CheckpointError, match=r"is missing.*drop_damaged=True"):
            resume_run(folder, seeded())
        resumed = resume_run(folder, seeded(), drop_damaged=True)
        assert resumed.replay_buffer.size() == 60
        assert np.array_equal(resumed.replay_buffer.rewards[:60], learner.replay_buffer.rewards[40:100])
        with pytest.warns(UserWarning, match="transitions 0 to 39"):
            resumed.learn(120, TD3XCheckpointCallback(10, folder), resume=True)
        assert "transitions 0 to 39" in str(Store(folder).checkpoints()[-1].manifest["resumed"])

    def without(self, damaged, folder, env, **kwargs):
        """A resumed run of 60 steps without the twenty of one segment, and the run as it was."""
        learner = model(env(), learning_starts=1000, **kwargs).learn(20)
        for _ in range(2):
            save_run(learner, folder)
            learner.learn(20, reset_num_timesteps=False)
        segments = save_run(learner, folder).manifest["replay"]["segments"]
        assert [one["first"] for one in segments] == [0, 20, 40]
        (folder / "replay" / segments[damaged]["file"]).unlink()
        return resume_run(folder, env(), drop_damaged=True), learner

    @pytest.mark.parametrize("terminates", [False, True])
    @pytest.mark.parametrize("kwargs", [{"n_steps": 3}, SHARED_MEMORY], ids=["n-step", "shared memory"])
    def test_nothing_is_learned_across_missing_transitions(self, tmp_path, monkeypatch, terminates, kwargs):
        monkeypatch.setattr(replay, "SMALL_ROWS", 1)
        length = 10 if terminates else 13
        runs = self.without(1, tmp_path, lambda: seeded(length=length, terminates=terminates), **kwargs)
        left, whole = (run.replay_buffer for run in runs)
        assert left.size() == 40
        assert (left.dones[19] == 1) == (terminates or "n_steps" not in kwargs)
        assert (left.timeouts[19] == 1) == (not terminates and "n_steps" in kwargs)
        assert np.array_equal(left.dones[:19], whole.dones[:19])
        assert np.array_equal(left.dones[20:40], whole.dones[40:60])

    @pytest.mark.filterwarnings("ignore:not restored exactly")
    @pytest.mark.parametrize("kwargs", [{"n_steps": 3}, SHARED_MEMORY], ids=["n-step", "shared memory"])
    def test_nor_from_before_the_last_ones_to_what_comes_next(self, tmp_path, monkeypatch, kwargs):
        monkeypatch.setattr(replay, "SMALL_ROWS", 1)
        resumed, _ = self.without(2, tmp_path, lambda: seeded(length=12), **kwargs)  # an episode begins after 60 steps
        left = resumed.learn(65, resume=True).replay_buffer
        assert left.size() == 45
        assert (left.dones[39] == 1) == ("n_steps" not in kwargs)
        assert (left.timeouts[39] == 1) == ("n_steps" in kwargs)

    def test_no_goals_are_drawn_from_missing_transitions(self, tmp_path, monkeypatch):
        monkeypatch.setattr(replay, "SMALL_ROWS", 1)
        kwargs = {"policy": "MultiInputPolicy", "replay_buffer_class": HerReplayBuffer}
        env = partial(DummyVecEnv, [lambda: BitFlippingEnv(n_bits=30, continuous=True, max_steps=6)])
        left, whole = (run.replay_buffer for run in self.without(1, tmp_path, env, **kwargs))
        drawn = np.flatnonzero(left.ep_length[:, 0])
        assert drawn.tolist() == [*range(18), *range(42, 60)]  # episodes of 6 steps
        assert np.array_equal(left.actions[drawn], whole.actions[drawn])

    def test_no_checkpoint_is_said_so(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"no checkpoint \(there: none\)"):
            resume_run(tmp_path, seeded())

    def test_a_checkpoint_that_is_not_there_is_answered_with_those_that_are(self, saved):
        with pytest.raises(CheckpointError, match=r"no checkpoint of 70 steps \(there: 80, 100\)"):
            resume_run(saved, seeded(), checkpoint=70)

    def test_a_save_removes_checkpoints_whose_manifest_is_damaged_and_what_is_left_of_others(self, saved, tmp_path):
        folder = self.copy(saved, tmp_path)
        (folder / "td3x_100_steps" / "manifest.json").write_bytes(b"{}")
        newer = '{"format": 99}'
        (folder / "newer").mkdir()
        (folder / "newer" / "manifest.json").write_text(f"{hashlib.sha256(newer.encode()).hexdigest()}\n{newer}\n")
        segments = set((folder / "replay").iterdir())
        for leftover in (".td3x_20_steps.removed", ".td3x_90_steps.partial"):
            (folder / leftover).mkdir()
        save_run(resume_run(folder, seeded(), checkpoint=80).learn(120, resume=True), folder)
        assert sorted(path.name for path in folder.iterdir()) == ["newer", "replay", "td3x_120_steps", "td3x_80_steps"]
        assert segments < set((folder / "replay").iterdir()), "the newer one may need any of them"

    @pytest.mark.parametrize("name", ["before_td3x_80_steps_of_monday", "td3x_80_steps (copy)", "good"])
    def test_a_copy_that_its_owner_named_is_never_removed_and_can_be_gone_on_with(self, saved, tmp_path, name):
        folder = self.copy(saved, tmp_path)
        shutil.copytree(folder / "td3x_80_steps", folder / name)
        save_run(resume_run(folder, seeded()).learn(120, resume=True), folder, keep_last=1)
        assert [one.steps for one in Store(folder).checkpoints()] == [120]
        (folder / "td3x_120_steps").rename(tmp_path / "elsewhere")
        (folder / name).rename(folder / "td3x_80_steps")
        assert resume_run(folder, seeded()).num_timesteps == 80

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_transitions_that_were_cleaned_away_or_cut_off_are_written_again_by_the_next_save(self, tmp_path, is_gone):
        learner = model(seeded(), seed=1).learn(60)
        save_run(learner, tmp_path)
        for segment in (tmp_path / "replay").iterdir():
            segment.unlink() if is_gone else segment.write_bytes(segment.read_bytes()[:-1])
        save_run(learner.learn(40, reset_num_timesteps=False), tmp_path, keep_last=1)
        resumed = resume_run(tmp_path, seeded())
        assert np.array_equal(resumed.replay_buffer.observations, learner.replay_buffer.observations)

    @pytest.mark.parametrize("prefix", ["", "a b_80_steps"])
    def test_whatever_the_prefix_is_checkpoints_are_found_and_old_ones_removed(self, tmp_path, prefix):
        model(seeded(), seed=1).learn(60, TD3XCheckpointCallback(20, tmp_path, name_prefix=prefix, keep_last=1))
        assert [one.path.name for one in Store(tmp_path).checkpoints()] == [f"{prefix}_60_steps"]

    def test_which_is_the_newest_does_not_depend_on_the_files_times(self, saved, tmp_path):
        folder = self.copy(saved, tmp_path)
        os.utime(folder / "td3x_80_steps" / "manifest.json", (2e9, 2e9))
        assert Store(folder).find().steps == 100
        (folder / "td3x_100_steps" / "manifest.json").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"td3x_100_steps.manifest\.json is damaged.*checkpoint=80"):
            resume_run(folder, seeded())


def damaged(content, chance):
    if chance.random() < 0.5:
        return content[: chance.randrange(len(content))]
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
