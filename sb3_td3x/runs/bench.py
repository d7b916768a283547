"""Milliseconds per update of SB3's ``TD3`` and of TD3X's paths at equal settings, in turns in one process."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.td3x.td3x import TD3X

BASELINE = "SB3 TD3"
Algorithms = Mapping[str, tuple[type[OffPolicyAlgorithm], dict[str, Any]]]  # by name, with the keywords that others lack
ALGORITHMS: Algorithms = {
    BASELINE: (TD3, {}),
    "TD3X plain": (TD3X, {"n_quantiles": 1, "accelerate": "plain"}),
    "TD3X compiled": (TD3X, {"n_quantiles": 1, "accelerate": "compiled"}),
}


@dataclass(frozen=True)
class Case:
    """The size of the work."""

    batch_size: int = 256
    net_arch: tuple[int, ...] = (400, 300)
    observations: int = 22  # numbers in one
    actions: int = 6
    n_critics: int = 2
    buffer_size: int = 100_000
    n_quantiles: int = 1  # above 1, TD3X is also measured with critics of this many quantiles


def model(algorithm: type[OffPolicyAlgorithm], case: Case, device: str = "cpu", **settings: Any) -> OffPolicyAlgorithm:
    """A model whose replay buffer is full of random transitions; its environment is never stepped."""

    def make_env() -> gym.Env:
        env: gym.Env = gym.Env()
        env.observation_space = spaces.Box(-np.inf, np.inf, (case.observations,), np.float32)
        env.action_space = spaces.Box(-1, 1, (case.actions,), np.float32)
        return env

    made = algorithm(
        "MlpPolicy", DummyVecEnv([make_env]), learning_rate=1e-3, buffer_size=case.buffer_size,
        batch_size=case.batch_size, tau=0.005, gamma=0.99,
        policy_kwargs={"net_arch": list(case.net_arch), "n_critics": case.n_critics}, seed=0, device=device, **settings,
    )  # fmt: skip
    made.set_logger(Logger(None, []))
    buffer: Any = made.replay_buffer
    random = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        random.standard_normal(out=getattr(buffer, name), dtype=np.float32)
    np.clip(buffer.actions, -1, 1, out=buffer.actions)
    buffer.full = True
    return made


def contenders(
    case: Case, device: str, announce: Callable[[str], None], algorithms: Algorithms = ALGORITHMS
) -> dict[str, Callable[[], None]]:
    """Functions that make one update each, by name. What cannot be used on this machine is announced with the reason."""
    quantiles: Algorithms = {
        f"{name}, {case.n_quantiles} quantiles": (algorithm, {**settings, "n_quantiles": case.n_quantiles})
        for name, (algorithm, settings) in algorithms.items()
        if algorithm is TD3X and case.n_quantiles > 1
    }
    updates: dict[str, Callable[[], None]] = {}
    for name, (algorithm, settings) in {**algorithms, **quantiles}.items():
        try:
            updates[name] = partial(model(algorithm, case, device, **settings).train, 1, case.batch_size)
        except ValueError as error:
            announce(f"{name} is not measured: {error}")
    return updates


def take_turns(
    updates: Mapping[str, Callable[[], None]], device: str, per_turn: int, seconds: float, announce: Callable[[str], None]
) -> dict[str, list[float]]:
    """Milliseconds per update of each contender, one number per turn: 1 to 11, of ``per_turn`` updates, in ``seconds``."""
    begin = time.perf_counter()
    taken: dict[str, list[float]] = {}
    for name, update in updates.items():
        is_compiled = "compiled" in name
        if is_compiled:
            announce(f"{name}: compiling two programs, about 10 s with an empty cache ...")
        try:
            first = 4 * _milliseconds(update, 4, device) / 1e3  # the actor is updated in every second one
        except ValueError as error:  # the compiler fails
            announce(f"{name} is not measured: {error}")
            continue
        taken[name] = []
        compiled = f"compiled in {first:.1f} s, " if is_compiled else ""
        announce(f"{name}: {compiled}{_milliseconds(update, 10, device):.2f} ms per update")
    for _ in range(11):
        turn_begin = time.perf_counter()
        for name, turns in taken.items():
            turns.append(_milliseconds(updates[name], per_turn, device))
        now = time.perf_counter()
        if now - begin + (now - turn_begin) > seconds:
            break
    return taken


def rows(taken: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Of each contender: median, fastest and slowest turn in milliseconds, and ratio to SB3's."""
    return [
        {
            "name": name, "ms": round(median(turns), 3), "fastest": round(min(turns), 3), "slowest": round(max(turns), 3),
            "times_sb3": ratio(taken, name, BASELINE),
        }
        for name, turns in taken.items()
    ]  # fmt: skip


def ratio(taken: Mapping[str, list[float]], name: str, other: str) -> float:
    """How many times as fast a contender is as another: the median over the turns."""
    return round(median(theirs / ours for theirs, ours in zip(taken[other], taken[name], strict=True)), 2)


def _milliseconds(update: Callable[[], None], count: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(count):
        update()
    if device != "cpu":
        th.cuda.synchronize(device)
    return (time.perf_counter() - start) / count * 1e3
