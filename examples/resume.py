"""Train with checkpoints. Stop it at any moment and start it again: it resumes from the last checkpoint to the same end."""

import argparse
from pathlib import Path

import gymnasium as gym
import torch

from sb3_td3x import TD3X, EpisodeSeeds, TD3XCheckpointCallback, resume_run

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=float, default=10_000)
parser.add_argument("--run", type=Path, default=Path("resumable"), help="folder of the checkpoints")
args = parser.parse_args()
torch.set_num_threads(1)  # more are much slower beside other programs

env = EpisodeSeeds(gym.make("Pendulum-v1"), 0)  # the start of an episode depends on its number only
checkpoints = TD3XCheckpointCallback(max(args.steps // 10, 1), args.run)
is_saved = any(args.run.glob("td3x_*_steps*"))  # a process that was killed early leaves a folder without a checkpoint
if is_saved:
    model = resume_run(args.run, env)
    print(f"resumed after {model.num_timesteps} steps")
else:
    model = TD3X("MlpPolicy", env, policy_kwargs={"net_arch": [128, 128]}, seed=0)
model.learn(args.steps, checkpoints, resume=is_saved)  # to this many steps in total
model.save("pendulum_resumable")
