"""
Time updates of TD3X's paths and of SB3's TD3 in turns in one process, without a simulator.

Prints one JSON object: CPU milliseconds per update, and the seconds that the first four updates took, compiling included.
Usage: ``python benchmarks/updates.py 100,128,256 5`` (batch sizes, turns of 30 updates). To compare two states of the code,
run it in turns with each checkout on PYTHONPATH.
"""

import json
import sys
import time

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.logger import Logger

from sb3_td3x import TD3X

OBSERVATIONS, ACTIONS, TRANSITIONS, UPDATES = 22, 6, 2_000, 30


class Noise(gym.Env):
    observation_space = spaces.Box(-10, 10, (OBSERVATIONS,), np.float32)
    action_space = spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(OBSERVATIONS, np.float32), {}

    def step(self, action):
        return self.np_random.normal(size=OBSERVATIONS).astype(np.float32), 0.5, False, False, {}


def ready(algorithm, batch_size, **kwargs):
    """A model whose replay buffer is filled, as ``learn`` leaves it."""
    model = algorithm(
        "MlpPolicy", Noise(), batch_size=batch_size, buffer_size=2 * TRANSITIONS, seed=0, device="cpu",
        policy_kwargs={"net_arch": [400, 300]}, **kwargs,
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    random = np.random.default_rng(0)
    for _ in range(TRANSITIONS):
        observation, next_observation = random.normal(size=(2, 1, OBSERVATIONS)).astype(np.float32)
        action = random.uniform(-1, 1, (1, ACTIONS)).astype(np.float32)
        model.replay_buffer.add(observation, next_observation, action, random.normal(size=1), np.zeros(1), [{}])
    model._total_timesteps = 10**6
    return model


def measure(batch_size, turns):
    models = {"sb3": ready(TD3, batch_size)}
    for n_quantiles in (1, 25):
        for path in ("plain", "compiled"):
            models[f"{path}-{n_quantiles}"] = ready(TD3X, batch_size, n_quantiles=n_quantiles, accelerate=path)
    first, spent = {}, {name: [] for name in models}
    for name, model in models.items():
        start = time.perf_counter()
        model.train(4, batch_size)
        first[name] = time.perf_counter() - start
    for _ in range(turns):
        for name, model in models.items():
            start = time.process_time()
            model.train(UPDATES, batch_size)
            spent[name].append((time.process_time() - start) / UPDATES * 1e3)
    return {"ms": {name: float(np.median(times)) for name, times in spent.items()}, "first_updates_s": first}


if __name__ == "__main__":
    th.set_num_threads(1)
    print(json.dumps({size: measure(int(size), int(sys.argv[2])) for size in sys.argv[1].split(",")}))
