"""Loading models and replay buffers: what ``load`` needs to be told, and what it must not change."""

import inspect
import io
import json
import pathlib
import warnings
import zipfile
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch as th
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.save_util import load_from_zip_file, open_path, recursive_getattr
from stable_baselines3.common.type_aliases import GymEnv, TensorDict
from stable_baselines3.common.utils import get_device
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x.common import buffers, files, validation
from sb3_td3x.common.transitions import AUTOMATIC_CLASSES, can_sample, check_fits, cut, stored_transitions
from sb3_td3x.errors import ModelFileError
from sb3_td3x.saving import fields, model_zip, parameters
from sb3_td3x.saving.pickle_files import read_buffer
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.exploration import Exploring

NOT_AFTER_IT_IS_BUILT = {"policy", "env", "_init_setup_model"}
"""Arguments of the constructor alone; ``load`` has an ``env`` of its own."""

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
        file = model_zip.read(path, strict=not trust)
        _require_known(cls, kwargs, file)
        # Nothing that the caller gives can be at fault when nothing is given
        blameless = not trust and env is None and not kwargs and not custom_objects
        kwargs["n_quantiles"] = n_quantiles = _n_quantiles(file, kwargs)
        device = get_device(device)
        given = dict(custom_objects or {})
        saved = file.data
        if not trust:
            with model_zip.explained_errors(file.name, everything=True):
                saved = fields.decoded(file, cls, given, kwargs)
            given = saved  # an attribute that is given is not unpickled by SB3: these are all that the file has
            if "policy_class" not in (custom_objects or {}):
                _require_size(file, saved, n_quantiles)
        if env is None:
            _require_no_hindsight(kwargs.get("replay_buffer_class", saved.get("replay_buffer_class")))
        replaced = (custom_objects or {}).get("learning_starts")
        request, window = kwargs.pop("learning_starts", replaced), kwargs.pop("stats_window_size", None)
        kwargs = _completed(kwargs, saved)
        with model_zip.explained_errors(file.name, everything=blameless), th.random.fork_rng(devices=[]):
            model = super().load(file.open(), env, device, given, print_system_info, force_reset, _loading=True, **kwargs)
        del model._loading
        if request is not None:
            model.learning_starts = request
        if window is not None:
            model._remember_episodes(validation.whole("stats_window_size", window, minimum=1))
        if kwargs.get("seed") is not None:
            model.set_random_seed(model.seed)
        elif "noise_generator" not in saved:
            model._seed_noise(model.seed)
        return model

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
        zipped, own_class = io.BytesIO(), self.policy_class
        self.policy_class = policies.class_for_sb3(own_class, self.policy_kwargs, self.n_quantiles)
        try:
            super().save(zipped, exclude, include)
        finally:
            self.policy_class = own_class
        with zipfile.ZipFile(zipped, "a") as archive:
            names = json.loads(archive.read("data"))
        model_zip.with_plain(zipped, *fields.encoded({name: self.__dict__[name] for name in names}))
        _write_whole(path, zipped.getbuffer())

    def _remember_episodes(self, count: int) -> None:
        """For the logged averages."""
        self._stats_window_size = count
        for name in ("ep_info_buffer", "ep_success_buffer"):
            if (known := getattr(self, name)) is not None:
                setattr(self, name, deque(known, maxlen=count))

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
        given: Any = load_path_or_dict
        if not isinstance(given, dict):
            file = model_zip.read(given)
            with model_zip.explained_errors(file.name, everything=True):
                _, given, _ = load_from_zip_file(file.open(), load_data=False, device=device)
        names = self._get_torch_save_params()[0]
        if exact_match and given.keys() != set(names):
            raise ValueError(f"there must be parameters of {', '.join(names)}, not of {', '.join(map(str, given))}")
        parameters.require_fit(given, {name: self._holder(name) for name in given}, is_whole=exact_match)
        super().set_parameters(given, exact_match, device)

    def _holder(self, name: str) -> th.nn.Module | th.optim.Optimizer:
        """Of a state dict of ``set_parameters``."""
        try:
            found = recursive_getattr(self, name)
        except AttributeError:
            found = None
        if not isinstance(found, (th.nn.Module, th.optim.Optimizer)):
            near = validation.did_you_mean(name, self._get_torch_save_params()[0])
            raise ValueError(f"the model has no network or optimiser {name!r}{near}")
        return found

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


