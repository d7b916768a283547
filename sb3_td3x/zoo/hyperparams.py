"""The preset ``default`` as rl-zoo3 reads it: ``--conf-file sb3_td3x.zoo.hyperparams``."""

from sb3_td3x import presets

UNKNOWN_TO_RL_ZOO3 = ("noise_dt",)

hyperparams = {
    environment: {key: value for key, value in entry.items() if key not in UNKNOWN_TO_RL_ZOO3}
    for environment, entry in presets.table("default").items()
}
