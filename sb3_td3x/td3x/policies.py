"""The policies: SB3's networks under SB3's parameter names (``actor.mu.*``, ``critic.qf0.*``), so that SB3 can load them."""

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import get_device
from stable_baselines3.td3 import policies as sb3
from torch import nn

from sb3_td3x.common.validation import AUTO, POLICY_CHECKS, did_you_mean
from sb3_td3x.saving.model_zip import PathOrFile, explained_errors, opened
from sb3_td3x.saving.safe_pickle import load_tensors
from sb3_td3x.td3x.critics import QuantileCritic
from sb3_td3x.td3x.normalizer import NormalizesObservations, ObservationNormalizer, RunningMoments

SelfPolicy = TypeVar("SelfPolicy", bound="TD3XPolicy")

OWN_DEFAULTS = {"n_quantiles": 1, "normalize_observations": False}  # of the arguments that SB3's policy does not have
TQC_QUANTILES = 25  # per critic, as in Kuznetsov et al. 2020 (https://arxiv.org/abs/2005.04269)

# Layers that compute the same in training and in evaluation mode. Nothing is assumed of other layers
WITHOUT_MODES = {
    nn.Linear, nn.Conv2d, nn.Flatten, nn.Identity, nn.LayerNorm, nn.Sequential, nn.ModuleDict, nn.ModuleList,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
    sb3.Actor, ContinuousCritic, QuantileCritic, FlattenExtractor, NatureCNN, CombinedExtractor,
    NormalizesObservations, ObservationNormalizer, RunningMoments,
}  # fmt: skip


def depends_on_mode(layer: nn.Module) -> bool:
    """Whether a layer may compute something else in training mode; so may a hook, as torch's `spectral_norm` has one."""
    has_hooks = bool(layer._forward_pre_hooks or layer._forward_hooks)
    return type(layer) not in WITHOUT_MODES or has_hooks or "forward" in vars(layer)


