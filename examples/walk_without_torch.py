"""
Run an exported walker with onnxruntime and PyBullet's environments, without torch.

`td3x export RUN --onnx walker.onnx` creates the file.
"""

import argparse
import sys

import gymnasium as gym
import onnxruntime
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="walker.onnx")
parser.add_argument("--steps", type=int, default=1_000)
args = parser.parse_args()

actor = onnxruntime.InferenceSession(args.model)
env = gym.make(actor.get_modelmeta().custom_metadata_map["environment"])
observation, _ = env.reset(seed=0)
total, steps, over = 0.0, 0, False
while not over and steps < args.steps:
    (actions,) = actor.run(None, {"observation": observation[None]})  # a batch of one
    observation, reward, terminated, truncated, _ = env.step(actions[0])
    total, steps, over = total + float(reward), steps + 1, terminated or truncated
print(f"return {total:.1f} after {steps} steps; torch is {'loaded' if 'torch' in sys.modules else 'not loaded'}")
