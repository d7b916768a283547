"""The tables and the picture of docs/speed.md from ``benchmarks/results/speed/`` and ``bench/``."""

import json
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results" / "speed"
BENCH = Path(__file__).parent / "results" / "bench"
PROCESSORS = ("zen5", "intel")
KEY_CASES = [(threads, batch) for threads in (1, 2) for batch in (100, 256)]
COMPILED, BF16, FLOOR, SBX = "TD3X compiled", "TD3X compiled, bf16", "matrix products alone", "SBX TD3 (JAX)"
ORDER = ("SB3 TD3", "eager, as the authors'", SBX, "TD3X plain", "TD3X plain, bf16", COMPILED, BF16, FLOOR)
COLOURS = ("#999999", "#bbbbbb", "#d9a441", "#8fb3dd", "#a9c7a0", "#1f5fa8", "#3d8b37", "#333333")


def load(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows_of(name: str) -> dict[str, dict]:
    figures = load(name)
    return {} if figures is None else {row["name"]: row for row in figures["rows"]}


def key_case(threads: int, batch: int) -> dict[str, dict]:
    return rows_of(f"updates_batch-{batch}_threads-{threads}")


def table(head: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *body)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def labels() -> list[str]:
    return [f"{threads} thread{'s' * (threads > 1)}, batch {batch}" for threads, batch in KEY_CASES]


def updates() -> str:
    head = ["ms per update (times SB3's rate)"]
    head += labels()
    cases = [key_case(*case) for case in KEY_CASES]
    body = []
    for name in ORDER:
        cells = [f"{case[name]['ms']:.2f} ({case[name]['times_sb3']:.2f})" if name in case else "-" for case in cases]
        body.append([name, *cells])
    return table(head, body)


def targets() -> str:
    head = ["", "target at batch 100", "measured", "target at batch 256", "measured"]
    goals = [
        ("updates over SB3 TD3, 1 thread", 1, COMPILED, "SB3 TD3", (2.0, 2.3)),
        ("updates over SB3 TD3, 2 threads", 2, COMPILED, "SB3 TD3", (2.0, 2.3)),
        ("updates over SBX TD3, 1 core", 1, COMPILED, SBX, (1.1, 1.2)),
        ("updates over SBX TD3, 2 cores", 2, COMPILED, SBX, (1.1, 1.2)),
        ("share of the matrix products' floor, 1 thread", 1, COMPILED, FLOOR, (0.8, 0.85)),
        ("share of the matrix products' floor, 2 threads", 2, COMPILED, FLOOR, (0.8, 0.85)),
        ("with bf16, updates over SB3 TD3, 2 threads", 2, BF16, "SB3 TD3", (2.5, 3.0)),
    ]
    body = []
    for label, threads, ours, theirs, wanted in goals:
        cells = []
        for batch, goal in zip((100, 256), wanted, strict=True):
            case = key_case(threads, batch)
            cells += verdict(goal, ratio(case, ours, theirs))
        body.append([label, *cells])
    cells = []
    for batch, goal in ((100, 1.9), (256, 2.2)):
        rows = rows_of(f"walker_batch-{batch}_threads-1")
        cells += verdict(goal, rows[COMPILED]["times_sb3"] if rows else None)
    body.append(["`learn` on the walker over SB3 TD3, 1 thread", *cells])
    return table(head, body)


def ratio(case: dict[str, dict], ours: str, theirs: str) -> float | None:
    """Of the two times: the median over the turns where it was recorded, else of the medians."""
    if ours not in case or theirs not in case:
        return None
    recorded = {"SB3 TD3": "times_sb3", FLOOR: "share_of_floor"}
    return case[ours][recorded[theirs]] if theirs in recorded else case[theirs]["ms"] / case[ours]["ms"]


def verdict(goal: float, reached: float | None) -> list[str]:
    if reached is None:
        return [f"{goal}", "not measured"]
    return [f"{goal}", f"{reached:.2f}" + ("" if round(reached, 2) >= goal else ", missed")]


def growth() -> str:
    base = "updates_batch-256_threads-1"
    cases = [("400-300, batch 256, 2 critics, 100,000 transitions", base)]
    names = {
        "batch 1024": "updates_batch-1024_threads-1",
        "256-256": f"{base}_net-256x256",
        "1024-1024": f"{base}_net-1024x1024",
        "376 observations, 17 actions": f"{base}_observations-376_actions-17",
        "1 critic": f"{base}_critics-1",
        "4 critics": f"{base}_critics-4",
        "10,000 transitions": f"{base}_buffer-10000",
        "1,000,000 transitions": f"{base}_buffer-1000000",
    }
    cases += list(names.items())
    body = []
    for label, name in cases:
        rows = rows_of(name)
        if rows:
            cells = [f"{rows[who]['ms']:.2f}" for who in ("SB3 TD3", COMPILED, BF16, FLOOR)]
            body.append([label, *cells, f"{rows[COMPILED]['times_sb3']:.2f}", f"{rows[COMPILED]['share_of_floor']:.0%}"])
    return table(["ms per update, 1 thread", "SB3 TD3", COMPILED, BF16, "floor", "times SB3", "share of the floor"], body)


def walker() -> str:
    cases = [rows_of(f"walker_batch-{batch}_threads-1") for batch in (100, 256)]
    names = list(cases[0] or cases[1])
    body = [
        [name, *(f"{case[name]['ms']:.2f} ({case[name]['times_sb3']:.2f})" if case else "-" for case in cases)]
        for name in names
    ]
    return table(["", "batch 100 (times SB3)", "batch 256 (times SB3)"], body)


def recipe() -> str:
    rows = rows_of("recipe_env-Walker2DBulletEnv-v0")
    labels = {
        "SB3 TD3": "SB3 TD3, rl-zoo3's settings (batch 256)",
        "TD3X": "TD3X, preset default (25 quantiles, batch 128), compiled",
    }
    body = [[labels[name], f"{row['ms']:.2f}", f"{row['times_sb3']:.2f}"] for name, row in rows.items()]
    return table(["", "ms per step", "times SB3"], body)


def memory() -> str:
    body = []
    for path in sorted(RESULTS.glob("memory_*.json")):
        figures = json.loads(path.read_text())
        keys = ("before_updates", "after_updates", "peak_of_compiler")
        body.append([figures["name"], *(f"{figures[key]:.0f}" if figures[key] else "-" for key in keys)])
    return table(["MB", "before", "after", "the compiler's own peak"], body)


def processor(prefix: str) -> str:
    """What ``contenders.py`` measured on another processor, whose files begin with ``prefix``."""
    cases = [json.loads(path.read_text()) for path in BENCH.glob(f"{prefix}_batch-???.json")]
    cases.sort(key=lambda one: one["case"]["batch_size"])
    names = [row["name"] for row in cases[0]["rows"]]
    rows = [{row["name"]: row for row in case["rows"]} for case in cases]
    head = ["ms per update (times SB3's rate)", *(f"batch {case['case']['batch_size']}" for case in cases)]
    return table(head, [[name, *(f"{one[name]['ms']:.2f} ({one[name]['times_sb3']:.2f})" for one in rows)] for name in names])


def draw(out: Path) -> None:
    figure = Figure(figsize=(9, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    cases = [key_case(*case) for case in KEY_CASES]
    width = 0.8 / len(ORDER)
    for index, (name, colour) in enumerate(zip(ORDER, COLOURS, strict=True)):
        places = [place + (index - len(ORDER) / 2) * width for place, case in enumerate(cases) if name in case]
        heights = [case[name]["ms"] for case in cases if name in case]
        axes.bar(places, heights, width, label=name, color=colour, align="edge")
    axes.set_xticks(
        range(len(KEY_CASES)), [f"{threads} thread{'s' * (threads > 1)}, batch {batch}" for threads, batch in KEY_CASES]
    )
    axes.set_ylabel("milliseconds per update")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, ncols=2, fontsize=9)
    figure.savefig(out)


def write(page: Path, picture: Path, fill: Callable[[Path, str, str], None]) -> None:
    for section in (updates, recipe, walker, memory):
        fill(page, f"speed {section.__name__}", section())
    draw(picture)
