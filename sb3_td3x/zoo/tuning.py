"""The search space of ``-optimize``: rl-zoo3's for TD3, and TD3X's own settings."""

from typing import Any

import optuna
from rl_zoo3.hyperparams_opt import convert_offpolicy_params, sample_td3_params

QUANTILES = (1, 10, 25)  # the cost of their loss grows with the square
MOST_DROPPED = 5  # as rl-zoo3's search for TQC; less than the least of QUANTILES that drops any
HER = ("n_sampled_goal", "goal_selection_strategy")


def sample(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """
    Draw the hyper-parameters of one trial.

    :param trial: what draws them
    :param n_actions: dimensions of an action
    :param n_envs: environments side by side
    :param additional_args: what rl-zoo3 knows of the replay buffer
    :return: keyword arguments of ``TD3X``
    """
    own = {
        "n_quantiles": trial.suggest_categorical("n_quantiles", QUANTILES),
        "top_quantiles_to_drop_per_net": trial.suggest_int("top_quantiles_to_drop_per_net", 0, MOST_DROPPED),
        "policy_delay": trial.suggest_int("policy_delay", 1, 4),
    }
    # Where rl-zoo3 draws no noise it gives no key, and TD3X's default is noise
    return {"action_noise": None, **sample_td3_params(trial, n_actions, n_envs, additional_args), **own}


def convert(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    What a study stored of a trial, in the keys of rl-zoo3's files (``--trial-id``).

    :param sampled_params: Optuna's parameters of the trial
    :return: an entry as in a preset
    """
    # rl-zoo3 would put `n_quantiles` among the policy's arguments, as for TQC
    own = {name: sampled_params[name] for name in ("n_quantiles", "top_quantiles_to_drop_per_net", "policy_delay")}
    goals = {name: sampled_params[name] for name in HER if name in sampled_params}
    entry = convert_offpolicy_params({name: value for name, value in sampled_params.items() if name not in {*own, *goals}})
    if entry["noise_type"] is None:  # which rl-zoo3 would hand to the constructor
        entry.update(noise_type="normal", noise_std=0.0)
    return {**entry, **own, **({"replay_buffer_kwargs": goals} if goals else {})}