def copy_of(policy: BasePolicy, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy. Tensors of a graph, which a layer may keep of its last pass, are detached: torch refuses to copy them."""
    held = [value for module in policy.modules() for value in list(vars(module).values())]  # other threads may set more
    kept = {id(value): value.detach() for value in held if isinstance(value, th.Tensor) and not value.is_leaf}
    return copy.deepcopy(policy, kept | (memo or {}))


@contextmanager
def torch_settings() -> Iterator[None]:
    """Inside, gradients are enabled and new networks are float32, whatever the user's program has set."""
    default_dtype = th.get_default_dtype()
    th.set_default_dtype(th.float32)
    try:
        with th.inference_mode(False), th.enable_grad():
            yield
    finally:
        th.set_default_dtype(default_dtype)


if TYPE_CHECKING:
    class_load = classmethod
else:

    class class_load(classmethod):
        """A class method that warns when it is called on an object, which it does not change."""

        def __get__(self, instance, owner=None):
            load = super().__get__(instance, owner)
            if instance is None:
                return load

            @functools.wraps(load)
            def load_anew(*args, **kwargs):  # torch.jit and debuggers only look at it
                name = type(instance).__name__
                warnings.warn(f"load returns a new {name} and does not change this one: use what it returns", stacklevel=2)
                return load(*args, **kwargs)

            return load_anew


class TD3XPolicy(sb3.TD3Policy):
    """
    Actor, ``n_critics`` critics and their target networks, for flat observations.

    Target networks start equal to their networks, receive no gradient and stay in evaluation mode.

    :param observation_space: what the actor and the critics see
    :param action_space: a bounded box; the networks work with actions scaled to [-1, 1]
    :param lr_schedule: learning rate as a function of the remaining progress (1 to 0)
    :param net_arch: hidden sizes, a list for both networks or ``{"pi": [...], "qf": [...]}``;
        ``None`` is [400, 300], the paper's, and [256, 256] behind ``NatureCNN``
    :param activation_fn: activation between hidden layers; the actor ends in tanh
    :param features_extractor_class: ``None`` is the class's ``default_features_extractor``
    :param features_extractor_kwargs: keyword arguments of the extractor
    :param normalize_images: divide images by 255
    :param optimizer_class: class of the optimizer of the actor and of the one of all critics
    :param optimizer_kwargs: keyword arguments of the optimizer, without the learning rate
    :param n_critics: number of critics, 1 or more; the target is the smallest of their values, or the pool of their quantiles
        without the largest
    :param share_features_extractor: one extractor for actor and critics, trained by the actor's loss only.
        Its target network then moves by tau twice, once with the actor's and once with the critics'
    :param n_quantiles: outputs of each critic; 1 is SB3's critic. ``TD3X`` passes its own ``n_quantiles``
    :param normalize_observations: subtract the mean, divide by the standard deviation of the observations so far, which are
        counted while acting and saved with the networks (for ``desired_goal`` the achieved ones too), and clip to [-10, 10].
        Images and discrete observations pass as they are. It computes in float32: numbers far from 0 compared with their
        spread need ``VecNormalize``
    :raises ValueError: for observations that networks cannot take, or that have no vector to normalize
    """

    default_features_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    has_modes = True  # outside of `learn`, where any layer may be exchanged

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        n_critics: int = 2,
        share_features_extractor: bool = False,
        n_quantiles: int = 1,
        normalize_observations: bool = False,
    ):
        # Set before SB3's constructor, which makes the networks
        self.n_quantiles, self.normalize_observations = n_quantiles, normalize_observations
        super().__init__(
            observation_space, action_space, lr_schedule, net_arch, activation_fn,
            features_extractor_class or self.default_features_extractor, features_extractor_kwargs, normalize_images,
            optimizer_class, optimizer_kwargs, n_critics, share_features_extractor,
        )  # fmt: skip

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> ContinuousCritic:
        """Make the critics: SB3's, or quantile critics."""
        if self.n_quantiles == 1:
            return super().make_critic(features_extractor)
        arguments = self._update_features_extractor(self.critic_kwargs, features_extractor)
        return QuantileCritic(**arguments, n_quantiles=self.n_quantiles).to(self.device)

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        """Make the extractor, with ``normalize_observations`` behind one normalizer for all networks."""
        check_observation_space(self.observation_space, self.features_extractor_class)
        extractor = super().make_features_extractor()
        if not self.normalize_observations:
            return extractor
        is_first = not hasattr(self, "actor")
        normalizer = ObservationNormalizer(self.observation_space, not self.normalize_images) if is_first else self.normalizer
        return NormalizesObservations(extractor, normalizer)

    @property
    def normalizer(self) -> ObservationNormalizer:
        """The module that ``normalize_observations`` adds to all networks."""
        return self.actor.features_extractor.normalizer  # type: ignore[return-value]

    def unscale_action(self, scaled_action: np.ndarray) -> np.ndarray:
        """Scale actions from [-1, 1] to the bounds of the environment, which SB3's result can exceed by a rounding error."""
        return np.clip(super().unscale_action(scaled_action), self.action_space.low, self.action_space.high)  # type: ignore[attr-defined]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        # Without default values, so that SB3's policy can read a file with SB3's networks
        changed = {name: value for name, default in OWN_DEFAULTS.items() if (value := getattr(self, name)) != default}
        return {**super()._get_constructor_parameters(), **changed}

    def look_for_modes(self) -> None:
        """Find out whether any layer depends on the mode, which then has to be switched at every step of a ``learn``."""
        self.has_modes = any(map(depends_on_mode, (*self.actor.modules(), *self.critic.modules())))

    def set_training_mode(self, mode: bool) -> None:
        """
        Switch actor and critics to training or evaluation mode, unless they do not depend on it: SB3 visits every module
        three times per environment step. The target networks stay in evaluation mode.
        """
        if self.has_modes or (self.training and not mode):
            super().set_training_mode(mode)

    @class_load
    def load(cls: type[SelfPolicy], path: PathOrFile, device: th.device | str = "auto", *, trust: bool = False) -> SelfPolicy:
        """
        Load a policy saved with its ``save``, by TD3X or by SB3's ``TD3``.

        :param path: the file
        :param device: where to put the networks
        :param trust: read the file as SB3 does, which runs whatever code it holds
        :raises UntrustedModelError: without ``trust``, for arguments that are more than spaces, numbers and known classes
        :raises ModelFileError: for a damaged file, or tensors that do not fit
        """
        device = get_device(device)
        with torch_settings(), explained_errors(path, "the policy"), opened(path, suffix="pth") as file:
            if trust:
                return super().load(file, device)
            saved = load_tensors(file.read())
            policy = cls(**saved["data"])
            policy.load_state_dict(saved["state_dict"])
            return policy.to(device)


MlpPolicy = TD3XPolicy


class CnnPolicy(TD3XPolicy):
    """``TD3XPolicy`` for images: the default extractor is SB3's ``NatureCNN``."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(TD3XPolicy):
    """``TD3XPolicy`` for Dict observations: the default extractor is SB3's ``CombinedExtractor``."""

    default_features_extractor = CombinedExtractor


def name_for(space: spaces.Space) -> str:
    """The name of the policy for these observations; ``ValueError`` for images that are none for SB3."""
    if isinstance(space, spaces.Dict):
        return "MultiInputPolicy"
    if is_image_space(space):
        return "CnnPolicy"
    if isinstance(space, spaces.Box) and len(space.shape) > 2:
        images = "of three axes and uint8 from 0 to 255, not normalized, frames stacked as channels"
        advice = "--set policy=MlpPolicy (in Python policy='MlpPolicy') would flatten these"
        raise ValueError(f"CnnPolicy takes images {images}, not {space}: {advice}")
    return "MlpPolicy"


