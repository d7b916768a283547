"""The algorithm: SB3's off-policy loop around the update of ``update.py``."""

import math
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, ReplayBufferSamples, Schedule
from stable_baselines3.common.utils import FloatSchedule, update_learning_rate
from stable_baselines3.td3.policies import Actor, TD3Policy

from sb3_td3x.common import buffers, transitions, validation
from sb3_td3x.common.resumable import Resumable, explained_deaths
from sb3_td3x.errors import NonFiniteError
from sb3_td3x.saving import model_zip
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.compiled import Accelerated, choose
from sb3_td3x.td3x.diagnostics import Diagnosed
from sb3_td3x.td3x.edits import Editable
from sb3_td3x.td3x.exploration import Annealing, LearningStarts, check_action_bounds
from sb3_td3x.td3x.gradient_step import UpdateSettings
from sb3_td3x.td3x.onnx import Exportable

SelfTD3X = TypeVar("SelfTD3X", bound="TD3X")
NOT_SAVED = ("_loading", "_is_refilling", "_maker", "_acting", "_pace", "_statistics")
"""Attributes that are made anew when they are needed."""


class TD3X(Editable, Accelerated, Diagnosed, Resumable, Exportable):
    """
    Twin Delayed DDPG (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477) for Stable-Baselines3.

    Keywords, order and meaning are those of SB3's ``TD3``; of their defaults only those of ``learning_starts`` and
    ``action_noise`` differ. The critics have quantiles; ``n_quantiles=1`` is SB3's critic. Values are checked when the
    model is built or loaded and where an attribute is set; a whole number may be given as a float (``1e6``).

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"`` or a ``TD3Policy`` class
    :param env: a Gymnasium environment, an SB3 ``VecEnv`` or a registered name; its actions a bounded ``Box``
    :param learning_rate: of both optimisers: a number, or a function of the remaining progress (1 to 0)
    :param buffer_size: transitions kept in the replay buffer, over all environments; the oldest are overwritten
    :param learning_starts: environment steps with random actions before the actor acts and training starts.
        ``"auto"`` is 2 % of the steps asked for in ``learn``, at least 100 and at most 10,000
    :param batch_size: transitions per update
    :param tau: step of the targets towards their networks, in [0, 1], with every actor update
    :param gamma: discount factor, in [0, 1]
    :param train_freq: train after this many steps, or ``(n, "step")``, or ``(n, "episode")`` with one environment
    :param gradient_steps: updates each time; -1 means as many as environment steps since the last time
    :param action_noise: exploration noise. A float is the standard deviation of Gaussian noise in the action
        space scaled to [-1, 1]; ``(first, last, steps)`` falls (or grows) from first to last over so many environment
        steps; an SB3 ``ActionNoise`` is used as it is; ``None`` is no noise
    :param replay_buffer_class: ``None`` chooses by ``n_steps`` and the observation space
    :param replay_buffer_kwargs: keyword arguments of the replay buffer
    :param optimize_memory_usage: store each observation once; needs
        ``replay_buffer_kwargs={"handle_timeout_termination": False}`` (SB3 issue #934)
    :param n_steps: steps summed in the return before the target network's value; not for Dict observations
    :param policy_delay: critic updates per update of the actor and the targets
    :param target_policy_noise: standard deviation of the target smoothing noise, scaled action space
    :param target_noise_clip: largest absolute value of that noise
    :param stats_window_size: episodes in the logged averages
    :param tensorboard_log: folder for TensorBoard; ``None`` for none
    :param policy_kwargs: keyword arguments of the policy, see ``TD3XPolicy``
    :param verbose: 0 no output, 1 information, 2 debug messages
    :param seed: seed of every random generator; ``None`` leaves the global ones as they are
    :param device: ``"auto"`` is CUDA where there is one, else the CPU. Not tested on a GPU yet
    :param _init_setup_model: build the networks now; only ``load`` turns this off
    :param accelerate: how updates are made: ``"plain"``, ``"compiled"``, or ``"auto"``, which chooses
        when a run starts and says why. All make the same updates up to rounding
    :param precision: ``"bf16"`` multiplies the hidden layers' matrices in bfloat16 during updates; all else is float32
    :param n_quantiles: outputs of each critic. 1 is TD3's critic; more are truncated quantile critics
        (Kuznetsov et al. 2020, https://arxiv.org/abs/2005.04269), which only TD3X can load. ``"auto"`` is the paper's 25, and
        1 for a policy class that has scalar critics only, such as a subclass of SB3's ``TD3Policy``
    :param top_quantiles_to_drop_per_net: of the target critics' pooled quantiles, how many of the largest are left out
        for each critic: 0 to ``n_quantiles`` - 1. The more, the lower the targets. Without effect with one quantile
    :param qf_learning_rate: of the critics' optimiser, as ``learning_rate``, which is the actor's alone then; ``None`` is
        ``learning_rate``
    :param max_grad_norm: largest 2-norm of the actor's gradient, and of all critics' (and the encoder's) together; longer
        ones are scaled down to it. ``None`` is no bound
    :param prioritization: ``"lap"`` draws transitions more often whose error was large (Fujimoto et al. 2020,
        https://arxiv.org/abs/2007.06049), from a ``PrioritizedReplayBuffer``: no Dict observations, no n-step returns.
        Scalar critics then have Huber loss
    :raises ValueError: for a value outside its range, or an environment that needs another policy
    :raises AssertionError: SB3's own, for a discrete or unbounded action space
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": policies.MlpPolicy,
        "CnnPolicy": policies.CnnPolicy,
        "MultiInputPolicy": policies.MultiInputPolicy,
    }
    policy: TD3Policy
    replay_buffer: ReplayBuffer
    n_quantiles: int

    def __init__(
        self,
        policy: str | type[TD3Policy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        buffer_size: int = 1_000_000,
        learning_starts: LearningStarts = "auto",
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | float | Annealing | None = 0.1,
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
            policy,
            env,
            learning_rate,
            buffer_size,
            learning_starts,
            batch_size,
            tau,
            gamma,
            train_freq,
            gradient_steps,
            action_noise=action_noise,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=dict(replay_buffer_kwargs or {}),  # SB3 writes into it
            optimize_memory_usage=optimize_memory_usage,
            n_steps=n_steps,
            policy_kwargs=policy_kwargs,
            stats_window_size=validation.whole("stats_window_size", stats_window_size, minimum=1),
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
            sde_support=False,
            supported_action_spaces=(spaces.Box,),
            support_multi_env=True,
        )
        self.policy_delay = policy_delay
        self.target_policy_noise = target_policy_noise
        self.target_noise_clip = target_noise_clip
        self.accelerate, self.precision = accelerate, precision
        self.n_quantiles = n_quantiles  # type: ignore[assignment]  # a number from _setup_model on
        self.top_quantiles_to_drop_per_net = top_quantiles_to_drop_per_net
        self.qf_learning_rate, self.max_grad_norm = qf_learning_rate, max_grad_norm
        self.prioritization = prioritization
        self.update_path: str | None = None  # what "auto" chose for this run
        self.format_version = model_zip.FORMAT_VERSION
        self._replay_buffer_is_automatic = False
        # Noise of the target actions; its state is part of the zip
        self.noise_generator = th.Generator()

        if _init_setup_model:
            self._setup_model()
            choose(self.accelerate, self.policy)  # a path that cannot run is refused now, not when training starts

    # The networks are looked up, not kept: they stay right when the policy is replaced
    @property
    def actor(self) -> Actor:  # type: ignore[override]
        return self.policy.actor

    @property
    def actor_target(self) -> Actor:
        return self.policy.actor_target

    @property
    def critic(self) -> ContinuousCritic:
        return self.policy.critic

    @property
    def critic_target(self) -> ContinuousCritic:
        return self.policy.critic_target

    def _setup_model(self) -> None:
        if not hasattr(self, "action_space"):
            raise ValueError("a model is made for an environment: TD3X(policy, env)")
        check_action_bounds(self.action_space)  # type: ignore[arg-type]
        self._settle()
        self.action_noise = self.action_noise  # checked, now that a loaded model has its action space too
        given = self.policy_kwargs
        self.policy_kwargs = policies.arguments(self.policy_class, given, self.n_quantiles)
        super()._setup_model()
        self.policy_kwargs = given
        policies.require_quantiles(self.policy, self.n_quantiles)
        if self.n_steps > 1:
            transitions.require_n_steps(self.replay_buffer, self.n_steps)
        policies.require_one_step(self.policy, self.replay_buffer)

    def _settle(self) -> None:
        """Check and choose what needs no environment."""
        self._check_settings()
        self.policy_class = policies.FROM_SB3.get(self.policy_class, self.policy_class)
        self._choose_quantiles()
        validation.checked_drop(self.top_quantiles_to_drop_per_net, self.n_quantiles)
        self._choose_replay_buffer_class()
        transitions.require_known_goals(self.replay_buffer_kwargs)

    def _choose_quantiles(self) -> None:
        request, self.n_quantiles = self.n_quantiles, policies.chosen_quantiles(self.n_quantiles, self.policy_class)
        if request != self.n_quantiles == 1 and self.verbose:
            print(f"n_quantiles: 1 ({self.policy_class.__name__} has scalar critics only)")  # noqa: T201  # as SB3 does here

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        self._convert_train_freq()
        transitions.require_stored_as_seen(self.env)  # type: ignore[arg-type]  # SB3 says itself that `learn` needs one
        self.replay_buffer.device = self.device  # a copy or a pickle of the model has left it on the host
        self._statistics = transitions.KeptStatistics(self._vec_normalize_env)
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        first = self._last_obs if self._vec_normalize_env is None else self._last_original_obs
        try:
            with self._statistics.kept_if_finite():
                transitions.require_finite(first, "observation", "the reset of the environment")  # type: ignore[arg-type]
        except NonFiniteError:
            self._last_obs = None  # or the next `learn` would not reset
            raise
        if isinstance(self.policy, policies.TD3XPolicy):
            self.policy.look_for_modes()
        return result

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        """Not below 0, as SB3's is where the last rollout goes past the end: a schedule may be negative there."""
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def learn(  # type: ignore[override]  # SB3's parameters by name
        self: SelfTD3X,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "TD3X",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        resume: bool = False,
    ) -> SelfTD3X:
        """
        Train for ``total_timesteps`` environment steps.

        :param total_timesteps: steps to make, over all environments; ``5e5`` is accepted
        :param callback: one or several SB3 callbacks, called at every step
        :param log_interval: episodes between two log outputs; ``None`` for none
        :param tb_log_name: name of the run in TensorBoard
        :param reset_num_timesteps: ``False`` continues the step counter and the current episode
        :param progress_bar: show SB3's progress bar (needs tqdm and rich)
        :param resume: go on to ``total_timesteps`` in all with a model from ``resume_run``
        :raises ValueError: for a layer around ``VecNormalize`` that changes observations after they are stored
        :raises NonFiniteError: a NaN or infinity from the environment or in an update; no step is made with it
        :raises EnvironmentDiedError: if the process of an environment has ended
        :return: the model itself
        """
        if total_timesteps != math.inf:  # until a callback stops it
            total_timesteps = validation.whole("total_timesteps", total_timesteps, minimum=0)
        if log_interval is not None:
            log_interval = validation.whole("log_interval", log_interval, minimum=1)
        with explained_deaths(self.env):
            super().learn(
                total_timesteps,
                callback,
                log_interval,
                tb_log_name,
                reset_num_timesteps=reset_num_timesteps,
                progress_bar=progress_bar,
                resume=resume,
            )
        return self

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Make updates of the critics, and every ``policy_delay``-th of the actor and the targets.

        While a model that was loaded without its replay buffer refills it, nothing is updated.

        :param gradient_steps: number of updates
        :param batch_size: transitions per update
        :raises NonFiniteError: naming the loss and the update; that update and later ones change nothing
        """
        if self._must_refill():
            return self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.policy.set_training_mode(True)
        self._set_learning_rates()
        if isinstance(self.replay_buffer, NStepReplayBuffer):
            self.replay_buffer.gamma = self.gamma  # the model's attribute is the truth
        rule_settings = self._rule_settings()
        update, losses = self._update_maker(), []
        try:
            with update.running(self.batch_size):
                for number in range(self._n_updates + 1, self._n_updates + gradient_steps + 1):
                    batch = transitions.sample(self.replay_buffer, batch_size, self._vec_normalize_env)
                    with_actor = number % self.policy_delay == 0
                    losses.append(update(batch, self._draw_noise(batch), rule_settings, with_actor, number))
                    if (errors := losses[-1].errors) is not None:
                        self.replay_buffer.update_priorities(errors)  # type: ignore[attr-defined]
        finally:
            self._n_updates = max(self._n_updates, update.last_good)

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name in ("critic", "actor", "encoder"):
            values = [value for one in losses if (value := getattr(one, name)) is not None]
            if values:
                self.logger.record(f"train/{name}_loss", th.stack(values).mean().item())

    def _rule_settings(self) -> UpdateSettings:
        return UpdateSettings(
            self.gamma,
            self.tau,
            self.target_policy_noise,
            self.target_noise_clip,
            self.max_grad_norm,
            validation.checked_drop(self.top_quantiles_to_drop_per_net, getattr(self.critic, "n_quantiles", 1)),
            buffers.check_prioritization(self.prioritization, type(self.replay_buffer)),
        )

    def _set_learning_rates(self) -> None:
        validation.checked_rate("learning_rate", self.lr_schedule(self._current_progress_remaining))
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        if self.qf_learning_rate is not None:
            schedule = FloatSchedule(self.qf_learning_rate)
            rate = validation.checked_rate("qf_learning_rate", schedule(self._current_progress_remaining))
            update_learning_rate(self.critic.optimizer, rate)
            self.logger.record("train/qf_learning_rate", rate)

    def _draw_noise(self, batch: ReplayBufferSamples) -> th.Tensor:
        """Standard normal numbers in the shape of the actions, from the algorithm's own generator."""
        actions = batch.actions
        return th.randn(actions.shape, generator=self.noise_generator, dtype=actions.dtype).to(actions.device)

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        normalizer = self._vec_normalize_env
        raw_obs, raw_reward = (
            (new_obs, reward) if normalizer is None else (normalizer.get_original_obs(), normalizer.get_original_reward())
        )
        with self._statistics.kept_if_finite():
            transitions.require_finite_step(raw_obs, raw_reward, dones, infos, f"environment step {self.num_timesteps}")
        if getattr(self.policy, "normalize_observations", False):
            self.policy.normalizer.update(self._last_obs)  # type: ignore[operator, union-attr]  # what is stored now
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Seed python, numpy, torch, the action space, the environment and the target noise.

        :param seed: ``None`` leaves all but the target noise as they are; that follows torch's global generator then
        """
        if self._loading:
            if self.device.type == "cuda" and self.seed is not None:  # what SB3's seeding does beside the generators
                th.backends.cudnn.deterministic, th.backends.cudnn.benchmark = True, False
            return
        super().set_random_seed(seed)
        self._seed_noise(seed)

    def _seed_noise(self, seed: int | None) -> None:
        if seed is None:
            with th.random.fork_rng(devices=[]):
                seed = int(th.randint(2**31, ()))
        self.noise_generator.manual_seed(seed)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *NOT_SAVED]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "actor.optimizer", "critic.optimizer"], []
