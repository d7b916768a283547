"""What setting an attribute of a model does: the value is checked in that line, and takes effect from the next update on."""

from collections.abc import Callable
from functools import partial
from typing import Any

from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x.common import buffers, transitions, validation
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.compiled import PATHS
from sb3_td3x.td3x.precision import PRECISIONS

ALL_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **validation.CHECKS,
    "accelerate": partial(validation.one_of, choices=PATHS),
    "precision": partial(validation.one_of, choices=PRECISIONS),
    "prioritization": partial(validation.one_of, choices=(None, *buffers.PRIORITIZATIONS)),
}

# What SB3 makes of a setting when it builds the model, and never again
PREPARED: dict[str, Callable[[OffPolicyAlgorithm], None]] = {
    "learning_rate": OffPolicyAlgorithm._setup_lr_schedule,
    "train_freq": OffPolicyAlgorithm._convert_train_freq,
}


class Editable(OffPolicyAlgorithm):
    """An off-policy algorithm that refuses settings which it could not follow, before and after it is built."""

    replay_buffer: ReplayBuffer
    n_steps: int
    n_quantiles: int

    def __setattr__(self, name: str, value: Any) -> None:
        value = ALL_CHECKS[name](name, value) if name in ALL_CHECKS else value
        is_built = "policy" in self.__dict__
        if is_built:
            self._require_follows(name, value)
        super().__setattr__(name, value)
        if is_built and name in PREPARED:
            PREPARED[name](self)

    def _require_follows(self, name: str, value: Any) -> None:
        """What the networks and the replay buffer were built with stays as it is."""
        if name == "n_quantiles":
            policies.require_quantiles(self.policy, value)
        elif name == "top_quantiles_to_drop_per_net":
            validation.checked_drop(value, self.n_quantiles)
        elif name == "n_steps" and value != self.n_steps:
            transitions.require_n_steps(self.replay_buffer, value)
        elif name in ("buffer_size", "optimize_memory_usage"):
            transitions.require_as_built(name, value, getattr(self, name))

    def _check_settings(self) -> None:
        """All of them once more, because ``load`` fills ``__dict__``."""
        for name in ALL_CHECKS:
            setattr(self, name, getattr(self, name))
