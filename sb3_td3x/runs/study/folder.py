"""What a study leaves on the disk: a folder per run, a table of scores per finished run, one table of all."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sb3_td3x.common import files
from sb3_td3x.results.run_dir import PRINTED, SCORES
from sb3_td3x.results.scores import TABLE_COLUMNS
from sb3_td3x.runs.study.grid import StudyRun


@dataclass(frozen=True)
class StudyFolder:
    """
    :param runs: holds the runs' folders
    :param tables: holds a CSV per finished run; that it is there is what makes a run finished
    """

    runs: Path
    tables: Path

    @classmethod
    def at(cls, path: Path) -> "StudyFolder":
        return cls(path / "runs", path / "returns")

    def run(self, run: StudyRun) -> Path:
        """The run's folder: the same on every node and at every attempt."""
        return self.runs / run.name

    def printed(self, run: StudyRun) -> Path:
        """What the run's attempts print."""
        return self.run(run) / PRINTED

    def table(self, run: StudyRun) -> Path:
        return self.tables / f"{run.name}.csv"

    def is_finished(self, run: StudyRun) -> bool:
        return self.table(run).exists()

    def finish(self, run: StudyRun) -> None:
        """Write the run's table from its scores."""
        self.tables.mkdir(parents=True, exist_ok=True)
        files.write(self.table(run), _csv({**_named(run), **row} for row in _rows(self.run(run) / SCORES)))

    def scores(self, run: StudyRun) -> list[dict[str, str]]:
        """A row per evaluation so far; those of a finished run stay when its folder is removed."""
        return _rows(self.table(run) if self.is_finished(run) else self.run(run) / SCORES)

    def write_summary(self, runs: Iterable[StudyRun], path: Path) -> None:
        """The last score of every run that has one, finished or not: a line per run."""
        last = ({**_named(run), **row} for run in runs for row in self.scores(run)[-1:])
        files.write(path, _csv(last))


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def _named(run: StudyRun) -> dict[str, str]:
    return {"algo": run.algo, "setting": run.setting, "env": run.env, "seed": str(run.seed)}


def _csv(rows: Iterator[dict[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, TABLE_COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()
