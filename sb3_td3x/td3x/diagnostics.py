"""The numbers that TD3 is debugged with, once per log output. They change no network and no generator (of the CPU)."""

import time
import warnings
from typing import Any

import torch as th
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x.common.random_state import generators_kept
from sb3_td3x.td3x.exploration import noise_std
from sb3_td3x.td3x.gradient_step import UpdateSettings, critic_target


def record(model: Any) -> None:
    """Record the diagnostics of a ``TD3X`` for the log line that is about to be written."""
    model.logger.record("train/replay_size", model.replay_buffer.size() * model.n_envs)
    if (std := noise_std(model.action_noise)) is not None:
        model.logger.record("rollout/action_noise_std", std)
    now, (then, steps, updates) = time.perf_counter(), model._pace
    if model._n_updates > updates and model._last_batch is None and model.n_quantiles > 1:
        problem = f"{type(model).__name__}.train replaces TD3X's, and TD3's losses are wrong for {model.n_quantiles} quantiles"
        warnings.warn(f"{problem}: if it has them, set n_quantiles=1", stacklevel=2)
    if (steps, updates) == (model.num_timesteps, model._n_updates):
        return  # of several lines in one step the first has the rest, as it has SB3's losses
    model.logger.record("time/updates_per_second", (model._n_updates - updates) / max(now - then, 1e-9))
    model._pace = now, model.num_timesteps, model._n_updates
    if (batch := model._last_batch) is not None:  # nothing is drawn from the buffer, whose sampling may have a state
        model.policy.set_training_mode(False)
        noise = th.randn(batch.actions.shape, generator=th.Generator().manual_seed(model.num_timesteps), device="cpu")
        with generators_kept():  # a network may draw numbers
            measured = measure(model.policy, batch, noise.to(batch.actions), model._settings_of_update())
        for name, value in measured.items():
            model.logger.record(f"train/{name}", value)


def measure(policy: TD3Policy, batch: ReplayBufferSamples, noise: th.Tensor, settings: UpdateSettings) -> dict[str, float]:
    """
    Means over a batch, as ``docs/logging.md`` explains them, for a policy in evaluation mode.

    :param noise: standard normal numbers for the target's actions, ``(batch, action_dim)``
    """
    with th.no_grad():
        outputs = policy.critic(batch.observations, batch.actions)
        values = th.stack([output.mean(dim=1) for output in outputs])  # (n_critics, batch)
        measured = {
            "q_mean": values.mean(),
            "target_mean": critic_target(policy, batch, noise, settings).mean(),
            "action_saturation": (policy.actor(batch.observations).abs() > 0.99).float().mean(),  # of at most 1
        }
        if len(values) > 1:
            measured["twin_gap"] = (values.amax(dim=0) - values.amin(dim=0)).mean()
        return dict(zip(measured, th.stack(list(measured.values())).tolist(), strict=True))  # synchronizes a GPU once
