"""
How long an update takes: TD3X's paths, SB3's ``TD3``, SBX's where it is installed, and the bare matrix products.

All are measured in one process in turns, so that their ratios hold on a machine whose speed changes by the minute.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import create_mlp
from torch import nn

from sb3_td3x.td3x import precision
from sb3_td3x.td3x.compiled import update_path
from sb3_td3x.td3x.td3x import TD3X

BASELINE = "SB3 TD3"
SBX = "SBX TD3 (JAX)"
EAGER = "eager, as the authors'"
FLOOR = "matrix products alone"


@dataclass(frozen=True)
class Case:
    """
    The size of the work.

    :param batch_size: transitions per update
    :param net_arch: hidden layers of actor and critics
    :param observations: numbers in an observation
    :param actions: numbers in an action
    :param n_critics: critics, where the algorithm lets them be chosen
    :param buffer_size: transitions in the full replay buffer
    :param n_quantiles: above 1, TD3X's paths are also measured with critics of so many quantiles
    """

    batch_size: int = 256
    net_arch: tuple[int, ...] = (400, 300)
    observations: int = 22
    actions: int = 6
    n_critics: int = 2
    buffer_size: int = 100_000
    n_quantiles: int = 1


class NoWorld(gym.Env):
    """Costs nothing: what is measured is the algorithm."""

    def __init__(self, case: Case):
        self.observation_space = spaces.Box(-np.inf, np.inf, (case.observations,), np.float32)
        self.action_space = spaces.Box(-1, 1, (case.actions,), np.float32)
        self._observation = np.zeros(case.observations, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return self._observation, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, {}


def contenders(case: Case, device: str = "cpu") -> dict[str, Callable[[], None]]:
    """
    What can be measured here, by name; each call makes one update (for the products: the average one of two).

    :param device: ``"cpu"`` or ``"cuda"``
    """
    paths: dict[str, dict[str, Any]] = {f"TD3X {path}": {"accelerate": path} for path in ("plain", "compiled")}
    paths |= {f"{name}, bf16": {**path, "precision": "bf16"} for name, path in paths.items()}
    found = {BASELINE: _updates(_model(TD3, case, device), case)}
    for what, networks in _networks(case).items():
        for name, settings in paths.items():
            model = _model(TD3X, case, device, **networks)
            products = settings.get("precision", "fp32")
            try:
                update_path(settings["accelerate"], model.policy)  # type: ignore[arg-type]
                precision.require_supported(products, model.device)
            except ValueError:
                continue
            for key, value in settings.items():
                setattr(model, key, value)
            found[name + what] = _updates(model, case)
    if find_spec("sbx") is not None and device == "cpu":
        from sbx import TD3 as JaxTD3

        found[SBX] = _updates(_model(JaxTD3, case, device), case)
    found[EAGER] = _EagerTD3(case, device, _model(TD3, case, device).replay_buffer).update  # type: ignore[arg-type]
    found[FLOOR] = _matrix_products(case, device)
    return found


def _networks(case: Case) -> dict[str, dict[str, Any]]:
    """Arguments of each kind of networks that TD3X is measured with, by what is added to the path's name."""
    quantiles = f", {case.n_quantiles} quantiles" if case.n_quantiles > 1 else ""
    kinds: dict[str, dict[str, Any]] = {"": {"n_quantiles": 1}, quantiles: {"n_quantiles": case.n_quantiles}}
    return kinds


def compare(
    case: Case,
    device: str = "cpu",
    repeats: int = 11,
    updates: int = 40,
    seconds: float = 120.0,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, list[float]]:
    """
    Milliseconds per update of all contenders, one number per repeat.

    :param repeats: times that every contender has its turn
    :param updates: made in one turn
    :param seconds: no turns begin after this time, but the first of each contender
    :param announce: called with a line of text for each contender when it has been measured for the first time
    """
    begin = time.perf_counter()
    entrants = contenders(case, device)
    for name, update in entrants.items():
        if "compiled" in name:
            announce(f"{name}: compiling, up to a minute where the compiler's cache is empty ...")
        start = time.perf_counter()
        _milliseconds(update, 4, device)  # compiles
        ready = time.perf_counter() - start
        announce(f"{name}: {_milliseconds(update, 10, device):.2f} ms per update, ready after {ready:.1f} s")
    taken: dict[str, list[float]] = {name: [] for name in entrants}
    for turn in range(repeats):
        if turn and time.perf_counter() - begin > seconds:
            break
        for name, update in entrants.items():
            taken[name].append(_milliseconds(update, updates, device))
    return taken


