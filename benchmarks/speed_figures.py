"""The tables of docs/speed.md, from ``benchmarks/results/speed/``, which has a folder per processor."""

import json
from pathlib import Path

from results import fill, table

RESULTS = Path(__file__).parent / "results" / "speed"
PROCESSORS = {"zen3": "Zen 3", "zen4": "Zen 4", "zen5": "Zen 5", "intel": "Xeon with AMX"}
BATCHES = (100, 128, 256)
COMPILED, BF16, FLOOR, TQC = "TD3X compiled", "TD3X compiled, bf16", "matrix products alone", "sb3-contrib TQC"
UPDATES = {
    "TD3's critics, compiled": COMPILED,
    "TD3's critics, plain": "TD3X plain",
    'TD3\'s critics, compiled, `precision="bf16"`': BF16,
    "25 quantiles, compiled": f"{COMPILED}, 25 quantiles",
    "25 quantiles, plain": "TD3X plain, 25 quantiles",
    "sb3-contrib's TQC, 25 quantiles": TQC,
}
# One factor at a time around batch 256, 400-300, 22 observations, 6 actions, 100,000 transitions
SIZES = {
    "batch 256": "",
    "batch 1024": "batch-1024",
    "256-256": "net-256x256",
    "1024-1024": "net-1024x1024",
    "376 observations, 17 actions": "observations-376_actions-17",
    "1,000,000 transitions": "buffer-1000000",
}


def measured(processor: str, name: str) -> dict[str, dict]:
    """The rows of one measurement by contender."""
    return {row["name"]: row for row in json.loads((RESULTS / processor / f"{name}.json").read_text())["rows"]}


def update_rows(processor: str, batch: int) -> dict[str, dict]:
    return measured(processor, f"updates_batch-{batch}_quantiles-25_threads-1")


def updates() -> str:
    """Times SB3's rate, by batch size."""
    body = []
    for label, name in UPDATES.items():
        cells = []
        for processor in PROCESSORS:
            ratios = [update_rows(processor, batch).get(name, {}).get("times_sb3") for batch in BATCHES]
            cells.append("-" if None in ratios else " / ".join(f"{ratio:.2f}" for ratio in ratios))
        body.append([label, *cells])
    return table(["times SB3's rate, batch 100 / 128 / 256", *PROCESSORS.values()], body)


def milliseconds() -> str:
    """Of all contenders on the Zen 4."""
    cases = [update_rows("zen4", batch) for batch in BATCHES]
    body = [[name, *(f"{case[name]['ms']:.2f}" for case in cases)] for name in cases[-1]]
    return table(["ms per update", *(f"batch {batch}" for batch in BATCHES)], body)


def walker() -> str:
    """``learn`` at equal settings."""
    body = []
    for label, name in (("TD3's critics, compiled", COMPILED), ("TD3's critics, plain", "TD3X plain")):
        cases = [[measured(which, f"walker_batch-{batch}_threads-1") for batch in (100, 256)] for which in PROCESSORS]
        body.append([label, *(" / ".join(f"{case[name]['times_sb3']:.2f}" for case in pair) for pair in cases)])
    return table(["times SB3's rate, batch 100 / 256", *PROCESSORS.values()], body)


def recipe() -> str:
    """The preset and SB3's TD3 with rl-zoo3's settings."""
    cases = [measured(processor, "recipe_env-Walker2DBulletEnv-v0") for processor in PROCESSORS]
    body = [
        [label, *(f"{case[name]['ms']:.2f} ({case[name]['times_sb3']:.2f})" for case in cases)]
        for label, name in (("SB3 TD3, rl-zoo3's settings", "SB3 TD3"), ("TD3X, preset `default`, compiled", "TD3X"))
    ]
    return table(["ms per step (times SB3's rate)", *PROCESSORS.values()], body)


def growth() -> str:
    """By size, on the Zen 4."""
    body = []
    for label, suffix in SIZES.items():
        name = f"updates_{suffix}_threads-1" if "batch" in suffix else f"updates_batch-256_threads-1_{suffix}".rstrip("_")
        case = measured("zen4", name)
        cells = [f"{case[contender]['ms']:.2f}" for contender in ("SB3 TD3", COMPILED, BF16, FLOOR)]
        body.append([label, *cells, f"{case[COMPILED]['times_sb3']:.2f}"])
    return table(["ms per update, 1 thread", "SB3 TD3", COMPILED, BF16, FLOOR, "compiled, times SB3's rate"], body)


def memory() -> str:
    body = []
    for path in sorted(RESULTS.glob("zen4/memory_*.json")):
        figures = json.loads(path.read_text())
        keys = ("before_updates", "after_updates", "peak_of_compiler")
        body.append([figures["name"], *(f"{figures[key]:.0f}" if figures[key] else "-" for key in keys)])
    return table(["MB", "before", "after", "the compiler's own peak"], body)


def write(page: Path) -> None:
    for section in (updates, milliseconds, walker, recipe, growth, memory):
        fill(page, f"speed {section.__name__}", section())
