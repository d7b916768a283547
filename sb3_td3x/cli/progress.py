"""What a training run shows: its progress, the algorithm's messages, and values in an experiment tracker."""

import threading
import time
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import KVWriter, SeqWriter
from stable_baselines3.common.utils import safe_mean

from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.results.scores import duration_text, score_text
from sb3_td3x.runs.experiment import Run

LIFE_SECONDS = 30
"""Without a terminal, a line says at least this often how far the run is."""


class Messages(SeqWriter):
    """Shows the sentences that the algorithm logs, such as how updates are made."""

    def __init__(self, console: PlainConsole):
        self.console = console

    def write_sequence(self, sequence: list[str]) -> None:
        self.console.print(" ".join(sequence))

    def close(self) -> None:
        """The console stays open."""


class Wandb(KVWriter):
    """Logs to Weights & Biases; with ``WANDB_MODE=offline`` to files in the run's folder."""

    def __init__(self, run: Run):
        import wandb

        folder = run.folder.path
        self.run = wandb.init(project="sb3_td3x", name=folder.name, config=run.hyperparameters, dir=str(folder))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        self.run.log({key: value for key, value in key_values.items() if not isinstance(value, str)}, step=step)

    def close(self) -> None:
        self.run.finish()


class ShowProgress(BaseCallback):
    """
    Steps, rate, time left and last score: a bar on a terminal, lines elsewhere.

    :param console: where to show them
    :param total: environment steps of the run
    :param bar: whether to show the bar
    """

    resumable = ("score",)
    only_shows = True

    def __init__(self, console: PlainConsole, total: int, bar: bool):
        super().__init__()
        self.console, self.total = console, total
        self.score, self.started, self.steps_before = "none yet", time.perf_counter(), 0
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[rate]:.0f} steps/s, left"),
            TimeRemainingColumn(),
            TextColumn("score {task.fields[score]}"),
            console=console,
            disable=not bar,
            speed_estimate_period=120,
        )
        self.task = self.bar.add_task("train", total=total, rate=0.0, score=self.score)
        self.ended = threading.Event()

    def __enter__(self) -> "ShowProgress":
        self.bar.start()
        if not self.console.is_terminal:
            threading.Thread(target=self._show_life, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        if self.n_calls:
            self._update_bar()
        self.bar.stop()

    def _show_life(self) -> None:
        """In a thread of its own, because compiling and evaluations may take longer than the time between two lines."""
        while not self.ended.wait(LIFE_SECONDS):
            if not hasattr(self, "model"):
                continue
            steps, rate = self.model.num_timesteps, self._rate()
            returns = [episode["r"] for episode in list(self.model.ep_info_buffer or ())]
            score = f"mean episode return {score_text(safe_mean(returns))}" if returns else "no episode has ended yet"
            left = f"{duration_text((self.total - steps) / rate)} left" if rate else "time left unknown"
            self.console.print(f"{steps:>9,} steps  {rate:.0f} steps/s  {score}  {left}")

    def _on_training_start(self) -> None:
        self.started, self.steps_before = time.perf_counter(), self.num_timesteps  # of a resumed run

    def _on_step(self) -> bool:
        if not self.bar.disable:
            self._update_bar()  # rich draws ten times a second, however often it is updated
        return True

    def _update_bar(self) -> None:
        done = min(self.num_timesteps, self.total)
        self.bar.update(self.task, completed=done, rate=self._rate(), score=self.score)

    def _rate(self) -> float:
        """Steps per second since this process began."""
        return (self.model.num_timesteps - self.steps_before) / max(time.perf_counter() - self.started, 1e-9)

    def show_evaluation(self, evaluation: EvalCallback) -> None:
        self.score = f"{score_text(evaluation.last_mean_reward)}, best {score_text(evaluation.best_mean_reward)}"
        if not self.console.is_terminal:
            self.console.print(f"{evaluation.num_timesteps:>9,} steps  score {self.score}  {self._rate():.0f} steps/s")
