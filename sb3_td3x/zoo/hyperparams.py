"""The preset ``default`` as rl-zoo3 reads it: ``--conf-file sb3_td3x.zoo.hyperparams``."""

from sb3_td3x import presets

hyperparams = presets.table("default")
