"""A robot arm reaches for a goal: Dict observations, a reward only at the goal, hindsight replay."""

import gymnasium as gym
import numpy as np
import panda_gym  # noqa: F401  # registers the Panda environments, on PyBullet
import torch
from stable_baselines3 import HerReplayBuffer

from sb3_td3x import TD3X


def success_rate(model: TD3X, env: gym.Env, episodes: int) -> float:
    """Fraction of episodes that end at their goal, without noise, on seeds that training has not used."""
    successes = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=10_000 + episode)
        over = False
        while not over:
            action, _ = model.predict(observation, deterministic=True)
            observation, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        successes.append(info["is_success"])
    return float(np.mean(successes))


torch.set_num_threads(1)  # more are much slower beside other programs

env = gym.make("PandaReach-v3")
settings = {"learning_rate": 1e-3, "gamma": 0.95, "policy_kwargs": {"net_arch": [64, 64]}}
replay = {"n_sampled_goal": 4, "goal_selection_strategy": "future"}
model = TD3X("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs=replay, seed=0, **settings)
model.learn(5_000)
model.save("reach")
print(f"{success_rate(model, env, episodes=100):.0%} of 100 episodes reach their goal")
