"""
What a checkpoint costs: time and bytes of ``save_run`` against SB3's ``save`` with ``save_replay_buffer``.

Usage: ``python benchmarks/checkpoints.py``. Writes ``benchmarks/results/checkpoints.json``; the two take turns.
"""

import json
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import numpy as np
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker
import torch as th
from results import versions
from stable_baselines3 import TD3

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import resume_run, save_run
from sb3_td3x.common.files import flush

SIZES = (10_000, 100_000, 1_000_000)
NEW = 10_000  # transitions between two saves, as `td3x train` makes them
REPEATS = 5
OUT = Path(__file__).parent / "results" / "checkpoints.json"


def filled(cls: type, size: int) -> TD3:
    """A model of the walker whose buffer holds ``size`` transitions of random numbers."""
    model = cls("MlpPolicy", "Walker2DBulletEnv-v0", buffer_size=max(size, 2 * NEW), seed=0, learning_starts=100)
    model.learn(200)
    buffer = model.replay_buffer
    random = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        memory = getattr(buffer, name)
        memory[:size] = random.random(memory[:size].shape, np.float32)
    buffer.pos, buffer.full = size % buffer.buffer_size, size == buffer.buffer_size
    return model


def collect(model: TD3, count: int) -> None:
    """What happens to the buffer between two saves."""
    buffer = model.replay_buffer
    index = (buffer.pos + np.arange(count)) % buffer.buffer_size
    buffer.rewards[index] = np.random.default_rng(model.num_timesteps).random((count, 1), np.float32)
    buffer.actions[index] = np.random.default_rng(model.num_timesteps).random((count, 1, 6), np.float32)
    buffer.full = buffer.full or buffer.pos + count >= buffer.buffer_size
    buffer.pos = (buffer.pos + count) % buffer.buffer_size
    model.num_timesteps += count


def written(folder: Path, before: float) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime >= before)


def timed(action, folder: Path) -> dict[str, float]:
    before, began = time.time() - 0.01, time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - began, "bytes": written(folder, before)}


def measure(size: int) -> dict[str, object]:
    ours, theirs = filled(TD3X, size), filled(TD3, size)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder, other = Path(name) / "td3x", Path(name) / "sb3"
        other.mkdir()

        def sb3() -> None:
            theirs.save(other / "model")
            theirs.save_replay_buffer(other / "buffer")

        def sb3_on_disk() -> None:
            sb3()
            for path in other.iterdir():
                flush(path)

        first = timed(lambda: save_run(ours, folder), folder)
        later, full, on_disk = [], [], []
        for _ in range(REPEATS):
            collect(ours, NEW)
            later.append(timed(lambda: save_run(ours, folder), folder))
            full.append(timed(sb3, other))
            on_disk.append(timed(sb3_on_disk, other))
        began = time.perf_counter()
        resume_run(folder, ours.get_env())
        resumed = time.perf_counter() - began
    series = {"later": later, "sb3": full, "sb3_on_disk": on_disk}
    middle = {kind: {key: median(one[key] for one in runs) for key in runs[0]} for kind, runs in series.items()}
    middle["later"]["slowest"] = max(one["seconds"] for one in later)
    return {"transitions": size, "first": first, **middle, "resume_seconds": resumed}


def main() -> None:
    warnings.simplefilter("ignore")
    th.set_num_threads(1)
    rows = []
    for size in SIZES:
        rows.append(measure(size))
        print(json.dumps(rows[-1]))
    OUT.write_text(
        json.dumps({"new_transitions": NEW, "repeats": REPEATS, "rows": rows, "versions": versions()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
