"""
State-action embeddings, SALE (Fujimoto et al. 2023, https://arxiv.org/abs/2306.02451): an encoder learns to predict the
embedding of the next state, and critics and actor see its embeddings beside the observation.

The encoder learns with the critics' optimizer and from its own loss only. What the networks see are the embeddings of a
slow encoder, which follows it as the targets follow their networks, so that inputs do not jump. Shapes: ``batch``
transitions, ``dim`` numbers per embedding.
"""

import copy
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp
from torch import nn
from torch.nn import functional as F

from sb3_td3x.td3x import losses
from sb3_td3x.td3x.critics import QuantileCritic


class StateEncoder(nn.Module):
    """
    From features of a state to its embedding.

    :param features_dim: features of a state
    :param dim: numbers of an embedding; the two hidden layers are twice as wide
    """

    def __init__(self, features_dim: int, dim: int):
        super().__init__()
        self.layers = nn.Sequential(*create_mlp(features_dim, dim, [2 * dim, 2 * dim], nn.ELU))

    def forward(self, states: th.Tensor) -> th.Tensor:
        return losses.avg_l1_norm(self.layers(states))


class Encoder(nn.Module):
    """
    Embeddings of states, and of states with actions, which predict the next state's.

    :param features_dim: features of a state
    :param action_dim: numbers of an action
    :param dim: numbers of an embedding
    """

    def __init__(self, features_dim: int, action_dim: int, dim: int):
        super().__init__()
        self.state = StateEncoder(features_dim, dim)
        self.transition = nn.Sequential(*create_mlp(dim + action_dim, dim, [2 * dim, 2 * dim], nn.ELU))

    def forward(self, states: th.Tensor, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Embeddings of the states and of the states with the actions, ``(batch, dim)`` each."""
        state = self.state(states)
        return state, self.transition(th.cat([state, actions], dim=1))

    def loss(self, states: th.Tensor, actions: th.Tensor, next_states: th.Tensor) -> th.Tensor:
        """How far the predicted embeddings are from those of the next states, which get no gradient."""
        _, predicted = self(states, actions)
        with th.no_grad():
            target = self.state(next_states)
        return F.mse_loss(predicted, target)


def follower_of(network: nn.Module) -> Any:
    """A copy that receives no gradient."""
    return copy.deepcopy(network).requires_grad_(False)


class ObservationAndEmbedding(BaseFeaturesExtractor):
    """
    What an embedded actor sees: a normalized linear map of the state beside its embedding, ``3 * dim`` numbers.

    :param extractor: gives the features of a state
    :param dim: numbers of the embedding
    """

    def __init__(self, extractor: BaseFeaturesExtractor, dim: int):
        super().__init__(extractor._observation_space, 3 * dim)
        self.extractor = extractor
        self.linear = nn.Linear(extractor.features_dim, 2 * dim)
        self.slow_encoder = follower_of(StateEncoder(extractor.features_dim, dim))

    def forward(self, observations: Any) -> th.Tensor:
        states = self.extractor(observations)
        return th.cat([losses.avg_l1_norm(self.linear(states)), self.slow_encoder(states)], dim=1)


class NormalizedHead(nn.Module):
    """
    A normalized linear map of the first numbers of its input; the others pass.

    :param inputs: how many are mapped
    :param outputs: to how many
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, values: th.Tensor) -> th.Tensor:
        first, others = values.tensor_split([self.linear.in_features], dim=1)
        return th.cat([losses.avg_l1_norm(self.linear(first)), others], dim=1)


class EmbeddedCritic(ContinuousCritic):
    """
    SB3's critics, which see ``4 * dim`` numbers: a normalized linear map of state and action (each critic has its own) and
    both embeddings.

    ``encoder`` learns, ``slow_encoder`` follows it. The target critics' ``encoder`` is there for their tensors to be those of
    the critics; nobody reads it.

    :param embedding_dim: numbers of an embedding; the other parameters are those of ``ContinuousCritic``
    """

    def __init__(self, *, action_space: spaces.Box, features_dim: int, embedding_dim: int, **kwargs: Any):
        super().__init__(action_space=action_space, features_dim=features_dim, **kwargs)
        action_dim = get_action_dim(action_space)
        for network in self.q_networks:
            network[0] = nn.Linear(4 * embedding_dim, network[0].out_features)  # type: ignore[index, operator]
            network.insert(0, NormalizedHead(features_dim + action_dim, 2 * embedding_dim))  # type: ignore[operator]
        self.encoder = Encoder(features_dim, action_dim, embedding_dim)
        self.slow_encoder = follower_of(self.encoder)

    def forward(self, obs: th.Tensor, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        inputs = self._inputs(obs, actions)
        return tuple(network(inputs) for network in self.q_networks)

    def q1_forward(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return self.q_networks[0](self._inputs(obs, actions))

    def _inputs(self, obs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        states = self._states(obs)
        return th.cat([states, actions, *self.slow_encoder(states, actions)], dim=1)

    def _states(self, obs: th.Tensor) -> th.Tensor:
        return self.extract_features(obs, self.features_extractor)

    def encoder_loss(self, obs: th.Tensor, actions: th.Tensor, next_obs: th.Tensor) -> th.Tensor:
        """What the encoder alone descends."""
        return self.encoder.loss(self._states(obs), actions, self._states(next_obs))


class EmbeddedQuantileCritic(QuantileCritic, EmbeddedCritic):
    """``EmbeddedCritic`` with ``n_quantiles`` outputs each."""


def require_fixed(extractor: nn.Module) -> None:
    """
    :raises ValueError: for a features extractor that changes: the encoder's loss would train it too, or move its statistics
    """
    if any(True for _ in extractor.parameters()) or any("running_" in name for name, _ in extractor.named_buffers()):
        raise ValueError(
            f"embedding_dim is for features extractors without weights or statistics, not for {type(extractor).__name__}: "
            "leave it out, or compute the features in a wrapper of the environment"
        )
