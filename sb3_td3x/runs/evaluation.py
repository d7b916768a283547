"""What a run does at every evaluation: keep the best model and its normalization, write the scores, report to the caller."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import env_state
from sb3_td3x.common import files
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.resumable import StopTraining
from sb3_td3x.common.transitions import check_rewards
from sb3_td3x.results.run_dir import SCORE_COLUMNS, SCORES, RunDir


def save_normalization(model: BaseAlgorithm, path: Path) -> None:
    """Write ``VecNormalize``'s statistics, if there are any."""
    if (normalization := model.get_vec_normalize_env()) is not None:
        files.write(path, lambda partial: normalization.save(str(partial)))


def save_last(model: BaseAlgorithm, folder: RunDir, lock: RunLock) -> None:
    """Write the model as it is now, and its normalization; ``RunLockedError`` if another process has the lock."""
    lock.require_ours()
    with files.explained(folder.last_model):
        model.save(folder.last_model)
    save_normalization(model, folder.normalization)


class Evaluation(EvalCallback):
    """
    Evaluates every ``eval_freq`` calls, when the next rollout starts (as for checkpoints), and at the end.

    An evaluation interrupted by a request to stop is discarded and made first on resume. Each completed one adds a line to
    ``scores.csv``. The last model is saved where training ends: before the last checkpoint, after which there is nothing to
    resume. A process that has lost the run's lock, for example while it was suspended, ends at the next evaluation.
    """

    resumable = ("seconds", "elapsed", "is_due")

    def __init__(
        self,
        eval_env: VecEnv,
        *,
        eval_freq: int,
        folder: RunDir,
        lock: RunLock,
        is_stopping: Callable[[], bool] = lambda: False,
        on_evaluation: Callable[[EvalCallback], None] = lambda _: None,
        **kwargs: Any,
    ):
        path = str(folder.path)
        # SB3's `_on_step` evaluates at every call, and is called when an evaluation is due
        super().__init__(eval_env, eval_freq=1, log_path=path, best_model_save_path=path, verbose=0, **kwargs)
        self.every, self.folder, self.lock = eval_freq, folder, lock
        self.is_stopping, self.on_evaluation = is_stopping, on_evaluation
        self.seconds: list[float] = []
        self.is_due = False

    @property
    def elapsed(self) -> float:
        """Seconds of training so far, including those of interrupted processes."""
        return time.perf_counter() - self.began

    @elapsed.setter
    def elapsed(self, seconds: float) -> None:
        self.began = time.perf_counter() - seconds

    def _init_callback(self) -> None:
        """Without SB3's warning that training has processes for its environments and the evaluation has none."""
        self.elapsed = 0.0

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._write_table()  # without what a lost process added after the checkpoint
        if not self.evaluations_timesteps:  # the checkpoint has none of these files, and could not bring an older one back
            folder = self.folder
            for path in (folder.evaluations, folder.curve, folder.best_model, folder.best_normalization):
                path.unlink(missing_ok=True)

    def _on_step(self) -> bool:
        self.is_due = self.is_due or self.n_calls % self.every == 0
        return True

    def _on_rollout_start(self) -> None:
        if self.is_due and not self.is_stopping():
            self._evaluate()

    def _on_training_end(self) -> None:
        is_last = self.num_timesteps >= self.model._total_timesteps
        if is_last and self.evaluations_timesteps[-1:] != [self.num_timesteps]:
            self._evaluate()
        save_last(self.model, self.folder, self.lock)

    def resumable_files(self) -> list[Path]:
        """Files that belong to a checkpoint besides those of SB3's ``EvalCallback``."""
        return [self.folder.best_normalization]

    def _evaluate(self) -> None:
        self.lock.require_ours()  # SB3 would overwrite the other process's files
        was_reset, best_before = self.last_mean_reward != -np.inf, self.best_mean_reward
        before = copy.deepcopy(env_state.get(self.eval_env, was_reset))  # it may be what the evaluation changes
        try:
            super()._on_step()
        except StopTraining:
            env_state.set_envs(self.eval_env, before, [False] * self.eval_env.num_envs)
            self.is_due = True
            return
        self.is_due = False
        self.seconds.append(self.elapsed)
        if self.best_mean_reward > best_before:
            save_normalization(self.model, self.folder.best_normalization)
        self._write_table()
        self.on_evaluation(self)

    def _log_success_callback(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        if self.is_stopping():
            raise StopTraining
        check_rewards(locals_["rewards"], "reward in the evaluation", f"environment step {self.num_timesteps}")
        is_known = "is_success" in locals_["info"] or self._is_success_buffer or self.evaluations_successes
        if locals_["done"] and is_known:  # an environment may tell of successes alone, and SB3 writes a table
            self._is_success_buffer += [False] * (len(locals_["episode_rewards"]) - len(self._is_success_buffer))
            if locals_["info"].get("is_success") is None:  # which SB3 passes over
                locals_["info"]["is_success"] = False
            missing = len(self.evaluations_timesteps) - len(self.evaluations_successes)
            self.evaluations_successes += [[False] * self.n_eval_episodes for _ in range(missing)]
        super()._log_success_callback(locals_, globals_)

    def _write_table(self) -> None:
        scores = zip(self.evaluations_timesteps, self.evaluations_results, self.seconds, strict=True)
        rows = [f"{steps},{np.mean(returns):.9g},{np.std(returns):.9g},{seconds:.1f}" for steps, returns, seconds in scores]
        files.write(self.folder.path / SCORES, "\n".join([",".join(SCORE_COLUMNS), *rows, ""]).encode())
