"""The progress.csv of a run that is resumed: no line is lost, none is there twice, whatever has happened to it."""

from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.checkpoint import TD3XCheckpointCallback, log_state, resume_run
from tests.resuming import rows, seeded
from tests.tools import LineEnv, model


def with_log(run, folder):
    run.set_logger(log_state.configure(folder / "progress.csv"))
    return run


def test_continues_at_the_right_line_though_its_header_has_grown(tmp_path):
    def grow(local, _):
        logger = local["self"].logger
        logger.record("early", 1)
        if local["self"].num_timesteps > 65:
            logger.record("late", 2)
        return True

    saving = TD3XCheckpointCallback(20, tmp_path / "checkpoint", keep_last=9)
    with_log(model(seeded()), tmp_path).learn(100, [ConvertCallback(grow), saving], log_interval=1)
    before = rows(tmp_path / "progress.csv")
    run = with_log(resume_run(tmp_path / "checkpoint", seeded(), checkpoint=40), tmp_path)
    run.learn(100, [ConvertCallback(grow)], log_interval=1, resume=True)
    assert "late" in before[0]
    assert rows(tmp_path / "progress.csv") == before


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
