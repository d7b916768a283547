"""
The returned policy: beside the actor that learns, a copy of the one that did best in its training episodes.

The actor moves all the time, so an episode's return belongs to no single actor. What is judged is a window of episodes: its
evidence is their mean return, and its actor the one in the middle, from which those that acted are least apart.
"""

import io
import math
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.td3.policies import Actor

from sb3_td3x.common import validation
from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import model_zip, parameters
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.loading import Loadable

CHOICES = ("live", "best")


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
            self.candidate = _copy_of(live)
        if self.episodes < window:
            return
        if (score := self.total / self.episodes) >= self.score:  # of equals the one that has learned longer
            self.actor, self.score, self.steps = self.candidate, score, steps
        self._begin_window()

    def _begin_window(self) -> None:
        self.candidate, self.total, self.episodes = None, 0.0, 0

    def leave_window(self) -> None:
        """Forget the window and the episodes under way."""
        self._begin_window()
        self.counts = np.zeros_like(self.counts)

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
            raise ModelFileError(f"{model_zip.BEST_ACTOR} is not what TD3X writes")
        for name in ("actor", "candidate"):
            if state[name] is not None:
                parameters.require_module(name, state[name], live.state_dict())
                setattr(self, name, _copy_of(live))
                getattr(self, name).load_state_dict(state[name])
        self.score, self.total = float(state["score"]), validation.real("total", state["total"])
        if math.isnan(self.score):
            raise ModelFileError(f"{model_zip.BEST_ACTOR} has the score {self.score}")
        self.steps, self.episodes = (validation.whole(name, state[name], minimum=0) for name in ("steps", "episodes"))
        if len(state["returns"]) == len(self.returns):
            self.returns, self.counts = (state[name].cpu().numpy() for name in ("returns", "counts"))


def _copy_of(actor: Actor) -> Actor:
    """A copy that acts and does not learn."""
    copied = policies.copied(actor, {id(actor.optimizer): actor.optimizer})
    del copied.optimizer
    copied.requires_grad_(False)
    copied.set_training_mode(False)
    return copied


class ReturnsBest(Loadable):
    """
    An algorithm with an actor that keeps the best one beside it. Learning does not depend on it.

    :ivar best_actor_window: episodes that are judged together; ``None`` keeps none
    :ivar predict_with: the actor of ``predict``
    """

    actor: Actor
    _acting: bool  # while `learn` chooses actions, always with the actor that learns
    _best: BestActor | None = None

    @property
    def best_actor_window(self) -> int | None:
        """1 or more, or ``None``."""
        return self.__dict__["best_actor_window"]

    @best_actor_window.setter
    def best_actor_window(self, window: int | None) -> None:
        if window is not None:
            window = validation.whole("best_actor_window", window, minimum=1)
        self._require_evidence(window, self.__dict__.get("predict_with", "live"))
        if window is None and self._best is not None:
            self._best.leave_window()  # its episodes go on unseen
        self.__dict__["best_actor_window"] = window

    @property
    def predict_with(self) -> str:
        """``"live"``, or ``"best"``, which needs evidence or a window to gather it by."""
        return self.__dict__["predict_with"]

    @predict_with.setter
    def predict_with(self, choice: str) -> None:
        validation.one_of("predict_with", choice, CHOICES)
        self._require_evidence(self.best_actor_window, choice)
        self.__dict__["predict_with"] = choice

    def _require_evidence(self, window: int | None, choice: str) -> None:
        if choice == "best" and window is None and self._best is None:
            raise ValueError('predict_with="best" needs best_actor_window, the number of episodes to judge an actor by')

    def _forget_best(self) -> None:
        """Its evidence is of another run or of other networks."""
        self._best = None
        if self.best_actor_window is None:
            self.predict_with = "live"

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        super().set_parameters(*args, **kwargs)
        if self._best is not None:  # `load` comes here too, and restores it afterwards
            self._forget_best()

    @property
    def best_actor(self) -> Actor | None:
        """
        The actor with the highest mean return of ``best_actor_window`` training episodes since ``learn`` began.

        It is kept when ``set_env`` gives the model another environment; for another task begin anew with
        ``learn(..., reset_num_timesteps=True)``, the default.

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
    def predictor(self) -> BasePolicy:
        """What ``predict`` asks: ``best_actor`` if ``predict_with`` says so and there is one, else the policy."""
        if self.predict_with == "best" and not self._acting and self.best_actor is not None:
            return self.best_actor
        return self.policy

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        return self.predictor.predict(observation, state, episode_start, deterministic)

    def _setup_model(self) -> None:
        validation.one_of("predict_with", self.predict_with, CHOICES)
        if self.best_actor_window is not None:
            self.best_actor_window = self.best_actor_window  # checked, because `load` fills `__dict__`
        super()._setup_model()

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps:
            self._forget_best()
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)

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
        if self._best is None:
            return {}
        content = io.BytesIO()
        th.save(self._best.state(), content)
        return {model_zip.BEST_ACTOR: content.getvalue()}

    def _restore_own_members(self, file: model_zip.ModelFile) -> None:
        content = file.member(model_zip.BEST_ACTOR)
        if content is not None:
            with model_zip.explained_errors(file.name, everything=True):
                state = th.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                best = BestActor(self.n_envs)
                best.set_state(state, self.actor)
            if self.best_actor_window is None:  # of parameters given to load; its episodes go on unseen
                best.leave_window()
            self._best = best
        self.predict_with = self.predict_with  # checked, now that it is known what the file holds
