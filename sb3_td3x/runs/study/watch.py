"""How far a run is, read from the files that it writes anyway."""

import csv
from dataclasses import dataclass
from pathlib import Path

from sb3_td3x.checkpoint import Store
from sb3_td3x.common.lock import is_touched
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.study.folder import StudyFolder
from sb3_td3x.runs.study.grid import StudyRun


@dataclass(frozen=True)
class Progress:
    """
    :param state: ``"done"``, ``"running"``, ``"stopped"`` (it has a checkpoint) or ``"waiting"``
    :param steps: environment steps so far
    :param rate: steps per second of the process at work
    :param score: mean return of the last evaluation
    """

    state: str
    steps: int = 0
    rate: float | None = None
    score: float | None = None


def progress(run: StudyRun, folder: StudyFolder) -> Progress:
    """How far a run is, whichever machine makes it."""
    place = RunDir(folder.run(run), run.env)
    last = folder.scores(run)[-1:]
    evaluated = int(last[0]["timesteps"]) if last else 0
    score = float(last[0]["mean_return"]) if last else None
    if folder.is_finished(run):
        return Progress("done", evaluated, score=score)
    if is_touched(place.path):
        logged, rate = _logged(place.log)
        return Progress("running", max(evaluated, logged), rate, score)
    saved = Store(place.checkpoints).checkpoints()
    return Progress("stopped", saved[-1].steps, score=score) if saved else Progress("waiting")


def _logged(path: Path) -> tuple[int, float | None]:
    """Steps and steps per second in SB3's log; its last line may be half written."""
    if not path.exists():
        return 0, None
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row.get("time/total_timesteps")]
    rates = [row["time/fps"] for row in rows if row.get("time/fps")]
    return int(float(rows[-1]["time/total_timesteps"])) if rows else 0, float(rates[-1]) if rates else None
