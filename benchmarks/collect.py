"""
Turn run folders of ``td3x train`` into result files: one CSV of scores and one YAML of settings and versions each.

Usage: ``python benchmarks/collect.py logs/td3x/Walker2DBulletEnv-v0_1 ...``
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import yaml
from results import RETURNS, versions

from sb3_td3x.rundir import RunDir
from sb3_td3x.study.folder import COLUMNS


def seconds_at(run: RunDir, steps: np.ndarray) -> np.ndarray:
    """Wall-clock seconds since the start at these steps, from SB3's log of every fourth episode."""
    with (run.path / "progress.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["time/time_elapsed"]]
    logged = [(float(row["time/total_timesteps"]), float(row["time/time_elapsed"])) for row in rows]
    return np.interp(steps, *np.array([(0.0, 0.0), *logged]).T)


def collect(run: RunDir, setting: str | None = None) -> Path:
    arguments = run.arguments()
    steps, returns = run.scores()
    setting, seed = setting or arguments["preset"], arguments["seed"]
    path = RETURNS / f"td3x_{setting}_{run.env_id}_s{seed}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for step, scores, seconds in zip(steps, returns, seconds_at(run, steps), strict=True):
            row = ["td3x", setting, run.env_id, seed, step]
            writer.writerow([*row, f"{scores.mean():.3f}", f"{scores.std():.3f}", f"{seconds:.1f}"])
    arguments.pop("device")
    facts = {"arguments": arguments, "config": run.config(), "versions": versions()}
    path.with_suffix(".yml").write_text(yaml.safe_dump(facts, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--setting", help="name of what was tried; the preset's name if left out")
    args = parser.parse_args()
    for folder in args.runs:
        print(collect(RunDir.open(folder), args.setting))


if __name__ == "__main__":
    main()