# The classes that replace those of a model saved by SB3's TD3; they have the same parameters
FROM_SB3: dict[type, type] = {sb3.TD3Policy: TD3XPolicy, sb3.CnnPolicy: CnnPolicy, sb3.MultiInputPolicy: MultiInputPolicy}


def class_for_sb3(policy_class: Any, policy_kwargs: dict[str, Any], n_quantiles: int) -> Any:
    """The policy class that a saved model names: SB3's if it has the same networks, so that SB3 can read the file."""
    if n_quantiles > 1 or policy_kwargs.keys() & OWN_DEFAULTS.keys():
        return policy_class
    return {replacement: sb3_class for sb3_class, replacement in FROM_SB3.items()}.get(policy_class, policy_class)


def choose_quantiles(request: int | str, policy_class: type[BasePolicy]) -> int:
    """The number of quantiles: ``"auto"`` is the paper's 25, or 1 for policies that only have scalar critics."""
    if request != AUTO:
        return int(request)
    known, takes_others = _parameters(policy_class)
    return TQC_QUANTILES if "n_quantiles" in known or (takes_others and issubclass(policy_class, TD3XPolicy)) else 1


def _parameters(policy_class: type[BasePolicy]) -> tuple[list[str], bool]:
    """The names of a policy's arguments, and whether it takes any others too."""
    parameters = inspect.signature(policy_class).parameters
    return list(parameters), any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def check_policy_kwargs(policy_class: type[BasePolicy], policy_kwargs: dict[str, Any], n_quantiles: int) -> dict[str, Any]:
    """Check the keyword arguments of a policy as far as possible without spaces, and add the number of quantiles."""
    if not isinstance(policy_kwargs, dict):
        raise ValueError(f"policy_kwargs must be a dict, not {policy_kwargs!r}")
    if "n_quantiles" in policy_kwargs:
        raise ValueError("n_quantiles is an argument of TD3X itself, not one of policy_kwargs")
    known, takes_others = _parameters(policy_class)
    for name in policy_kwargs:
        if name not in known and not takes_others:
            raise ValueError(f"policy_kwargs has no {name!r}{did_you_mean(str(name), known)}")
    if issubclass(policy_class, TD3XPolicy):
        checks = {name: check for name, check in POLICY_CHECKS.items() if name in policy_kwargs}
        policy_kwargs = {**policy_kwargs, **{name: check(name, policy_kwargs[name]) for name, check in checks.items()}}
    if n_quantiles == 1:
        return policy_kwargs
    if choose_quantiles(AUTO, policy_class) == 1:
        problem = f"{policy_class.__name__} cannot have quantile critics (n_quantiles={n_quantiles})"
        raise ValueError(f"{problem}: derive it from TD3XPolicy and let it take n_quantiles")
    return {**policy_kwargs, "n_quantiles": n_quantiles}


def is_module_name(key: str) -> bool:
    """Whether torch can make a part of that name; when it exports a network, it pastes the name into source code."""
    return bool(key) and key.isprintable() and not {*key} & {*'."\\'} and not hasattr(nn.ModuleDict(), key)


def check_observation_space(space: spaces.Space, features_extractor_class: type) -> None:
    """Refuse observations that the features extractor or SB3's preprocessing cannot handle: ``ValueError``."""
    if features_extractor_class is CombinedExtractor and not isinstance(space, spaces.Dict):
        raise ValueError(f"MultiInputPolicy's CombinedExtractor is for Dict observations, not for {space}: use MlpPolicy")
    if features_extractor_class in (FlattenExtractor, NatureCNN) and isinstance(space, spaces.Dict):
        owner = "MlpPolicy" if features_extractor_class is FlattenExtractor else "CnnPolicy"
        raise ValueError(f"{owner}'s extractor is not for Dict observations such as {space}: use MultiInputPolicy's")
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {"observation": space}
    for key, part in parts.items():
        if isinstance(part, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(part.start):
            problem = "does not start at 0"
        elif isinstance(part, spaces.Box) and (not part.shape or 0 in part.shape):
            problem = "has no axis or is empty"
        elif isinstance(part, spaces.MultiDiscrete) and len(part.shape) > 1:
            problem = "has more than one axis"
        elif features_extractor_class is CombinedExtractor and not is_module_name(key):
            problem = "has a name that torch does not allow for a module, or would take for code"
        else:
            continue
        advice = "wrap the environment with gymnasium.wrappers.FlattenObservation, which makes one vector, and use MlpPolicy"
        raise ValueError(f"{key!r} in the observations, {' '.join(str(part).split())}, {problem}: {advice}")
