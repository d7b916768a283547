"""
Make the pictures and tables of README and docs from the raw results.

Usage: ``python benchmarks/figures.py [--film logs/td3x/Walker2DBulletEnv-v0_1/video/best_model.mp4]``
"""

import argparse
import json
from pathlib import Path

import ablation_figures
import imageio.v2 as imageio
import numpy as np
import speed_figures
import strength_figures
from matplotlib.figure import Figure
from results import RETURNS, read, runs

ROOT = Path(__file__).parent.parent
CHECKPOINTS = ROOT / "benchmarks" / "results" / "checkpoints.json"
RAY_VEC_ENV = ROOT / "benchmarks" / "results" / "ray_vec_env.json"
STUDY = ROOT / "benchmarks" / "results" / "study.json"
STATIC = ROOT / "docs" / "_static"
WALKER = {
    "TD3X, preset default": ("td3x_default_Walker2DBulletEnv-v0_s0", "#1f5fa8"),
    "the same with embeddings": ("td3x_embeddings_Walker2DBulletEnv-v0_s0", "#a06cc0"),
    "the same, TD3's critics, tau 0.005, constant rate": ("td3x_scalar-compiled_Walker2DBulletEnv-v0_s0", "#8fb3dd"),
    "TD3X, preset t3d": ("td3x_t3d_Walker2DBulletEnv-v0_s0", "#c8501e"),
    "SB3 TD3, rl-zoo's settings": ("sb3_td3_zoo_Walker2DBulletEnv-v0_s0", "#777777"),
}


def walker_runs() -> dict[str, tuple[dict[str, np.ndarray], str]]:
    """The walker's runs that are there: label to columns and colour."""
    return {label: (read(name), colour) for label, (name, colour) in WALKER.items() if (RETURNS / f"{name}.csv").exists()}


def draw_walker(out: Path) -> None:
    figure = Figure(figsize=(7.5, 4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for label, (run, colour) in walker_runs().items():
        steps, mean, spread = run["timesteps"], run["mean_return"], run["std_return"]
        axes.plot(steps, mean, color=colour, linewidth=1.5, label=label)
        axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
    axes.set_title("Walker2DBulletEnv-v0, seed 0", fontsize=11, loc="left")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return per episode")
    axes.set_xlim(0, 500_000)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(out)


def checkpoints_table() -> str:
    """Seconds and megabytes of a save, as Markdown."""
    heads = (
        "SB3's two saves",
        "the same, on the disk",
        "first save",
        "later saves",
        "slowest",
        "times SB3, on the disk",
        "resume",
    )
    lines = [f"| transitions | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row in json.loads(CHECKPOINTS.read_text())["rows"]:
        costs = {
            name: f"{row[name]['seconds']:.3f} s, {row[name]['bytes'] / 1e6:.1f} MB" for name in ("sb3", "first", "later")
        }
        durable, later = row["sb3_on_disk"]["seconds"], row["later"]["seconds"]
        cells = (
            f"{row['transitions']:,}",
            costs["sb3"],
            f"{durable:.3f} s",
            costs["first"],
            costs["later"],
            f"{row['later']['slowest']:.3f} s",
            f"{row['sb3']['seconds'] / later:.1f}, {durable / later:.1f}",
            f"{row['resume_seconds']:.2f} s",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def study_table() -> str:
    """What the engine of a study costs, as Markdown."""
    facts = json.loads(STUDY.read_text())
    middle = {name: float(np.median(values)) for name, values in facts["seconds"].items()}
    lines = [f"| {facts['runs']} runs of {facts['steps']:,} steps | seconds | runs per hour | more than directly, per run |"]
    lines.append("|---" * 4 + "|")
    for name, seconds in middle.items():
        # On two nodes each has half of the runs
        own = middle["directly"] / (2 if name == "Ray, two nodes" else 1)
        one_after_another = facts["runs"] * own / middle["directly"]
        extra = f"{(seconds - own) / one_after_another:.2f} s, {seconds / own - 1:.1%}"
        lines.append(f"| {name} | {seconds:.1f} | {3600 * facts['runs'] / seconds:.0f} | {extra} |")
    lines.append(f"\nTwo nodes make {middle['Ray, one node'] / middle['Ray, two nodes']:.2f} times the runs of one.")
    return "\n".join(lines)


def ray_vec_env_table() -> str:
    """Steps per second of environments elsewhere, as Markdown: for the sleeping simulator as a share of the ideal."""
    rows = json.loads(RAY_VEC_ENV.read_text())["rows"]
    names = list(max((row["contenders"] for row in rows), key=len))
    lines = [f"| simulator, environments | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        ideal = row["environments"] * 100 if row["simulator"].startswith("sleeps") else None
        cells = []
        for name in names:
            rate = row["contenders"].get(name, {}).get("steps_per_second")
            share = "" if rate is None or ideal is None else f", {rate / ideal:.0%}"
            cells.append("-" if rate is None else f"{rate:,.0f}{share}")
        lines.append(f"| {row['simulator']}, {row['environments']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: Path, marker: str, text: str) -> None:
    """Replace what stands between ``<!-- marker -->`` and ``<!-- end -->``."""
    before, opening, rest = page.read_text().partition(f"<!-- {marker} -->\n")
    _, closing, after = rest.partition("<!-- end -->")
    if not closing:
        raise ValueError(f"{page.name} has no place for {marker!r}")
    page.write_text(f"{before}{opening}{text}\n{closing}{after}")


def draw_film_strip(film: Path, out: Path, first: int = 120, every: int = 9, count: int = 6) -> None:
    """Frames side by side, cut to the middle of the picture; at 60 a second, every ninth is 0.15 s apart."""
    frames = imageio.mimread(film, memtest=False)[first : first + every * count : every]
    imageio.imwrite(out, np.concatenate([frame[:, 60:-60] for frame in frames], axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--film", type=Path, help="a film to take the strip of frames from")
    film = parser.parse_args().film
    STATIC.mkdir(parents=True, exist_ok=True)
    draw_walker(STATIC / "walker_curve.png")
    results = strength_figures.results_table(runs())
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        fill(page, "results table", results)
    fill(ROOT / "README.md", "rivals table", strength_figures.rivals_table(runs()))
    strength_figures.write(ROOT / "docs" / "strength.md", STATIC / "strength.png", fill)
    ablation_figures.write(ROOT / "docs" / "ablation.md", fill)
    speed_figures.write(ROOT / "docs" / "speed.md", STATIC / "speed.png", fill)
    fill(ROOT / "docs" / "resume.md", "checkpoints table", checkpoints_table())
    fill(ROOT / "docs" / "scale.md", "study table", study_table())
    fill(ROOT / "docs" / "environments_elsewhere.md", "steps table", ray_vec_env_table())
    if film is not None:
        draw_film_strip(film, STATIC / "walker_film.png")
    print(results)


if __name__ == "__main__":
    main()
