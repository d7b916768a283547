"""Loading models and replay buffers: what ``load`` needs to be told, and what it must not change."""

import io
import pathlib
from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import get_device

from sb3_td3x import modelfile
from sb3_td3x.exploration import LearningStarts
from sb3_td3x.replay import AUTOMATIC_CLASSES, check_fits

SelfLoadable = TypeVar("SelfLoadable", bound="Loadable")


class Loadable(OffPolicyAlgorithm):
    """An off-policy algorithm whose ``load`` leaves the random generators alone and explains bad files."""

    replay_buffer: ReplayBuffer
    n_steps: int
    learning_starts: LearningStarts  # type: ignore[assignment]
    _replay_buffer_is_automatic = False
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
        :param kwargs: attributes to change, for example ``gamma=0.95`` or ``learning_starts=0``
        :raises ModelFileError: for a damaged file or another algorithm's
        :raises ValueError: for an environment with other spaces, a value outside its range, or another ``n_quantiles``
        """
        saved = {**modelfile.BEFORE, **modelfile.check(path)}
        if kwargs.setdefault("n_quantiles", saved["n_quantiles"]) != saved["n_quantiles"]:
            raise ValueError(
                f"n_quantiles cannot be {kwargs['n_quantiles']!r}: the critics in the file have {saved['n_quantiles']}"
            )
        device = get_device(device)
        if "replay_buffer_class" in kwargs:
            kwargs["_replay_buffer_is_automatic"] = kwargs["replay_buffer_class"] is None
        elif "n_steps" in kwargs:
            kwargs.setdefault("_replay_buffer_is_automatic", saved.get("_replay_buffer_is_automatic", True))
        request = kwargs.pop("learning_starts", None)
        # SB3's zips hold a number alone: that is what the program did, whatever today's default is
        kwargs["_learning_starts_request"] = saved.get("_learning_starts_request", saved["learning_starts"])
        with modelfile.explained_errors(path), th.random.fork_rng(devices=[]):
            model = super().load(path, env, device, custom_objects, print_system_info, force_reset, _loading=True, **kwargs)
        del model._loading
        if request is not None:
            model.learning_starts = request
        if kwargs.get("seed") is not None:
            model.set_random_seed(model.seed)
        elif "noise_generator" not in saved:
            model._seed_noise(model.seed)
        return model

    def load_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """
        Load a replay buffer saved with ``save_replay_buffer``.

        :param path: the file
        :param truncate_last_traj: end a ``HerReplayBuffer``'s last, unfinished episode where it was cut
        :raises ValueError: for a buffer of another number of environments, other spaces or other n-step returns;
            the old one is kept then
        """
        before = self.replay_buffer
        try:
            super().load_replay_buffer(path, truncate_last_traj)
            n_steps = self.n_steps if self._replay_buffer_is_automatic else getattr(before, "n_steps", 1)
            check_fits(self.replay_buffer, self.n_envs, n_steps, self.observation_space, self.action_space)
        except BaseException:
            self.replay_buffer = before
            raise

    def _choose_replay_buffer_class(self) -> None:
        """Let SB3 choose again where it chose before, so that ``load(path, n_steps=1)`` takes effect."""
        chosen_by_sb3 = self._replay_buffer_is_automatic or (self.n_steps > 1 and self._is_n_step_of_a_zip())
        if chosen_by_sb3 and self.replay_buffer_class in AUTOMATIC_CLASSES:
            self.replay_buffer_class = None
            self.replay_buffer_kwargs = {
                key: value for key, value in self.replay_buffer_kwargs.items() if key not in ("n_steps", "gamma")
            }
        self._replay_buffer_is_automatic = self.replay_buffer_class is None

    def _is_n_step_of_a_zip(self) -> bool:
        """SB3's zips do not say who chose the buffer; only SB3 writes the model's own ``n_steps`` into its arguments."""
        own = self.replay_buffer_kwargs.get("n_steps") == self.n_steps
        return own and self.replay_buffer_class is NStepReplayBuffer and self._loading
