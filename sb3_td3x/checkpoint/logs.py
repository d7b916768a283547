"""Log files that go on where a checkpoint was made: what a lost process wrote after it would be written twice."""

import os
from pathlib import Path
from typing import Any

from stable_baselines3.common import logger as sb3
from stable_baselines3.common.logger import CSVOutputFormat, Logger, TensorBoardOutputFormat
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import world


def lengths(logger: Logger, env: VecEnv, folder: Path) -> dict[str, int]:
    """
    :param folder: paths are relative to it, so that a run can be moved
    :return: bytes in each CSV and Monitor file
    """
    csv = [output.file.name for output in logger.output_formats if isinstance(output, CSVOutputFormat)]
    return {os.path.relpath(path, folder): os.path.getsize(path) for path in (*csv, *world.monitor_files(env))}


def truncate(saved: dict[str, int], folder: Path) -> None:
    """
    Cut the files back to what they held.

    :param saved: from ``lengths``
    """
    for name, length in saved.items():
        path = folder / name
        if path.exists() and path.stat().st_size > length:
            os.truncate(path, length)


def configure(folder: Path, formats: list[str]) -> Logger:
    """
    SB3's ``configure``, but what ``progress.csv`` holds stays.

    :param folder: of the log files
    :param formats: SB3's names, such as ``"csv"`` and ``"tensorboard"``
    """
    progress = folder / "progress.csv"
    kept = progress.read_text() if progress.exists() else ""
    logger = sb3.configure(str(folder), formats)
    for output in logger.output_formats:
        if isinstance(output, CSVOutputFormat) and kept:
            output.file.write(kept)
            output.keys = kept.splitlines()[0].split(",")
    return logger


def forget_after(output: TensorBoardOutputFormat, step: int) -> None:
    """Let TensorBoard drop the points after ``step`` that an earlier process wrote."""
    writer: Any = output.writer
    folder = writer.log_dir
    writer.close()
    output.writer = type(writer)(log_dir=folder, purge_step=step + 1)
