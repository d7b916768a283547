"""
The figures of docs/speed.md: updates, whole ``learn`` steps and memory, each in a process of its own pinned to its cores.

Usage: ``python benchmarks/speed.py FOLDER [updates] [walker] [recipe] [memory] [--only TEXT]`` on a quiet machine.
What is in the folder (``benchmarks/results/speed/zen4``) is skipped: delete a file to measure it again.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch as th
from results import versions
from stable_baselines3 import TD3

from sb3_td3x import TD3X, presets
from sb3_td3x.runs import bench
from sb3_td3x.runs.environments import TRAINING, open_env

UPDATES = [{"batch": batch, "quantiles": 25, "threads": 1} for batch in (100, 128, 256)]
# One factor at a time
GROWTH = [
    {},
    {"batch": 1024},
    {"net": "256,256"},
    {"net": "1024,1024"},
    {"observations": 376, "actions": 17},
    {"buffer": 1_000_000},
]
WALKER = [{"batch": batch, "threads": 1} for batch in (100, 256)]
CASES = {
    "updates": [*UPDATES, *({"batch": 256, "threads": 1} | change for change in GROWTH)],
    "walker": WALKER,
    "recipe": [{"env": "Walker2DBulletEnv-v0"}],
    "memory": [{"name": name} for name in bench.ALGORITHMS],
}


def pinned(command: list[str]) -> None:
    """Run a command with one thread on the first core."""
    first = sorted(os.sched_getaffinity(0))[:1]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=env, preexec_fn=lambda: os.sched_setaffinity(0, first))


def name_of(kind: str, case: dict) -> str:
    return "_".join([kind, *(f"{key}-{str(value).replace(',', 'x')}" for key, value in case.items())])


def measure_updates(case: dict, out: Path) -> None:
    options = [text for key, value in case.items() for text in (f"--{key}", str(value))]
    script = str(Path(__file__).with_name("contenders.py"))
    pinned([sys.executable, script, *options, "--out", str(out)])


class Idle(gym.Env):
    """Costs nothing, and has the walker's spaces."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (22,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(22, np.float32), {}

    def step(self, action):
        return np.zeros(22, np.float32), 0.0, False, False, {}


def build(name: str, env, batch: int, buffer_size: int = 100_000):
    th.set_num_threads(1)
    algorithm, settings = bench.ALGORITHMS[name]
    settings = {"learning_rate": 7e-4, "gamma": 0.98, "learning_starts": 100, "seed": 0, "device": "cpu", **settings}
    return algorithm("MlpPolicy", env, batch_size=batch, buffer_size=buffer_size, **settings)


def walker(batch: int, out: Path) -> None:
    """Milliseconds per step of ``learn`` without evaluation on PyBullet's walker, the algorithms taking turns."""
    models = {name: build(name, open_env("Walker2DBulletEnv-v0", 0, TRAINING), batch) for name in bench.ALGORITHMS}
    write(out, {"batch": batch, "threads": 1, "rows": learn_in_turns(models)})


def recipe(env_id: str, out: Path) -> None:
    """The same with the settings that each is trained with: rl-zoo3's tuned ones and the preset ``default``."""
    th.set_num_threads(1)
    zoo = {"learning_rate": 7e-4, "gamma": 0.98, "batch_size": 256, "policy_kwargs": {"net_arch": [400, 300]}}
    ours = {**presets.model_arguments(presets.load("default", env_id)), "accelerate": "compiled"}
    common = {"buffer_size": 200_000, "learning_starts": 100, "seed": 0, "device": "cpu"}
    models = {
        "SB3 TD3": TD3("MlpPolicy", open_env(env_id, 0, TRAINING), **zoo, **common),
        "TD3X": TD3X("MlpPolicy", open_env(env_id, 0, TRAINING), **(ours | common)),
    }
    write(out, {"env": env_id, "threads": 1, "rows": learn_in_turns(models)})


def learn_in_turns(models: dict, repeats: int = 7, steps: int = 600) -> list[dict]:
    """Milliseconds per step of ``learn``, medians over the turns: a row per model, compared with ``SB3 TD3``."""
    for model in models.values():
        model.learn(300)
    taken = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            start = time.perf_counter()
            model.learn(steps, reset_num_timesteps=False)
            taken[name].append((time.perf_counter() - start) / steps * 1e3)
    return bench.rows(taken)


def memory(name: str, out: Path) -> None:
    """Resident memory of one model after 300 updates, with SB3's default buffer of a million transitions; MB."""
    cache = tempfile.TemporaryDirectory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache.name  # the compiler has to run
    model = build(name, Idle(), 256, buffer_size=1_000_000)
    model.learn(100)
    before = resident()
    model.learn(300, reset_num_timesteps=False)
    peaks = {
        f"peak_of_{of}": round(resource.getrusage(who).ru_maxrss / 1e3, 1)
        for of, who in (("process", resource.RUSAGE_SELF), ("compiler", resource.RUSAGE_CHILDREN))
    }
    write(out, {"name": name, "before_updates": before, "after_updates": resident(), **peaks})


def resident() -> float:
    """MB of memory in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def write(out: Path, figures: dict) -> None:
    out.write_text(json.dumps({"versions": versions(), **figures}, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of this processor's figures")
    parser.add_argument("kinds", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # one measurement, in this process
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.child:
        value, out = args.child
        measure = {"walker": walker, "recipe": recipe, "memory": memory}[args.kinds[0]]
        return measure(json.loads(value), Path(out))

    for kind in args.kinds:
        for case in CASES[kind]:
            out = args.folder / f"{name_of(kind, case).replace(' ', '-')}.json"
            if out.exists() or args.only not in out.name:
                continue
            print(out.stem, flush=True)
            if kind == "updates":
                measure_updates(case, out)
            else:
                value = json.dumps(next(iter(case.values())))
                pinned([sys.executable, __file__, str(args.folder), kind, "--child", value, str(out)])


if __name__ == "__main__":
    main()
