"""Saving a run at regular intervals, and when it is asked to stop."""

from pathlib import Path

import numpy as np
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.type_aliases import TrainFrequencyUnit

from sb3_td3x.checkpoint import env_state
from sb3_td3x.checkpoint.run import save_run
from sb3_td3x.checkpoint.store import Checkpoint, Store, require_prefix
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.resumable import Resumable, StopTraining
from sb3_td3x.common.validation import check_int


class TD3XCheckpointCallback(CheckpointCallback):
    """
    SB3's ``CheckpointCallback``, whose checkpoints a run can be resumed from, see ``save_run`` and ``resume_run``. Each is a
    folder, in which ``model.zip`` is the model.

    SB3 calls ``on_step`` before it stores the transition, so a checkpoint is made when the next rollout starts. A save that is
    due waits until the run can be resumed exactly: with one environment for the end of the episode, at most until the next
    save is due. It does not wait with several environments, whose episodes need not end together, or where the environment
    offers its state. A run that reaches its last step is saved there; one that a callback ends is not, because SB3 has not
    stored its last transition. Give it to ``learn``, before callbacks that change something in ``_on_rollout_start``, which a
    resumed run calls again.

    :param save_freq: calls between two saves: environment steps with one environment
    :param save_path: folder of the checkpoints; one run per folder
    :param name_prefix: of each checkpoint's folder
    :param save_replay_buffer: ``False`` makes small checkpoints, after which a buffer has to be filled again
    :param save_vecnormalize: no effect, kept for SB3's order of arguments: the statistics are part of every checkpoint
    :param verbose: 2 prints each save
    :param keep_last: checkpoints to keep; older ones are removed
    :param lock: of ``td3x train``'s folder; a process that has lost it, for example because it was suspended, saves no more
    :raises RunLockedError: if another process has the lock
    :raises CheckpointError: if a checkpoint cannot be written, or the folder holds another run's; earlier checkpoints stay
    :raises ValueError: inside an ``EventCallback``, which would never let it save; for what ``save_run`` refuses
    """

    model: Resumable
    resumable = ("_due_at",)

    def __init__(
        self,
        save_freq: int,
        save_path: str | Path,
        name_prefix: str = "td3x",
        save_replay_buffer: bool = True,
        save_vecnormalize: bool = True,
        verbose: int = 0,
        *,
        keep_last: int = 2,
        lock: RunLock | None = None,
    ):
        save_freq = check_int("save_freq", save_freq, minimum=1)
        require_prefix(name_prefix)
        super().__init__(save_freq, str(save_path), name_prefix, save_replay_buffer, save_vecnormalize, verbose)
        self.keep_last = check_int("keep_last", keep_last, minimum=1)
        self.lock = lock
        self.last: Checkpoint | None = None
        self.is_stopping = False
        self._due_at: int | None = 0  # the call since which a save is due: the first is made before the first step

    def save_and_stop(self) -> None:
        """
        Save before the next rollout and end ``learn`` there; with ``train_freq`` in episodes before the next step, after which
        the run cannot be resumed exactly. Safe to call in a signal handler. After an error before that, the
        request stays: use a new callback.
        """
        self.is_stopping = True

    def _require_outermost(self) -> None:
        if self.parent is not None:
            outer = type(self.parent).__name__
            raise ValueError(f"a checkpoint cannot be made inside {outer}: give {type(self).__name__} to learn itself")

    def _on_training_start(self) -> None:
        self._require_outermost()
        self._callbacks = self.locals["callback"]  # all of them
        self.last, self._began_at = None, self.model.num_timesteps
        if [saved.steps for saved in Store(Path(self.save_path)).checkpoints()[-1:]] != [self._began_at]:
            self._due_at = self.n_calls  # a new run, an older checkpoint was resumed, or a save failed
        self._waits = self.training_env.num_envs == 1 and not env_state.get(self.training_env)["complete"]

    def _on_rollout_start(self) -> None:
        try:
            if self.is_stopping or (self._due_at is not None and self._is_good_moment(self.n_calls - self._due_at)):
                self._save()
            if self.is_stopping:
                raise StopTraining
        except BaseException:
            self.is_stopping = False  # also if the save fails: the next `learn` is another request
            raise

    def _on_step(self) -> bool:
        self._require_outermost()  # SB3 does not tell `callback_on_new_best` that training starts
        if self.n_calls % self.save_freq == 0 and self._due_at is None:
            self._due_at = self.n_calls
        if self.is_stopping and self.model.train_freq.unit is TrainFrequencyUnit.EPISODE and not self.locals["dones"].all():
            self.model._stops_before_next_step = True
        return True

    def _on_training_end(self) -> None:
        self.is_stopping = False  # not where training starts: a signal may come while it is set up
        has_moved = self.model.num_timesteps > self._began_at
        if has_moved and self.model._is_stored:  # not where a callback ended training inside a step: no run's state is that
            self._save()

    def _is_good_moment(self, waited: int) -> bool:
        at_start = np.all(self.model._last_episode_starts)  # always, with train_freq in episodes
        return bool(not self._waits or at_start or waited + self.model.train_freq.frequency >= self.save_freq)

    def _save(self) -> None:
        self._due_at = None  # as the checkpoint is to hold it
        if self.last is not None and self.last.steps == self.model.num_timesteps:
            return
        if self.lock is not None:
            self.lock.require_ours()
        self.last = save_run(
            self.model,
            self.save_path,
            self._callbacks,
            keep_last=self.keep_last,
            name_prefix=self.name_prefix,
            save_replay_buffer=self.save_replay_buffer,
        )
        if self.verbose >= 2:
            print(f"Saved the run to {self.last.path}")  # noqa: T201  # as SB3's callbacks do
