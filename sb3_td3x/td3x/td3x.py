"""``TD3X``: SB3's off-policy algorithm around the gradient step of ``gradient_step.py``."""

import math
import pathlib
import time
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium as gym
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, ReplayBufferSamples, Schedule, TrainFreq
from stable_baselines3.common.utils import FloatSchedule, get_parameters_by_name, update_learning_rate
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from stable_baselines3.td3.policies import Actor, TD3Policy

from sb3_td3x import presets
from sb3_td3x.common import buffers, transitions, validation
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.common.validation import CHECKS, check_int, check_learning_rate
from sb3_td3x.common.vec_envs import env_id_of
from sb3_td3x.errors import NonFiniteError
from sb3_td3x.saving import model_zip
from sb3_td3x.saving.model_zip import PathOrFile
from sb3_td3x.saving.pickle_files import read_buffer
from sb3_td3x.td3x import diagnostics, exploration, onnx, policies
from sb3_td3x.td3x.compiled import Updater, update_path
from sb3_td3x.td3x.gradient_step import UpdateSettings
from sb3_td3x.td3x.precision import require_supported

SelfTD3X = TypeVar("SelfTD3X", bound="TD3X")
OF_LOAD = ("_loaded_tensors", "set_parameters")
"""Attributes that a model has only while ``load`` rebuilds it."""


def _in_policy(name: str) -> Any:
    return property(lambda model: getattr(model.policy, name), lambda model, network: setattr(model.policy, name, network))


def _running_statistics_of(name: str) -> Any:
    # SB3's `_setup_model` sets them, and so do copies of it; here they follow from the network
    return property(lambda model: get_parameters_by_name(getattr(model.policy, name), ["running_"]), lambda *_: None)


