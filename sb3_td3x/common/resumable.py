"""What an algorithm adds to SB3's training loop so that a run can be stopped cleanly and a saved run can be resumed."""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import HumanOutputFormat, Logger
from stable_baselines3.common.noise import VectorizedActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x.common.transitions import store_terminal_obs, truncate_episodes
from sb3_td3x.common.vec_envs import Hook, explained_deaths, hook_uses, vec_layers

SelfResumable = TypeVar("SelfResumable", bound="Resumable")


class StopTraining(Exception):
    """
    Raised by a callback in ``_on_rollout_start`` to end ``learn`` there, where everything is stored.

    Returning ``False`` from ``_on_step`` ends it before SB3 has stored the transition of that step.
    """


class _WatchedCallback:
    """
    The callback of a rollout. Notes how often the environments were used when a step has just been made, and keeps what the
    callback's last step returned: SB3 treats ``None`` as ``False`` without a warning.
    """

    result: Any = True

    def __init__(self, callback: BaseCallback, model: "Resumable"):
        self._callback, self._model = callback, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def update_locals(self, values: dict[str, Any]) -> None:
        self._callback.update_locals({**values, "callback": self._callback})

    def on_step(self) -> Any:
        self._model._env_uses = self._model._count_env_uses()
        self.result = self._callback.on_step()
        return self.result

    def on_rollout_end(self) -> None:
        is_learning = self._model.gradient_steps != 0 and self._model.num_timesteps > self._model.learning_starts
        self._model._stopped_in_rollout = is_learning  # for a checkpoint that is saved here, where the updates are due
        self._callback.on_rollout_end()
        self._model._stopped_in_rollout = False


