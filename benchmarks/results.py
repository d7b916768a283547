"""Where raw results are kept, in which columns, what is recorded beside them, and how they are read."""

import argparse
import csv
import json
import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from sb3_td3x.checkpoint.run import versions as package_versions
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import TABLE_COLUMNS
from sb3_td3x.td3x.precision import processor

RETURNS = Path(__file__).parent / "results" / "returns"
ACTORS = Path(__file__).parent / "results" / "actors"
VALUES = Path(__file__).parent / "results" / "values"
TUNING_SEEDS = 10
"""Results are reported on seeds below this one."""

Runs = dict[tuple[str, str, str], list[dict[str, np.ndarray]]]


def versions() -> dict[str, str]:
    """The commit, Python, processor and the packages that can change a number."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "python": platform.python_version(), "processor": processor(), **package_versions()}


def fill(page: Path, marker: str, text: str) -> None:
    """Replace what stands between ``<!-- marker -->`` and ``<!-- end -->``."""
    before, opening, rest = page.read_text().partition(f"<!-- {marker} -->\n")
    _, closing, after = rest.partition("<!-- end -->")
    if not closing:
        raise ValueError(f"{page.name} has no place for {marker!r}")
    page.write_text(f"{before}{opening}{text}\n{closing}{after}")


def write_facts(doc: str | None, folder: Path, facts_of: Callable[[RunDir], dict[str, Any]]) -> None:
    """What a script does that writes facts about each of the runs that it is given, in a JSON of ``folder``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs of one thread each")
    th.set_num_threads(1)
    for path in parser.parse_args().runs:
        run, out = RunDir.open(path), folder / f"{path.name}.json"
        facts = {"env": run.env_id, "seed": run.arguments()["seed"], **facts_of(run), "versions": versions()}
        out.write_text(json.dumps(facts, indent=1))
        print(out)


def read(name: str) -> dict[str, np.ndarray]:
    """The columns of one run's CSV; numbers as float arrays."""
    with (RETURNS / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = TABLE_COLUMNS[:3]
    return {name: np.array([row[name] if name in texts else float(row[name]) for row in rows]) for name in TABLE_COLUMNS}


def runs() -> Runs:
    """All runs there are, by algorithm, setting and environment."""
    found: Runs = defaultdict(list)
    for path in sorted(RETURNS.glob("*.csv")):
        run = read(path.stem)
        found[run["algo"][0], run["setting"][0], run["env"][0]].append(run)
    return found


def last(run: dict[str, np.ndarray], steps: int) -> float:
    """Mean score over the run's last ``steps`` environment steps."""
    return float(run["mean_return"][run["timesteps"] > run["timesteps"].max() - steps].mean())


def score(run: dict[str, np.ndarray], step: int) -> float | None:
    """The score of the evaluation at a step, ``None`` if the run is shorter."""
    at = run["mean_return"][run["timesteps"] == step]
    return float(at[0]) if len(at) else None


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *body)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