class TD3X(Resumable, OffPolicyAlgorithm):
    """
    Twin Delayed DDPG (TD3, Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477) with quantile critics by default;
    ``n_quantiles=1`` is standard TD3.

    Keywords, their order and meaning are those of SB3's ``TD3``, and so are the default values, except for ``learning_starts``
    and ``action_noise``. A whole number may be given as a float (``1e6``). Attributes may be edited at any time, but for
    ``seed``, ``stats_window_size`` and what networks and replay buffer were made with; an edit is checked, and takes effect,
    at the next ``learn`` or series of updates.

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"`` or a ``TD3Policy`` class
    :param env: a Gymnasium environment, an SB3 ``VecEnv`` or a registered name; its actions are a bounded ``Box``
    :param learning_rate: of all optimizers: a number, or a function of the remaining progress (1 to 0)
    :param buffer_size: transitions kept in the replay buffer, over all environments; the oldest are overwritten
    :param learning_starts: environment steps with random actions before the actor acts and training starts.
        ``"auto"`` is 2 % of the steps of a ``learn`` that begins anew, at least 100 and at most 10,000
    :param batch_size: transitions per update
    :param tau: step size of the target networks towards their networks, in [0, 1], at every actor update
    :param gamma: discount factor, in [0, 1]
    :param train_freq: train after n steps of each environment, or ``(n, "step")``; ``(n, "episode")`` is for one environment
    :param gradient_steps: updates each time; -1 means as many as the environment steps of the rollout
    :param action_noise: exploration noise. A float is the standard deviation of Gaussian noise in the action space scaled to
        [-1, 1]; an SB3 ``ActionNoise`` is used as it is, by several environments as a copy each; ``None`` is no noise
    :param replay_buffer_class: ``None`` chooses by ``n_steps``, ``prioritization`` and the observation space
    :param replay_buffer_kwargs: keyword arguments of the replay buffer
    :param optimize_memory_usage: store each observation once. Needs ``replay_buffer_kwargs={"handle_timeout_termination":
        False}`` (SB3 issue #934), with which a time limit counts as a termination
    :param n_steps: rewards summed before the target network's value; not for Dict observations
    :param policy_delay: critic updates per update of the actor and the target networks
    :param target_policy_noise: standard deviation of the target smoothing noise, scaled action space
    :param target_noise_clip: largest absolute value of that noise
    :param stats_window_size: episodes in the logged averages
    :param tensorboard_log: folder for TensorBoard; ``None`` for none
    :param policy_kwargs: keyword arguments of the policy, see ``TD3XPolicy``
    :param verbose: 0 no output, 1 information, 2 debug messages
    :param seed: seed of every random generator; ``None`` leaves the global ones as they are
    :param device: ``"auto"`` is CUDA where there is one, else the CPU
    :param _init_setup_model: build the networks now; ``load`` turns this off
    :param accelerate: how updates are made: ``"plain"``, ``"compiled"`` (on a CPU), or ``"auto"``, which on Linux compiles
        them after 5,000 updates since the model was constructed or loaded. All make the same updates up to rounding
    :param precision: ``"bf16"`` multiplies the matrices of hidden layers of at least 64 by 64 in bfloat16 during updates, on
        processors with units for it; all else is float32
    :param n_quantiles: outputs of each critic. 1 is TD3's critic; more are truncated quantile critics (Kuznetsov et al. 2020,
        https://arxiv.org/abs/2005.04269), which only TD3X can load. ``"auto"`` is the paper's 25, or 1 for a policy class
        that has scalar critics only, such as a subclass of SB3's ``TD3Policy``
    :param top_quantiles_to_drop_per_net: how many of the largest of the target critics' pooled quantiles are left out, for
        each critic: 0 to ``n_quantiles`` - 1. The more, the lower the targets. Without effect with one quantile
    :param qf_learning_rate: learning rate of the critics. Defaults to ``learning_rate``
    :param max_grad_norm: largest 2-norm of the actor's gradient, and of the gradient of all critics
        together; longer ones are scaled down to it. ``None`` is no bound
    :param prioritization: ``"lap"`` samples transitions with large errors more often (Fujimoto et al. 2020,
        https://arxiv.org/abs/2007.06049), from a ``sb3_td3x.common.buffers.PrioritizedReplayBuffer``: no Dict observations, no
        n-step returns. Scalar critics then have the Huber loss
    :raises ValueError: for a value outside its range, or an environment that needs another policy or a wrapper
    :raises AssertionError: SB3's own, or its ``NotImplementedError``, for spaces and buffers that it does not support
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": policies.MlpPolicy,
        "CnnPolicy": policies.CnnPolicy,
        "MultiInputPolicy": policies.MultiInputPolicy,
    }
    only_in_checkpoints: ClassVar[tuple[str, ...]] = ("_updates_since_load", "_may_lack_data")
    only_in_process: ClassVar[tuple[str, ...]] = (
        *Resumable.only_in_process, *OF_LOAD, "_checked_settings", "_updater", "_matrix_kernels", "_last_batch", "_pace",
        "_statistics",
    )  # fmt: skip
    policy: TD3Policy
    replay_buffer: ReplayBuffer
    n_quantiles: int
    _checked_settings: dict[str, Any] | None = None  # at the last check; `None` before the model is built
    _may_lack_data = False  # `True` until the replay buffer is seen to hold enough to train on
    _learning_starts_from = 0  # steps that were made when `learning_starts` was set
    _loaded_tensors: dict[str, Any] | None = None  # while `load` rebuilds a model, which must not be seeded again
    _last_batch: ReplayBufferSamples | None = None
    _pace = 0.0, 0, 0  # time of the last log output, and environment steps and updates until then
    _updater: Updater | None = None
    _matrix_kernels: str | None = None  # those of a resumed run; `None` chooses by the processor

    def __init__(
        self,
        policy: str | type[TD3Policy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        buffer_size: int = 1_000_000,
        learning_starts: exploration.LearningStarts = "auto",
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | float | None = 0.1,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        policy_delay: int = 2,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        accelerate: Literal["auto", "plain", "compiled"] = "auto",
        precision: Literal["fp32", "bf16"] = "fp32",
        n_quantiles: int | Literal["auto"] = "auto",
        top_quantiles_to_drop_per_net: int = 2,
        qf_learning_rate: float | Schedule | None = None,
        max_grad_norm: float | None = None,
        prioritization: Literal["lap"] | None = None,
    ):
        super().__init__(
            policy, env, learning_rate, buffer_size, learning_starts,  # type: ignore[arg-type]  # its setter takes "auto"
            batch_size, tau, gamma, train_freq, gradient_steps,
            action_noise=action_noise,  # type: ignore[arg-type]  # its setter takes a float
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=dict(replay_buffer_kwargs or {}),  # SB3 writes into it
            optimize_memory_usage=optimize_memory_usage,
            n_steps=n_steps,
            # Its owner may change it for the next model
            policy_kwargs=dict(policy_kwargs) if isinstance(policy_kwargs, dict) else policy_kwargs,
            stats_window_size=check_int("stats_window_size", stats_window_size, minimum=1),
            tensorboard_log=tensorboard_log, verbose=verbose, device=device, seed=seed,
            sde_support=False, supported_action_spaces=(spaces.Box,), support_multi_env=True,
        )  # fmt: skip
        self.policy_delay = policy_delay
        self.target_policy_noise = target_policy_noise
        self.target_noise_clip = target_noise_clip
        self.accelerate, self.precision = accelerate, precision
        self.n_quantiles = n_quantiles  # type: ignore[assignment]  # a number from _setup_model on
        self.top_quantiles_to_drop_per_net = top_quantiles_to_drop_per_net
        self.qf_learning_rate, self.max_grad_norm = qf_learning_rate, max_grad_norm
        self.prioritization = prioritization
        self._updates_since_load = 0  # counted by accelerate="auto"; in checkpoints and copies, not in saved models
        self.format_version = model_zip.FORMAT_VERSION
        self.noise_generator = th.Generator()  # of the target actions; its state is part of saved models

        if _init_setup_model:
            self._setup_model()
            # Refuse now what would fail when training starts
            update_path(self.accelerate, self.policy)
            require_supported(self.precision, self.device)

    @classmethod
    def from_preset(
        cls: type[SelfTD3X], env: GymEnv | str, preset: str | pathlib.Path = "default", **changes: Any
    ) -> SelfTD3X:
        """
        Make a model with the hyperparameters of a preset, as ``td3x train`` does.

        :param env: a registered name, for which the environments that the preset asks for are made (``n_envs``,
            ``env_wrapper``, ``normalize``), or an environment or ``VecEnv``, which is used as it is. The name, or the ``spec``
            of the environment, chooses the preset's entry
        :param preset: the name of a preset, or the path of a YAML file of entries by environment
        :param changes: what replaces the preset's values: keyword arguments of the constructor, as it takes them, or the
            preset's keys for environments, policy and noise
        :raises ValueError: for an unknown preset or an invalid value, or if an environment lacks the wrapper or the
            normalization that the preset asks for
        """
        if not isinstance(env, str):
            if "n_envs" in changes:
                raise ValueError("n_envs is for the name of an environment: one that is given is used as it is")
            env = cls._wrap_env(env)
        preset_entry = presets.load(preset, env if isinstance(env, str) else env_id_of(env))
        entry = {**preset_entry, **{name: changes.pop(name) for name in (*presets.ENV_KEYS, "gamma") if name in changes}}
        vec_env = presets.make_env(env, entry) if isinstance(env, str) else presets.require_wrapped(env, entry)
        arguments = presets.model_arguments(entry, vec_env.action_space.shape or ())
        policy = entry.get("policy") or policies.name_for(vec_env.observation_space)
        return cls(policy, vec_env, **{**arguments, **presets.updates_for(preset_entry, vec_env.num_envs), **changes})

    # Properties, so that they stay right when the policy is replaced
    actor: Actor = _in_policy("actor")
    actor_target: Actor = _in_policy("actor_target")
    critic: ContinuousCritic = _in_policy("critic")
    critic_target: ContinuousCritic = _in_policy("critic_target")
    actor_batch_norm_stats: list[th.Tensor] = _running_statistics_of("actor")
    actor_batch_norm_stats_target: list[th.Tensor] = _running_statistics_of("actor_target")
    critic_batch_norm_stats: list[th.Tensor] = _running_statistics_of("critic")
    critic_batch_norm_stats_target: list[th.Tensor] = _running_statistics_of("critic_target")

    @property
    def learning_starts(self) -> int:
        """Steps with random actions. Setting it makes a new request; ``"auto"`` is resolved when a run starts."""
        return self.__dict__["learning_starts"]

    @learning_starts.setter
    def learning_starts(self, request: exploration.LearningStarts) -> None:
        # The resolved number has SB3's name, so that SB3 reads it from a saved model
        self.__dict__["learning_starts"] = exploration.resolve_learning_starts(request)
        self._learning_starts_request, self._learning_starts_from = request, self.num_timesteps

    @property
    def action_noise(self) -> ActionNoise | None:
        """The exploration noise. Setting it, at any time, takes what the constructor takes."""
        return self.__dict__["action_noise"]

    @action_noise.setter
    def action_noise(self, noise: ActionNoise | float | None) -> None:
        if hasattr(self, "action_space"):
            noise = exploration.resolve_action_noise(noise, self.action_space, self.n_envs)  # type: ignore[arg-type]
        elif not isinstance(noise, ActionNoise | None):  # `load` sets it before there is an action space
            validation.check_not_negative("action_noise", noise)
        self.__dict__["action_noise"] = noise

    @property  # type: ignore[override]
    def train_freq(self) -> TrainFreq:
        """When to train. Setting it, at any time, takes what the constructor takes."""
        return self.__dict__["train_freq"]

    @train_freq.setter
    def train_freq(self, value: Any) -> None:
        self.__dict__["train_freq"] = validation.check_train_freq("train_freq", value)
        if "policy" in self.__dict__ and not isinstance(value, TrainFreq):
            self._convert_train_freq()

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if isinstance(env, gym.vector.VectorEnv):
            raise ValueError(f"{type(env).__name__} is a vector environment of Gymnasium (gym.make_vec): use make_vec_env")
        env = maybe_make_env(env, verbose)  # SB3's constructor takes a name, its `load` and `set_env` do not
        return OffPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    @policies.torch_settings()
    def _setup_model(self) -> None:
        if not hasattr(self, "action_space"):
            raise ValueError("a model is made for an environment: TD3X(policy, env)")
        if self._loaded_tensors is not None:  # SB3's `load` sets parameters, but has read none
            set_own, tensors = self.set_parameters, self._loaded_tensors
            self.set_parameters = lambda load_path_or_dict, *args, **kwargs: set_own(  # type: ignore[method-assign]
                load_path_or_dict or tensors, *args, **kwargs
            )
        exploration.check_action_bounds(self.action_space)  # type: ignore[arg-type]
        self._choose_classes()
        self.action_noise = self.action_noise  # resolves it: a loaded model has its action space only now
        policy_kwargs = self.policy_kwargs
        self.policy_kwargs = policies.check_policy_kwargs(self.policy_class, policy_kwargs, self.n_quantiles)
        super()._setup_model()
        self.policy_kwargs = policy_kwargs
        if not hasattr(self.policy, "actor_target"):
            policy = f"{self.policy_class.__module__}.{self.policy_class.__name__}"
            raise ValueError(f"{policy} is no policy of TD3: give a name such as MlpPolicy or a subclass of TD3Policy")
        self._create_aliases()
        space: Any = self.observation_space
        if type(self.replay_buffer) is HerReplayBuffer and (missing := {"achieved_goal", "desired_goal"} - space.keys()):
            raise ValueError(f"HerReplayBuffer needs {' and '.join(sorted(missing))} in the observations, which are {space}")
        if getattr(self.critic, "n_quantiles", 1) != self.n_quantiles:
            maker = f"make_critic of {self.policy_class.__name__}"
            raise ValueError(f"{maker} makes no critics with n_quantiles={self.n_quantiles}: use 1")
        if self.n_steps not in (1, buffer_steps := getattr(self.replay_buffer, "n_steps", 1)):
            name = type(self.replay_buffer).__name__
            raise ValueError(f"{name} gives {buffer_steps}-step returns, n_steps={self.n_steps} is not for it")
        self._checked_settings = {name: getattr(self, name) for name in CHECKS}
        self._logger = Logger(None, [])  # until the first `learn`, for a `train` before it

    def _create_aliases(self) -> None:
        """SB3's hook for names of parts of the policy. Those of the networks are properties here."""

    def _choose_classes(self) -> None:
        """Check all settings that do not depend on an environment, and choose the classes that follow from them."""
        self.policy_class = policies.FROM_SB3.get(self.policy_class, self.policy_class)
        self._check_settings()
        self.replay_buffer_class = buffers.buffer_class_for(self.prioritization, self.replay_buffer_class, self.n_steps)

    def _check_settings(self) -> None:
        """Check the settings edited since the last call; an edited ``learning_rate`` takes effect."""
        before = self._checked_settings
        if before is not None and all(value is getattr(self, name) for name, value in before.items()):
            return
        for name, check in CHECKS.items():
            setattr(self, name, check(name, getattr(self, name)))
        self.n_quantiles = policies.choose_quantiles(self.n_quantiles, self.policy_class)
        if 1 < self.n_quantiles <= (drop := self.top_quantiles_to_drop_per_net):
            raise ValueError(f"top_quantiles_to_drop_per_net ({drop}; default 2) must be below n_quantiles {self.n_quantiles}")
        if before is None:
            return
        for name in ("buffer_size", "optimize_memory_usage", "n_steps", "n_quantiles"):
            if (value := getattr(self, name)) != before[name]:
                or_load = "" if name == "n_quantiles" else " or load"
                raise ValueError(f"{name} cannot be changed from {before[name]!r} to {value!r}: give it to TD3X(...){or_load}")
        if self.learning_rate != before["learning_rate"]:
            self._setup_lr_schedule()  # which SB3 does only once
        self._checked_settings = {name: getattr(self, name) for name in CHECKS}

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed Python, numpy, torch, the action space, the environment and the target noise.

        :param seed: ``None`` seeds the target noise alone, from torch's global generator
        """
        if self._loaded_tensors is None:
            super().set_random_seed(seed)
            self._seed_noise(seed)

    def _seed_noise(self, seed: int | None) -> None:
        if seed is None:
            with th.random.fork_rng(devices=[]):
                seed = int(th.randint(2**31, (), device="cpu"))
        self.noise_generator.manual_seed(seed)

    def learn(  # type: ignore[override]  # SB3's parameters by name
        self: SelfTD3X,
        total_timesteps: float,
        callback: MaybeCallback = None,
        log_interval: int | None = 4,
        tb_log_name: str = "TD3X",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        resume: bool = False,
    ) -> SelfTD3X:
        """
        Train for ``total_timesteps`` environment steps. Parameters that are not listed are SB3's.

        :param total_timesteps: steps to make, over all environments; ``5e5`` is accepted, ``math.inf`` lasts until a callback
            ends the training
        :param log_interval: episodes between two log outputs; ``None`` or 0 for none
        :param reset_num_timesteps: ``False`` continues the step counter and the current episode. A schedule still ends with
            each call: one that falls to 0 jumps up and falls again
        :param resume: continue to ``total_timesteps`` in all with a model from ``resume_run``
        :raises ValueError: for an invalid setting, no environment, or a wrapper around ``VecNormalize`` that changes
            observations, because those before the change are stored
        :raises NonFiniteError: for a NaN or infinity from the environment or in an update; no step is made with it
        :raises EnvironmentDiedError: if the process of an environment has ended
        """
        if total_timesteps != math.inf:
            total_timesteps = check_int("total_timesteps", total_timesteps, minimum=0)
        try:
            return super().learn(
                total_timesteps, callback, log_interval or None, tb_log_name,
                reset_num_timesteps=reset_num_timesteps, progress_bar=progress_bar, resume=resume,
            )  # fmt: skip
        except NonFiniteError:
            transitions.restore_statistics(self._vec_normalize_env, self._statistics)
            raise
        finally:
            vars(self.policy).pop("has_modes", None)  # `_setup_learn` has set it

    def _setup_learn(
        self, total_timesteps: int, callback: MaybeCallback = None, reset_num_timesteps: bool = True, *args: Any, **kwargs: Any
    ) -> tuple[int, BaseCallback]:
        self._check_settings()
        normalization = self._vec_normalize_env
        if self.env is None or (normalization is not None and normalization.venv is None):  # copied without what it wraps
            raise ValueError("no environment to learn in: use set_env, or set_venv of a copied model's VecNormalize")
        transitions.require_stored_as_seen(self.env)
        if (reset_num_timesteps and self._on_resume is None) or self.num_timesteps == 0:  # resumed: `Resumable` refuses it
            request, self._learning_starts_from = self._learning_starts_request, 0
            self.__dict__["learning_starts"] = exploration.resolve_learning_starts(request, total_timesteps)
        self._statistics = transitions.kept_statistics(normalization)
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *args, **kwargs)
        # A model loaded without its buffer is past `learning_starts`, and SB3 would train on one transition. Hindsight replay
        # needs an episode that has ended, and by `learning_starts` none may have
        if self._on_resume is None or self.replay_buffer.size() == 0:
            is_empty = self.replay_buffer.size() == 0  # and stays so while callbacks use the training environment
            self._may_lack_data = is_empty or self.num_timesteps > 0 or isinstance(self.replay_buffer, HerReplayBuffer)
        if self.num_timesteps >= self.learning_starts > 0 and self._lacks_data():
            lacks = "the replay buffer lacks learning_starts transitions, or for hindsight replay an ended episode"
            warnings.warn(f"no updates yet: {lacks} (load_replay_buffer loads a saved buffer)", stacklevel=5)
        if isinstance(self.policy, policies.TD3XPolicy):
            self.policy.look_for_modes()
        self._pace = time.perf_counter(), self.num_timesteps, self._n_updates
        return result

    @policies.torch_settings()
    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Make updates of the critics, and every ``policy_delay``-th time also of the actor and the target networks.

        There are no updates while a model loaded without its buffer refills it, or before hindsight replay has an episode.

        :param gradient_steps: number of updates
        :param batch_size: transitions per update; each size is compiled by itself
        :raises ValueError: for a setting edited to an invalid value
        :raises NonFiniteError: naming the loss and the update, which has changed nothing
        """
        if self.num_timesteps > self.learning_starts and self._lacks_data():  # earlier only a user calls this
            return self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        settings = self._settings_of_update()
        gradient_steps, batch_size = int(gradient_steps), int(batch_size)  # a callback may have set 64.0
        self.policy.set_training_mode(True)
        self._update_learning_rates()
        if getattr(self.policy, "normalize_observations", False):  # counts what this model has not collected itself
            self.policy.normalizer.count_stored(self.replay_buffer, self._vec_normalize_env)  # type: ignore[operator, union-attr]
        if getattr(self.replay_buffer, "n_steps", 1) > 1:
            self.replay_buffer.gamma = self.gamma  # type: ignore[attr-defined]  # of the returns that it sums
        if isinstance(self.replay_buffer, HerReplayBuffer) and self.replay_buffer.env is None:
            self.replay_buffer.env = self.env  # that of a copied model has none
        updater, losses = self._get_updater(), []
        updater.prepare(self._updates_since_load)
        try:
            for number in range(self._n_updates + 1, self._n_updates + gradient_steps + 1):
                batch = transitions.sample(self.replay_buffer, batch_size, self._vec_normalize_env, f"update {number}")
                with_actor = number % self.policy_delay == 0
                losses.append(updater(batch, self._draw_noise(batch), settings, with_actor, number))
                if (errors := losses[-1].errors) is not None:
                    self.replay_buffer.update_priorities(errors)  # type: ignore[attr-defined]
                    losses[-1] = losses[-1]._replace(errors=None)  # a long series would keep them all
                self._last_batch = batch
        finally:
            self._n_updates += len(losses)  # also those before an error
            self._updates_since_load += len(losses)
            self._stopped_in_rollout |= len(losses) < gradient_steps  # a checkpoint that is saved then lacks the rest
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name in ("critic", "actor"):
            values = [value for update in losses if (value := getattr(update, name)) is not None]
            if values:
                self.logger.record(f"train/{name}_loss", th.stack(values).mean().item())

    def _lacks_data(self) -> bool:
        """Whether too little is stored to train on: loaded without the buffer, or no ended episode for hindsight replay."""
        buffer = self.replay_buffer
        # Of an episode that is overwritten in part no goal can be drawn
        if self._may_lack_data or (isinstance(buffer, HerReplayBuffer) and buffer.full):
            stored = buffer.size() * buffer.n_envs
            # SB3's users write `model.learning_starts = model.num_timesteps + 5_000` to collect 5,000
            begun = self._learning_starts_from
            starts = self.learning_starts - (begun if begun < self.learning_starts else 0)
            needed = min(starts, buffer.buffer_size * buffer.n_envs)  # a small buffer can only be full
            has_no_episode = isinstance(buffer, HerReplayBuffer) and not (  # the newest is the last to be overwritten
                buffer.ep_length[buffer._current_ep_start - 1, range(buffer.n_envs)].any()
            )
            self._may_lack_data = stored < max(needed, 1) or has_no_episode
            if self._may_lack_data and (buffer.full or stored >= 10 * max(needed, 100)):
                problem = "nothing is learned now: HerReplayBuffer samples episodes that have ended, and it holds none"
                advice = "Give the environment a time limit (max_episode_steps), and buffer_size room for several episodes"
                warnings.warn(f"{problem}. {advice}", stacklevel=2)
        return self._may_lack_data

    def _update_learning_rates(self) -> None:
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        self._update_learning_rate(optimizers)
        for optimizer in optimizers:
            check_learning_rate("learning_rate", optimizer.param_groups[0]["lr"])
        if self.qf_learning_rate is not None:
            rate = FloatSchedule(self.qf_learning_rate)(self._current_progress_remaining)
            check_learning_rate("qf_learning_rate", rate)
            update_learning_rate(self.critic.optimizer, rate)
            self.logger.record("train/qf_learning_rate", rate)

    def _settings_of_update(self) -> UpdateSettings:
        buffers.check_prioritization(self.prioritization, type(self.replay_buffer))  # either may have been set since
        self._check_settings()
        return UpdateSettings(*[getattr(self, name) for name in UpdateSettings._fields])

    def _draw_noise(self, batch: ReplayBufferSamples) -> th.Tensor:
        """Standard normal numbers in the shape of the actions, from the algorithm's own generator."""
        actions = batch.actions
        return th.randn(actions.shape, generator=self.noise_generator, dtype=actions.dtype, device="cpu").to(actions.device)

    def _get_updater(self) -> Updater:
        """The object that makes the updates, a new one if the policy or a setting that it was made for has changed."""
        made_for = (self.policy, self.accelerate, self.precision, self._matrix_kernels)
        if self._updater is None or self._updater.made_for != made_for:
            model = weakref.proxy(self)  # in a cycle, the replay buffer would stay in memory after the model
            self._updater = Updater(*made_for, announce=lambda line: model.logger.log(line))
        return self._updater

    def dump_logs(self) -> None:
        diagnostics.record(self)
        super().dump_logs()

    def _take_over_reset(self) -> None:
        super()._take_over_reset()
        first = self._last_obs if self._vec_normalize_env is None else self._last_original_obs
        try:
            transitions.require_finite(first, "observation", "the reset of the environment")  # type: ignore[arg-type]
        except NonFiniteError:
            self._last_obs = None  # so that the next `learn` resets the environments
            raise
        self._statistics = transitions.kept_statistics(self._vec_normalize_env)

    def _store_transition(
        self, replay_buffer: Any, buffer_action: Any, new_obs: Any, reward: Any, dones: Any, infos: Any
    ) -> None:
        is_stored = not self._is_watched or not self._is_env_used_by_others()
        if is_stored:
            when = f"environment step {self.num_timesteps}"
            transitions.check_transition(buffer_action, new_obs, reward, infos, self._vec_normalize_env, when)
            self._statistics = transitions.kept_statistics(self._vec_normalize_env)
            if getattr(self.policy, "normalize_observations", False):
                self.policy.normalizer.update(self._last_obs)  # type: ignore[operator, union-attr]  # what is stored now
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        if is_stored and self._may_lack_data and replay_buffer.size() == 0:
            self._may_lack_data = False  # nobody knows: a buffer of the user's own that keeps its transitions elsewhere

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """As SB3's, but not below 0 where the last rollout passes the end: a schedule may be negative there."""
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def save(self, path: PathOrFile, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save the model to a file, which SB3's ``TD3`` reads too with ``n_quantiles=1`` (where this package is installed, if the
        model has ``prioritization``, ``normalize_observations`` or a held learning rate).

        Attributes other than plain values and known classes, such as a function as ``learning_rate``, are saved as SB3 does;
        loading them takes ``trust=True`` or ``custom_objects``.

        :param path: the file; ``.zip`` is added to a name without suffix
        :param exclude: attributes to leave out
        :param include: attributes to save that are left out otherwise
        """
        policy_class = policies.class_for_sb3(self.policy_class, self.policy_kwargs, self.n_quantiles)
        model_zip.save(super().save, self, policy_class, path, exclude, include)

    @policies.class_load
    def load(
        cls: type[SelfTD3X],
        path: PathOrFile,
        env: GymEnv | str | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        *,
        trust: bool = False,
        **kwargs: Any,
    ) -> SelfTD3X:
        """
        Load a model saved by TD3X or by SB3's ``TD3``. Parameters that are not listed are SB3's.

        The random generators of Python, numpy, torch and the environment are left as they are, unless ``seed`` is given.

        :param path: the file
        :param env: the environment to continue with, of any number of environments, or its name
        :param custom_objects: replacements for saved objects, by name
        :param trust: read the file as SB3 does, which runs whatever code it holds. Otherwise only plain values, tensors and
            known classes are read, and ``custom_objects`` has to replace everything else
        :param kwargs: attributes to change, for example ``gamma=0.95`` or ``learning_starts=0``
        :return: a new model, also when called on an object, which stays as it is
        :raises UntrustedModelError: without ``trust``, naming the attribute that needs code and the ways to load it
        :raises ModelFileError: for a damaged file or another algorithm's
        :raises ValueError: for an environment with other spaces, a value outside its range, or another ``n_quantiles``
        :raises TypeError: for an attribute that does not exist
        """
        sb3_load = partial(super().load, device=device, print_system_info=print_system_info, force_reset=force_reset)
        return model_zip.load(sb3_load, cls, path, env, custom_objects or {}, trust, kwargs)

    @policies.torch_settings()
    def set_parameters(
        self, load_path_or_dict: PathOrFile | dict[str, Any], exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load networks and optimizers from a saved model or from ``get_parameters``; if one does not fit, none is changed.

        :param load_path_or_dict: a saved model, or state dicts by name
        :param exact_match: refuse if a network, an optimizer or a tensor of a network is missing
        :param device: not used: tensors are copied to where the networks are
        :raises ModelFileError: for names that are missing or unknown, tensors of other shapes, or a damaged file
        """
        model_zip.set_parameters(super().set_parameters, self, load_path_or_dict, exact_match)

    def load_replay_buffer(self, path: PathOrFile, truncate_last_traj: bool = True, *, trust: bool = False) -> None:
        """
        Load a replay buffer saved with ``save_replay_buffer``.

        :param path: the file
        :param truncate_last_traj: end the unfinished episodes where the buffer ends
        :param trust: read the file as SB3 does, which runs whatever code it holds
        :raises UntrustedModelError: without ``trust``, for a buffer of an unknown class or with objects of other classes
        :raises ModelFileError: for a damaged file
        :raises ValueError: for a buffer of another number of environments, other spaces, other n-step returns, or priorities
            that do not fit ``prioritization``. After any error the model keeps its buffer
        """
        loaded = read_buffer(path, trust)
        transitions.check_fits(loaded, getattr(self, "replay_buffer", None) or self)  # it may be deleted to save memory
        buffers.check_prioritization(self.prioritization, type(loaded))
        if truncate_last_traj:
            transitions.truncate_episodes(loaded)
        if isinstance(loaded, HerReplayBuffer):
            loaded.env = self.env
        loaded.device = self.device
        self.replay_buffer = loaded

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "actor.optimizer", "critic.optimizer"], []

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``deepcopy``: without the compiled programs and what only ``load`` needs."""
        return {name: value for name, value in super().__getstate__().items() if name not in OF_LOAD} | {"_updater": None}

    def export_onnx(self, path: str | pathlib.Path, env: VecEnv | None = None) -> None:
        """
        Export ``policy.predict`` as one ONNX graph, from raw observations to actions of the environment. A subclass's own
        ``TD3X.predict`` is not part of it.

        Inputs are named ``observation``, or as the keys of a Dict observation; the output is ``action`` (``chosen_action``
        if a key has that name). All have a batch axis of any size. The graph gives the actions of ``predict`` up to rounding;
        a difference of 0.001 of half their range is an error.

        :param path: the file to write, usually ``.onnx``
        :param env: its ``VecNormalize`` and ``VecTransposeImage`` become part of the graph; ``None`` is the model's own. A
            model without an environment takes the normalized observations of its ``observation_space``. Other wrappers
            are not part of the graph, which takes their observations and gives the actions that they take
        :raises ValueError: without the packages onnx, onnxscript and onnxruntime; for an environment of other observations, a
            wrapper around ``VecNormalize`` that cannot be part of the graph, a network that cannot be exported, or a file that
            cannot be written
        """
        with th.device("cpu"):  # another may be the default
            onnx.export_onnx(self, path, env)


def check_arguments(policy: str | type[TD3Policy], **arguments: Any) -> None:
    """Raise a ``ValueError`` for the first invalid argument of ``TD3X``, as far as that can be seen without an environment."""
    model = TD3X(policy, None, _init_setup_model=False, **arguments)  # type: ignore[arg-type]
    model._choose_classes()
    policies.check_policy_kwargs(model.policy_class, model.policy_kwargs, model.n_quantiles)
