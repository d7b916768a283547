"""
Run a grid of algorithms, environments and seeds, one single-threaded process each, and write one
CSV of evaluation scores per run.

A run whose CSV is there is skipped and one that was interrupted goes on from its last checkpoint (in ``runs/``), so the same
command finishes an interrupted grid.
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

RUNS = Path(__file__).parent.parent / "runs"  # not under version control
SAVE_FREQ = 10_000
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
    """SB3's algorithm, unchanged but for going on where a checkpoint was made."""
    from sb3_td3x.resumable import Resumable

    if name == "sb3_td3":
        from stable_baselines3 import TD3 as SB3
    elif name == "sb3_tqc":
        from sb3_contrib import TQC as SB3
    else:
        raise ValueError(f"unknown algo {name!r}: choose sb3_td3 or sb3_tqc")
    return type(f"Resumable{SB3.__name__}", (Resumable, SB3), {})


def scores_callback(run: dict, eval_env, folder: Path):
    """SB3's evaluation of the live actor, with the seconds of training up to each."""
    from stable_baselines3.common.callbacks import EvalCallback

    class Scores(EvalCallback):
        resumable = ("seconds",)

        def __init__(self):
            super().__init__(
                eval_env, n_eval_episodes=run["eval_episodes"], eval_freq=run["eval_freq"], log_path=str(folder), verbose=0
            )
            self.seconds: list[float] = []

        def _on_training_start(self) -> None:
            super()._on_training_start()
            self.start = time.perf_counter() - (self.seconds[-1] if self.seconds else 0)

        def _on_step(self) -> bool:
            goes_on = super()._on_step()
            if len(self.evaluations_timesteps) > len(self.seconds):
                self.seconds.append(time.perf_counter() - self.start)
            return goes_on

        def write(self, path: Path) -> None:
            with path.open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(COLUMNS)
                for steps, scores, seconds in zip(
                    self.evaluations_timesteps, self.evaluations_results, self.seconds, strict=True
                ):
                    row = [run["algo"], run["setting"], run["env"], run["seed"], steps]
                    table.writerow([*row, f"{np.mean(scores):.3f}", f"{np.std(scores):.3f}", f"{seconds:.1f}"])

    return Scores()


def train(run: dict) -> None:
    """Train one run to its end, going on from its last checkpoint, and write its CSV, a row per evaluation."""
    import torch as th
    from stable_baselines3.common.noise import NormalActionNoise

    from sb3_td3x import environments
    from sb3_td3x.checkpoint import RunLock, Store, TD3XCheckpointCallback, resume_run

    th.set_num_threads(1)
    environments.require_registered(run["env"])
    folder = RUNS / run_name(run)
    folder.mkdir(parents=True, exist_ok=True)
    algorithm = algorithm_class(run["algo"])
    with RunLock(folder):
        train_env = environments.build(run["env"], run["seed"], environments.TRAINING)
        eval_env = environments.build(run["env"], run["seed"], environments.EVALUATION)
        if is_begun := bool(Store(folder / "checkpoint").checkpoints()):
            model = resume_run(folder / "checkpoint", train_env, trust=True, algorithm=algorithm, device="cpu")
        else:
            arguments = dict(run["arguments"])
            if "noise_std" in run:
                size = train_env.action_space.shape[0]
                arguments["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, run["noise_std"]))
            model = algorithm("MlpPolicy", train_env, seed=run["seed"], device="cpu", **arguments)
        scores = scores_callback(run, eval_env, folder)
        model.learn(run["steps"], [scores, TD3XCheckpointCallback(SAVE_FREQ, folder / "checkpoint")], resume=is_begun)
        RETURNS.mkdir(parents=True, exist_ok=True)
        path = RETURNS / f"{run_name(run)}.csv"
        facts = {"run": run, "versions": versions(), "resumed": model.resumptions}
        path.with_suffix(".yml").write_text(yaml.safe_dump(facts, sort_keys=False))
        scores.write(path)


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
