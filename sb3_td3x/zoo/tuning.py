"""The search space of rl-zoo3's ``--optimize-hyperparameters``: that of its TD3, and the settings that only TD3X has."""

from typing import Any

import optuna
from rl_zoo3.hyperparams_opt import convert_offpolicy_params, sample_td3_params

QUANTILES = (1, 10, 25)
MOST_DROPPED = 5  # as in rl-zoo3's search space of TQC; less than 10 quantiles, the fewest that can lose some
TD3X_SETTINGS = ("n_quantiles", "top_quantiles_to_drop_per_net", "policy_delay")
HER_SETTINGS = ("n_sampled_goal", "goal_selection_strategy")


def sample(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``TD3X`` for one trial, with the parameters of rl-zoo3's samplers."""
    settings = {
        "n_quantiles": trial.suggest_categorical("n_quantiles", QUANTILES),
        "top_quantiles_to_drop_per_net": trial.suggest_int("top_quantiles_to_drop_per_net", 0, MOST_DROPPED),
        "policy_delay": trial.suggest_int("policy_delay", 1, 4),
    }
    # rl-zoo3 leaves the key out where it samples no noise; TD3X would then use its default noise
    return {"action_noise": None, **sample_td3_params(trial, n_actions, n_envs, additional_args), **settings}


def convert(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """A stored trial (``--trial-id``) as an entry of a preset."""
    # Without these: rl-zoo3 would move n_quantiles into policy_kwargs, where TQC has it
    separate = (*TD3X_SETTINGS, *HER_SETTINGS)
    entry = convert_offpolicy_params({name: value for name, value in sampled_params.items() if name not in separate})
    if entry["noise_type"] is None:  # rl-zoo3 would pass noise_type to the constructor
        entry.update(noise_type="normal", noise_std=0.0)
    if goals := {name: sampled_params[name] for name in HER_SETTINGS if name in sampled_params}:
        entry["replay_buffer_kwargs"] = goals
    return {**entry, **{name: sampled_params[name] for name in TD3X_SETTINGS}}
