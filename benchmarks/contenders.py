"""
How long an update takes: TD3X's paths, SB3's ``TD3``, sb3-contrib's ``TQC``, an update without a framework, and the bare
matrix products.

All take turns in one process. To compare two states of the code, run it with each checkout on PYTHONPATH, in turns.
Usage: ``python benchmarks/contenders.py [--batch 256] [--quantiles 25] [--out FILE]``
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch as th
from results import versions
from sb3_contrib import TQC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.torch_layers import create_mlp
from torch import nn

from sb3_td3x.runs import bench
from sb3_td3x.runs.bench import Case
from sb3_td3x.td3x import precision
from sb3_td3x.td3x.td3x import TD3X

EAGER = "eager, as the authors'"
FLOOR = "matrix products alone"


def algorithms() -> bench.Algorithms:
    """Those of ``td3x bench``, TD3X's paths with bfloat16, and others' algorithms."""
    bf16 = {
        f"{name}, bf16": (algorithm, {**settings, "precision": "bf16"})
        for name, (algorithm, settings) in bench.ALGORITHMS.items()
        if algorithm is TD3X
    }
    return {**bench.ALGORITHMS, **bf16, "sb3-contrib TQC": (TQC, {})}


def contenders(case: Case, device: str = "cpu", announce: Callable[[str], None] = print) -> dict[str, Callable[[], None]]:
    """Functions that make one update each, by name (for the products: the average one of two)."""
    updates = bench.contenders(case, device, announce, algorithms())
    buffer: Any = bench.model(bench.TD3, case, device).replay_buffer
    return {**updates, EAGER: _EagerTD3(case, device, buffer).update, FLOOR: _matrix_products(case, device)}


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": "batch_size", "observations": "observations", "actions": "actions", "critics": "n_critics"}
    sizes |= {"buffer": "buffer_size", "quantiles": "n_quantiles"}
    for option, field in sizes.items():
        parser.add_argument(f"--{option}", dest=field, type=int, default=getattr(Case, field))
    parser.add_argument("--net", default="400,300", help="hidden layers")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=120.0, help="no turns begin after this time")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(arguments)
    layers = tuple(int(part) for part in args.net.split(","))
    case = Case(net_arch=layers, **{field: getattr(args, field) for field in sizes.values()})
    th.set_num_threads(args.threads)
    taken = bench.take_turns(contenders(case, args.device), args.device, 40, args.seconds, print)
    rows = [{**row, "share_of_floor": bench.ratio(taken, row["name"], FLOOR)} for row in bench.rows(taken)]
    for row in rows:
        print(f"{row['name']}: {row['ms']:.2f} ms, times SB3 {row['times_sb3']:.2f}, of floor {row['share_of_floor']:.0%}")
    if args.out is not None:
        figures = {"versions": versions(), "threads": args.threads, "device": args.device, "case": asdict(case), "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
