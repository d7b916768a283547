"""
Make the figures and tables of README and docs from the raw results, and all tables in ``results/README.md``.

Usage: ``python benchmarks/figures.py [--video logs/td3x/Walker2DBulletEnv-v0_1/video/best_model.mp4]``
"""

import argparse
import json
from pathlib import Path

import ablation_figures
import imageio.v2 as imageio
import numpy as np
import results_figures
import speed_figures
from PIL import Image
from results import Runs, fill, runs, table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STATIC = ROOT / "docs" / "_static"


def checkpoints_table() -> str:
    """Seconds and megabytes of a save."""
    body = []
    for row in json.loads((RESULTS / "checkpoints.json").read_text())["rows"]:
        sb3, first, later = (
            f"{row[name]['seconds']:.3f} s, {row[name]['bytes'] / 1e6:.1f} MB" for name in ("sb3", "first", "later")
        )
        durable, times = row["sb3_on_disk"]["seconds"], row["later"]["seconds"]
        ratios = f"{row['sb3']['seconds'] / times:.1f}, {durable / times:.1f}"
        costs = sb3, f"{durable:.3f} s", first, later, f"{row['later']['slowest']:.3f} s"
        body.append([f"{row['transitions']:,}", *costs, ratios, f"{row['resume_seconds']:.2f} s"])
    saves = "SB3's two saves", "the same, on the disk", "first save", "later saves", "slowest"
    return table(["transitions", *saves, "times SB3, on the disk", "resume"], body)


def study_table() -> str:
    """What the engine of a study costs."""
    facts = json.loads((RESULTS / "study.json").read_text())
    middle = {name: float(np.median(values)) for name, values in facts["seconds"].items()}
    body = []
    for name, seconds in middle.items():
        # On two nodes each has half of the runs
        own = middle["directly"] / (2 if name == "Ray, two nodes" else 1)
        one_after_another = facts["runs"] * own / middle["directly"]
        extra = f"{(seconds - own) / one_after_another:.2f} s, {seconds / own - 1:.1%}"
        body.append([name, f"{seconds:.1f}", f"{3600 * facts['runs'] / seconds:.0f}", extra])
    head = [f"{facts['runs']} runs of {facts['steps']:,} steps", "seconds", "runs per hour", "overhead per run"]
    ratio = middle["Ray, one node"] / middle["Ray, two nodes"]
    return f"{table(head, body)}\n\nTwo nodes make {ratio:.2f} times the runs of one."


def ray_vec_env_table() -> str:
    """Steps per second of environments elsewhere, for the sleeping simulator also as a share of the ideal."""
    rows = json.loads((RESULTS / "ray_vec_env.json").read_text())["rows"]
    names = list(max((row["contenders"] for row in rows), key=len))
    body = []
    for row in rows:
        ideal = row["environments"] * 100 if row["simulator"].startswith("sleeps") else None
        cells = []
        for name in names:
            rate = row["contenders"].get(name, {}).get("steps_per_second")
            share = "" if rate is None or ideal is None else f", {rate / ideal:.0%}"
            cells.append("-" if rate is None else f"{rate:,.0f}{share}")
        body.append([f"{row['simulator']}, {row['environments']}", *cells])
    return table(["simulator, environments", *names], body)


def write_raw_tables(page: Path, found: Runs) -> None:
    """All tables that the documentation is too short for."""
    sections = {
        "Results on PyBullet": results_figures.results_table(found),
        "Runs of 500,000 steps on the reported seeds": results_figures.runs_table(found),
        "The last and the best actor of a run on 100 fresh episodes": results_figures.actors_table(),
        "Runs on tuning seeds": ablation_figures.screening_table(found),
        "Values of the critics and discounted returns of the actor": ablation_figures.values_table(),
    }
    made = "Made by `python benchmarks/figures.py`. Runs shared machines, so their minutes do not compare methods."
    made += " The file beside each CSV has what was set (without `config`, the rest is the preset of the CSV's commit) and"
    made += " versions. `q25` is 25 quantiles, `scalar` TD3's critics, `sale64` embeddings"
    made += " of 64, `lin` a rate that falls to 0, `hold` one that is held first, `starts` random steps, `drop` quantiles"
    made += " dropped per critic, `delay` the policy delay, `nstep` steps of the returns, `lap` prioritized replay."
    parts = [f"## {title}\n\n{text}\n" for title, text in sections.items()]
    page.write_text("\n".join(["# Raw results as tables\n", f"{made}\n", *parts]))


def draw_animation(video: Path, out: Path, first: int = 120, every: int = 3, count: int = 60, width: int = 360) -> None:
    """The middle of a part of a video as a GIF of 20 frames per second with few colors."""
    frames = [Image.fromarray(frame) for frame in imageio.mimread(video, memtest=False)[first : first + every * count : every]]
    wide, high = frames[0].size
    box = (int(0.2 * wide), int(0.3 * high), int(0.8 * wide), int(0.8 * high))
    size = (width, width * (box[3] - box[1]) // (box[2] - box[0]))
    parts = [frame.crop(box).resize(size, Image.Resampling.LANCZOS) for frame in frames]
    # Half of the palette for the floor, half for the walker, whose strong colors are a small part of the picture
    pixels = np.asarray(parts[0]).reshape(-1, 3)
    is_strong = np.ptp(pixels.astype(int), axis=1) > 90
    halves = [np.resize(pixels[chosen], (len(pixels), 3)) for chosen in (is_strong, ~is_strong)]
    palette = Image.fromarray(np.stack(halves)).quantize(64)
    images = [part.quantize(palette=palette, dither=Image.Dither.NONE) for part in parts]
    images[0].save(out, save_all=True, append_images=images[1:], duration=50, loop=0, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", type=Path, help="a video of the walker, to make the animation of")
    video = parser.parse_args().video
    found = runs()
    fill(ROOT / "README.md", "results table", results_figures.readme_table(found))
    results_figures.write(ROOT / "docs" / "results.md", STATIC / "results.png", found)
    ablation_figures.write(ROOT / "docs" / "ablations.md", found)
    speed_figures.write(ROOT / "docs" / "speed.md")
    fill(ROOT / "docs" / "resume.md", "checkpoints table", checkpoints_table())
    fill(ROOT / "docs" / "experiments.md", "study table", study_table())
    fill(ROOT / "docs" / "distributed.md", "steps table", ray_vec_env_table())
    write_raw_tables(RESULTS / "README.md", found)
    if video is not None:
        draw_animation(video, STATIC / "walker.gif")
    print(results_figures.results_table(found))


if __name__ == "__main__":
    main()
