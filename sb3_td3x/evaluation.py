"""What a run does at every evaluation: keep the best model and its normalisation, redraw the curve, tell the caller."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback

from sb3_td3x.rundir import RunDir


def save_normalization(model: BaseAlgorithm, path: Path) -> None:
    """Write ``VecNormalize``'s statistics, if there are any; a NaN that has spoilt them never replaces good ones."""
    normalization = model.get_vec_normalize_env()
    if normalization is None:
        return
    statistics = normalization.obs_rms
    for one in statistics.values() if isinstance(statistics, dict) else [statistics]:
        if not (np.isfinite(one.mean).all() and np.isfinite(one.var).all()):
            return
    beside = path.with_suffix(".partial")
    normalization.save(str(beside))
    beside.replace(path)


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
    """Also evaluates at the last step, and where a run is stopped before its first evaluation: it has a score then."""

    resumable = ()

    def _on_training_end(self) -> None:
        is_last = self.num_timesteps >= self.model._total_timesteps
        if (is_last or not self.evaluations_timesteps) and self.evaluations_timesteps[-1:] != [self.num_timesteps]:
            self.eval_freq = 1
            self._on_step()


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
            from sb3_td3x.curves import draw

            draw([self.folder], self.folder.curve)
        self.on_evaluation(self.parent)
        return True