def summary(taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Per contender the median time, the fastest and slowest turn, the median ratio to SB3's and the share of the floor."""

    def ratio(name: str, other: str) -> float:
        return round(median(a / b for a, b in zip(taken[other], taken[name], strict=True)), 2)

    return [
        {
            "name": name,
            "ms": round(median(values), 3),
            "fastest": round(min(values), 3),
            "slowest": round(max(values), 3),
            "times_sb3": ratio(name, BASELINE),
            "share_of_floor": ratio(name, FLOOR),
        }
        for name, values in taken.items()
    ]


def _milliseconds(update: Callable[[], None], updates: int, device: str) -> float:
    start = time.perf_counter()
    for _ in range(updates):
        update()
    if device != "cpu":
        th.cuda.synchronize()
    return (time.perf_counter() - start) / updates * 1e3


def _model(algorithm: type[OffPolicyAlgorithm], case: Case, device: str, **own: Any) -> OffPolicyAlgorithm:
    kwargs: dict[str, Any] = {"net_arch": list(case.net_arch), "n_critics": case.n_critics} | own.pop("policy_kwargs", {})
    model = algorithm(
        "MlpPolicy", NoWorld(case), learning_rate=1e-3, buffer_size=case.buffer_size, batch_size=case.batch_size,
        tau=0.005, gamma=0.99, policy_kwargs=kwargs, seed=0, device=device, **own,
    )  # fmt: skip
    model.set_logger(Logger(None, []))
    random = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        random.standard_normal(out=getattr(model.replay_buffer, name), dtype=np.float32)
    np.clip(model.replay_buffer.actions, -1, 1, out=model.replay_buffer.actions)  # type: ignore[union-attr]
    model.replay_buffer.full = True  # type: ignore[union-attr]
    return model


def _updates(model: OffPolicyAlgorithm, case: Case) -> Callable[[], None]:
    return lambda: model.train(1, case.batch_size)


class _EagerTD3:
    """
    The update in the manner of the paper authors' program: no framework around it, every operation on its own.

    For comparison only; TD3X's own rule is in ``losses.py``.
    """

    def __init__(self, case: Case, device: str, buffer: ReplayBuffer):
        self.case, self.buffer, self.calls = case, buffer, 0
        self.actor = self._network(case.observations, case.actions, squash_output=True).to(device)
        inputs = case.observations + case.actions
        self.critics = nn.ModuleList(self._network(inputs, 1) for _ in range(case.n_critics)).to(device)
        self.actor_target, self.critic_targets = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.actor_optimizer = th.optim.Adam(self.actor.parameters(), lr=1e-3)
        self.critic_optimizer = th.optim.Adam(self.critics.parameters(), lr=1e-3)

    def _network(self, inputs: int, outputs: int, squash_output: bool = False) -> nn.Sequential:
        return nn.Sequential(*create_mlp(inputs, outputs, list(self.case.net_arch), squash_output=squash_output))

    def update(self) -> None:
        batch = self.buffer.sample(self.case.batch_size)
        with th.no_grad():
            noise = (th.randn_like(batch.actions) * 0.2).clamp(-0.5, 0.5)
            inputs = th.cat([batch.next_observations, (self.actor_target(batch.next_observations) + noise).clamp(-1, 1)], 1)
            smallest = th.cat([critic(inputs) for critic in self.critic_targets], 1).amin(1, keepdim=True)
            target = batch.rewards + (1 - batch.dones) * 0.99 * smallest
        inputs = th.cat([batch.observations, batch.actions], 1)
        loss = sum(
            (nn.functional.mse_loss(critic(inputs), target) for critic in self.critics), th.zeros((), device=target.device)
        )
        self._step(self.critic_optimizer, loss)
        self.calls += 1
        if self.calls % 2 == 0:
            inputs = th.cat([batch.observations, self.actor(batch.observations)], 1)
            self._step(self.actor_optimizer, -self.critics[0](inputs).mean())
            for network, slow in ((self.actor, self.actor_target), (self.critics, self.critic_targets)):
                for new, old in zip(network.parameters(), slow.parameters(), strict=True):
                    old.data.copy_(0.005 * new.data + 0.995 * old.data)

    @staticmethod
    def _step(optimizer: th.optim.Optimizer, loss: th.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _matrix_products(case: Case, device: str) -> Callable[[], None]:
    """
    All products that an update cannot do without, into memory that is there already and with the kernels that compiled
    updates take: the floor of its time.
    """
    kernels = precision.choose_matrix_kernels() if device == "cpu" else "default"
    actor = _products(case, [case.observations, *case.net_arch, case.actions], device)
    critics = [_products(case, [case.observations + case.actions, *case.net_arch, 1], device) for _ in range(case.n_critics)]
    calls = 0

    def update() -> None:
        nonlocal calls
        calls += 1
        with precision.matrix_kernels(kernels):
            for network in (actor, *critics, *critics):  # the targets' values and the critics' own
                _forward(network)
            for network in critics:
                _backward(network)
            if calls % 2 == 0:
                _forward(actor)
                _forward(critics[0])
                _backward(critics[0], weights=False, inputs=case.actions)
                _backward(actor)

    return update


def _products(case: Case, sizes: list[int], device: str) -> list[dict[str, th.Tensor]]:
    rows = case.batch_size
    return [
        {
            "weight": th.randn(outs, ins, device=device), "bias": th.randn(outs, device=device),
            "inputs": th.randn(rows, ins, device=device), "outputs": th.randn(rows, outs, device=device),
            "weight_gradient": th.empty(outs, ins, device=device), "input_gradient": th.empty(rows, ins, device=device),
            "action_gradient": th.empty(rows, case.actions, device=device),
            "result": th.empty(rows, outs, device=device),
        }
        for ins, outs in pairwise(sizes)
    ]  # fmt: skip


def _forward(network: list[dict[str, th.Tensor]]) -> None:
    for layer in network:
        th.addmm(layer["bias"], layer["inputs"], layer["weight"].t(), out=layer["result"])


def _backward(network: list[dict[str, th.Tensor]], weights: bool = True, inputs: int = 0) -> None:
    """
    :param weights: whether the weights' gradients are needed
    :param inputs: of how many of the network's last inputs the gradient is needed
    """
    for index in reversed(range(len(network))):
        layer = network[index]
        if weights:
            th.mm(layer["outputs"].t(), layer["inputs"], out=layer["weight_gradient"])
        if index:
            th.mm(layer["outputs"], layer["weight"], out=layer["input_gradient"])
        elif inputs:
            th.mm(layer["outputs"], layer["weight"][:, -inputs:], out=layer["action_gradient"])
