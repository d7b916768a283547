"""Observation normalization inside the policy, with statistics that are counted while acting and saved with the networks."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import TensorDict
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

EPSILON, CLIP = 1e-8, 10.0  # the defaults of SB3's VecNormalize
CHUNK = 10_000  # transitions of a replay buffer that are counted at once


class RunningMoments(nn.Module):
    """Elementwise mean and variance of all observations so far, computed like SB3's ``RunningMeanStd``."""

    mean: th.Tensor
    var: th.Tensor
    count: th.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        # In float32 the mean would hardly move after a million observations
        self.register_buffer("mean", th.zeros(shape, dtype=th.float64))
        self.register_buffer("var", th.ones(shape, dtype=th.float64))
        self.register_buffer("count", th.full((), 1e-4, dtype=th.float64))

    def update(self, batch: np.ndarray) -> None:
        """:param batch: observations, ``(..., *shape)``"""
        new = th.as_tensor(batch, dtype=th.float64, device=self.mean.device).reshape(-1, *self.mean.shape)
        n, old_count = len(new), self.count.clone()
        total, delta = old_count + n, new.mean(0) - self.mean
        squares = self.var * old_count + new.var(0, correction=0) * n + delta**2 * old_count * n / total
        self.mean += delta * n / total  # in place: compiled updates need the tensors to stay the same objects
        self.var.copy_(squares / total)
        self.count.copy_(total)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        scaled = (observations - self.mean.to(observations.dtype)) / (self.var + EPSILON).sqrt().to(observations.dtype)
        return scaled.clamp(-CLIP, CLIP)


class ObservationNormalizer(nn.Module):
    """
    ``RunningMoments`` of an observation, or of each vector in a Dict. Images and discrete observations are not changed.

    :param normalized_images: whether images are between 0 and 1; SB3 then takes any ``Box`` of three axes for an image
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
        # A list, because names of modules may not contain dots and keys of a Dict may
        self.moments: Sequence[RunningMoments] = nn.ModuleList(map(RunningMoments, shapes))  # type: ignore[arg-type, assignment]

    def update(self, observations: np.ndarray | Mapping[str, np.ndarray]) -> None:
        """:param observations: as the policy gets them; any number of axes may precede those of one observation"""
        for key, moments in zip(self.keys, self.moments, strict=True):
            part = observations[key] if isinstance(observations, Mapping) else observations
            # Hindsight replay puts the one in the place of the other
            if key == "desired_goal" and "achieved_goal" in self.keys and observations["achieved_goal"].shape == part.shape:
                part = np.concatenate([part, observations["achieved_goal"]])
            moments.update(part)

    def count_stored(self, buffer: ReplayBuffer, normalization: VecNormalize | None) -> None:
        """Count all observations of a buffer that holds a tenth more than were counted: it was loaded or filled by hand."""
        if 1.1 * min(moments.count.item() for moments in self.moments) >= buffer.size() * buffer.n_envs:
            return
        for moments in self.moments:
            moments.load_state_dict(RunningMoments(moments.mean.shape).state_dict())  # forgets all, in place
        stored: np.ndarray | dict[str, np.ndarray] = buffer.observations
        rows = max(CHUNK // buffer.n_envs, 1)
        for start in range(0, buffer.size(), rows):
            steps = slice(start, min(start + rows, buffer.size()))
            chunk = {key: part[steps] for key, part in stored.items()} if isinstance(stored, dict) else stored[steps]
            self.update(chunk if normalization is None else normalization.normalize_obs(chunk))

    def forward(self, observations: th.Tensor | TensorDict) -> th.Tensor | TensorDict:
        if not isinstance(observations, dict):
            return self.moments[0](observations)
        scaled = {key: moments(observations[key]) for key, moments in zip(self.keys, self.moments, strict=True)}
        return {**observations, **scaled}


class NormalizesObservations(BaseFeaturesExtractor):
    """A features extractor behind a normalizer, which all networks of a policy share."""

    def __init__(self, extractor: BaseFeaturesExtractor, normalizer: ObservationNormalizer):
        super().__init__(extractor._observation_space, extractor.features_dim)
        self.extractor, self.normalizer = extractor, normalizer

    def forward(self, observations: th.Tensor | TensorDict) -> th.Tensor:
        return self.extractor(self.normalizer(observations))
