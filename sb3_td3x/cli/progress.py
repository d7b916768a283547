"""The live line of a training run."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import SeqWriter

from sb3_td3x.results.scores import score_text

REFRESH_SECONDS = 0.2


class Messages(SeqWriter):
    """Shows the sentences that the algorithm logs, such as how updates are made."""

    def __init__(self, console: Console):
        self.console = console

    def write_sequence(self, sequence: list[str]) -> None:
        self.console.print(" ".join(sequence), soft_wrap=True)

    def close(self) -> None:
        """The console stays open."""


class ShowProgress(BaseCallback):
    """
    Steps, rate, time left and last score: a bar on a terminal, a line per evaluation elsewhere.

    :param console: where to show it
    :param total: environment steps of the run
    """

    resumable = ("score",)
    only_shows = True

    def __init__(self, console: Console, total: int):
        super().__init__()
        self.console = console
        self.total = total
        self.score = "-"
        self.started = self.refreshed = time.perf_counter()
        self.steps_before = 0
        self.bar = Progress(
            # 80 columns hold all of it
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[rate]:.0f} steps/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("score {task.fields[score]}"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=120,
        )
        self.task = self.bar.add_task("train", total=total, rate=0.0, score=self.score)

    def __enter__(self) -> "ShowProgress":
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.n_calls:
            self._refresh()
        self.bar.stop()

    def _on_training_start(self) -> None:
        self.started = time.perf_counter()
        self.steps_before = self.num_timesteps  # of a resumed run

    def _on_step(self) -> bool:
        if time.perf_counter() - self.refreshed > REFRESH_SECONDS:
            self._refresh()
        return True

    def _refresh(self) -> None:
        self.refreshed = time.perf_counter()
        rate = self._rate(self.refreshed)
        self.bar.update(self.task, completed=min(self.num_timesteps, self.total), rate=rate, score=self.score)

    def _rate(self, now: float) -> float:
        """Steps per second since this process began."""
        return (self.model.num_timesteps - self.steps_before) / max(now - self.started, 1e-9)

    def show_evaluation(self, evaluation: EvalCallback) -> None:
        self.score = f"{score_text(evaluation.last_mean_reward)}, best {score_text(evaluation.best_mean_reward)}"
        if not self.console.is_terminal:
            rate = self._rate(time.perf_counter())
            line = f"{evaluation.num_timesteps:>9,} steps  score {self.score}  {rate:.0f} steps/s"
            self.console.print(line, soft_wrap=True)
