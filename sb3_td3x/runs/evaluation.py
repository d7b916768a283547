"""What a run does at every evaluation: keep the best model and its normalisation, redraw the curve, tell the caller."""

import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback

from sb3_td3x.common import files
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.transitions import running
from sb3_td3x.results.run_dir import SCORE_COLUMNS, SCORES, RunDir


def save_normalization(model: BaseAlgorithm, path: Path) -> None:
    """Write ``VecNormalize``'s statistics, if there are any; a NaN that has spoilt them never replaces good ones."""
    normalization = model.get_vec_normalize_env()
    if normalization is None:
        return
    if not all(np.isfinite(one.mean).all() and np.isfinite(one.var).all() for one in running(normalization)):
        return
    files.write(path, lambda beside: normalization.save(str(beside)))


class SaveNormalization(BaseCallback):
    """Keep the normalisation that belongs to the best model."""

    resumable = ()

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def _on_step(self) -> bool:
        save_normalization(self.model, self.path)
        return True

    def resumable_files(self) -> list[Path]:
        return [self.path]


class Evaluation(EvalCallback):
    """
    Also evaluates at the last step, and where a run is stopped before its first evaluation: it has a score then.

    Keeps a table of the scores, ``scores.csv`` beside ``evaluations.npz``, with the seconds of training up to each.

    :param lock: of the run's folder; a process that has lost it, because it slept for instance, writes nothing more
    :raises RunLockedError: if another process has the lock
    """

    resumable = ("seconds", "elapsed")

    def __init__(self, *args: Any, lock: RunLock | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.lock = lock
        self.seconds: list[float] = []

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, the interrupted processes' among them."""
        return time.perf_counter() - self.began

    @elapsed.setter
    def elapsed(self, seconds: float) -> None:
        self.began = time.perf_counter() - seconds

    def _init_callback(self) -> None:
        self.elapsed = self.seconds[-1] if self.seconds else 0.0
        with warnings.catch_warnings():
            # Several environments have processes of their own, the evaluation's one has none; both are built alike
            warnings.filterwarnings("ignore", "Training and eval env are not of the same type")
            super()._init_callback()

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._write_table()  # without what a lost process added after the checkpoint

    def _on_step(self) -> bool:
        if self.lock is not None and self.n_calls % self.eval_freq == 0:
            self.lock.require_ours()  # what SB3 writes at an evaluation would be the other process's
        goes_on = super()._on_step()
        if len(self.evaluations_timesteps) > len(self.seconds):
            self._write_table()
        return goes_on

    def _write_table(self) -> None:
        missing = len(self.evaluations_timesteps) - len(self.seconds)
        self.seconds += missing * [self.elapsed]
        scores = zip(self.evaluations_timesteps, self.evaluations_results, self.seconds, strict=True)
        rows = [f"{steps},{np.mean(one):.9g},{np.std(one):.9g},{seconds:.1f}" for steps, one, seconds in scores]
        content = "\n".join([",".join(SCORE_COLUMNS), *rows, ""])
        files.write(Path(str(self.log_path)).with_name(SCORES), content.encode())

    def _on_training_end(self) -> None:
        is_last = self.num_timesteps >= self.model._total_timesteps
        if (is_last or not self.evaluations_timesteps) and self.evaluations_timesteps[-1:] != [self.num_timesteps]:
            frequency, self.eval_freq = self.eval_freq, 1
            self._on_step()
            self.eval_freq = frequency


class AfterEvaluation(BaseCallback):
    """Redraw the curve and tell the caller."""

    resumable = ()

    parent: EvalCallback

    def __init__(self, folder: RunDir, on_evaluation: Callable[[EvalCallback], None]):
        super().__init__()
        self.folder = folder
        self.on_evaluation = on_evaluation

    def _on_step(self) -> bool:
        if find_spec("matplotlib") is not None:
            from sb3_td3x.results import scores
            from sb3_td3x.results.plots import draw

            draw([scores.of_run(self.folder)], self.folder.curve)
        self.on_evaluation(self.parent)
        return True


class AtTheEnd(BaseCallback):
    """Call a function where training ends: before the last checkpoint, after which there is nothing to resume."""

    resumable = ()

    def __init__(self, function: Callable[[], None]):
        super().__init__()
        self.function = function

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self.function()