class Resumable(OffPolicyAlgorithm):
    """
    An off-policy algorithm that can be stopped between two steps and can resume a saved run.

    Put before one of SB3's algorithms it makes that one resumable too: ``class ResumableSAC(Resumable, SAC): ...``.

    :ivar resumptions: where a saved run was resumed (``steps``) and what was not restored then (``not_restored``)
    """

    replay_buffer: ReplayBuffer
    train_freq: TrainFreq  # type: ignore[assignment]  # since the model was set up
    only_in_checkpoints: ClassVar[tuple[str, ...]] = ()
    """Attributes of a run that are saved in checkpoints and not in models."""
    only_in_process: ClassVar[tuple[str, ...]] = (
        "_on_resume", "_is_stored", "_is_watched", "_stops_before_next_step", "_stopped_in_rollout",
        "_env_hooks", "_env_uses",
    )  # fmt: skip
    """Attributes that are not saved."""
    resumptions: Sequence[dict[str, Any]] = ()

    _on_resume: Callable[[BaseCallback], None] | None = None  # restores everything around the model
    _is_stored = True  # whether the last environment step is in the replay buffer
    _is_watched: bool | None = False  # before the first rollout; `True` in `collect_rollouts` here, `None` after it
    _stops_before_next_step = False
    _stopped_in_rollout = False  # whether training was stopped, or is saved, before the updates of a rollout
    _env_hooks: Sequence[Hook] = ()  # count the uses of the environments
    _env_uses = 0  # as many as there are while nobody else uses them

    def learn(self: SelfResumable, total_timesteps: float, *args: Any, resume: bool = False, **kwargs: Any) -> SelfResumable:
        """SB3's ``learn``; with ``resume``, for a model from ``resume_run``, until ``total_timesteps`` in all."""
        if resume:
            if total_timesteps < self.num_timesteps:
                counted = f"with resume=True total_timesteps ({total_timesteps:,}) counts from the beginning"
                warnings.warn(f"nothing to do: {self.num_timesteps:,} steps have been made, and {counted}", stacklevel=3)
            total_timesteps = max(total_timesteps - self.num_timesteps, 0)
            kwargs["reset_num_timesteps"] = False
        with explained_deaths(self.env):
            return super().learn(total_timesteps, *args, **kwargs)  # type: ignore[arg-type]  # it only compares it

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        if self._is_watched:
            advice = "end learn there and continue with learn(..., reset_num_timesteps=False)"
            raise ValueError(f"set_env inside a rollout (in a callback) would mix two environments: {advice}")
        before = self.env
        super().set_env(env, force_reset)
        buffer = getattr(self, "replay_buffer", None)  # it may be deleted to save memory
        if isinstance(buffer, HerReplayBuffer) and buffer.env is before:  # else one of the user's own judges its goals
            buffer.env = self.env

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, *args: Any, **kwargs: Any) -> RolloutReturn:
        self._on_resume = None  # only now, so that a `learn` that has failed before its first step can be repeated
        watched = _WatchedCallback(callback, self)
        try:
            self._is_watched = True
            if self._last_obs is None:  # a callback has brought other environments when training started
                self._begin_new_episodes()
            rollout = super().collect_rollouts(env, watched, *args, **kwargs)  # type: ignore[arg-type]
            self._is_stored |= rollout.continue_training  # also by a subclass that stores transitions in its own way
        except StopTraining:
            return RolloutReturn(0, 0, continue_training=False)
        finally:
            self._is_watched = None
            if not self._is_stored:  # a callback, Ctrl-C or an error has ended the rollout inside a step
                self._last_obs = None  # so that the next `learn` resets the environments
        if not rollout.continue_training and watched.result is None:
            problem = f"training ends after {self.num_timesteps} steps, because a callback returned None"
            warnings.warn(f"{problem}: return True to continue", stacklevel=5)
        return rollout

    def _sample_action(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        if self._stops_before_next_step:
            self._stops_before_next_step, self._stopped_in_rollout = False, True
            raise StopTraining
        if self._is_watched and self._is_env_used_by_others():
            self._begin_new_episodes()
        self._is_stored = not self._is_watched  # next, the environments make this step
        return super()._sample_action(*args, **kwargs)

    def _store_transition(
        self, replay_buffer: Any, buffer_action: Any, new_obs: Any, reward: Any, dones: np.ndarray, infos: Any
    ) -> None:
        is_used_by_others = self._is_watched and self._is_env_used_by_others()  # a loop of the user's own stores its steps
        if not is_used_by_others:  # VecNormalize has only the latest observations, VecFrameStack has written into these
            super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
            store_terminal_obs(replay_buffer, dones, infos, self._vec_normalize_env)
        # Some environments write into one array at every step. SB3 keeps episode starts for on-policy algorithms only
        self._last_obs, self._last_episode_starts = copy.deepcopy(new_obs), np.array(dones)
        self._is_stored = True
        if is_used_by_others:
            problem = "a callback used the training environments inside a step, which is not learned from"
            warnings.warn(f"{problem}; new episodes begin: give it environments that only it uses", stacklevel=8)
            self._begin_new_episodes()

    def _is_env_used_by_others(self) -> bool:
        """Whether the environments were stepped or reset by others since the last step, for example by an evaluation."""
        return self._is_watched is not False and self._count_env_uses() != self._env_uses

    def _count_env_uses(self) -> int:
        return sum([hook.calls for hook in self._env_hooks])

    def _begin_new_episodes(self) -> None:
        """Truncate the unfinished episodes in the replay buffer and reset the environments, which may be others now."""
        self._env_hooks = hook_uses(self.env)  # type: ignore[arg-type]
        truncate_episodes(self.replay_buffer)
        self._last_obs = self.env.reset()  # type: ignore[union-attr, assignment]
        self._last_episode_starts = np.ones(self.n_envs, dtype=bool)
        if self._vec_normalize_env is not None:
            self._last_original_obs = self._vec_normalize_env.get_original_obs()
        if self.action_noise is not None:
            self.action_noise.reset()
        self._take_over_reset()

    def _take_over_reset(self) -> None:
        """Continue from the present observations, after a reset or where a saved run is resumed."""
        self._last_obs = copy.deepcopy(self._last_obs)
        self._env_uses = self._count_env_uses()

    def _setup_learn(
        self, total_timesteps: int, callback: MaybeCallback = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        if reset_num_timesteps and self._on_resume is not None:
            raise ValueError("a model from resume_run continues with learn(total, ..., resume=True); to begin anew, use load")
        if self.env is not None and getattr(vec_layers(self.env)[-1], "waiting", False):
            raise ValueError("a SubprocVecEnv was interrupted inside a step: give the model new environments with set_env")
        hooks_before, self._env_hooks = self._env_hooks, [] if self.env is None else hook_uses(self.env)
        if hooks_before in ((), self._env_hooks) and self._is_env_used_by_others():  # a copy has none yet
            self._last_obs = None  # so that SB3 resets the environments
        if self.replay_buffer is not None and (reset_num_timesteps or self._last_obs is None):
            truncate_episodes(self.replay_buffer)  # SB3 is about to reset the environments
        has_logger, made = self._custom_logger, None
        noise = self.action_noise
        is_kept = not reset_num_timesteps and self._last_obs is not None and noise is not None and "reset" not in vars(noise)
        if is_kept := is_kept and (self.n_envs == 1 or isinstance(noise, VectorizedActionNoise)):
            # For one call: otherwise SB3 restarts correlated noise inside the episode
            vars(noise)["reset"] = lambda *_: vars(noise).pop("reset")
        try:
            if not has_logger and self.tensorboard_log is None:  # SB3's own leaves an empty folder in the temporary directory
                self.set_logger(made := Logger(None, [HumanOutputFormat(sys.stdout)] if self.verbose else []))
            result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)
        finally:
            if is_kept:
                vars(noise).pop("reset", None)
            self._custom_logger &= has_logger or self._logger is not made  # a callback may have set one
        self._is_stored = True
        self._stops_before_next_step = self._stopped_in_rollout = False
        if reset_num_timesteps:
            self.resumptions = []
        elif self._on_resume is not None:
            self._on_resume(result[1])
        self._take_over_reset()
        return result

    def _init_callback(self, *args: Any, **kwargs: Any) -> BaseCallback:
        self._env_uses = self._count_env_uses()
        callback = super()._init_callback(*args, **kwargs)
        if self._count_env_uses() != self._env_uses:
            self._last_obs = None  # so that `collect_rollouts` resets the environments
        return callback

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: Any = None) -> None:
        """SB3's, without an ``info["episode"]`` of another kind or left from an earlier step in a dict that is used again."""

        def is_new(episode: Any, done: bool) -> bool:
            if not isinstance(episode, dict) or not {"r", "l"} <= episode.keys():
                return False
            # `Monitor` writes the time; without it, equal episodes are different ones
            return (done and "t" not in episode) or repr(episode) not in map(repr, reversed(self.ep_info_buffer or ()))

        ended = [False] * len(infos) if dones is None else dones
        cleaned = [
            info if "episode" not in info or is_new(info["episode"], done) else {**info, "episode": None}
            for info, done in zip(infos, ended, strict=True)
        ]
        super()._update_info_buffer(cleaned, dones)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``deepcopy``: without the hooks, which hold the environments, and ``learn``'s own logger."""
        state = {**self.__dict__, "_env_hooks": (), "_is_watched": self._is_watched and None}
        if not self._custom_logger and "_logger" in state:
            state["_logger"] = Logger(None, [])  # it may hold the terminal; the next `learn` makes its own
        if not self._is_stored:  # inside a step, as by a callback: the copy begins a new episode
            state |= {"_is_stored": True, "_last_obs": None}
        return state

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *type(self).only_in_process, *type(self).only_in_checkpoints]
