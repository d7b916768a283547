"""The progress.csv of a run that goes on: no line is lost, none is there twice, whatever has happened to it."""

import csv

from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import TD3XCheckpointCallback, logs, resume_run
from tests.resuming import seeded
from tests.tools import LineEnv, model


def test_goes_on_at_the_right_line_though_its_header_has_grown(tmp_path):
    def grow(local, _):
        logger = local["self"].logger
        logger.record("early", 1)
        if local["self"].num_timesteps > 65:
            logger.record("late", 2)
        return True

    def learner(run):
        run.set_logger(logs.configure(tmp_path / "progress.csv"))
        return run

    def rows():
        return list(csv.DictReader((tmp_path / "progress.csv").read_text().splitlines()))

    saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", keep_last=9)
    learner(model(seeded())).learn(100, [ConvertCallback(grow), saving], log_interval=1)
    before = rows()
    run = learner(resume_run(tmp_path / "checkpoint", seeded(), checkpoint=40))
    run.learn(100, [ConvertCallback(grow)], log_interval=1, resume=True)
    assert "late" in before[0]
    assert before[0].keys() == rows()[0].keys()
    for name in ("time/episodes", "time/total_timesteps", "early", "late"):
        assert [row[name] for row in rows()] == [row[name] for row in before], name


def test_is_never_emptied(tmp_path, monkeypatch):
    path = tmp_path / "progress.csv"
    path.write_text("step\n1\n")
    held = []

    def opened(name, mode):
        file = open(name, mode)  # noqa: SIM115  # SB3's to close
        held.append(path.read_text())
        return file

    monkeypatch.setattr("stable_baselines3.common.logger.open", opened, raising=False)
    logger = logs.configure(path)
    logger.record("step", 2)
    logger.dump()
    assert set(held) == {"step\n1\n"}
    assert path.read_text() == "step\n1\n2\n"


def test_has_its_header_after_a_kill_before_the_first_line_that_counts(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("lost\n1\n")
    logger = logs.configure(path)
    logs.go_on(logger, DummyVecEnv([LineEnv]), tmp_path, {"progress.csv": 0}, step=0)
    for value in (2, 3):
        logger.record("step", value)
        logger.dump()
    assert path.read_text() == "step\n2\n3\n"


def test_is_known_under_any_name_of_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "progress.csv").write_text("step\n1\n")
    logger = logs.configure(tmp_path / "link" / "progress.csv")
    assert logs.lengths(logger, DummyVecEnv([LineEnv]), tmp_path / "run") == {"progress.csv": 2, "./": 0}
