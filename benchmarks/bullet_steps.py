"""
PyBullet's walkers, stepped in half of the time: the physics and observations of ``pybullet_envs_gymnasium`` with few calls.

``python benchmarks/bullet_steps.py --check`` compares them. With a file and a number it is a worker of ``gpu_screen.py``.
"""

import json
import math
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

OBSERVATIONS, ACTIONS = 28, 8  # of the largest task; smaller ones are filled up with zeros
TASKS = {"HalfCheetah": (26, 6, 0.32), "Ant": (28, 8, 0.46), "Hopper": (15, 3, 0.26), "Walker2D": (22, 6, 0.30)}
"""Observations, actions, and milliseconds per step, by which tasks are shared out."""
TIME_LIMIT = 1000


class Exchange:
    """
    Arrays in shared memory, one row per environment.

    Processors that reorder writes (ARM) could read a number before the row that it announces.
    """

    command: np.ndarray  # number of the step that is asked for, -1 for none anymore
    done: np.ndarray  # number of the last step that each worker has made
    action: np.ndarray
    next: np.ndarray  # observation after the action; of an episode that ended, its last
    now: np.ndarray  # observation to act on: the same, or the first of the next episode
    reward: np.ndarray
    terminated: np.ndarray
    ended: np.ndarray  # by a termination or at the time limit
    episodes: np.ndarray
    score: np.ndarray
    length: np.ndarray

    def __init__(self, path: str, workers: int, envs: int, create: bool = False):
        shapes = {
            "command": (np.int64, (8,)), "done": (np.int64, (workers, 8)), "action": (np.float32, (envs, ACTIONS)),
            "next": (np.float32, (envs, OBSERVATIONS)), "now": (np.float32, (envs, OBSERVATIONS)),
            "reward": (np.float32, (envs,)), "terminated": (np.float32, (envs,)), "ended": (np.float32, (envs,)),
            "episodes": (np.int64, (envs,)), "score": (np.float64, (envs,)), "length": (np.int64, (envs,)),
        }  # fmt: skip
        sizes = [math.ceil(math.prod(shape) * np.dtype(kind).itemsize / 64) * 64 for kind, shape in shapes.values()]
        if create:
            Path(path).write_bytes(bytes(sum(sizes)))
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        begin = 0
        for (name, (kind, shape)), size in zip(shapes.items(), sizes, strict=True):
            setattr(self, name, np.frombuffer(memory, kind, math.prod(shape), begin).reshape(shape))
            begin += size


class Walker:
    """One environment. Its first reset is the original's, which loads the robot."""

    def __init__(self, task: str, seed: int):
        import gymnasium
        import pybullet
        import pybullet_envs_gymnasium  # noqa: F401

        self.task, self.bullet = task, pybullet
        self.env: Any = gymnasium.make(f"{task}BulletEnv-v0").unwrapped
        self.env.reset(seed=seed)
        self.robot, self.client = self.env.robot, self.env._p._client
        self.body = self.robot.objects[0]
        joints, parts = self.robot.ordered_joints, list(self.robot.parts.values())
        self.joints = [joint.jointIndex for joint in joints]
        self.power = [self.robot.power * joint.power_coef for joint in joints]
        self.limits = [(joint.lowerLimit, joint.upperLimit) for joint in joints]
        own = [part for part in parts if part.bodies[part.bodyIndex] == self.body]
        self.ground = [part.get_position() for part in parts[len(own) :]]  # counts in the mean position
        self.links = [part.bodyPartIndex for part in own]
        self.torso = self.robot.robot_body.bodyPartIndex
        self.feet = {part.bodyPartIndex: place for place, part in enumerate(self.robot.feet)}
        self.reset()

    def reset(self) -> np.ndarray:
        self.bullet.restoreState(self.env.stateId, physicsClientId=self.client)
        for joint in self.robot.ordered_joints:
            joint.reset_current_position(self.robot.np_random.uniform(low=-0.1, high=0.1), 0)
        self.contact = [0.0] * len(self.feet)
        self.initial_z: float | None = None
        observation = self.observe()
        self.potential = -self.distance / self.env.scene.dt
        self.steps, self.score = 0, 0.0
        return observation

    def observe(self) -> np.ndarray:
        bullet, where = self.bullet, {"physicsClientId": self.client}
        numbers: list[float] = []
        states = bullet.getJointStates(self.body, self.joints, **where)
        for (position, speed, _, _), (low, high) in zip(states, self.limits, strict=True):
            numbers += (2 * (position - low) / (high - low) - 1.0, 0.1 * speed)
        joints = np.array(numbers, np.float32)
        self.speeds = joints[1::2]
        self.at_limit = np.count_nonzero(np.abs(joints[0::2]) > 0.99)
        linked = [link for link in self.links if link >= 0]
        parts = dict(zip(linked, bullet.getLinkStates(self.body, linked, computeLinkVelocity=1, **where), strict=True))
        if -1 in self.links:
            base = bullet.getBasePositionAndOrientation(self.body, **where)
            parts[-1] = (*base, None, None, None, None, bullet.getBaseVelocity(self.body, **where)[0])
        places = [parts[link][0] for link in self.links] + self.ground
        x, y = (np.add.reduce(np.array([place[axis] for place in places])) / len(places) for axis in (0, 1))
        torso = parts[self.torso]
        z = torso[0][2]
        roll, self.pitch, yaw = bullet.getEulerFromQuaternion(torso[1])
        self.initial_z = z if self.initial_z is None else self.initial_z
        self.distance = math.hypot(y, 1e3 - x)
        angle = math.atan2(-y, 1e3 - x) - yaw
        cos, sin = math.cos(-yaw), math.sin(-yaw)
        vx, vy, vz = torso[6]
        body = [z - self.initial_z, math.sin(angle), math.cos(angle),
                0.3 * (cos * vx - sin * vy), 0.3 * (sin * vx + cos * vy), 0.3 * vz, roll, self.pitch]  # fmt: skip
        return np.concatenate([np.array(body, np.float32), joints, np.array(self.contact, np.float32)]).clip(-5, 5)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        bullet, where = self.bullet, {"physicsClientId": self.client}
        action = action[: len(self.joints)]
        forces = [power * min(1.0, max(-1.0, value)) for power, value in zip(self.power, action.tolist(), strict=True)]
        bullet.setJointMotorControlArray(self.body, self.joints, bullet.TORQUE_CONTROL, forces=forces, **where)
        bullet.stepSimulation(**where)
        observation = self.observe()
        height = float(observation[0]) + self.initial_z
        if self.task == "HalfCheetah":
            is_alive = abs(self.pitch) < 1.0 and not any(self.contact[place] for place in (1, 2, 4, 5))
        elif self.task == "Ant":
            is_alive = height > 0.26
        else:
            is_alive = height > 0.8 and abs(self.pitch) < 1.0
        self.contact = [0.0] * len(self.feet)  # in the next observation
        for point in bullet.getContactPoints(self.body, **where):
            if point[3] in self.feet and (point[2], point[4]) in self.env.ground_ids:
                self.contact[self.feet[point[3]]] = 1.0
        before, self.potential = self.potential, -self.distance / self.env.scene.dt
        costs = 2.0 * float(np.abs(action * self.speeds).mean()) + 0.1 * float(np.square(action).mean()) + 0.1 * self.at_limit
        reward = (1.0 if is_alive else -1.0) + self.potential - before - costs
        self.steps, self.score = self.steps + 1, self.score + reward
        return observation, reward, not is_alive and self.task != "HalfCheetah"


