"""An untrusted checkpoint changes nothing outside of the run that resumes it."""

import math
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.logger import HumanOutputFormat, Logger

from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, log_state, resume_run, save_run, store
from sb3_td3x.common import files
from sb3_td3x.errors import CheckpointError
from tests.resuming import evaluating, seeded
from tests.tools import model
from tests.zips import with_attributes


def forge(folder, change):
    newest = Store(folder).checkpoints()[-1]
    state_file = newest.path / "state.pkl"
    state = pickle.loads(state_file.read_bytes())
    change(newest.manifest, state)
    state_file.write_bytes(pickle.dumps(state))
    if isinstance(newest.manifest["files"], dict):
        newest.manifest["files"]["state.pkl"] = files.describe(state_file)
    (newest.path / "manifest.json").write_bytes(store._sealed(newest.manifest))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrusted") / "run"
    model(seeded()).learn(40, [evaluating(10, log_path=folder), TD3XCheckpointCallback(20, folder)])
    return folder


class TestAnUntrustedCheckpoint:
    """Its checksums fit whatever it says, so they prove nothing."""

    @pytest.fixture
    def run(self, saved, tmp_path):
        (tmp_path / "mine").write_text("my work\n")
        return Path(shutil.copytree(saved, tmp_path / "run"))

    def test_runs_no_code(self, run):
        class Attack:
            def __reduce__(self):
                return os.system, (f"touch {run / 'canary'}",)

        forge(run, lambda manifest, state: state["callbacks"].update(attack=Attack()))
        with pytest.raises(CheckpointError, match=r"state.pkl cannot be restored.*system"):
            resume_run(run, seeded())
        assert not (run / "canary").exists()

    def test_does_not_cut_files_that_the_run_does_not_write(self, run):
        forge(run, lambda manifest, state: manifest["logs"].update({"../mine": 0}))
        resume_run(run, seeded()).learn(60, resume=True)
        assert (run.parent / "mine").read_text() == "my work\n"

    def test_does_not_write_events_into_another_runs_folder(self, run):
        (run.parent / "Other_1").mkdir()
        forge(run, lambda manifest, state: manifest["logs"].update({"../Other_1/": 0}))
        resumed = resume_run(run, seeded())
        resumed.set_logger(log_state.configure(run / "progress.csv"))
        resumed.learn(60, resume=True)
        assert list((run.parent / "Other_1").iterdir()) == []
        assert any(run.glob("events.out.tfevents.*"))

    def test_sets_nothing_of_a_callback_but_its_state(self, run):
        theirs = {"save_path": str(run.parent), "log_path": str(run.parent / "mine"), "model": None}
        forge(run, lambda manifest, state: [saved["attributes"].update(theirs) for saved in state["callbacks"].values()])
        evaluation, saving = evaluating(10, log_path=run), TD3XCheckpointCallback(20, run)
        resume_run(run, seeded()).learn(60, [evaluation, saving], resume=True)
        assert (saving.save_path, evaluation.log_path) == (str(run), str(run / "evaluations"))
        assert sorted(path.name for path in run.parent.iterdir()) == ["mine", "run"]

    def test_does_not_say_what_of_the_model_it_restores(self, run):
        zipped = Store(run).checkpoints()[-1].path / "model.zip"
        zipped.write_bytes(with_attributes(zipped.read_bytes(), only_in_checkpoints=["_updates_since_load", "gamma"]))

        def change(manifest, state):
            state["model"]["gamma"] = 0.5
            manifest["files"]["model.zip"] = files.describe(zipped)

        forge(run, change)
        assert resume_run(run, seeded()).gamma != 0.5

    def test_that_says_to_keep_more_of_a_log_than_there_is_keeps_all(self, run):
        (run / "progress.csv").write_text("a\n1\n")
        forge(run, lambda manifest, state: manifest["logs"].update({"progress.csv": 10**15}))
        resumed = resume_run(run, seeded())
        resumed.set_logger(log_state.configure(run / "progress.csv"))
        resumed.learn(60, resume=True)
        assert (run / "progress.csv").read_text() == "a\n1\n"  # no line is due in these steps

    @pytest.mark.parametrize("where", ["numpy", "action space", "environment", "torch"])
    def test_with_a_generator_behind_its_end_is_refused(self, run, where):
        """Numpy would read behind the end of its memory, and torch where its position and the rest are behind it."""

        def change(manifest, state):
            generators = state["generators"]
            behind = {**generators["numpy"], "state": {"key": generators["numpy"]["state"]["key"], "pos": 2 * 10**9}}
            if where == "numpy":
                generators["numpy"] = behind
            if where == "action space":
                generators["action_space"] = behind
            if where == "environment":
                state["env"]["envs"][0]["random"] = behind
            if where == "torch":
                drawn = th.random.manual_seed(0)
                th.rand(10)
                assert struct.unpack_from("<iiQ", drawn.get_state().numpy().tobytes(), 8) == (615, 1, 10)  # left, _, position
                generators["torch"][8:12] = np.frombuffer(np.int32(624).tobytes(), np.uint8)
                generators["torch"][16:24] = np.frombuffer(np.int64(624).tobytes(), np.uint8)

        forge(run, change)
        with pytest.raises(CheckpointError, match=r"state.pkl cannot be restored.*position"):
            resume_run(run, seeded()).learn(60, resume=True)

    def test_sends_no_control_characters_to_the_terminal(self, run, capsys):
        forge(run, lambda manifest, state: manifest["machine"].update(processor="\x1b]0;owned\x07"))
        forge(run, lambda manifest, state: state.update({"plain because": "\x1b]0;value"}))
        resumed = resume_run(run, seeded(), accelerate="auto")
        resumed.set_logger(Logger(None, [HumanOutputFormat(sys.stdout)]))
        with pytest.warns(UserWarning, match=r"processor was \\x1b\]0;owned"):
            resumed.learn(100, resume=True, log_interval=1)
        printed = capsys.readouterr().out
        assert r"\x1b]0;value" in printed
        assert "\x1b" not in printed

    def test_whose_folder_hides_what_is_in_it_is_refused(self, run, monkeypatch):
        listed = os.scandir

        def scandir(path):
            if Path(path).name == "replay":
                raise PermissionError(13, "Permission denied", str(path))
            return listed(path)

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(CheckpointError, match="Permission denied"):
            files.link_out_of(run)

    @pytest.mark.parametrize("what", ["replay", "checkpoint"])
    def test_whose_parts_lie_elsewhere_is_left_alone(self, run, what):
        place = run / "replay" if what == "replay" else Store(run).checkpoints()[0].path
        moved = place.rename(run.parent / "elsewhere")
        place.symlink_to(moved)
        before = sorted(moved.iterdir())
        with pytest.raises(CheckpointError, match="leads out of"):
            resume_run(run, seeded())
        with pytest.raises(CheckpointError, match="leads out of"):
            save_run(model(seeded()).learn(20), run)
        assert sorted(moved.iterdir()) == before

    def test_does_not_have_a_link_written_through(self, run):
        (run / "new").symlink_to(run.parent / "mine")
        files.write(run / "new", b"content")
        assert (run / "new").read_bytes() == b"content"
        assert (run.parent / "mine").read_text() == "my work\n"

    @pytest.mark.parametrize("chunks", [5, [{}], [{"file": "a", "bytes": 0, "sha256": ""}]])
    def test_whose_chunks_are_invalid_is_refused(self, run, chunks):
        forge(run, lambda manifest, state: manifest["replay"].update(chunks=chunks))
        with pytest.raises(CheckpointError):
            resume_run(run, seeded())

    @pytest.mark.parametrize("part", ["generators", "env", "callbacks", "model"])
    @pytest.mark.parametrize("value", [None, [1]])
    def test_whose_state_is_invalid_is_refused(self, run, part, value):
        forge(run, lambda manifest, state: state.update({part: value}))
        with pytest.raises(CheckpointError, match=r"state.pkl cannot be restored"):
            resume_run(run, seeded()).learn(60, evaluating(10, log_path=run), resume=True)

    @pytest.mark.parametrize(
        "change", [{"replay": None}, {"logs": [1]}, {"files": {"model.zip": 3}}, {"format": 99}, {"steps": math.inf}]
    )
    def test_whose_manifest_is_invalid_is_refused(self, run, change):
        forge(run, lambda manifest, state: manifest.update(change))
        with pytest.raises(CheckpointError, match=r"manifest.json (has|cannot|lists)"):
            resume_run(run, seeded())

    @pytest.mark.parametrize("how", ["objects", "longer", "elsewhere"])
    def test_whose_transitions_are_not_as_we_write_them_is_refused(self, run, how):
        def change(manifest, state):
            chunk = manifest["replay"]["chunks"][-1]
            path = run / "replay" / chunk["file"]
            arrays = dict(np.load(path))
            if how == "objects":
                arrays["actions"] = np.array([print] * 5, dtype=object)
            if how == "longer":
                arrays["actions"] = np.zeros((10_000, *arrays["actions"].shape[1:]), arrays["actions"].dtype)
            if how == "elsewhere":
                chunk["last"] = 10**15
            np.savez(path, **arrays)
            chunk.update(files.describe(path))

        forge(run, change)
        with pytest.raises(CheckpointError, match=r"transitions_\d+_40_.*(npz file of numbers|shape|said to hold)"):
            resume_run(run, seeded())

    @pytest.mark.parametrize("part", ["files", "replay"])
    def test_that_names_a_file_outside_is_refused(self, run, part):
        def change(manifest, state):
            if part == "files":
                manifest["files"]["../../mine"] = files.describe(run.parent / "mine")
            else:
                manifest["replay"]["chunks"][0]["file"] = "../../mine"

        forge(run, change)
        with pytest.raises(CheckpointError, match="names a file outside of its folder"):
            resume_run(run, seeded())
