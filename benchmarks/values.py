"""
Compare the values of a run's critics with the discounted returns of its last actor: higher values are overestimation.

For each step of fresh episodes, the mean of all critics and quantiles at the action taken, and the discounted sum of the
rewards from there on. Writes one JSON per run.
Usage: ``python benchmarks/values.py runs/td3x_default_HopperBulletEnv-v0_s0 ...``
"""

import math
from typing import Any

import numpy as np
import torch as th
from results import VALUES, write_facts
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import TD3X
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.play import open_evaluation_env

EPISODES = 5
SEED = 1_000  # as for `td3x eval`; evaluations during training have the run's
NEGLIGIBLE = 0.01  # what is left of a reward, by gamma, when an episode that was cut ends


def earned(rewards: list[float], gamma: float, is_cut: bool) -> np.ndarray:
    """The discounted sum of rewards from each step on, without the last steps of an episode that was cut."""
    sums = np.zeros(len(rewards) + 1)
    for step in reversed(range(len(rewards))):
        sums[step] = rewards[step] + gamma * sums[step + 1]
    horizon = math.ceil(math.log(NEGLIGIBLE) / math.log(gamma)) if is_cut else 0
    return sums[: max(len(rewards) - horizon, 0)]


def episode(model: TD3X, env: VecEnv, noise: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Values and discounted returns of an episode's steps, ``(steps,)`` each, and its plain return."""
    observation, values, rewards = env.reset(), [], []
    while True:
        action = model.policy.scale_action(model.predict(observation, deterministic=True)[0])
        action = np.clip(action + noise * random.standard_normal(action.shape), -1, 1).astype(np.float32)
        with th.no_grad():
            tensor, _ = model.policy.obs_to_tensor(observation)
            values.append(th.cat(model.critic(tensor, th.as_tensor(action)), dim=1).mean().item())
        observation, reward, done, infos = env.step(model.policy.unscale_action(action))
        rewards.append(float(reward[0]))
        if done[0]:
            sums = earned(rewards, model.gamma, infos[0]["TimeLimit.truncated"])
            return np.array(values[: len(sums)]), sums, sum(rewards)


def compare(run: RunDir, noise: float) -> dict[str, float]:
    model = TD3X.load(run.last_model, device="cpu", buffer_size=1)
    env, random = open_evaluation_env(run, SEED), np.random.default_rng(SEED)
    try:
        episodes = [episode(model, env, noise, random) for _ in range(EPISODES)]
    finally:
        env.close()
    values, sums = (np.concatenate(parts) for parts in list(zip(*episodes, strict=True))[:2])
    found = {"value": values.mean(), "earned": sums.mean()}
    found["return"] = np.mean([whole for *_, whole in episodes])
    return {name: round(float(value), 3) for name, value in found.items()}


def facts(run: RunDir) -> dict[str, Any]:
    return {
        "steps": int(run.scores()[0][-1]),
        "without noise": compare(run, 0.0),
        "with noise of 0.1": compare(run, 0.1),
    }


if __name__ == "__main__":
    write_facts(__doc__, VALUES, facts)
