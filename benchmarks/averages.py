"""
Make runs of a study as ``returns.py`` does, with averages of the actor's weights scored beside the actor that learns.

Training is the same bit for bit. Every 10,000 steps the actor and its averages over 1,000 and 5,000 of its updates play five
episodes each; writes one CSV of those scores per run.
Usage: ``python benchmarks/averages.py FILE.yml [--jobs 2] [--only TEXT]``
"""

import copy
import csv
import shutil
from pathlib import Path

import returns
import torch as th
from results import AVERAGES
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.td3.policies import Actor

from sb3_td3x.checkpoint import Store
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import environments, experiment
from sb3_td3x.runs.study import StudyRun

WINDOWS = (1_000, 5_000)
COLUMNS = ("timesteps", "live", *(f"average over {window} updates" for window in WINDOWS))
EVERY, EPISODES = 10_000, 5
TABLE, STATE = "averages.csv", "averages.pt"


class AverageActor:
    """The mean of the weights that the actor goes through: plain over the first ``window`` updates, then exponential."""

    def __init__(self, live: Actor):
        self.actor, self.updates = copy.deepcopy(live), 0

    def take_in(self, live: Actor, count: int, window: int) -> None:
        self.updates += count
        share = min(count / min(self.updates, window), 1.0)
        polyak_update(live.parameters(), self.actor.parameters(), share)


class Averages(BaseCallback):
    """A run that goes on takes up the averages as they were when they were last scored."""

    resumable = ()

    def __init__(self, run: StudyRun, folder: Path):
        super().__init__()
        self.run, self.folder = run, folder

    def _on_training_start(self) -> None:
        self.env = environments.open_env(self.run.env, self.run.seed, environments.EVALUATION)
        self.averages = {window: AverageActor(self.model.actor) for window in WINDOWS}
        self.updates = self._actor_updates()
        if (self.folder / STATE).exists():
            for window, state in th.load(self.folder / STATE).items():
                self.averages[window].actor.load_state_dict(state["actor"])
                self.averages[window].updates = state["updates"]
        else:
            (self.folder / TABLE).write_text(",".join(COLUMNS) + "\n")

    def _on_step(self) -> bool:
        count, self.updates = self._actor_updates() - self.updates, self._actor_updates()
        if count:
            for window, average in self.averages.items():
                average.take_in(self.model.actor, count, window)
        if self.num_timesteps % EVERY == 0:
            self._score()
        return True

    def _actor_updates(self) -> int:
        return self.model._n_updates // self.model.policy_delay

    def _score(self) -> None:
        actors = [self.model.actor, *(average.actor for average in self.averages.values())]
        scores = [evaluate_policy(actor, self.env, EPISODES)[0] for actor in actors]
        with (self.folder / TABLE).open("a", newline="") as file:
            csv.writer(file).writerow([self.num_timesteps, *(f"{score:.1f}" for score in scores)])  # type: ignore[str-bytes-safe]
        states = {window: {"actor": one.actor.state_dict(), "updates": one.updates} for window, one in self.averages.items()}
        th.save(states, self.folder / STATE)


def train(run: StudyRun, folder: Path) -> bool:
    """As ``returns.train``, which finds the run finished and notes what it was made with."""
    saved = Store(folder / "checkpoint").checkpoints()
    if not (saved and saved[-1].is_finished):
        prepared = experiment.resume(RunDir.open(folder)) if saved else experiment.prepare(run.experiment(), folder)
        if not experiment.train(prepared, [Averages(run, folder)]):
            return False
    AVERAGES.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / TABLE, AVERAGES / f"{run.name}.csv")
    return returns.train(run, folder)


if __name__ == "__main__":
    returns.main(train)
