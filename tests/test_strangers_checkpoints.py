"""A checkpoint from somebody else changes nothing outside the run that goes on with it."""

import json

import numpy as np
import pytest
from stable_baselines3.common.callbacks import EvalCallback

from sb3_td3x import files
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, resume_run, store
from sb3_td3x.errors import CheckpointError
from tests.resuming import seeded
from tests.tools import model


class TestAStrangersCheckpoint:
    """Its checksums fit whatever it says, so they prove nothing."""

    def forge(self, folder, change):
        newest = Store(folder).checkpoints()[-1]
        state_file = newest.path / "state.json"
        state = json.loads(state_file.read_text())
        change(newest.manifest, state)
        state_file.write_text(json.dumps(state))
        if isinstance(newest.manifest["files"], dict):
            newest.manifest["files"]["state.json"] = files.describe(state_file)
        (newest.path / "manifest.json").write_bytes(store._sealed(newest.manifest))

    @pytest.fixture
    def run(self, tmp_path):
        evaluation = EvalCallback(seeded(), eval_freq=10, log_path=tmp_path / "run", verbose=0, warn=False)
        model(seeded()).learn(40, [evaluation, TD3XCheckpointCallback(20, tmp_path / "run")])
        (tmp_path / "mine").write_text("my work\n")
        return tmp_path / "run"

    def test_does_not_cut_files_that_the_run_does_not_write(self, run):
        self.forge(run, lambda manifest, state: manifest["logs"].update({"../mine": 0}))
        resume_run(run, seeded()).learn(60, resume=True)
        assert (run.parent / "mine").read_text() == "my work\n"

    def test_does_not_say_where_to_write(self, run):
        def change(manifest, state):
            (copy,) = state["files"].values()
            state["files"] = {"../mine": copy, "mine": copy}

        self.forge(run, change)
        resume_run(run, seeded()).learn(60, resume=True)
        assert (run.parent / "mine").read_text() == "my work\n"

    def test_does_not_have_other_files_copied_into_the_run(self, run):
        self.forge(run, lambda manifest, state: state.update(files=dict.fromkeys(state["files"], "../../mine")))
        evaluation = EvalCallback(seeded(), eval_freq=1000, log_path=run, verbose=0, warn=False)
        before = (run / "evaluations.npz").read_bytes()
        resume_run(run, seeded()).learn(60, evaluation, resume=True)
        assert (run / "evaluations.npz").read_bytes() == before

    @pytest.mark.parametrize("change", [{"replay": None}, {"logs": [1]}, {"files": "model.zip"}, {"total": None}])
    def test_whose_manifest_is_not_one_is_refused(self, run, change):
        self.forge(run, lambda manifest, state: manifest.update(change))
        with pytest.raises(CheckpointError, match=f"manifest.json has no valid '{next(iter(change))}'"):
            resume_run(run, seeded())

    @pytest.mark.parametrize("how", ["compressed", "objects", "longer", "elsewhere"])
    def test_whose_transitions_are_not_as_we_write_them_is_refused(self, run, how):
        def change(manifest, state):
            segment = manifest["replay"]["segments"][-1]
            path = run / "replay" / segment["file"]
            arrays = dict(np.load(path))
            if how == "objects":
                arrays["actions"] = np.array([print] * 5, dtype=object)
            if how == "longer":
                arrays["actions"] = np.zeros((10_000, *arrays["actions"].shape[1:]), arrays["actions"].dtype)
            if how == "elsewhere":
                segment["last"] = 10**15
            (np.savez_compressed if how == "compressed" else np.savez)(path, **arrays)
            segment.update(files.describe(path))

        self.forge(run, change)
        with pytest.raises(CheckpointError, match=r"transitions_\d+_40_.*(compressed|pickle|shape|said to hold)"):
            resume_run(run, seeded())

    @pytest.mark.parametrize("part", ["files", "replay"])
    def test_that_names_a_file_outside_is_refused(self, run, part):
        def change(manifest, state):
            if part == "files":
                manifest["files"]["../../mine"] = files.describe(run.parent / "mine")
            else:
                manifest["replay"]["segments"][0]["file"] = "../../mine"

        self.forge(run, change)
        with pytest.raises(CheckpointError, match="names a file outside its folder"):
            resume_run(run, seeded())
