"""Going on with a run: what an algorithm adds to SB3's loop so that a saved run continues and one can be stopped cleanly."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any, ClassVar, TypeVar

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback, RolloutReturn
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_td3x.common.transitions import cut
from sb3_td3x.errors import EnvironmentDiedError

SelfResumable = TypeVar("SelfResumable", bound="Resumable")


TRANSIENT = ("_on_resume", "_is_stored", "_rows_stored")
"""Attributes of ``Resumable`` that belong to the process and are not saved."""


class StopTraining(Exception):
    """
    Raised by a callback in ``_on_rollout_start`` to end ``learn`` there, where everything is stored.

    Returning ``False`` from ``_on_step`` ends it before SB3 has stored the transition of that step.
    """


class Resumable(OffPolicyAlgorithm):
    """
    An off-policy algorithm that can be stopped between two rollouts and can go on with a saved run.

    Put before an algorithm of SB3 (``class ResumableSAC(Resumable, SAC): ...``) it makes that one resumable too.

    ``resumptions`` lists where a saved run was gone on with (``steps``) and what was not restored then (``not_restored``).
    """

    replay_buffer: ReplayBuffer
    only_in_checkpoints: ClassVar[tuple[str, ...]] = ()  # attributes that belong to a run but not to a saved model
    _on_resume: Callable[[BaseCallback], None] | None = None  # gives everything around the model its saved state
    _is_stored = True  # whether the environments' last step is in the replay buffer
    _rows_stored = 0  # steps that this process has put into the replay buffer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.resumptions: list[dict[str, Any]] = []

    def learn(self: SelfResumable, total_timesteps: int, *args: Any, resume: bool = False, **kwargs: Any) -> SelfResumable:
        """
        SB3's ``learn``.

        :param resume: go on to ``total_timesteps`` in all with a model from ``resume_run``
        """
        if resume:
            if total_timesteps < self.num_timesteps:
                warnings.warn(
                    f"nothing to do: {self.num_timesteps:,} steps are made, and with resume=True total_timesteps "
                    f"({total_timesteps:,}) counts from the beginning",
                    stacklevel=2,
                )
            total_timesteps = max(total_timesteps - self.num_timesteps, 0)
            kwargs["reset_num_timesteps"] = False
        return super().learn(total_timesteps, *args, **kwargs)

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> RolloutReturn:
        self._on_resume = None  # no earlier: a `learn` that ends with an error before its first step can be called again
        try:
            return super().collect_rollouts(*args, **kwargs)
        except StopTraining:
            return RolloutReturn(0, 0, continue_training=False)
        finally:
            if not self._is_stored:  # a callback, Ctrl-C or an error has ended it inside a step
                self._last_obs = None  # the next `learn` may not go on from before it

    def _sample_action(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        self._is_stored = False  # the environments make their step next
        return super()._sample_action(*args, **kwargs)

    def _store_transition(
        self, replay_buffer: Any, buffer_action: Any, new_obs: Any, reward: Any, dones: np.ndarray, infos: Any
    ) -> None:
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        # SB3 keeps it for on-policy algorithms only; a copy, as some environments write into one array at every step
        self._last_episode_starts = np.array(dones)
        self._is_stored = True
        self._rows_stored += 1

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps and self._on_resume is not None:
            raise ValueError("a model from resume_run goes on with learn(total, ..., resume=True); to begin anew, use load")
        if self.replay_buffer is not None and (reset_num_timesteps or self._last_obs is None):
            cut(self.replay_buffer)  # SB3 resets the environments
        noise = self.action_noise
        continues_episode = not reset_num_timesteps and self._last_obs is not None
        if continues_episode and (self.n_envs == 1 or isinstance(noise, VectorizedActionNoise)):
            self.__dict__["action_noise"] = None  # or SB3 would restart correlated noise inside the episode
        try:
            result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        finally:
            if self.action_noise is None:
                self.__dict__["action_noise"] = noise
        self._is_stored = True
        if reset_num_timesteps:
            self.resumptions = []
        elif self._on_resume is not None:
            self._on_resume(result[1])
        return result

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *TRANSIENT, *self.only_in_checkpoints]


@contextmanager
def explained_deaths(env: VecEnv | None) -> Iterator[None]:
    """Say which environment's process has ended where SB3 would raise what its pipe raises."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        innermost = None if env is None else env.unwrapped
        if not isinstance(innermost, SubprocVecEnv):
            raise
        # Its pipe closes a moment before it ends
        connection.wait([process.sentinel for process in innermost.processes], timeout=1)
        dead = {index: process.exitcode for index, process in enumerate(innermost.processes) if not process.is_alive()}
        if not dead:
            raise
        innermost.waiting = False  # `close` would wait for answers that are read already or will not come
        codes = ", ".join(map(str, dead.values()))
        how = f"ended with exit code {codes} (negative: a signal; -9 often means that memory ran out)"
        raise EnvironmentDiedError(list(dead), how) from error
