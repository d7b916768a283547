"""Environments that do not end by themselves, for the tests of stops. Importing this module registers them."""

import time

import gymnasium as gym

from tests.tools import LineEnv


class Endless(LineEnv):
    """An episode without an end."""

    def __init__(self):
        super().__init__(length=float("inf"))


class Hanging(LineEnv):
    """Does not come back from its 11th step."""

    def step(self, action):
        if self.time == 10:
            time.sleep(10**6)
        return super().step(action)


gym.register("Endless-v0", Endless)
gym.register("Hanging-v0", Hanging)
