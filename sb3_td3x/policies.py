"""
The policy: an actor, its critics and a slowly following copy of each.

The networks are SB3's, with SB3's parameter names (``actor.mu.*``, ``critic.qf0.*``), so that zips stay exchangeable.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import get_device
from stable_baselines3.td3 import policies as sb3
from torch import nn

from sb3_td3x import modelfile, parameters, rule
from sb3_td3x.pickled import read_policy
from sb3_td3x.settings import AUTO, whole

SelfPolicy = TypeVar("SelfPolicy", bound="TD3XPolicy")

TQC_QUANTILES = 25
"""Per critic, as in Kuznetsov et al. 2020 (https://arxiv.org/abs/2005.04269)."""


class CriticKind(NamedTuple):
    """
    What an update needs to know of a kind of critics, whose ``forward`` gives one tensor per critic.

    :param target: of the target critics' outputs, rewards, dones, discounts and quantiles to drop
    :param loss: of the critics' outputs and the target
    :param ascended: of the critic, observations and actions: the values whose mean the actor ascends
    """

    target: Callable[..., th.Tensor]
    loss: Callable[..., th.Tensor]
    ascended: Callable[..., th.Tensor]


SCALAR = CriticKind(
    rule.scalar_target,
    rule.scalar_critic_loss,
    lambda critic, observations, actions: critic.q1_forward(observations, actions),
)
QUANTILES = CriticKind(
    rule.quantile_target,
    rule.quantile_critic_loss,
    lambda critic, observations, actions: th.cat(critic(observations, actions), dim=1),
)


def kind_of(critic: ContinuousCritic) -> CriticKind:
    """A critic class names its kind; SB3's and a user's own have scalar values."""
    return getattr(critic, "kind", SCALAR)


class QuantileCritic(ContinuousCritic):
    """
    SB3's critics with ``n_quantiles`` outputs each, under the same parameter names (``qf0.*``).

    :param n_quantiles: width of the last layers; the others are those of ``ContinuousCritic``
    """

    kind = QUANTILES

    def __init__(self, *args: Any, n_quantiles: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.n_quantiles = n_quantiles
        for network in self.q_networks:
            network[-1] = nn.Linear(network[-1].in_features, n_quantiles)  # type: ignore[index, operator]

    def q1_forward(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """The first critic's value, ``(batch, 1)``: the mean of its quantiles."""
        return super().q1_forward(obs, actions).mean(dim=1, keepdim=True)


# Layers that do the same in training and in evaluation; of any other, a user's own among them, nothing is assumed
WITHOUT_MODES = {
    nn.Linear, nn.Conv2d, nn.Flatten, nn.Identity, nn.LayerNorm, nn.Sequential, nn.ModuleDict, nn.ModuleList,
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid,
    sb3.Actor, ContinuousCritic, QuantileCritic, FlattenExtractor, NatureCNN, CombinedExtractor,
}  # fmt: skip


class TD3XPolicy(sb3.TD3Policy):
    """
    Actor, ``n_critics`` critics and their targets, for flat observations.

    Targets start equal to their networks, receive no gradient and stay in evaluation mode. The critics start different.

    :param observation_space: what the actor and the critics see
    :param action_space: a bounded box; the networks work with actions scaled to [-1, 1]
    :param lr_schedule: learning rate as a function of the remaining progress (1 to 0)
    :param net_arch: hidden sizes, a list for both networks or ``{"pi": [...], "qf": [...]}``;
        ``None`` is [400, 300], the paper's, and [256, 256] behind ``NatureCNN``
    :param activation_fn: activation between hidden layers; the actor ends in tanh
    :param features_extractor_class: ``None`` is the class's ``default_features_extractor``
    :param features_extractor_kwargs: keyword arguments of the extractor
    :param normalize_images: divide images by 255
    :param optimizer_class: one optimiser for the actor, one for all critics
    :param optimizer_kwargs: keyword arguments of the optimiser, without the learning rate
    :param n_critics: number of critics, 1 or more; the target takes the smallest of their values
    :param share_features_extractor: one extractor for actor and critics, trained by the actor's loss only.
        Its target then moves with 2 tau, once with the actor and once with the critics
    :param n_quantiles: outputs of each critic; 1 is SB3's critic. ``TD3X`` passes its own ``n_quantiles``
    :raises ValueError: if ``n_critics`` or ``n_quantiles`` is below 1
    """

    default_features_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

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
    ):
        self.n_quantiles = whole("n_quantiles", n_quantiles, minimum=1)  # SB3's constructor makes the critics
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch,
            activation_fn,
            features_extractor_class or self.default_features_extractor,
            features_extractor_kwargs,
            normalize_images,
            optimizer_class,
            optimizer_kwargs,
            whole("n_critics", n_critics, minimum=1),
            share_features_extractor,
        )
        self.look_for_modes()

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> ContinuousCritic:
        """The critics, of the kind that the policy's arguments ask for."""
        if self.n_quantiles == 1:
            return super().make_critic(features_extractor)
        arguments = self._update_features_extractor(self.critic_kwargs, features_extractor)
        return QuantileCritic(**arguments, n_quantiles=self.n_quantiles).to(self.device)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        # SB3's policy can then still read what only has SB3's critics
        own = {} if self.n_quantiles == 1 else {"n_quantiles": self.n_quantiles}
        return {**super()._get_constructor_parameters(), **own}

    def look_for_modes(self) -> None:
        """Find out whether any layer works differently in training; only then is there a mode to switch at every step."""
        self.has_modes = not all(type(module) in WITHOUT_MODES for module in (*self.actor.modules(), *self.critic.modules()))

    def set_training_mode(self, mode: bool) -> None:
        """
        Switch actor and critics to training or evaluation; the targets stay in evaluation.

        SB3 walks over every module, twice per environment step. Networks in which no layer depends on the mode
        stay in evaluation here.
        """
        if self.has_modes or (self.training and not mode):
            super().set_training_mode(mode)

    @classmethod
    def load(cls: type[SelfPolicy], path: str, device: th.device | str = "auto", *, trust: bool = False) -> SelfPolicy:
        """
        Load a policy saved with its ``save``, by TD3X or by SB3's ``TD3``.

        :param path: the file
        :param device: where to put the networks
        :param trust: read the file as SB3 does, which runs whatever code it holds
        :raises UntrustedModelError: without ``trust``, for arguments that are more than spaces, numbers and known classes
        :raises ModelFileError: for a damaged file, or tensors that do not fit
        """
        if trust:
            return super().load(path, device)
        device = get_device(device)
        saved = read_policy(path, device)
        with modelfile.explained_errors(modelfile.name_of(path), everything=True):
            parameters.require_policy(saved["state_dict"], cls, saved["data"])
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


# A zip of SB3's TD3 names SB3's classes; their parameters are the same, so ours take their place.
FROM_SB3: dict[type, type[TD3XPolicy]] = {
    sb3.TD3Policy: TD3XPolicy,
    sb3.CnnPolicy: CnnPolicy,
    sb3.MultiInputPolicy: MultiInputPolicy,
}


def chosen_quantiles(request: int | str, policy_class: type[BasePolicy]) -> int:
    """The number of quantiles: ``"auto"`` is the paper's 25, and 1 for policies that only have scalar critics."""
    if request != AUTO:
        return int(request)
    return TQC_QUANTILES if _takes_quantiles(policy_class) else 1


def _takes_quantiles(policy_class: type[BasePolicy]) -> bool:
    taken = inspect.signature(policy_class).parameters
    passes_on = issubclass(policy_class, TD3XPolicy) and any(one.kind is one.VAR_KEYWORD for one in taken.values())
    return "n_quantiles" in taken or passes_on


def arguments(policy_class: type[BasePolicy], given: dict[str, Any], n_quantiles: int) -> dict[str, Any]:
    """
    A policy's keyword arguments: those the user has given, and the number of quantiles if there are several.

    :raises ValueError: for a class of policies that cannot have quantile critics
    """
    if "n_quantiles" in given:
        raise ValueError("n_quantiles is an argument of TD3X itself, not one of policy_kwargs")
    if n_quantiles == 1:
        return given
    if not _takes_quantiles(policy_class):
        raise ValueError(
            f"{policy_class.__name__} cannot have quantile critics (n_quantiles={n_quantiles}): "
            "derive it from TD3XPolicy and let it take n_quantiles"
        )
    return {**given, "n_quantiles": n_quantiles}
