"""Log files that continue where a checkpoint was made: what a lost process wrote after it would be written twice."""

import os
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import CSVOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import env_state


def lengths(logger: Logger, env: VecEnv, folder: Path) -> dict[str, int]:
    """Lines in each CSV and Monitor file, by path relative to ``folder``; names of TensorBoard's folders end with a slash."""
    # Not bytes: SB3 writes a CSV anew when its header grows
    lines = {name: path.read_bytes().count(b"\n") for name, path in _files(logger, env, folder).items()}
    return {**lines, **dict.fromkeys(_boards(logger, folder), 0)}


def truncate(logger: Logger, env: VecEnv, folder: Path, saved: dict[str, int], step: int) -> None:
    """Cut the logs of ``logger`` and ``env`` back to what the checkpoint's held; a checkpoint does not say where to write."""
    for name, board in _boards(logger, folder).items():
        if name in saved:  # otherwise it may be another run's, because SB3 opens the newest
            writer: Any = board.writer
            writer.close()
            # TensorBoard drops the points after `step` that an earlier process wrote
            board.writer = type(writer)(log_dir=writer.log_dir, purge_step=step + 1)
    for name, path in _files(logger, env, folder).items():
        if name in saved:
            with path.open("r+b") as file:  # a power failure may have cut a line off
                file.truncate(sum(len(line) for line in islice(file, saved[name]) if line.endswith(b"\n")))
    for table in logger.output_formats:
        # The position moves to the new end, or a gap of zeros would follow the cut
        if isinstance(table, CSVOutputFormat) and table.file.seek(0, os.SEEK_END) == 0:
            table.keys = []  # the header is gone too


class ContinuedCSV(CSVOutputFormat):
    """SB3's, but keeps what the file holds. SB3 empties it, and a process that is killed then could not restore it."""

    def __init__(self, path: Path):
        super().__init__(os.devnull)
        self.file.close()
        path.touch()
        self.file = path.open("r+")
        self.keys = [key for key in self.file.readline().rstrip("\n").split(",") if key]
        self.file.seek(0, os.SEEK_END)


def configure(path: Path) -> Logger:
    """SB3's logger for a new or a resumed run: a CSV file, whose lines stay, and TensorBoard's next to it if it is there."""
    outputs: list[KVWriter] = [ContinuedCSV(path)]
    if find_spec("tensorboard") is not None:
        outputs.append(TensorBoardOutputFormat(str(path.parent)))
    return Logger(str(path.parent), outputs)


def _files(logger: Logger, env: VecEnv, folder: Path) -> dict[str, Path]:
    csv = [output.file.name for output in logger.output_formats if isinstance(output, CSVOutputFormat)]
    paths = map(os.path.realpath, (*csv, *env_state.monitor_files(env)))  # `folder` is one too
    return {os.path.relpath(path, folder): Path(path) for path in paths}


def _boards(logger: Logger, folder: Path) -> dict[str, TensorBoardOutputFormat]:
    boards = [output for output in logger.output_formats if isinstance(output, TensorBoardOutputFormat)]
    return {f"{os.path.relpath(os.path.realpath(board.writer.log_dir), folder)}/": board for board in boards}
