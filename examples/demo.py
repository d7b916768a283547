"""What `make demo` runs: a trained walker walks, a pendulum is trained before your eyes, and the report of the run opens."""

import argparse
import subprocess
import sys
import webbrowser
from pathlib import Path

import imageio.v3 as iio
import numpy as np

OUT = Path("logs", "demo")
# Small networks and TD3's own critics, so that the pendulum is solved within a minute
PENDULUM = """--env Pendulum-v1 --eval-freq 1000 --eval-episodes 5 --set policy_kwargs.net_arch=[64,64]
    --set learning_rate=2e-3 --set learning_starts=500 --set batch_size=128 --set gamma=0.95 --set tau=0.02 --set n_quantiles=1
    --set action_noise=0.3"""


def td3x(*arguments: str) -> None:
    """Run the command and show it."""
    print(f"\n$ td3x {' '.join(arguments)}", flush=True)
    if subprocess.Popen([sys.executable, "-m", "sb3_td3x", *arguments]).wait():  # `run` would kill it at a Ctrl-C
        sys.exit(1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", default="4000", help="of the pendulum's training")
steps = parser.parse_args().steps

video, picture = OUT / "walker.mp4", OUT / "walker.png"
td3x("enjoy", str(Path(__file__).parent.parent / "agents" / "Walker2DBulletEnv-v0"), "--video", str(video))
frames = iio.imread(video)[100:190:15]  # (6, height, width, 3): six moments, a quarter of a second apart
iio.imwrite(picture, np.concatenate(frames[:, 60:220, 80:-80], axis=1))

td3x("train", "--steps", steps, "--out", str(OUT), *PENDULUM.split())
run = max((OUT / "td3x").glob("Pendulum-v1_*"), key=lambda path: path.stat().st_mtime)
td3x("report", str(run))

webbrowser.open((run / "report.html").resolve().as_uri())
print(f"\nThe walker: {video} and {picture}\nThe pendulum (above -180 is solved, -1200 is random): {run / 'report.html'}")
