"""The returned policy: which actor ``predict`` asks, the one that learns or one of those kept beside it."""

import io
import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.td3.policies import Actor

from sb3_td3x import settings
from sb3_td3x.average_actor import AverageActor
from sb3_td3x.best_actor import BestActor
from sb3_td3x.loading import Loadable
from sb3_td3x.serialization import modelfile

CHOICES = ("live", "best", "average")
WINDOWS = ("best_actor_window", "average_actor_window")


class ReturnsActors(Loadable):
    """
    An algorithm with an actor that keeps the best one, and the mean of all, beside it. Learning does not depend on them.

    :ivar best_actor_window: episodes that are judged together; ``None`` keeps no best actor
    :ivar average_actor_window: updates of the actor that are averaged over; ``None`` keeps no average
    """

    actor: Actor
    best_actor_window: int | None
    average_actor_window: int | None
    _acting: bool  # while `learn` chooses actions, always with the actor that learns
    _best: BestActor | None = None
    _averaged: AverageActor | None = None

    @property
    def predict_with(self) -> str:
        """The actor of ``predict``: ``"live"``, or one of the others, which needs its window."""
        return self.__dict__["predict_with"]

    @predict_with.setter
    def predict_with(self, choice: str) -> None:
        settings.one_of("predict_with", choice, CHOICES)
        if choice == "best" and self.best_actor_window is None and self._best is None:
            raise ValueError('predict_with="best" needs best_actor_window, the number of episodes to judge an actor by')
        if choice == "average" and self.average_actor_window is None and self._averaged is None:
            raise ValueError('predict_with="average" needs average_actor_window, the number of updates to average over')
        self.__dict__["predict_with"] = choice

    @property
    def best_actor(self) -> Actor | None:
        """
        The actor with the highest mean return of ``best_actor_window`` training episodes since ``learn`` began.

        It has a ``predict`` of its own, so SB3's ``evaluate_policy`` takes it. ``None`` before the first window has ended.
        """
        return None if self._best is None else self._best.actor

    @property
    def best_actor_return(self) -> float:
        """
        That mean return, minus infinity without ``best_actor``.

        With exploration noise, and the highest of many: no estimate of what the actor scores in an evaluation.
        """
        return -math.inf if self._best is None else self._best.score

    @property
    def average_actor(self) -> Actor | None:
        """The mean of the actors since ``learn`` began, with a ``predict`` of its own; ``None`` before the first update."""
        return None if self._averaged is None else self._averaged.actor

    @property
    def predictor(self) -> BasePolicy:
        """What ``predict`` asks: the actor that ``predict_with`` names if there is one, else the policy."""
        kept = {"best": self.best_actor, "average": self.average_actor}.get(self.predict_with)
        return self.policy if kept is None or self._acting else kept

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        return self.predictor.predict(observation, state, episode_start, deterministic)

    def _setup_model(self) -> None:
        settings.one_of("predict_with", self.predict_with, CHOICES)
        for name in WINDOWS:
            if (window := getattr(self, name)) is not None:
                setattr(self, name, settings.whole(name, window, minimum=1))
        super()._setup_model()

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps:
            self._best = self._averaged = None
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)

    def _average(self, updates: int) -> None:
        """Take in the actor after this many updates of it."""
        if self.average_actor_window is not None and updates > 0:
            self._averaged = self._averaged or AverageActor(self.actor)
            self._averaged.take_in(self.actor, updates, self.average_actor_window)

    def _store_transition(
        self, replay_buffer: Any, buffer_action: Any, new_obs: Any, reward: np.ndarray, dones: np.ndarray, infos: Any
    ) -> None:
        if self.best_actor_window is not None:
            self._best = self._best or BestActor(self.n_envs)
            raw = reward if self._vec_normalize_env is None else self._vec_normalize_env.get_original_reward()
            acts = self.num_timesteps - self.n_envs >= int(self.learning_starts)
            before = self._best.actor
            self._best.step(
                self.actor, self.best_actor_window, raw, np.asarray(self._last_episode_starts), dones, acts, self.num_timesteps
            )
            if self._best.actor is not before:
                self.logger.record("rollout/best_actor_return", self._best.score)
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)

    def _own_members(self) -> dict[str, bytes]:
        kept = {modelfile.BEST_ACTOR: self._best, modelfile.AVERAGE_ACTOR: self._averaged}
        return {name: _written(one.state()) for name, one in kept.items() if one is not None}

    def _restore_own_members(self, file: modelfile.ModelFile) -> None:
        with modelfile.explained_errors(file.name, everything=True):
            if (content := file.member(modelfile.BEST_ACTOR)) is not None:
                best = BestActor(self.n_envs)
                best.set_state(_read(content), self.actor)
                self._best = best
            if (content := file.member(modelfile.AVERAGE_ACTOR)) is not None:
                averaged = AverageActor(self.actor)
                averaged.set_state(_read(content))
                self._averaged = averaged
        self.predict_with = self.predict_with  # checked, now that it is known what the file holds


def _written(state: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    th.save(state, content)
    return content.getvalue()


def _read(content: bytes) -> Any:
    return th.load(io.BytesIO(content), map_location="cpu", weights_only=True)
