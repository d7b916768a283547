"""A network of your own: a features extractor, different layers for actor and critics, another optimizer."""

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from sb3_td3x import TD3X


class Angles(BaseFeaturesExtractor):
    """Pendulum's observation (cos, sin, speed), through one linear layer and layer normalization."""

    def __init__(self, observation_space: spaces.Box, features_dim: int = 32):
        super().__init__(observation_space, features_dim)
        self.layers = nn.Sequential(nn.Linear(observation_space.shape[0], features_dim), nn.LayerNorm(features_dim), nn.ELU())

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.layers(observations)  # (batch, observation size) -> (batch, features_dim)


th.set_num_threads(1)  # more are much slower beside other programs
network = {
    "features_extractor_class": Angles,
    "features_extractor_kwargs": {"features_dim": 32},
    "net_arch": {"pi": [64, 64], "qf": [128, 128]},  # the actor's hidden layers and each critic's
    "activation_fn": nn.ELU,
    "n_critics": 3,
    "optimizer_class": th.optim.AdamW,
    "optimizer_kwargs": {"weight_decay": 1e-4},
}
model = TD3X("MlpPolicy", "Pendulum-v1", policy_kwargs=network, seed=0)
model.learn(10_000)
model.save("pendulum_custom")
TD3X.load("pendulum_custom", trust=True)  # a class of your own needs trust or custom_objects
