"""
Steps per second of ``RayVecEnv`` beside SB3's ``SubprocVecEnv``: PyBullet's walker, and a simulator that takes 10 ms a step.

Usage: ``python benchmarks/ray_vec_env.py``. Writes ``benchmarks/results/ray_vec_env.json``; the contenders take turns.
"""

import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import gymnasium as gym
import numpy as np
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker
import ray
from results import versions
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_td3x import RayVecEnv

WALKER = "Walker2DBulletEnv-v0"
COUNTS = (2, 4, 8)
REPEATS = 5
SECONDS = 3.0  # of one measurement
SIMULATED = 0.01
OUT = Path(__file__).parent / "results" / "ray_vec_env.json"


class Simulator(gym.Env):
    """Shaped as the walker; a step takes 10 ms and no processor."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (22,))
    action_space = gym.spaces.Box(-1, 1, (6,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(22, np.float32), {}

    def step(self, action):
        time.sleep(SIMULATED)
        return np.zeros(22, np.float32), 0.0, False, False, {}


def contenders(maker: Callable[[], gym.Env], count: int) -> dict[str, Callable[[], VecEnv]]:
    makers = [maker] * count
    made = {
        "SubprocVecEnv": lambda: SubprocVecEnv(makers),
        "RayVecEnv": lambda: RayVecEnv(makers, num_cpus=0.1),
        "RayVecEnv, 1 actor of processes": lambda: RayVecEnv(makers, count, SubprocVecEnv, num_cpus=0.1),
    }
    if count > 2:
        made["RayVecEnv, 2 actors"] = lambda: RayVecEnv(makers, count // 2, num_cpus=0.1)
    return made


def steps_per_second(env: VecEnv, actions: np.ndarray, seconds: float) -> float:
    for _ in range(20):
        env.step(actions)
    began, rounds = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        env.step(actions)
        rounds += 1
    return rounds * len(actions) / passed


def measure(simulator: str, maker: Callable[[], gym.Env], count: int) -> dict[str, object]:
    actions = np.random.default_rng(0).uniform(-1, 1, (count, 6)).astype(np.float32)
    envs, starts = {}, {}
    for name, make in contenders(maker, count).items():
        began = time.perf_counter()
        envs[name] = make()
        envs[name].reset()
        starts[name] = time.perf_counter() - began
    rates: dict[str, list[float]] = {name: [] for name in envs}
    for _ in range(REPEATS):
        for name, env in envs.items():
            rates[name].append(steps_per_second(env, actions, SECONDS))
    for env in envs.values():
        env.close()
    rows = {
        name: {"steps_per_second": median(all_), "all": all_, "start_seconds": starts[name]} for name, all_ in rates.items()
    }
    return {"simulator": simulator, "environments": count, "contenders": rows}


def main() -> None:
    warnings.simplefilter("ignore")
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as SubprocVecEnv's processes
    ray.init("local", include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False, logging_level="ERROR")
    load = os.getloadavg()[0]
    rows = []
    for simulator, maker in (("sleeps 10 ms", Simulator), (WALKER, lambda: gym.make(WALKER))):
        for count in COUNTS:
            rows.append(measure(simulator, maker, count))
            print(json.dumps(rows[-1]), flush=True)
    facts = {"repeats": REPEATS, "seconds": SECONDS, "load_before": load, "cores": os.cpu_count()}
    OUT.write_text(json.dumps({**facts, "rows": rows, "versions": {**versions(), "ray": ray.__version__}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
