"""Loading models and replay buffers: what ``load`` needs to be told, and what it must not change."""

import io
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch as th
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv, TensorDict
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x.common import buffers, validation
from sb3_td3x.common.transitions import AUTOMATIC_CLASSES, can_sample, check_fits, cut, stored_transitions
from sb3_td3x.saving import model_zip
from sb3_td3x.saving.pickle_files import read_buffer
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.exploration import Exploring

PATIENCE = 10
"""How many times the transitions that updates need may be stored without the end of an episode before a warning."""

SelfLoadable = TypeVar("SelfLoadable", bound="Loadable")


class Loadable(Exploring):
    """An off-policy algorithm whose ``load`` leaves the random generators alone and explains bad files."""

    replay_buffer: ReplayBuffer
    n_steps: int
    n_quantiles: int
    prioritization: Literal["lap"] | None = None
    _replay_buffer_is_automatic: bool | None = False  # `None` for a zip that does not say
    _is_refilling = False  # while the replay buffer holds too little to train on, as after loading a model without it
    _loading = False  # while `load` rebuilds a model: its seed has been used already

    def _seed_noise(self, seed: int | None) -> None:
        raise NotImplementedError

    @classmethod
    def load(
        cls: type[SelfLoadable],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        *,
        trust: bool = False,
        **kwargs: Any,
    ) -> SelfLoadable:
        """
        Load a model saved by TD3X or by SB3's ``TD3``.

        The random generators of python, numpy and torch are left as they are, unless ``seed`` is given.

        :param path: the zip file
        :param env: environment to go on with; may have another number of environments than the saved one
        :param device: where to put the networks
        :param custom_objects: replacements for saved objects, by name
        :param print_system_info: print the versions of the saving and of this system
        :param force_reset: reset the environment before training
        :param trust: read the file as SB3 does, which runs whatever code it holds. Otherwise only plain values, tensors
            and known classes are read, and what the file holds beyond them has to come from ``custom_objects``
        :param kwargs: attributes to change, for example ``gamma=0.95`` or ``learning_starts=0``
        :raises UntrustedModelError: without ``trust``, naming the attribute that runs code and the ways to load it
        :raises ModelFileError: for a damaged file or another algorithm's
        :raises ValueError: for an environment with other spaces, a value outside its range, or another ``n_quantiles``
        :raises TypeError: for an attribute that there is not
        """
        return model_zip.load(
            super().load, cls, path, env, device, custom_objects, print_system_info, force_reset, trust, kwargs
        )

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """
        Save the model to a zip, which SB3's ``TD3`` reads too if it was made with ``n_quantiles=1``.

        Attributes that are no plain values, a function as ``learning_rate`` for example, are saved as SB3 does; loading
        them again takes ``trust=True`` or ``custom_objects``.

        :param path: the file; ``.zip`` is added to a name without suffix
        :param exclude: attributes to leave out
        :param include: attributes to save that are left out otherwise
        """
        policy_class = policies.class_for_sb3(self.policy_class, self.policy_kwargs, self.n_quantiles)
        model_zip.save(super().save, self, policy_class, path, exclude, include)

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        Take networks and optimisers from a zip or from what ``get_parameters`` gave. All of them fit, or none is taken.

        :param load_path_or_dict: a model's zip, or state dicts by name
        :param exact_match: refuse if a network, an optimiser or a tensor of theirs is missing; ``False`` takes what there is
        :param device: where a zip's tensors are put
        :raises ModelFileError: for tensors of other names, shapes or types, or a damaged file
        :raises ValueError: for a name that the model does not have, or one that is missing
        """
        model_zip.set_parameters(super().set_parameters, self, load_path_or_dict, exact_match, device)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        super().set_env(env, force_reset)
        if isinstance(self.replay_buffer, HerReplayBuffer):
            self.replay_buffer.env = self.env  # asked for the rewards of other goals; SB3 would go on asking the old one

    def load_replay_buffer(
        self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True, *, trust: bool = False
    ) -> None:
        """
        Load a replay buffer saved with ``save_replay_buffer``.

        :param path: the file
        :param truncate_last_traj: end the unfinished episodes where the buffer ends
        :param trust: read the file as SB3 does, which runs whatever code it holds
        :raises UntrustedModelError: without ``trust``, for a buffer of a class that is not known or with foreign objects
        :raises ModelFileError: for a damaged file
        :raises ValueError: for a buffer of another number of environments, other spaces, other n-step returns, or priorities
            that do not go with ``prioritization``. After any error the model has the buffer that it had
        """
        loaded = read_buffer(path, trust)
        n_steps = self.n_steps if self._replay_buffer_is_automatic else getattr(self.replay_buffer, "n_steps", 1)
        check_fits(loaded, self.n_envs, n_steps, self.observation_space, self.action_space)
        buffers.check_prioritization(self.prioritization, type(loaded))
        if isinstance(loaded, HerReplayBuffer):
            if self.env is None:
                raise ValueError("a HerReplayBuffer needs the model's environment: load the model with env=...")
            loaded.set_env(self.env)
        if truncate_last_traj:
            cut(loaded)
        loaded.device = self.device
        self.replay_buffer = loaded

    def _setup_learn(self, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        result = super()._setup_learn(*args, **kwargs)
        # A model loaded without its buffer goes on past `learning_starts`, where SB3 would train on one transition. And a
        # number of steps that nobody has asked for may end before the first episode does, which hindsight replay waits for
        self._is_refilling = self.num_timesteps > 0 or self._learning_starts_request == validation.AUTO
        if self._must_refill() and self.num_timesteps >= int(self.learning_starts):
            self.logger.log(f"Filling the replay buffer again: no update before {self._updates_start_at()} transitions")
        return result

    def _updates_start_at(self) -> int:
        """Transitions needed before the first update; a buffer smaller than ``learning_starts`` can only be full."""
        buffer = self.replay_buffer
        return min(int(self.learning_starts), buffer.buffer_size * buffer.n_envs)

    def _must_refill(self) -> bool:
        if self._is_refilling:
            stored, needed = stored_transitions(self.replay_buffer), self._updates_start_at()
            self._is_refilling = stored < needed or not can_sample(self.replay_buffer)
            if self._is_refilling and stored >= PATIENCE * needed:
                warnings.warn(
                    "nothing is learned yet: HerReplayBuffer draws from episodes that have ended, and none has. Give the "
                    "environment a time limit (max_episode_steps)",
                    stacklevel=2,
                )
        return self._is_refilling

    def _choose_replay_buffer_class(self) -> None:
        """Choose again where it was chosen before, so that ``load(path, n_steps=1)`` takes effect."""
        is_automatic = self._replay_buffer_is_automatic
        if is_automatic is None:  # only SB3 itself writes the model's own `n_steps` into the arguments of a buffer
            own = self.n_steps > 1 and self.replay_buffer_kwargs.get("n_steps") == self.n_steps
            is_automatic = own and self.replay_buffer_class is NStepReplayBuffer
        if is_automatic and self.replay_buffer_class in AUTOMATIC_CLASSES:
            self.replay_buffer_class = None
            self.replay_buffer_kwargs = {
                key: value for key, value in self.replay_buffer_kwargs.items() if key not in ("n_steps", "gamma")
            }
        self._replay_buffer_is_automatic = self.replay_buffer_class is None
        self.replay_buffer_class = buffers.buffer_class_for(self.prioritization, self.replay_buffer_class, self.n_steps)
