"""
What a user debugs TD3 with, measured once per log output: values, targets, twins, actions, exploration, pace.

Updates report nothing but their losses; the rest is computed here, on a batch of its own. Learning never depends on it: the
random generators stay where they are, and the networks, in evaluation mode, keep their statistics.
"""

import copy
import time
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x.common.random_state import generators_kept
from sb3_td3x.common.transitions import can_sample, sample, stored_transitions
from sb3_td3x.td3x.exploration import noise_std
from sb3_td3x.td3x.gradient_step import UpdateSettings, target_of
from sb3_td3x.td3x.loading import Loadable

SATURATED = 0.99
"""An action beyond this, of at most 1, counts as saturated."""


def measure(policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> dict[str, float]:
    """
    Means over a batch. A quantile critic's value is the mean of its quantiles.

    :param policy: in evaluation mode; it is not changed
    :param batch: transitions, actions scaled to [-1, 1]
    :param noise: standard normal numbers, ``(batch, action_dim)``, for the target's actions
    :param settings: of the rule
    :return: ``q_mean`` of all critics at the stored actions; ``target_mean``, of what they are moved towards;
        ``action_saturation``, the share of the actor's action components beyond 0.99; if there are several critics,
        ``twin_gap``, the largest minus the smallest critic's value
    """
    with th.no_grad():
        outputs = policy.critic(batch.observations, batch.actions)
        values = th.stack([output.mean(dim=1) for output in outputs])  # (n_critics, batch)
        found = {
            "q_mean": values.mean(),
            "target_mean": target_of(policy, batch, noise, settings).mean(),
            "action_saturation": (policy.actor(batch.observations).abs() > SATURATED).float().mean(),
        }
        if len(values) > 1:
            found["twin_gap"] = (values.amax(dim=0) - values.amin(dim=0)).mean()
        return dict(zip(found, th.stack(list(found.values())).tolist(), strict=True))  # one wait for a GPU


def undisturbed_sample(
    buffer: ReplayBuffer, batch_size: int, normalization: VecNormalize | None, seed: int
) -> tuple[ReplayBufferSamples, th.Tensor]:
    """
    A batch and standard normal numbers in the shape of its actions, determined by ``seed`` and the buffer's content.

    No global generator moves, and none that the buffer itself holds.
    """
    own = {name: value for name, value in vars(buffer).items() if isinstance(value, GENERATORS)}
    with generators_kept(buffer.device, seed):
        try:
            vars(buffer).update(copy.deepcopy(own))
            batch = sample(buffer, batch_size, normalization)
        finally:
            vars(buffer).update(own)
        noise = th.randn(batch.actions.shape, dtype=batch.actions.dtype)
    return batch, noise.to(batch.actions.device)


GENERATORS = (np.random.Generator, np.random.RandomState, th.Generator)


class Diagnosed(Loadable):
    """An off-policy algorithm with TD3's networks that adds to SB3's log, whenever it is written, what is measured here."""

    policy: TD3Policy
    _pace: tuple[float, int, int] | None = None  # when the log was last written, and the steps and updates until then

    def _rule_settings(self) -> UpdateSettings:
        raise NotImplementedError

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        result = super()._setup_learn(*args, **kwargs)
        self._pace = time.perf_counter(), self.num_timesteps, self._n_updates
        return result

    def dump_logs(self) -> None:
        """Write the log, with the diagnostics."""
        self._record_diagnostics()
        super().dump_logs()

    def _record_diagnostics(self) -> None:
        self.logger.record("train/replay_size", stored_transitions(self.replay_buffer))
        std = noise_std(self.action_noise)
        if std is not None:
            self.logger.record("rollout/action_noise_std", std)
        self._record_pace()
        if self._n_updates == 0 or self._is_refilling or not can_sample(self.replay_buffer):
            return  # the critics know nothing yet, or the buffer holds next to nothing
        self.policy.set_training_mode(False)
        batch, noise = undisturbed_sample(
            self.replay_buffer, self.batch_size, self._vec_normalize_env, seed=self.num_timesteps
        )
        for name, value in measure(self.policy, batch, noise, self._rule_settings()).items():
            self.logger.record(f"train/{name}", value)

    def _record_pace(self) -> None:
        """Once per step: where episodes of several environments end together, SB3 writes the log for each."""
        now = time.perf_counter()
        if self._pace is not None:
            then, steps, updates = self._pace
            if steps == self.num_timesteps:
                return
            self.logger.record("time/updates_per_second", (self._n_updates - updates) / max(now - then, 1e-9))
        self._pace = now, self.num_timesteps, self._n_updates
