"""
Runs of 20,000 steps on PyBullet's walker from start to end, in CPU seconds: SB3's TD3 and TD3X at equal settings.

TD3X chooses its path by itself (``accelerate="auto"``), first with an empty compiler cache, then with a warm one.
Usage: ``python benchmarks/short_runs.py``
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from results import versions

OUT = Path(__file__).parent / "results" / "short_runs.json"
STEPS, BATCH = 20_000, 128
RUN = """
import sys
import torch
from stable_baselines3.common.noise import NormalActionNoise
from sb3_td3x.runs.environments import TRAINING, open_env
torch.set_num_threads(1)
env = open_env("Walker2DBulletEnv-v0", 0, TRAINING)
settings = dict(batch_size={batch}, learning_rate=7e-4, gamma=0.98, learning_starts=1_000, seed=0, device="cpu")
if sys.argv[1] == "SB3 TD3":
    from stable_baselines3 import TD3
    import numpy as np
    noise = NormalActionNoise(np.zeros(6), np.full(6, 0.1))
    TD3("MlpPolicy", env, action_noise=noise, **settings).learn({steps})
else:
    from sb3_td3x import TD3X
    TD3X("MlpPolicy", env, n_quantiles=1, **settings).learn({steps})
"""


def cpu_seconds(name: str, cache: str) -> float:
    """Of one run in a process of its own, with the compiler that it calls."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", RUN.format(batch=BATCH, steps=STEPS), name], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        seconds = {}
        for run in ("SB3 TD3", "TD3X, empty cache", "TD3X, warm cache", "SB3 TD3 again"):
            seconds[run] = cpu_seconds(run.removesuffix(" again"), cache)
            print(f"{run}: {seconds[run]:.0f} s", flush=True)
    facts = {"what": f"CPU seconds of {STEPS:,} steps, batch {BATCH}, TD3's critics, one thread", "versions": versions()}
    OUT.write_text(json.dumps({**facts, "seconds": seconds}, indent=1) + "\n")
