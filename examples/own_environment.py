"""An environment of your own with a time limit: a cart is pushed to the middle of a track."""

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_td3x import TD3X


class CartOnTrack(gym.Env):
    """An episode terminates where the track ends. The time limit of `register` truncates it, which is not a terminal state."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)  # position, velocity
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)  # force

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.uniform([-1.0, 0.0], [1.0, 0.0]).astype(np.float32)
        return self.state.copy(), {}

    def step(self, action):
        position, velocity = self.state
        velocity = 0.95 * velocity + 0.1 * float(action[0])
        self.state = np.array([position + 0.1 * velocity, velocity], np.float32)
        return self.state.copy(), 1.0 - abs(float(position)), bool(abs(position) > 2.0), False, {}


gym.register("CartOnTrack-v0", entry_point=CartOnTrack, max_episode_steps=100)

torch.set_num_threads(1)  # more are much slower beside other programs
env = gym.make("CartOnTrack-v0")
model = TD3X("MlpPolicy", env, gamma=0.95, learning_starts=500, policy_kwargs={"net_arch": [64, 64]}, seed=0)
model.learn(5_000)
model.save("cart")
mean, std = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
print(f"return {mean:.1f} ± {std:.1f}, at most 100")