def work(path: str, worker: int) -> None:
    """Step the environments of one worker until there is no more to do."""
    if (os.cpu_count() or 1) > worker + 1:
        os.sched_setaffinity(0, {worker + 1})
    plan = json.loads(Path(path + ".json").read_text())
    exchange = Exchange(path, plan["workers"], len(plan["envs"]))
    mine = [(row, Walker(task, seed)) for row, (task, seed, owner) in enumerate(plan["envs"]) if owner == worker]
    for row, walker in mine:
        first = walker.reset()
        exchange.now[row, : len(first)] = first
    number, exchange.done[worker, 0], parent = 0, -1, os.getppid()
    while number >= 0:
        while exchange.command[0] == number:
            if os.getppid() != parent:
                return
        number = int(exchange.command[0])
        for row, walker in mine if number >= 0 else []:
            observation, exchange.reward[row], exchange.terminated[row] = walker.step(exchange.action[row])
            exchange.next[row, : len(observation)] = observation
            exchange.ended[row] = exchange.terminated[row] or walker.steps == TIME_LIMIT
            if exchange.ended[row]:
                exchange.score[row], exchange.length[row] = walker.score, walker.steps
                exchange.episodes[row] += 1
                observation = walker.reset()
            exchange.now[row, : len(observation)] = observation
        exchange.done[worker, 0] = number


def check() -> None:
    """Compare with the original environments over 1,200 random steps, and the time of both."""
    import gymnasium

    for task in TASKS:
        walker = Walker(task, seed=3)
        original: Any = gymnasium.make(f"{task}BulletEnv-v0").unwrapped
        original.reset(seed=3)
        difference = np.abs(original.reset()[0] - walker.observe()).max()
        random, seconds, steps = np.random.default_rng(0), np.zeros(2), 0
        for _ in range(1200):
            action = random.uniform(-1.2, 1.2, TASKS[task][1]).astype(np.float32)
            begin = time.perf_counter()
            observation, reward, ended, _, _ = original.step(action)
            middle = time.perf_counter()
            ours = walker.step(action)
            seconds += (middle - begin, time.perf_counter() - middle)
            steps += 1
            difference = max(difference, np.abs(observation - ours[0]).max(), abs(reward - ours[1]), ended != ours[2])
            if ended or steps == TIME_LIMIT:
                difference, steps = max(difference, np.abs(original.reset()[0] - walker.reset()).max()), 0
        print(f"{task}: largest difference {difference:.0e}; {seconds[0] / 1.2:.2f} and {seconds[1] / 1.2:.2f} ms per step")


if __name__ == "__main__":
    check() if sys.argv[1:] == ["--check"] else work(sys.argv[1], int(sys.argv[2]))
