"""
Turn run folders of ``td3x train`` into result files: one CSV of scores and one YAML of settings and versions each.

Usage: ``python benchmarks/collect.py logs/td3x/Walker2DBulletEnv-v0_1 ...``
"""

import argparse
import csv
from pathlib import Path

import yaml
from results import RETURNS, versions

from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import TABLE_COLUMNS, of_run


def collect(run: RunDir, setting: str | None = None) -> Path:
    arguments = run.arguments()
    scores = of_run(run)
    setting, seed = setting or arguments["preset"], arguments["seed"]
    path = RETURNS / f"td3x_{setting}_{run.env_id}_s{seed}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(TABLE_COLUMNS)
        for step, mean, std, seconds in zip(scores.steps, scores.mean, scores.spread, scores.seconds, strict=True):
            writer.writerow(["td3x", setting, run.env_id, seed, step, f"{mean:.3f}", f"{std:.3f}", f"{seconds:.1f}"])
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
