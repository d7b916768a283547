"""
TD3X in rl-zoo3 under the name ``td3x``.

``python -m sb3_td3x.zoo train --algo td3x ...`` registers TD3X and hands over to rl-zoo3's script of that name. rl-zoo3's own
commands know it where a ``custom_envs.py`` calls ``register``: rl-zoo3 imports a module of that name if there is one.
"""

from importlib.util import find_spec


def register() -> None:
    """
    Make rl-zoo3 know TD3X in this process: as an algorithm, for its search of hyper-parameters, and by the names of buffers.

    To be called before a script of rl-zoo3 reads its arguments. Calling it again changes nothing.

    :raises ImportError: if rl-zoo3 is not installed
    """
    if find_spec("rl_zoo3") is None:
        raise ImportError("rl-zoo3 is missing: pip install rl_zoo3")
    from rl_zoo3 import ALGOS, exp_manager, hyperparams_opt

    from sb3_td3x import presets
    from sb3_td3x.results.run_dir import ALGORITHM
    from sb3_td3x.td3x.td3x import TD3X
    from sb3_td3x.zoo import tuning

    ALGOS[ALGORITHM] = TD3X
    hyperparams_opt.HYPERPARAMS_SAMPLER[ALGORITHM] = tuning.sample
    hyperparams_opt.HYPERPARAMS_CONVERTER[ALGORITHM] = tuning.convert
    # rl-zoo3 evaluates `replay_buffer_class: "NStepReplayBuffer"` in this module, which imports HerReplayBuffer alone
    for name, buffer in presets.replay_buffers().items():
        setattr(exp_manager, name, buffer)
