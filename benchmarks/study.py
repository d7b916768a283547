"""
What a study costs: the same runs directly one after another, in processes, and on Ray clusters of one and two one-core nodes.

Usage: ``python benchmarks/study.py`` on a quiet machine with two cores or more. Writes ``benchmarks/results/study.json``.
Starting a cluster is not counted; starting workers in it is.
"""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch as th
from ray.cluster_utils import Cluster
from results import versions

from sb3_td3x.runs import runners
from sb3_td3x.runs.runners import Runner
from sb3_td3x.runs.study import StudyFolder, StudyRun, Train, attempt, train_td3x

OUT = Path(__file__).parent / "results" / "study.json"
RUNS, STEPS = 4, 1_500


def study(runs: int, steps: int) -> list[StudyRun]:
    options = {"steps": steps, "eval_freq": steps // 4, "save_freq": steps // 4, "overrides": {"accelerate": "plain"}}
    return [StudyRun("td3x", "default", "Pendulum-v1", seed, options) for seed in range(runs)]


def directly(train: Train, folder: StudyFolder, runs: list[StudyRun]):
    """The runner that nothing can beat: no engine."""
    for run in runs:
        attempt(train, folder, run)
        yield run, ""


def seconds(runs: list[StudyRun], runner: Runner) -> float:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        began = time.perf_counter()
        place = StudyFolder.at(Path(folder))
        ended = list(runners.drive(runs, place, train_td3x, runner))
        assert all(map(place.is_finished, runs)), ended  # noqa: S101
        return time.perf_counter() - began


def on_nodes(runs: list[StudyRun], count: int) -> float:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        return seconds(runs, runners.on_ray(cluster.address))
    finally:
        cluster.shutdown()


def main() -> None:
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # as the processes it is compared with
    th.set_num_threads(1)
    runs = study(RUNS, STEPS)
    seconds(study(1, 400), directly)  # imports
    ways = {
        "directly": partial(seconds, runner=directly),
        "processes, one at a time": partial(seconds, runner=runners.local(1)),
        "Ray, one node": partial(on_nodes, count=1),
        "Ray, two nodes": partial(on_nodes, count=2),
    }
    taken = {}
    for name, way in ways.items():
        taken[name] = [way(runs)]
        print(f"{name}: {RUNS} runs in {taken[name][0]:.1f} s", flush=True)
    facts = {"runs": RUNS, "steps": STEPS, "seconds": taken, "versions": versions()}
    OUT.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