def _require_known(cls: type, given: Iterable[str], file: model_zip.ModelFile) -> None:
    """SB3 would set any attribute, and learning would go on as if the misspelt one had not been given."""
    known = (_constructor_arguments(cls) | file.data.keys()) - NOT_AFTER_IT_IS_BUILT
    for name in given:
        if name not in known:
            raise TypeError(f"{cls.__name__} has no {name!r} to load with{validation.did_you_mean(name, known)}")


def _constructor_arguments(cls: type) -> set[str]:
    """By name, with those that a subclass passes on as ``**kwargs``."""
    names: set[str] = set()
    for one in cls.__mro__:
        if "__init__" in vars(one):
            found = inspect.signature(one).parameters.values()
            names |= {each.name for each in found}
            if not any(each.kind is each.VAR_KEYWORD for each in found):
                break
    return names


def _require_no_hindsight(buffer_class: Any) -> None:
    if inspect.isclass(buffer_class) and issubclass(buffer_class, HerReplayBuffer):
        raise ValueError("the model has a HerReplayBuffer, which asks the environment for rewards: give load its env=...")


def _completed(given: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The attributes to change, with those that follow from them and from what the file has or lacks."""
    given = dict(given)
    if "replay_buffer_class" in given:
        given["_replay_buffer_is_automatic"] = given["replay_buffer_class"] is None
    else:
        unless_saved = True if {"n_steps", "prioritization"} & given.keys() else None
        given.setdefault("_replay_buffer_is_automatic", saved.get("_replay_buffer_is_automatic", unless_saved))
    if "replay_buffer_kwargs" in given:
        given["replay_buffer_kwargs"] = given["replay_buffer_kwargs"] or {}
    # SB3's zips hold a number alone: that is what the program did, whatever today's default is
    given["_learning_starts_request"] = saved.get("_learning_starts_request", saved.get("learning_starts", validation.AUTO))
    return {**{name: value for name, value in model_zip.BEFORE.items() if name not in saved}, **given}


def _n_quantiles(file: model_zip.ModelFile, given: dict[str, Any]) -> int:
    """Of the critics in the file; another number cannot be asked for."""
    saved = file.data.get("n_quantiles", model_zip.BEFORE["n_quantiles"])
    if given.get("n_quantiles", saved) not in (saved, validation.AUTO):
        raise ValueError(f"n_quantiles cannot be {given['n_quantiles']!r}: the critics in the file have {saved}")
    return validation.whole("n_quantiles", saved, minimum=1)


def _write_whole(path: str | pathlib.Path | io.BufferedIOBase, content: memoryview) -> None:
    """Write a zip so that a process that is killed leaves the old one."""
    if not isinstance(path, (str, pathlib.Path)):
        open_path(path, "w", verbose=0).write(content)
        return
    named = pathlib.Path(path)
    place = named if named.suffix else pathlib.Path(f"{named}.zip")  # as SB3 names it
    place.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(place) as beside:
        beside.write_bytes(content)


def _require_size(file: model_zip.ModelFile, saved: dict[str, Any], n_quantiles: int) -> None:
    """The networks that the attributes describe are those whose tensors are in the file, and there are no others."""
    with model_zip.explained_errors(file.name, everything=True), zipfile.ZipFile(file.open()) as archive:
        tensors, variables = (
            th.load(io.BytesIO(archive.read(member)), map_location="cpu", weights_only=True)
            if member in archive.namelist()
            else None
            for member in ("policy.pth", "pytorch_variables.pth")
        )
        if variables:
            raise ModelFileError("it has tensors beside the networks")
        kind = saved["policy_class"]
        own = {key: value for key, value in saved["policy_kwargs"].items() if key != "device"}
        arguments = policies.arguments(kind, own, n_quantiles)
        spaces = {"observation_space": saved["observation_space"], "action_space": saved["action_space"]}
        parameters.require_policy(tensors, kind, {**spaces, "lr_schedule": lambda _: 0.0, **arguments})
