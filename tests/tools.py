"""Small environments and helpers that several tests share."""

import io
import math
import os
from collections import deque
from functools import partial

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X

SMALL = {"net_arch": [16, 12]}
SOAK = os.environ.get("TD3X_SOAK") == "1"


class LineEnv(gym.Env):
    """
    A point on a line, pushed by the action; reward is minus the distance to 0. Determined by the reset seed.

    :param observation_space: what the observation is shaped and typed like
    :param action_space: any bounded box
    :param length: steps to the end of an episode
    :param terminates: the end is a termination, otherwise a time limit
    """

    def __init__(self, observation_space=None, action_space=None, length=20, terminates=False):
        self.observation_space = observation_space or spaces.Box(-10, 10, (3,))
        self.action_space = action_space or spaces.Box(-1, 1, (1,))
        self.length, self.terminates = length, terminates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.time = float(self.np_random.uniform(-1, 1)), 0
        return self._observe(self.observation_space), {}

    def step(self, action):
        low, high = self.action_space.low, self.action_space.high
        self.position += 0.2 * float(np.mean(2 * (action - low) / (high - low) - 1))
        self.time += 1
        over = self.time >= self.length
        observation = self._observe(self.observation_space)
        return observation, -abs(self.position), over and self.terminates, over and not self.terminates, {}

    def _observe(self, space):
        if isinstance(space, spaces.Dict):
            return {key: self._observe(inner) for key, inner in space.spaces.items()}
        if space.dtype == np.uint8:
            return np.full(space.shape, int(np.clip(128 + 40 * self.position, 0, 255)), np.uint8)
        return np.clip(np.full(space.shape, self.position), -10, 10).astype(space.dtype)


class Samples(LineEnv):
    """Its observations are drawn from the space, whatever that is."""

    def _observe(self, space):
        return space.sample()


class Spoilt(LineEnv):
    """
    Returns something else than it should at one step of all its episodes, or does not return.

    :param at: the number of that step, from 1 on
    :param spoil: takes what the step would return and gives what it returns
    """

    def __init__(self, at, spoil, **kwargs):
        super().__init__(**kwargs)
        self.left, self.spoil = at, spoil

    def step(self, action):
        self.left -= 1
        result = super().step(action)
        return self.spoil(*result) if self.left == 0 else result


def without_observation(observation, *rest):
    """Spoils a step with an observation of NaN."""
    return observation * np.nan, *rest


class WithoutSpec(DummyVecEnv):
    """As of a simulator of another library, which Gymnasium has not made."""

    def get_attr(self, attr_name, indices=None):
        if attr_name == "spec":
            raise AttributeError(attr_name)
        return super().get_attr(attr_name, indices)


def line_envs(count):
    return DummyVecEnv([LineEnv] * count)


OBSERVATIONS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)  # four of a ``LineEnv``


class BatchNorm(FlattenExtractor):
    """In training mode every forward pass moves its statistics."""

    def __init__(self, observation_space):
        super().__init__(observation_space)
        self.norm = th.nn.BatchNorm1d(self.features_dim)

    def forward(self, observations):
        return self.norm(super().forward(observations))


def model(env=None, policy="MlpPolicy", *, cls=TD3X, **kwargs):
    """A model that is quick to build and to train; its critics are TD3's, unless a test asks for quantiles."""
    kwargs = {"policy_kwargs": SMALL, "buffer_size": 1000, "learning_starts": 10, "batch_size": 8, "seed": 0, **kwargs}
    if issubclass(cls, TD3X):
        kwargs.setdefault("n_quantiles", 1)
    return cls(policy, env or LineEnv(), device="cpu", **kwargs)


def reloaded(algorithm, cls=TD3X, **kwargs):
    """What its saved model is loaded as."""
    file = io.BytesIO()
    algorithm.save(file)
    return cls.load(file, **kwargs)


def without_output(algorithm):
    """A model on which ``train`` may be called before ``learn``."""
    algorithm.set_logger(Logger(None, []))
    return algorithm


