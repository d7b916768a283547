"""``python -m sb3_td3x.zoo <script> ...``: a script of rl-zoo3 that knows ``--algo td3x``."""

import argparse
import runpy
import sys
import warnings

from sb3_td3x.results.run_dir import ALGORITHM
from sb3_td3x.zoo import register

SCRIPTS = {
    **{name: f"rl_zoo3.{name}" for name in ("train", "enjoy", "record_video")},
    **{name: f"rl_zoo3.plots.{name}" for name in ("all_plots", "plot_train", "plot_from_file")},
}


def main() -> None:
    """Register TD3X and run the script, which parses all arguments but the first."""
    parser = argparse.ArgumentParser("python -m sb3_td3x.zoo", description="rl-zoo3's scripts, with --algo td3x.")
    parser.add_argument("script", choices=SCRIPTS, help="what to run; SCRIPT --help lists its options")
    parser.add_argument("arguments", nargs="...", help="the script's options")
    script = parser.parse_args(sys.argv[1:2]).script
    try:
        register()
    except ImportError as error:
        parser.error(f"{error}: pip install 'rl_zoo3[plots]' requests moviepy")
    sys.argv[1:] = with_our_preset(sys.argv[2:]) if script == "train" else sys.argv[2:]
    # Importing rl_zoo3.plots imports the script; `python -m rl_zoo3.plots.all_plots` gives the same warning
    warnings.filterwarnings("ignore", "'rl_zoo3.* found in sys.modules", RuntimeWarning)
    runpy.run_module(SCRIPTS[script], run_name="__main__", alter_sys=True)


def with_our_preset(arguments: list[str]) -> list[str]:
    """Add the preset ``default`` as the hyperparameter file if the arguments of ``train`` name TD3X; a file in them wins."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--algo")
    options, _ = parser.parse_known_args(arguments)
    return ["--conf-file", "sb3_td3x.zoo", *arguments] if options.algo == ALGORITHM else arguments


if __name__ == "__main__":
    main()
