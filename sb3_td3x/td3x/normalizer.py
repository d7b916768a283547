"""Normalising observations inside the policy, with statistics that are learned while acting and saved with the networks."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import TensorDict
from torch import nn

EPSILON, CLIP = 1e-8, 10.0  # VecNormalize's


class RunningMoments(nn.Module):
    """
    Mean and variance of all observations so far, per number, as SB3's ``RunningMeanStd`` computes them.

    :param shape: of one observation
    """

    mean: th.Tensor
    var: th.Tensor
    count: th.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        # In float32 a million observations would hardly move the mean any more
        self.register_buffer("mean", th.zeros(shape, dtype=th.float64))
        self.register_buffer("var", th.ones(shape, dtype=th.float64))
        self.register_buffer("count", th.full((), 1e-4, dtype=th.float64))

    def update(self, batch: np.ndarray) -> None:
        """:param batch: ``(observations, *shape)``. The tensors stay the same, so compiled updates see what is in them."""
        new = th.as_tensor(batch, dtype=th.float64, device=self.mean.device)
        n, old = len(new), self.count.clone()
        total, delta = old + n, new.mean(0) - self.mean
        spread = self.var * old + new.var(0, correction=0) * n + delta**2 * old * n / total
        self.mean += delta * n / total
        self.var.copy_(spread / total)
        self.count.copy_(total)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        scaled = (observations - self.mean.to(observations.dtype)) / (self.var + EPSILON).sqrt().to(observations.dtype)
        return scaled.clamp(-CLIP, CLIP)


class ObservationNormalizer(nn.Module):
    """
    ``RunningMoments`` of an observation, or of each part of a Dict that is a vector. Images and discrete parts pass.

    :param space: the observation space
    :param normalized_images: whether images are between 0 and 1 already; as for SB3 any ``Box`` of three axes is one then
    :raises ValueError: if there is no vector in it
    """

    def __init__(self, space: spaces.Space, normalized_images: bool = False):
        super().__init__()
        parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
        self.keys = [
            key for key, part in parts.items()
            if isinstance(part, spaces.Box) and not is_image_space(part, normalized_image=normalized_images)
        ]  # fmt: skip
        shapes = [parts[key].shape for key in self.keys]
        if not self.keys:
            raise ValueError(f"normalize_observations is for vectors, and there are none in {space}")
        # Names of modules may hold no dots, keys of a Dict may
        self.moments: Sequence[RunningMoments] = nn.ModuleList(map(RunningMoments, shapes))  # type: ignore[arg-type, assignment]

    def update(self, observations: np.ndarray | Mapping[str, np.ndarray]) -> None:
        """:param observations: of all environments, as the policy gets them"""
        for key, moments in zip(self.keys, self.moments, strict=True):
            moments.update(observations[key] if isinstance(observations, Mapping) else observations)

    def forward(self, observations: th.Tensor | TensorDict) -> th.Tensor | TensorDict:
        if not isinstance(observations, dict):
            return self.moments[0](observations)
        scaled = {key: moments(observations[key]) for key, moments in zip(self.keys, self.moments, strict=True)}
        return {**observations, **scaled}


class NormalizesObservations(BaseFeaturesExtractor):
    """
    A features extractor behind an ``ObservationNormalizer``.

    :param extractor: whose features are returned
    :param normalizer: one for all networks of a policy
    """

    def __init__(self, extractor: BaseFeaturesExtractor, normalizer: ObservationNormalizer):
        super().__init__(extractor._observation_space, extractor.features_dim)
        self.extractor, self.normalizer = extractor, normalizer

    def forward(self, observations: th.Tensor | TensorDict) -> th.Tensor:
        return self.extractor(self.normalizer(observations))
