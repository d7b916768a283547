"""Train on Pendulum, save, load, act: SB3's interface from beginning to end. It takes about a minute on one core."""

import gymnasium as gym
import torch
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_td3x import TD3X

torch.set_num_threads(1)  # more are much slower beside other programs

env = gym.make("Pendulum-v1")
model = TD3X("MlpPolicy", env, learning_starts=1_000, policy_kwargs={"net_arch": [128, 128]}, seed=0)
model.learn(10_000)
model.save("pendulum")

model = TD3X.load("pendulum", env=env)
mean, std = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
print(f"return {mean:.0f} ± {std:.0f}")
