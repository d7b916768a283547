"""Environments that do not end by themselves, for the tests of stops. Importing this module registers them."""

import subprocess
import time

import gymnasium as gym

from tests.tools import LineEnv


class Endless(LineEnv):
    """An episode without an end, which says when it has come to its 100th step."""

    def __init__(self):
        super().__init__(length=float("inf"))

    def step(self, action):
        if self.time == 100:
            print("the 100th step", flush=True)
        return super().step(action)


class Hanging(LineEnv):
    """Does not come back from its 11th step, and says so before."""

    def step(self, action):
        if self.time == 10:
            print("no way back", flush=True)
            time.sleep(10**6)
        return super().step(action)


class Simulating(LineEnv):
    """Starts a program, and ends it when it is closed."""

    def __init__(self):
        super().__init__()
        self.program = subprocess.Popen(["sleep", "1000"])

    def close(self):
        self.program.terminate()
        self.program.wait()


gym.register("Endless-v0", Endless)
gym.register("Hanging-v0", Hanging)
gym.register("Simulating-v0", Simulating)
