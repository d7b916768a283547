"""TD3X in rl-zoo3, see docs/zoo.md. ``python -m sb3_td3x.zoo <script> ...``: a script of it that knows ``--algo td3x``."""

import argparse
import re
import runpy
import sys
import warnings
from typing import Any

from stable_baselines3.common.utils import LinearSchedule

from sb3_td3x import presets
from sb3_td3x.results.run_dir import ALGORITHM


def readable(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of a preset as rl-zoo3 takes it, whose rates fall from the start, and which has no ``noise_dt``."""
    known = {key: value for key, value in entry.items() if key != "noise_dt"}
    if isinstance(rate := entry.get("learning_rate"), str):
        known["learning_rate"] = re.sub("^hold.*_", "lin_", rate)
    return known


hyperparams = {env: readable(entry) for env, entry in presets.table("default").items()}
"""The preset ``default`` for ``--conf-file sb3_td3x.zoo``."""

SCRIPTS = {
    **{name: f"rl_zoo3.{name}" for name in ("train", "enjoy", "record_video")},
    **{name: f"rl_zoo3.plots.{name}" for name in ("all_plots", "plot_train", "plot_from_file")},
}
SEARCHED = ("n_quantiles", "top_quantiles_to_drop_per_net", "policy_delay")  # besides the settings of rl-zoo3's TD3


def register() -> None:
    """Register TD3X with rl-zoo3 before a script of it reads its arguments; ``ImportError`` if it is not installed."""
    from rl_zoo3 import ALGOS, exp_manager, hyperparams_opt

    from sb3_td3x.td3x.td3x import TD3X

    ALGOS[ALGORITHM] = TD3X
    hyperparams_opt.HYPERPARAMS_SAMPLER[ALGORITHM] = sample
    hyperparams_opt.HYPERPARAMS_CONVERTER[ALGORITHM] = convert
    # rl-zoo3 evaluates the text of `replay_buffer_class` in `exp_manager`, which imports HerReplayBuffer only
    for name in presets.CLASSES["replay_buffer_class"][1]:
        setattr(exp_manager, name, presets.known_class("replay_buffer_class", name))
    # SB3's has the same values up to rounding, and models with it load without trust
    vars(exp_manager)["SimpleLinearSchedule"] = lambda rate: LinearSchedule(rate, 0.0, 1.0)


def sample(trial: Any, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``TD3X`` for one trial of Optuna's, with the parameters of rl-zoo3's samplers."""
    from rl_zoo3.hyperparams_opt import sample_td3_params

    return {
        "n_quantiles": trial.suggest_categorical("n_quantiles", (1, 10, 25)),
        # As in rl-zoo3's search space of TQC: at most 5 of the 10 or 25
        "top_quantiles_to_drop_per_net": trial.suggest_int("top_quantiles_to_drop_per_net", 0, 5),
        "policy_delay": trial.suggest_int("policy_delay", 1, 4),
        "action_noise": None,  # rl-zoo3 leaves the key out where it samples no noise; TD3X would then use its default noise
        **sample_td3_params(trial, n_actions, n_envs, additional_args),
    }


def convert(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """A stored trial (``--trial-id``) as an entry of a preset."""
    from rl_zoo3.hyperparams_opt import convert_offpolicy_params

    # Without these: rl-zoo3 would move n_quantiles into policy_kwargs, where TQC has it
    entry = convert_offpolicy_params({name: value for name, value in sampled_params.items() if name not in SEARCHED})
    if entry["noise_type"] is None:  # rl-zoo3 would pass noise_type to the constructor
        entry.update(noise_type="normal", noise_std=0.0)
    return {**entry, **{name: sampled_params[name] for name in SEARCHED}}


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
