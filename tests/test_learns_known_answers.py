"""Two environments so small that value and best action are known exactly."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from tests.tools import model

GAMMA = 0.5


class Probe(gym.Env):
    """One episode of ``length`` steps; the observation is drawn from ``observations`` or counts the steps."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (1,))
    length = 1
    observations = (0.0,)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.seen = self.observe()
        return self.seen, {}

    def step(self, action):
        reward = float(self.reward(self.seen[0], float(action[0])))
        self.time += 1
        self.seen = self.observe()
        return self.seen, reward, self.time == self.length, False, {}

    def observe(self):
        return np.array([self.np_random.choice(self.observations)], dtype=np.float32)


class DelayedReward(Probe):
    """The target has to look one step ahead, and not past the end: Q(0) = gamma, Q(1) = 1."""

    length = 2

    def observe(self):
        return np.array([min(self.time, 1)], dtype=np.float32)

    def reward(self, observation, action):
        return observation

    expected = ((0.0, None, GAMMA), (1.0, None, 1.0))


class ActionForObservation(Probe):
    """The actor has to read the observation: its best action is half of it."""

    observations = (-1.0, 1.0)

    def reward(self, observation, action):
        return -((action - observation / 2) ** 2)

    expected = ((-1.0, -0.5, 0.0), (1.0, 0.5, 0.0))


@pytest.mark.parametrize("probe", [DelayedReward, ActionForObservation])
@pytest.mark.parametrize("n_quantiles", [1, 25])
def test_value_and_action_are_found(probe, n_quantiles):
    algorithm = model(
        probe(), learning_rate=3e-3, gamma=GAMMA, tau=0.05, learning_starts=100, batch_size=64,
        policy_kwargs={"net_arch": [32, 32]}, n_quantiles=n_quantiles,
    )  # fmt: skip
    algorithm.learn(1_000)
    for observation, best_action, value in probe.expected:
        seen = np.array([observation], dtype=np.float32)
        action, _ = algorithm.predict(seen, deterministic=True)
        if best_action is not None:
            assert action[0] == pytest.approx(best_action, abs=0.1)
        with th.no_grad():
            values = algorithm.critic(th.as_tensor(seen[None]), th.as_tensor(action[None]))
        for critic_value in values:
            assert critic_value.mean().item() == pytest.approx(value, abs=0.1)
