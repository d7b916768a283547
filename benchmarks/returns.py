"""
Run a grid of algorithms, environments and seeds, one single-threaded process each, and write one
CSV of evaluation scores per run.

A run whose CSV is there is skipped, so the same command finishes an interrupted grid.
Usage: ``python benchmarks/returns.py FILE.yml [--jobs 2] [--only TEXT]``
"""

import argparse
import concurrent.futures
import csv
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from results import COLUMNS, RETURNS, versions

EVALUATOR_KEYS = ("steps", "eval_freq", "eval_episodes")


def expand(grid: dict) -> list[dict]:
    """One dict per run: the entry's own keys over the file's common ones."""
    common = {key: grid[key] for key in EVALUATOR_KEYS}
    return [
        {**common, **entry, "env": env, "seed": seed}
        for entry in grid["runs"]
        for env in entry["envs"]
        for seed in entry["seeds"]
    ]


def run_name(run: dict) -> str:
    return f"{run['algo']}_{run['setting']}_{run['env']}_s{run['seed']}"


def algorithm_class(name: str):
    if name == "sb3_td3":
        from stable_baselines3 import TD3

        return TD3
    if name == "sb3_tqc":
        from sb3_contrib import TQC

        return TQC
    raise ValueError(f"unknown algo {name!r}: choose sb3_td3 or sb3_tqc")


def train(run: dict) -> None:
    """Train one run to its end and write its CSV, a row per evaluation."""
    import torch as th
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    from sb3_td3x import environments

    class WriteScores(BaseCallback):
        """Evaluate the live actor on an environment of its own and append a row to the CSV."""

        def __init__(self, eval_env, path: Path):
            super().__init__()
            self.eval_env, self.path, self.start = eval_env, path, time.perf_counter()

        def _on_step(self) -> bool:
            if self.num_timesteps % run["eval_freq"] == 0:
                scores, _ = evaluate_policy(self.model, self.eval_env, run["eval_episodes"], return_episode_rewards=True)
                row = [run["algo"], run["setting"], run["env"], run["seed"], self.num_timesteps]
                row += [f"{np.mean(scores):.3f}", f"{np.std(scores):.3f}", f"{time.perf_counter() - self.start:.1f}"]
                with self.path.open("a", newline="") as file:
                    csv.writer(file).writerow(row)
            return True

    th.set_num_threads(1)
    environments.require_registered(run["env"])
    train_env = environments.build(run["env"], run["seed"], environments.TRAINING)
    eval_env = environments.build(run["env"], run["seed"], environments.EVALUATION)
    arguments = dict(run["arguments"])
    if "noise_std" in run:
        size = train_env.action_space.shape[0]
        arguments["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, run["noise_std"]))

    RETURNS.mkdir(parents=True, exist_ok=True)
    path = RETURNS / f"{run_name(run)}.csv"
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
    model = algorithm_class(run["algo"])("MlpPolicy", train_env, seed=run["seed"], device="cpu", **arguments)
    model.learn(run["steps"], callback=WriteScores(eval_env, partial))
    facts = {"run": run, "versions": versions(), "cpu_seconds": round(time.process_time(), 1)}
    path.with_suffix(".yml").write_text(yaml.safe_dump(facts, sort_keys=False))
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a grid such as benchmarks/returns.yml")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)  # one run, in this process
    args = parser.parse_args()
    runs = expand(yaml.safe_load(args.file.read_text()))
    if args.index is not None:
        return train(runs[args.index])

    wanted = [(index, run_name(run)) for index, run in enumerate(runs) if args.only in run_name(run)]
    todo = [(index, name) for index, name in wanted if not (RETURNS / f"{name}.csv").exists()]
    print(f"{len(todo)} of {len(runs)} runs to do, {args.jobs} at a time")

    def start(job: tuple[int, str]) -> tuple[str, int]:
        command = [sys.executable, __file__, str(args.file), "--index", str(job[0])]
        return job[1], subprocess.run(command).returncode

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for name, code in pool.map(start, todo):
            print(f"{name}: {'done' if code == 0 else f'failed with exit code {code}'}", flush=True)


if __name__ == "__main__":
    main()
