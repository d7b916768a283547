"""Updating while the environments step: for a ``VecEnv`` whose environments live in other processes."""

import io
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, TensorDict, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn


class OverlapVecEnv(VecEnvWrapper):
    """
    Between sending actions to the environments and waiting for them, does the work that is ``pending``.

    :param venv: runs its environments elsewhere, as SB3's ``SubprocVecEnv`` and ``RayVecEnv`` do
    :raises ValueError: for environments in this process, where nothing would run side by side
    """

    def __init__(self, venv: VecEnv):
        if isinstance(venv.unwrapped, DummyVecEnv):
            raise ValueError(
                "overlap=True needs environments in other processes: use SubprocVecEnv or RayVecEnv, not DummyVecEnv"
            )
        super().__init__(venv)
        self._innermost = venv.unwrapped
        self.pending: Callable[[], None] | None = None

    def finish(self) -> None:
        """Do the pending work now, if there is any."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions)
        try:
            self.finish()
        except BaseException:
            self._innermost.step_wait()  # nobody will ask for these results: the next step must not find them
            raise

    def step_wait(self) -> VecEnvStepReturn:
        return self.venv.step_wait()

    def reset(self) -> VecEnvObs:
        return self.venv.reset()


class Overlapping(OffPolicyAlgorithm):
    """
    An off-policy algorithm that can update while its environments step.

    The updates due after a rollout are made in the first step of the next one, with the replay buffer and the
    normalisation as they were at the end of the rollout; only that step's action is older than the updates. Whatever
    looks at the model from outside (``save``, ``predict``, ``get_parameters``, ``set_parameters``, ``export_onnx``, an
    evaluation, the end of ``learn``) finds the updates made.
    """

    overlap: bool
    _overlapping = False  # while `learn` runs with overlap=True
    _acting = False

    def get_env(self) -> VecEnv | None:
        """The user's own environments, without the wrapper around them."""
        return self.env.venv if isinstance(self.env, OverlapVecEnv) else self.env

    def _start_overlapping(self) -> None:
        """For ``overlap=True``, put a wrapper around the environments that makes the updates while they step."""
        self._finish_pending()  # of a `learn` that an error ended
        self._overlapping = self.overlap
        if self.overlap and self.env is not None:
            if isinstance(self.replay_buffer, HerReplayBuffer):
                raise ValueError("overlap=True is not for HerReplayBuffer, which asks the environments while they step")
            if self.train_freq.unit == TrainFrequencyUnit.EPISODE:  # type: ignore[union-attr]
                raise ValueError("overlap=True needs train_freq in steps: after an episode nothing is left to overlap with")
            if not isinstance(self.env, OverlapVecEnv):
                self.env = OverlapVecEnv(self.env)

    def _now_or_while_stepping(self, work: Callable[[], None]) -> None:
        self._finish_pending()
        last = self.num_timesteps >= self._total_timesteps  # no step will follow
        if self._overlapping and isinstance(self.env, OverlapVecEnv) and not last:
            self.env.pending = work
        else:
            work()

    def _finish_pending(self) -> None:
        if isinstance(self.env, OverlapVecEnv):
            self.env.finish()

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        self._finish_pending()
        super().set_env(env, force_reset)

    def load_replay_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._finish_pending()
        super().load_replay_buffer(*args, **kwargs)

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        self._finish_pending()
        super().save(path, exclude, include)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        self._finish_pending()
        return super().get_parameters()

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        self._finish_pending()
        super().set_parameters(load_path_or_dict, exact_match, device)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        if not self._acting:
            self._finish_pending()
        return super().predict(observation, state, episode_start, deterministic)

    def _sample_action(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        self._acting = True  # the actions that overlap with the updates are chosen before them
        try:
            return super()._sample_action(*args, **kwargs)
        finally:
            self._acting = False
