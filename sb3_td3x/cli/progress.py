"""What a training run shows: its progress, the algorithm's messages, and values in an experiment tracker."""

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import KVWriter, SeqWriter
from stable_baselines3.common.utils import safe_mean

from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import score_text
from sb3_td3x.runs.experiment import Run

LIFE_SECONDS = 30  # without a bar, a line says this often how far the run is


def scores_text(folder: RunDir) -> str:
    """The last and the best score of a run so far."""
    try:
        steps, results = folder.scores()
    except ValueError:
        return "no score yet"
    means = results.mean(axis=1)
    best = np.nan_to_num(means, nan=-np.inf).argmax()
    return f"score {score_text(means[-1])}, best {score_text(means[best])} at {steps[best]:,} steps"


class Messages(SeqWriter):
    """Shows the sentences that the algorithm logs, such as how updates are made."""

    def __init__(self, console: PlainConsole):
        self.console = console

    def write_sequence(self, sequence: list[str]) -> None:
        self.console.print(" ".join(sequence))

    def close(self) -> None:
        """The console stays open."""


class Wandb(KVWriter):
    """Logs to Weights & Biases; its files are beside the run's folder, because links among them lead out of it."""

    def __init__(self, run: Run):
        import wandb

        folder = run.folder.path
        try:
            project = os.environ.get("WANDB_PROJECT", "sb3_td3x")
            config = {**run.folder.arguments(), **run.hyperparameters}
            self.run = wandb.init(project=project, name=folder.name, config=config, dir=str(folder.parent))
        except wandb.Error as error:  # without a login or a connection
            raise ValueError(f"wandb cannot begin to log (WANDB_MODE=offline needs no connection): {error}") from error

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        self.run.log({key: value for key, value in key_values.items() if not isinstance(value, str)}, step=step)

    def close(self) -> None:
        with suppress(Exception):  # a signal of Slurm or systemd has ended wandb's own process too
            self.run.finish(exit_code=int(sys.exc_info()[0] is not None))  # else a run that failed counts as finished


class ShowProgress(BaseCallback):
    """Shows steps, rate, time left and scores: as a bar, or as lines where there is none."""

    resumable = ()  # a checkpoint keeps nothing of it

    def __init__(self, console: PlainConsole, run: Run, has_bar: bool):
        super().__init__()
        self.console, self.run, self.has_bar = console, run, has_bar
        self.bar = Progress(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),  # a narrow terminal breaks the scores, not this
            BarColumn(bar_width=12),
            TextColumn("{task.fields[rate]:.0f} steps/s, left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[scores]}", table_column=Column()),
            console=console,
            disable=not has_bar,
            refresh_per_second=2,
        )
        self.task = self.bar.add_task("train", total=run.total, rate=0.0, scores=scores_text(run.folder))
        self.shown_at = time.monotonic()

    def _on_step(self) -> bool:
        if self.has_bar:  # rich draws twice a second, however often it is updated
            self.bar.update(self.task, completed=self.num_timesteps, rate=self._rate())
        elif time.monotonic() - self.shown_at > LIFE_SECONDS:
            self.shown_at = time.monotonic()
            returns = [episode["r"] for episode in self.run.model.ep_info_buffer or ()]
            score = f"mean episode return {score_text(safe_mean(returns))}" if returns else "no episode has ended yet"
            left = timedelta(seconds=round(max(self.run.total - self.num_timesteps, 0) / self._rate()))
            self.console.print(f"{self.num_timesteps:>9,} steps  {self._rate():.0f} steps/s  {score}  {left} left")
        return True

    def show_evaluation(self, evaluation: EvalCallback) -> None:
        scores = scores_text(self.run.folder)
        self.bar.update(self.task, scores=scores)
        if not self.has_bar:
            self.console.print(f"{evaluation.num_timesteps:>9,} steps  {self._rate():.0f} steps/s  {scores}")

    def _rate(self) -> float:
        """Steps per second of this process, as SB3's ``time/fps``."""
        model = self.run.model
        return (model.num_timesteps - model._num_timesteps_at_start) / ((time.time_ns() - model.start_time) / 1e9)
