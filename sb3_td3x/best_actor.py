"""
The best actor by evidence from training: a copy of the one that did best in its training episodes.

The actor moves all the time, so an episode's return belongs to no single actor. What is judged is a window of episodes: its
evidence is their mean return, and its actor the one in the middle, from which those that acted are least apart.
"""

import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.td3.policies import Actor

from sb3_td3x import settings
from sb3_td3x.errors import ModelFileError
from sb3_td3x.policies import acting_copy
from sb3_td3x.serialization import modelfile, parameters


class BestActor:
    """
    The best actor so far and the window under way.

    ``actor`` is the copy (``None`` before the first window has ended), ``score`` its window's mean return, ``steps`` when
    that window ended.

    :param n_envs: environments side by side
    """

    def __init__(self, n_envs: int):
        self.actor: Actor | None = None
        self.score, self.steps = -math.inf, 0
        self.candidate: Actor | None = None  # the actor in the middle of the window
        self.total, self.episodes = 0.0, 0  # of the window's ended episodes
        self.returns = np.zeros(n_envs)  # of the episodes under way
        self.counts = np.zeros(n_envs, dtype=bool)  # whether those began with the actor acting

    def step(
        self, live: Actor, window: int, rewards: np.ndarray, starts: np.ndarray, dones: np.ndarray, acts: bool, steps: int
    ) -> None:
        """
        Take in one step of all environments.

        :param live: the actor that learns
        :param window: episodes to judge together
        :param rewards: ``(n_envs,)``, as the environments gave them
        :param starts: whether this was the first step of its episode
        :param dones: whether it was the last
        :param acts: whether ``live`` chose the actions; episodes that begin without it are no evidence
        :param steps: environment steps so far
        """
        self.returns = np.where(starts, 0.0, self.returns) + rewards
        self.counts = np.where(starts, acts, self.counts)
        for value in self.returns[dones.astype(bool) & self.counts]:
            self._end_episode(float(value), live, window, steps)

    def _end_episode(self, value: float, live: Actor, window: int, steps: int) -> None:
        self.total, self.episodes = self.total + value, self.episodes + 1
        if self.candidate is None and self.episodes >= (window + 1) // 2:
            self.candidate = acting_copy(live)
        if self.episodes < window:
            return
        if (score := self.total / self.episodes) >= self.score:  # of equals the one that has learned longer
            self.actor, self.score, self.steps = self.candidate, score, steps
        self.candidate, self.total, self.episodes = None, 0.0, 0

    def state(self) -> dict[str, Any]:
        """As tensors and numbers, for a file."""
        return {
            **{name: None if (one := getattr(self, name)) is None else one.state_dict() for name in ("actor", "candidate")},
            **{name: getattr(self, name) for name in ("score", "steps", "total", "episodes")},
            **{name: th.as_tensor(getattr(self, name)) for name in ("returns", "counts")},
        }

    def set_state(self, state: Any, live: Actor) -> None:
        """
        :param state: of ``state``, by anybody. Episodes under way in another number of environments are left out
        :param live: an actor of the same kind
        :raises ModelFileError: for anything else
        """
        if not isinstance(state, dict) or state.keys() != self.state().keys():
            raise ModelFileError(f"{modelfile.BEST_ACTOR} is not what TD3X writes")
        for name in ("actor", "candidate"):
            if state[name] is not None:
                parameters.require_module(name, state[name], live.state_dict())
                setattr(self, name, acting_copy(live))
                getattr(self, name).load_state_dict(state[name])
        self.score, self.total = float(state["score"]), settings.real("total", state["total"])
        if math.isnan(self.score):
            raise ModelFileError(f"{modelfile.BEST_ACTOR} has the score {self.score}")
        self.steps, self.episodes = (settings.whole(name, state[name], minimum=0) for name in ("steps", "episodes"))
        if len(state["returns"]) == len(self.returns):
            self.returns, self.counts = (state[name].cpu().numpy() for name in ("returns", "counts"))
