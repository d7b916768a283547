"""Begin with demonstrations: a trained agent fills the replay buffer, and a new one learns from them and its own steps."""

import argparse
from pathlib import Path

import pybullet_envs_gymnasium  # noqa: F401  # registers the PyBullet environments
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_td3x import TD3X

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20_000, help="the new agent's own steps")
parser.add_argument("--demonstrations", type=int, default=5_000, help="steps of the trained agent")
args = parser.parse_args()

env = make_vec_env("Walker2DBulletEnv-v0", seed=0)
agent = Path(__file__).parent.parent / "agents" / "Walker2DBulletEnv-v0" / "best_model.zip"
teacher = TD3X.load(agent, env=env, buffer_size=1)

# No random steps: the buffer is full of better ones
model = TD3X("MlpPolicy", env, learning_rate=7e-4, gamma=0.98, batch_size=128, tau=0.02, learning_starts=0, seed=0)
observations = env.reset()
for _ in range(args.demonstrations):
    actions, _ = teacher.predict(observations, deterministic=True)
    next_observations, rewards, dones, infos = env.step(actions)
    stored = next_observations.copy()
    for number, info in enumerate(infos):
        if dones[number]:  # the environment has been reset: store where the episode ended
            stored[number] = info["terminal_observation"]
    scaled = model.policy.scale_action(actions)  # replay buffers hold actions in [-1, 1]
    model.replay_buffer.add(observations, stored, scaled, rewards, dones, infos)
    observations = next_observations

model.learn(args.steps)
model.save("student")
mean, std = evaluate_policy(model, env, n_eval_episodes=5)
print(f"return {mean:.0f} ± {std:.0f}")
