"""The progress.csv of a run that is resumed: no line is lost, none is there twice, whatever has happened to it."""

import csv

import numpy as np
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.logger import Figure, Logger
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import TD3XCheckpointCallback, log_state, resume_run, save_run
from tests.resuming import seeded
from tests.tools import LineEnv, model

TIMES = ("time/fps", "time/time_elapsed", "time/updates_per_second")


def with_log(run, folder):
    run.set_logger(log_state.configure(folder / "progress.csv"))
    return run


def rows(folder):
    """The log's lines without the times."""
    lines = csv.DictReader((folder / "progress.csv").read_text().splitlines())
    return [{name: value for name, value in row.items() if name not in TIMES} for row in lines]


def test_continues_at_the_right_line_though_its_header_has_grown(tmp_path):
    def grow(local, _):
        logger = local["self"].logger
        logger.record("early", 1)
        if local["self"].num_timesteps > 65:
            logger.record("late", 2)
        return True

    saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", keep_last=9)
    with_log(model(seeded()), tmp_path).learn(100, [ConvertCallback(grow), saving], log_interval=1)
    before = rows(tmp_path)
    run = with_log(resume_run(tmp_path / "checkpoint", seeded(), checkpoint=40), tmp_path)
    run.learn(100, [ConvertCallback(grow)], log_interval=1, resume=True)
    assert "late" in before[0]
    assert rows(tmp_path) == before


def test_what_was_recorded_before_a_checkpoint_is_in_the_next_line(tmp_path):
    """SB3 writes what an episode's training has recorded with the next episode's line, which may be another process's."""

    def record(local, _):
        logger = local["self"].logger
        if local["self"].num_timesteps % 20 == 5:
            logger.record_mean("mean", local["self"].num_timesteps)
        if local["self"].num_timesteps == 55:
            logger.record("text", "seen")
            logger.record("picture", Figure(None, close=False), exclude=("csv", "tensorboard"))
        return True

    saving = TD3XCheckpointCallback(60, tmp_path / "checkpoint", keep_last=9)
    arguments = {"train_freq": (1, "episode"), "gradient_steps": 3, "learning_starts": 20, "seed": 1}
    with_log(model(seeded(), **arguments), tmp_path).learn(160, [ConvertCallback(record), saving], log_interval=2)
    before = rows(tmp_path)
    assert [row["time/total_timesteps"] for row in before] == ["40", "80", "120", "160"]
    run = with_log(resume_run(tmp_path / "checkpoint", seeded(), checkpoint=60), tmp_path)
    run.learn(160, [ConvertCallback(record)], log_interval=2, resume=True)
    after = rows(tmp_path)
    # A new process measures the critics after its first update, which follows its first line here
    measured = {name for name in before[1] if before[1][name] != after[1][name]}
    assert measured == {"train/q_mean", "train/target_mean", "train/twin_gap", "train/action_saturation"}
    assert [*after[:1], after[1] | {name: before[1][name] for name in measured}, *after[2:]] == before
    assert (before[1]["mean"], before[1]["text"], before[2]["text"]) == ("55.0", "seen", "")
    assert before[1]["train/critic_loss"] != ""


def test_means_and_exclusions_continue(tmp_path):
    def learner():
        run = model(seeded(), seed=1)
        run.set_logger(Logger(None, []))
        return run

    first = learner().learn(40)
    first.logger.record("a", np.float32(1.5), exclude="csv")
    first.logger.record_mean("b", 2.0)
    first.logger.record_mean("b", 4.0)
    save_run(first, tmp_path)
    second = resume_run(tmp_path, seeded())
    second.set_logger(logger := Logger(None, []))
    seen = []

    def look(*_):
        if not seen:
            logger.record_mean("b", 6.0)
            seen.append([dict(found) for found in (logger.name_to_value, logger.name_to_count, logger.name_to_excluded)])
        return True

    second.learn(60, ConvertCallback(look), resume=True)
    values, counts, excluded = seen[0]
    assert (values["a"], type(values["a"]), excluded["a"]) == (1.5, np.float32, ("csv",))
    assert (values["b"], counts["b"]) == (4.0, 3)


def test_is_never_emptied(tmp_path, monkeypatch):
    path = tmp_path / "progress.csv"
    path.write_text("step\n1\n")
    held = []

    def opened(name, mode):
        file = open(name, mode)  # noqa: SIM115  # SB3's to close
        held.append(path.read_text())
        return file

    monkeypatch.setattr("stable_baselines3.common.logger.open", opened, raising=False)
    logger = log_state.configure(path)
    logger.record("step", 2)
    logger.dump()
    assert set(held) == {"step\n1\n"}
    assert path.read_text() == "step\n1\n2\n"


def test_continues_on_a_line_of_its_own_where_a_power_failure_has_cut_the_last_one_off(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("step\n1\n22")
    logger = log_state.configure(path)
    log_state.truncate(logger, DummyVecEnv([LineEnv]), tmp_path, {"progress.csv": 3}, step=0)
    logger.record("step", 3)
    logger.dump()
    assert path.read_text() == "step\n1\n3\n"


def test_has_its_header_after_a_kill_before_the_first_line_that_counts(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("lost\n1\n")
    logger = log_state.configure(path)
    log_state.truncate(logger, DummyVecEnv([LineEnv]), tmp_path, {"progress.csv": 0}, step=0)
    for value in (2, 3):
        logger.record("step", value)
        logger.dump()
    assert path.read_text() == "step\n2\n3\n"
