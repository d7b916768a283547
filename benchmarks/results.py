"""Where raw results are kept, in which columns, and what is recorded beside them."""

import csv
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from sb3_td3x.precision import processor
from sb3_td3x.scores import TABLE_COLUMNS

RETURNS = Path(__file__).parent / "results" / "returns"
ACTORS = Path(__file__).parent / "results" / "actors"
AVERAGES = Path(__file__).parent / "results" / "averages"
VALUES = Path(__file__).parent / "results" / "values"
PACKAGES = ("torch", "stable-baselines3", "sb3-contrib", "gymnasium", "numpy", "pybullet", "pybullet-envs-gymnasium")


def versions() -> dict[str, str]:
    """Python, processor and the packages that can change a number."""
    facts = {"python": platform.python_version(), "processor": processor()}
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def read(name: str) -> dict[str, np.ndarray]:
    """The columns of one run's CSV; numbers as float arrays."""
    with (RETURNS / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = TABLE_COLUMNS[:3]
    return {name: np.array([row[name] if name in texts else float(row[name]) for row in rows]) for name in TABLE_COLUMNS}