class Calls(BaseCallback):
    """Its hooks are functions that are given the callback, such as ``_on_rollout_start``; after a step training continues."""

    resumable = ()

    def __init__(self, _on_step=lambda callback: None, **hooks):
        super().__init__()
        self.step = _on_step
        for name, hook in hooks.items():
            setattr(self, name, partial(hook, self))

    def _on_step(self):
        self.step(self)
        return True


def at(step, act):
    """A callback that calls ``act`` with the model, once so many steps are made."""
    return Calls(lambda callback: callback.num_timesteps == step and act(callback.model))


SPACES = spaces.Box(-10, 10, (3,)), spaces.Box(-1, 1, (1,))


def moved(buffer):
    """By how much each stored transition changes the observation."""
    return (buffer.next_observations - buffer.observations)[: buffer.size()]


def filled(cls, transitions, size=32, n_envs=2):
    """Observation, reward and the rest tell which transition of which environment they belong to."""
    buffer = cls(size * n_envs, *SPACES, device="cpu", n_envs=n_envs)
    for step in range(transitions):
        number = np.arange(n_envs) + 100.0 * step
        observation = np.repeat(number[:, None], 3, axis=1).astype(np.float32)
        done = np.array([step % 3 == 0] * n_envs)
        infos = [{"TimeLimit.truncated": step % 6 == 0}] * n_envs
        buffer.add(observation, observation + 0.5, (number % 2)[:, None], number, done, infos)
    return buffer


def random_batch(seed, batch=8, action_dim=1, dtype=th.float32):
    """A batch whose numbers are exact in float32, with some terminations."""
    random = np.random.default_rng(seed)

    def tensor(values):
        return th.as_tensor(values.astype(np.float32)).to(dtype)

    return ReplayBufferSamples(
        observations=tensor(random.normal(size=(batch, 3))),
        actions=tensor(random.uniform(-1, 1, size=(batch, action_dim))),
        next_observations=tensor(random.normal(size=(batch, 3))),
        dones=tensor(random.random((batch, 1)) < 0.3),
        rewards=tensor(random.normal(size=(batch, 1))),
    )


def feed(algorithm, batches, noises):
    """Make ``train`` use these batches and this target noise instead of drawing its own."""
    batches, noises = iter(batches), iter(noises)
    algorithm.replay_buffer.sample = lambda batch_size, env=None: next(batches)
    algorithm._draw_noise = lambda batch: next(noises)


def train_on(algorithm, seeds):
    """Make an update with the random batch and the target noise of each seed."""
    noises = [th.randn(8, 1, generator=th.Generator().manual_seed(seed)) for seed in seeds]
    feed(algorithm, [random_batch(seed) for seed in seeds], noises)
    algorithm.train(len(seeds), 8)


def train_each(algorithms, seeds):
    for algorithm in algorithms:
        train_on(algorithm, seeds)


def weights(algorithm):
    """All parameters, targets included, as one flat array each."""
    return {name: value.detach().clone() for name, value in algorithm.policy.state_dict().items()}


def largest_difference(left, right):
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().nan_to_num(nan=th.inf).max().item() for name in left)


def without_constructor(kind, **attributes):
    """An object of a class with just these attributes, as unpickling makes them."""
    made = object.__new__(kind)
    made.__dict__.update(attributes)
    return made


def equal(left, right):
    """Equal in type and value, deeply."""
    if type(left) is not type(right):
        return False
    if isinstance(left, th.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and equal(left.tolist(), right.tolist())
    if isinstance(left, np.ndarray):
        is_alike = left.dtype == right.dtype and left.shape == right.shape
        return is_alike and equal(left.tolist(), right.tolist())
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, (list, tuple, deque)):
        is_alike = len(left) == len(right) and getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
        return is_alike and all(map(equal, left, right))
    if isinstance(left, dict):  # an OrderedDict too
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, spaces.Space):  # without the texts that gymnasium makes when a space is first printed
        attributes = [{key: value for key, value in sorted(vars(s).items()) if "_repr" not in key} for s in (left, right)]
        return left == right and equal(*attributes)
    if isinstance(left, np.random.Generator):
        return equal(left.bit_generator.state, right.bit_generator.state)
    if isinstance(left, th.Generator):
        return th.equal(left.get_state(), right.get_state())
    return equal(vars(left), vars(right)) if hasattr(left, "__dict__") and not isinstance(left, type) else left == right
