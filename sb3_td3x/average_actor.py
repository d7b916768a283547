"""
The average actor: an exponential mean of the weights that the learning actor goes through.

Single actors on the way fail now and then where their neighbours do not; their mean is steadier. Averaging the weights on an
optimiser's path is Polyak's (Polyak and Juditsky 1992); in reinforcement learning see Nikishin et al. 2018, "Improving
stability in deep reinforcement learning with weight averaging".
"""

from typing import Any

import torch as th
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.td3.policies import Actor

from sb3_td3x import settings
from sb3_td3x.errors import ModelFileError
from sb3_td3x.policies import acting_copy
from sb3_td3x.serialization import modelfile, parameters


class AverageActor:
    """
    The mean so far.

    ``actor`` acts and does not learn, ``updates`` counts the actor's updates that are in it.

    :param live: the actor that learns, as it is now
    """

    def __init__(self, live: Actor):
        self.actor, self.updates = acting_copy(live), 0

    def take_in(self, live: Actor, count: int, window: int) -> None:
        """
        Move towards the actor as it is after a series of updates, which counts for as many as they were.

        The plain mean of the first ``window`` updates, and from then on a mean that forgets them at the rate of 1 in
        ``window``. What is no weight, such as running statistics, is taken as it is.

        :param count: updates of ``live`` since the last time
        :param window: updates to average over
        """
        self.updates += count
        share = min(count / min(self.updates, window), 1.0)
        polyak_update(live.parameters(), self.actor.parameters(), share)
        with th.no_grad():
            for own, theirs in zip(self.actor.buffers(), live.buffers(), strict=True):
                own.copy_(theirs)

    def state(self) -> dict[str, Any]:
        """As tensors and a number, for a file."""
        return {"actor": self.actor.state_dict(), "updates": self.updates}

    def set_state(self, state: Any) -> None:
        """
        :param state: of ``state``, by anybody
        :raises ModelFileError: for anything else
        """
        if not isinstance(state, dict) or state.keys() != {"actor", "updates"}:
            raise ModelFileError(f"{modelfile.AVERAGE_ACTOR} is not what TD3X writes")
        parameters.require_module("actor", state["actor"], self.actor.state_dict())
        self.actor.load_state_dict(state["actor"])
        self.updates = settings.whole("updates", state["updates"], minimum=0)
