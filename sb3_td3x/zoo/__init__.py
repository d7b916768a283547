"""
TD3X in rl-zoo3, under the name ``td3x``.

``python -m sb3_td3x.zoo train --algo td3x ...`` registers TD3X and runs rl-zoo3's script of that name. rl-zoo3's own commands
accept ``--algo td3x`` if a module ``custom_envs.py``, which rl-zoo3 imports where there is one, calls ``register``.
"""

from sb3_td3x import presets
from sb3_td3x.results.run_dir import ALGORITHM

UNKNOWN_TO_RL_ZOO3 = ("noise_dt",)

hyperparams = {
    environment: {key: value for key, value in entry.items() if key not in UNKNOWN_TO_RL_ZOO3}
    for environment, entry in presets.table("default").items()
}
"""The preset ``default`` as rl-zoo3 reads it: ``--conf-file sb3_td3x.zoo``."""


def register() -> None:
    """
    Register TD3X with rl-zoo3 in this process: the algorithm, its search space and the names of buffers.

    Call it before a script of rl-zoo3 reads its arguments. Calling it twice changes nothing.

    :raises ImportError: if rl-zoo3 is not installed
    """
    from rl_zoo3 import ALGOS, exp_manager, hyperparams_opt

    from sb3_td3x.td3x.td3x import TD3X
    from sb3_td3x.zoo import tuning

    ALGOS[ALGORITHM] = TD3X
    hyperparams_opt.HYPERPARAMS_SAMPLER[ALGORITHM] = tuning.sample
    hyperparams_opt.HYPERPARAMS_CONVERTER[ALGORITHM] = tuning.convert
    # rl-zoo3 evaluates the text of `replay_buffer_class` in this module, which imports HerReplayBuffer only
    for name in presets.CLASSES["replay_buffer_class"][1]:
        setattr(exp_manager, name, presets.known_class("replay_buffer_class", name))
