"""Handing out the runs of a study: one driver per study, and no run that is finished already."""

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

from sb3_td3x.common.lock import RunLock
from sb3_td3x.runs.study.attempt import Train, attempt
from sb3_td3x.runs.study.folder import StudyFolder
from sb3_td3x.runs.study.grid import StudyRun
from sb3_td3x.runs.study.runners import Outcome, Runner


def drive(runs: Sequence[StudyRun], folder: StudyFolder, train: Train, runner: Runner) -> Generator[Outcome, None, None]:
    """
    Make the runs that are not finished. Close the generator to stop: runs under way save a checkpoint.

    :param train: begins a run or goes on with it
    :param runner: where runs are made
    :return: an outcome per run, as each ends
    :raises RunLockedError: if another driver is at work in this folder
    """
    folder.runs.mkdir(parents=True, exist_ok=True)
    with RunLock(folder.runs):
        todo = [run for run in runs if not folder.is_finished(run)]
        with closing(runner(partial(attempt, train, folder), todo)) as outcomes:
            yield from outcomes
