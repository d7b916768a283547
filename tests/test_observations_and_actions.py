"""Observations that networks cannot take are refused at once with the wrapper that helps; actions stay in their bounds."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer

from sb3_td3x import TD3XPolicy
from tests.tools import LineEnv, Samples, model

VECTOR = spaces.Box(-1, 1, (2,))


REFUSED = {
    "Discrete that starts at 5": (spaces.Discrete(3, start=5), "does not start at 0"),
    "MultiDiscrete of two axes": (spaces.MultiDiscrete([[2, 3], [2, 2]]), "has more than one axis"),
    "a single number": (spaces.Box(-1, 1, ()), "has no axis or is empty"),
    "an empty Box": (spaces.Box(-1, 1, (0,)), "has no axis or is empty"),
    "Dict with an empty Box": (spaces.Dict({"a": VECTOR, "b": spaces.Box(-1, 1, (0,))}), "^'b' .* has no axis or is empty"),
    **{
        f"Dict with the key {key!r}": (spaces.Dict({key: VECTOR}), "not allow for a module, or would take for code")
        for key in ("a.b", "", "keys", 'a"', "a\\", "a\rb", "a\nb")
    },
    "Dict with a Discrete that starts at 2": (spaces.Dict({"a": spaces.Discrete(3, start=2)}), "does not start at 0"),
    "Dict with the key 'type'": (spaces.Dict({"type": VECTOR}), "^'type' .* has a name"),
}


def policy_for(space):
    return "MultiInputPolicy" if isinstance(space, spaces.Dict) else "MlpPolicy"


@pytest.mark.parametrize("what", REFUSED)
def test_observations_that_networks_cannot_take_are_refused_with_the_wrapper_that_makes_them_work(what):
    space, problem = REFUSED[what]
    with pytest.raises(ValueError, match=problem) as error:
        model(Samples(space), policy_for(space))
    assert "gymnasium.wrappers.FlattenObservation" in str(error.value)
    assert "\n" not in str(error.value)
    if what != "an empty Box":
        model(gym.wrappers.FlattenObservation(Samples(space))).learn(30)


def test_hindsight_replay_of_observations_without_goals_is_refused_before_the_random_steps():
    space = spaces.Dict({"observation": VECTOR, "achieved_goal": VECTOR})
    with pytest.raises(ValueError, match="HerReplayBuffer needs desired_goal in the observations, which are Dict"):
        model(LineEnv(space), "MultiInputPolicy", replay_buffer_class=HerReplayBuffer)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_action_leaves_its_box_by_a_rounding_error(dtype):
    """SB3's arithmetic puts 7 % of the saturated actions of random boxes outside (float32)."""
    random = np.random.default_rng(0)
    policy = TD3XPolicy(VECTOR, spaces.Box(-1, 1, (1,), dtype), lambda _: 1e-3, net_arch=[4])
    for _ in range(400):
        low = random.uniform(-10, 10, 1).astype(dtype)
        policy.action_space = spaces.Box(low, (low + random.uniform(0.01, 20, 1)).astype(dtype), dtype=dtype)
        for saturated in (-1, 1):
            (action,) = policy.unscale_action(np.full((1, 1), saturated, np.float32))
            assert policy.action_space.contains(action.astype(dtype))


def test_saturated_actions_are_in_their_box_while_acting_and_in_predict():
    low, high = np.float32([0.1]), np.float32([0.7])  # 0.1 + 2 / 2 * (0.7 - 0.1) is above 0.7 in float32

    class Strict(LineEnv):
        def step(self, action):
            assert self.action_space.contains(action), action
            return super().step(action)

    algorithm = model(Strict(action_space=spaces.Box(low, high)), learning_starts=0, gradient_steps=0)
    for bias in (-30, 30):
        with th.no_grad():
            algorithm.actor.mu[-2].bias.fill_(bias)
        algorithm.learn(30)
        action, _ = algorithm.predict(np.zeros((1, 3), np.float32))
        assert algorithm.action_space.contains(action[0])
