"""Log files that go on where a checkpoint was made: what a lost process wrote after it would be written twice."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import CSVOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import env_state

RECORDED = (int, float, str, np.number, np.bool_)
"""Of what is recorded, the types that a checkpoint keeps."""


def lengths(logger: Logger, env: VecEnv, folder: Path) -> dict[str, int]:
    """
    :param folder: paths are relative to it, so that a run can be moved
    :return: lines in each CSV and Monitor file; not bytes, because SB3 writes a CSV anew when its header grows. TensorBoard's
        folder is a name that ends with a slash
    """
    found = {name: path.read_bytes().count(b"\n") for name, path in _files(logger, env, folder).items()}
    return {**found, **{f"{_relative(_folder(output), folder)}/": 0 for output in _tensorboards(logger)}}


def truncate(logger: Logger, env: VecEnv, folder: Path, saved: dict[str, int], step: int) -> None:
    """
    Cut the logs back to what they held when the checkpoint was made. Only files that ``logger`` and ``env`` write themselves
    are touched, whatever ``saved`` names, because a checkpoint may be untrusted.

    :param folder: given to ``lengths``
    :param saved: from ``lengths``
    :param step: environment steps of the checkpoint
    """
    for board in _tensorboards(logger):
        _forget_after(board, _own_folder(_folder(board), folder, saved), step)
    for output in logger.output_formats:
        if isinstance(output, CSVOutputFormat):
            output.file.flush()
    for name, path in _files(logger, env, folder).items():
        if name in saved:
            _truncate_lines(path, saved[name])
    for output in logger.output_formats:
        if isinstance(output, CSVOutputFormat) and output.file.seek(0, os.SEEK_END) == 0:
            output.keys = []  # the header is gone too


def unwritten(logger: Logger) -> dict[str, Any]:
    """
    What was recorded since SB3 wrote its last line, and will be in the next one: numbers and texts, no pictures.

    :return: by name the value, how many it is the mean of, and the outputs that leave it out
    """
    kept = {name: value for name, value in logger.name_to_value.items() if isinstance(value, RECORDED)}
    return {
        name: [value, logger.name_to_count.get(name, 0), *logger.name_to_excluded.get(name, ())]
        for name, value in kept.items()
    }


def record(logger: Logger, saved: dict[str, Any]) -> None:
    """
    :param saved: from ``unwritten``
    """
    for name, (value, count, *excluded) in saved.items():
        logger.record(name, value, tuple(excluded))
        if count:  # otherwise it is no mean
            logger.name_to_count[name] = count


class ContinuedCSV(CSVOutputFormat):
    """SB3's, but what the file holds stays: SB3 empties it, and a process that is killed then could not put it back."""

    def __init__(self, path: Path):
        super().__init__(os.devnull)
        self.file.close()
        path.touch()
        self.file = path.open("r+")
        self.keys = [key for key in self.file.readline().rstrip("\n").split(",") if key]
        self.file.seek(0, os.SEEK_END)


def configure(path: Path) -> Logger:
    """
    SB3's logger for a run, which may be one that goes on.

    :param path: of the CSV, whose lines stay; TensorBoard's files are beside it, if TensorBoard is installed
    """
    outputs: list[KVWriter] = [ContinuedCSV(path)]
    if find_spec("tensorboard") is not None:
        outputs.append(TensorBoardOutputFormat(str(path.parent)))
    return Logger(str(path.parent), outputs)


def _files(logger: Logger, env: VecEnv, folder: Path) -> dict[str, Path]:
    csv = [output.file.name for output in logger.output_formats if isinstance(output, CSVOutputFormat)]
    paths = map(os.path.realpath, (*csv, *env_state.monitor_files(env)))  # `folder` is one too
    return {_relative(Path(path), folder): Path(path) for path in paths}


def _relative(path: Path, folder: Path) -> str:
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # on another of Windows' drives
        return str(path)


def _truncate_lines(path: Path, lines: int) -> None:
    with path.open("r+b") as file:
        for _ in range(lines):
            if not file.readline():
                break
        file.truncate()


def _tensorboards(logger: Logger) -> list[TensorBoardOutputFormat]:
    return [output for output in logger.output_formats if isinstance(output, TensorBoardOutputFormat)]


def _folder(output: TensorBoardOutputFormat) -> Path:
    return Path(os.path.realpath(output.writer.log_dir))


def _own_folder(opened: Path, folder: Path, saved: dict[str, int]) -> Path:
    """The run's: SB3 has opened the newest beside it, which may be another run's. A stranger can name no folder elsewhere."""
    named = [Path(os.path.realpath(folder / name)) for name in saved if name.endswith("/")]
    return next((one for one in named if one.parent == opened.parent and one.is_dir()), opened)


def _forget_after(output: TensorBoardOutputFormat, folder: Path, step: int) -> None:
    """Go on in ``folder``, and let TensorBoard drop the points after ``step`` that an earlier process wrote there."""
    writer: Any = output.writer
    writer.close()
    output.writer = type(writer)(log_dir=str(folder), purge_step=step + 1)
