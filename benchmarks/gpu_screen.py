"""
Try changes of the PyBullet preset in dozens of runs at a time: on one GPU, with a batched TD3 whose updates are TD3X's.

A plan (``gpu_screen*.yml``) names factors, and settings by a sign per factor. Each factor is in half of the settings, so that
all runs tell about it: ``gpu_screen.yml`` has twelve settings (Plackett and Burman 1946,
https://doi.org/10.1093/biomet/33.4.305), the others half of a full factorial plan. All runs take their steps together. The
updates that follow a step are made during the next one, which they do not yet know.
Usage: ``python benchmarks/gpu_screen.py PLAN [--seconds 570]``, or ``--check``, which needs no GPU and compares the updates.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
import yaml
from bullet_steps import ACTIONS, OBSERVATIONS, TASKS, Exchange
from results import versions
from torch.nn import functional as F

from sb3_td3x.common.buffers import PRIORITY_EXPONENT

HERE = Path(__file__).parent
BIN = 25_000  # steps
MEASURED = 110_000, 120_000  # the steps between which the pace is measured, to end in time
HIDDEN = (400, 300)
ROW = 2 * OBSERVATIONS + ACTIONS + 3
"""A transition: observation, action, next observation, reward, whether it terminated, whether an episode ended with it."""
Episode = tuple[int, int, float, int]
"""The step at which it ended, the environment's row, its score and its length."""
RATE, GAMMA, DROP, NOISE = 7e-4, 0.98, 2, 0.1  # of all settings
EPSILON, MOMENTUM = 1e-3, 0.01  # of batch normalization, as in sb3-contrib's CrossQ


@dataclass(frozen=True)
class Setting:
    """By default that of the preset in runs of 500,000 steps."""

    held: float = 0.0  # share of the run after which the rate falls, to 0 at the end
    batch: int = 128
    tau: float = 0.02
    buffer: int = 1_000_000
    starts: int = 10_000
    quantiles: int = 25
    target_noise: float = 0.2
    twice_until: int = 0  # steps with two updates each
    last_gamma: float = GAMMA  # 1 - gamma changes by a constant factor per step between 0.3 and 0.7 of the run
    three_steps: float = 0.0  # share of three-step returns until 0.2 of the run; none after 0.6
    lap: bool = False
    batch_norm: bool = False  # critics of 256-256 with batch normalization, without targets; actor every third time

    def shared(self) -> "Setting":
        """What runs that are updated together have in common."""
        return replace(self, tau=0.0, buffer=0, last_gamma=0.0, three_steps=0.0, lap=False)

    def gamma(self, progress: float) -> float:
        moved = min(max((progress - 0.3) / 0.4, 0.0), 1.0)
        return 1 - (1 - GAMMA) ** (1 - moved) * (1 - self.last_gamma) ** moved

    def share(self, progress: float) -> float:
        return self.three_steps * min(max((0.6 - progress) / 0.4, 0.0), 1.0)


def forward(layers: list[th.Tensor], x: th.Tensor) -> th.Tensor:
    """As many networks with ReLU as the first axis has entries, of weights and biases in turn: ``(networks, batch, size)``."""
    for place in range(0, len(layers), 2):
        x = th.baddbmm(layers[place + 1], F.relu(x) if place else x, layers[place])
    return x


def normalized_forward(layers: list[th.Tensor], x: th.Tensor, statistics: list[th.Tensor], training: bool) -> th.Tensor:
    """
    ``forward`` with batch normalization of the inputs and before each ReLU.

    :param layers: as of ``forward``, and before each pair the factor and the summand of a normalization
    :param statistics: running mean and variance of each normalization, which training moves
    """
    for place in range(0, len(layers), 4):
        mean, variance = statistics[place // 2 : place // 2 + 2]
        if training:
            of_batch = x.mean(1, keepdim=True), x.var(1, keepdim=True)
            with th.no_grad():
                mean.lerp_(of_batch[0], MOMENTUM)
                variance.lerp_(of_batch[1], MOMENTUM)
            mean, variance = of_batch[0], of_batch[1] * (1 - 1 / x.shape[1])
        x = (x - mean) * (layers[place] * (variance + EPSILON).rsqrt()) + layers[place + 1]
        x = th.baddbmm(layers[place + 3], F.relu(x) if place else x, layers[place + 2])
    return x


def twice(x: th.Tensor) -> th.Tensor:
    """Each entry of the first axis for two critics."""
    return x[:, None].expand(-1, 2, -1, -1).reshape(2 * len(x), *x.shape[1:])


class Adam:
    def __init__(self, parameters: list[th.Tensor], beta: float = 0.9):
        self.parameters, self.beta = parameters, beta
        self.moments = [[th.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
        self.steps = [th.zeros((), device=parameter.device) for parameter in parameters]

    @th.no_grad()
    def step(self, gradients: Any, rate: th.Tensor) -> None:
        th._foreach_add_(self.steps, 1)
        th._fused_adam_(
            self.parameters, list(gradients), *self.moments, [], self.steps,
            lr=rate, beta1=self.beta, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


class Runs:
    """Replay buffers and actors of all runs: each of the tasks with the first setting, then with the next."""

    def __init__(self, settings: list[Setting], tasks: list[str], steps: int, device: str):
        alike = [list(group) for _, group in groupby(settings, Setting.shared)]
        self.groups = [Group(group, tasks, 10 + number, device) for number, group in enumerate(alike)]
        each = [setting for setting in settings for _ in tasks]
        self.count = count = len(each)
        self.limits = th.tensor([min(setting.buffer, steps) for setting in each], device=device)
        longest = int(self.limits.max())
        self.rows = th.zeros(count * longest, ROW, device=device)
        self.offsets = th.arange(count, device=device) * longest
        self.place, self.size = (th.zeros(count, dtype=th.long, device=device) for _ in range(2))
        self.random = th.ones(count, 1, device=device)
        side = math.ceil(math.sqrt(longest))
        self.priorities = th.zeros(count if any(setting.lap for setting in settings) else 0, side, side, device=device)
        self.largest = th.ones(count, 1, device=device)  # priority
        self.before = th.zeros(count, OBSERVATIONS, device=device)
        self.action = th.zeros(count, ACTIONS, device=device)
        self.mask = th.cat([group.mask for group in self.groups])
        self.actor = [th.cat([p.detach() for p in layers]) for layers in zip(*[g.actor for g in self.groups], strict=True)]
        end = 0
        for group in self.groups:
            begin, end = end, end + len(group.tasks)
            mine = group.slice = slice(begin, end)
            group.actor = [p[mine].detach().requires_grad_() for p in self.actor]
            group.adams["actor"] = Adam(group.actor)
            group.rows, group.offsets = self.rows, self.offsets[mine, None]
            group.size, group.place, group.limits = (x[mine, None] for x in (self.size, self.place, self.limits))
            group.priorities, group.largest = self.priorities[mine], self.largest[mine]

    @th.no_grad()
    def act(self, incoming: th.Tensor, outgoing: th.Tensor) -> None:
        """
        Store the last transitions and choose the next actions.

        :param incoming: next and present observation, reward, termination and end
        :param outgoing: filled with the actions
        """
        o = OBSERVATIONS
        row = th.cat([self.before, self.action, incoming[:, :o], incoming[:, 2 * o :]], dim=1)
        self.rows.index_copy_(0, self.offsets + self.place, row)
        if len(self.priorities):
            self.priorities.flatten(1).scatter_(1, self.place[:, None], self.largest)
        self.place.copy_((self.place + 1) % self.limits)
        self.size.copy_(th.minimum(self.size + 1, self.limits))
        self.before.copy_(incoming[:, o : 2 * o])
        actions = forward(self.actor, self.before[:, None]).tanh()[:, 0]
        noisy = (actions + NOISE * th.randn_like(actions)).clamp(-1, 1)
        self.action.copy_(th.where(self.random > 0, 2 * th.rand_like(noisy) - 1, noisy) * self.mask[:, 0])
        outgoing.copy_(self.action)

    def go_to(self, step: int, steps: int) -> None:
        """Set what follows the steps of a run, which has ``steps`` in all."""
        for group in self.groups:
            self.random[group.slice].fill_(step <= group.setting.starts)
            group.go_to(step / steps)
        if len(self.priorities):
            self.largest.copy_(self.priorities.amax((1, 2))[:, None].clamp(min=1))

    def forget(self) -> None:
        for stored in (self.place, self.size, self.priorities):
            stored.zero_()


class Group:
    """The networks of settings that have ``Setting.shared`` in common, two critics for each run of the first axis."""

    rows: th.Tensor
    offsets: th.Tensor
    size: th.Tensor
    place: th.Tensor
    limits: th.Tensor
    priorities: th.Tensor  # (runs, n, n)
    largest: th.Tensor
    slice: slice

    def __init__(self, settings: list[Setting], each: list[str], seed: int, device: str):
        self.setting, self.device = settings[0], device
        self.settings = [setting for setting in settings for _ in each]
        self.tasks = tasks = each * len(settings)
        self.tau = th.tensor([setting.tau for setting in self.settings], device=device)[:, None, None]
        self.exponent = th.tensor([PRIORITY_EXPONENT * setting.lap for setting in self.settings], device=device)[:, None]
        self.has_priorities = any(setting.lap for setting in settings)
        self.has_three_steps = any(setting.three_steps for setting in settings)
        self.gamma, self.share = (th.zeros(len(tasks), 1, device=device) for _ in range(2))
        self.rate = th.zeros((), device=device)
        self.go_to(0.0)
        generator = th.Generator().manual_seed(seed)

        def network(inputs: list[int], sizes: tuple[int, ...]) -> list[th.Tensor]:
            layers, used = [], th.tensor(inputs)
            for size_in, size_out in pairwise(sizes):
                bound = 1 / math.sqrt(len(used))  # as in torch's Linear
                weight, bias = th.zeros(size_in, size_out), th.empty(1, size_out)
                weight[used] = th.empty(len(used), size_out).uniform_(-bound, bound, generator=generator)
                layers += [weight, bias.uniform_(-bound, bound, generator=generator)]
                used = th.arange(size_out)
            return layers

        normalizes = self.setting.batch_norm
        self.delay = 3 if normalizes else 2
        sizes = (256, 256) if normalizes else HIDDEN
        actors, critics = [], []
        for task in tasks:
            observed, acted = list(range(TASKS[task][0])), [OBSERVATIONS + place for place in range(TASKS[task][1])]
            actors.append(network(observed, (OBSERVATIONS, *HIDDEN, ACTIONS)))
            critics += [network(observed + acted, (OBSERVATIONS + ACTIONS, *sizes, self.setting.quantiles)) for _ in range(2)]
        self.actor, self.critic = (
            [th.stack(layer).to(device).requires_grad_() for layer in zip(*networks, strict=True)]
            for networks in (actors, critics)
        )
        self.statistics: list[th.Tensor] = []
        if normalizes:
            plain, self.critic = self.critic, []
            for weight, bias in zip(plain[0::2], plain[1::2], strict=True):
                shape = len(weight), 1, weight.shape[1]
                self.critic += [
                    weight.new_ones(shape).requires_grad_(),
                    weight.new_zeros(shape).requires_grad_(),
                    weight,
                    bias,
                ]
                self.statistics += [weight.new_zeros(shape), weight.new_ones(shape)]
        self.actor_target, self.critic_target = ([p.detach().clone() for p in net] for net in (self.actor, self.critic))
        self.adams = {"actor": Adam(self.actor), "critic": Adam(self.critic, 0.5 if normalizes else 0.9)}
        self.mask = th.zeros(len(tasks), 1, ACTIONS, device=device)
        for number, task in enumerate(tasks):
            self.mask[number, :, : TASKS[task][1]] = 1

    def go_to(self, progress: float) -> None:
        """Set what follows the progress of the run, from 0 to 1."""
        self.rate.fill_(RATE * min(1.0, (1 - progress) / (1 - self.setting.held)))
        self.gamma.copy_(th.tensor([[setting.gamma(progress)] for setting in self.settings]))
        self.share.copy_(th.tensor([[setting.share(progress)] for setting in self.settings]))

    def rows_at(self, index: th.Tensor) -> th.Tensor:
        return self.rows.index_select(0, (index + self.offsets).view(-1)).view(*index.shape, ROW)

    def sample(self) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Where transitions lie, ``(runs, batch)``, they ``(runs, batch, ROW)`` and the factors of their next values."""
        index = self.by_priority() if self.has_priorities else (self.random() * self.size).long()
        index = first = th.minimum(index, (self.size - 1).clamp(min=0))
        rows = self.rows_at(index)
        gamma = self.gamma.expand_as(index)
        if not self.has_three_steps:
            return index, rows, gamma
        newest = (self.place - 1) % self.limits
        last, reward, discounts = rows, rows[..., -3], gamma
        goes_on = self.random() < self.share
        for _ in range(2):
            goes_on = goes_on & (last[..., -1] == 0) & (index != newest)
            index = (index + 1) % self.limits
            last = th.where(goes_on[..., None], self.rows_at(index), last)
            reward = th.where(goes_on, reward + discounts * last[..., -3], reward)
            discounts = th.where(goes_on, discounts * gamma, discounts)
        o, a = OBSERVATIONS, ACTIONS
        rows = th.cat([rows[..., : o + a], last[..., o + a : 2 * o + a], reward[..., None], last[..., -2:]], 2)
        return first, rows, discounts

    def random(self) -> th.Tensor:
        return th.rand(len(self.tasks), self.setting.batch, device=self.device)

    def by_priority(self) -> th.Tensor:
        """Draw rows of the square that the priorities are in, then a place in each row."""
        sums = self.priorities.sum(2)
        edges = sums.cumsum(1)
        drawn = self.random() * edges[:, -1:]
        row = th.searchsorted(edges, drawn, right=True).clamp(max=sums.shape[1] - 1)
        rest = drawn - (edges - sums).gather(1, row)
        inside = self.priorities.gather(1, row[..., None].expand(-1, -1, sums.shape[1])).cumsum(2)
        return row * sums.shape[1] + (inside <= rest[..., None]).sum(2)

    def set_priorities(self, index: th.Tensor, estimates: th.Tensor, target: th.Tensor) -> None:
        """As TD3X with ``prioritization="lap"``; without it all are 1."""
        errors = estimates.mean(2).view(len(self.tasks), 2, -1) - target.mean(2)[:, None]
        new = errors.abs().amax(1).clamp(min=1) ** self.exponent
        self.priorities.flatten(1).scatter_(1, index, new)
        self.largest.copy_(th.maximum(self.largest, new.amax(1, keepdim=True)))

    def update_after(self, step: int, acted: Any) -> None:
        """Start the updates after a step, if there are any, as soon as the step's actions are chosen."""
        since = step - self.setting.starts
        if since > 1:
            with th.cuda.stream(self.stream):
                self.stream.wait_event(acted)
                with_actor = since % self.delay == self.delay - 1
                for graph in self.graphs if step <= self.setting.twice_until else [self.graphs[with_actor]]:
                    graph.replay()
                self.updated.record()
            th.cuda.current_stream().wait_event(self.updated)

    def update(self, with_actor: bool, rows: th.Tensor | None = None, noise: th.Tensor | None = None) -> None:
        index, discounts = None, self.gamma
        if rows is None or noise is None:
            index, rows, discounts = self.sample()
            noise = th.randn(*rows.shape[:2], ACTIONS, device=self.device)
        estimates, values = self.estimates_and_next_values(rows, noise)
        runs, batch, n = len(self.tasks), self.setting.batch, self.setting.quantiles
        with th.no_grad():
            pool = values.view(runs, 2, batch, n).transpose(1, 2).reshape(runs, batch, 2 * n)
            kept = pool.amin(2, keepdim=True) if n == 1 else pool.sort(2).values[..., : 2 * (n - DROP)]
            target = rows[..., -3:-2] + (1 - rows[..., -2:-1]) * discounts[..., None] * kept
            if self.has_priorities and index is not None:
                self.set_priorities(index, estimates, target)
            slopes = self.slopes(estimates, target)
        self.adams["critic"].step(th.autograd.grad(estimates, self.critic, slopes), self.rate)
        if self.setting.batch_norm:  # weights of unit norm, of all but the last layer, which sets the scale of the values
            with th.no_grad():
                for weight in self.critic[2:-4:4]:
                    weight.div_(weight.norm(dim=1, keepdim=True))
        if with_actor:
            self.update_actor(rows[..., :OBSERVATIONS])

    def estimates_and_next_values(self, rows: th.Tensor, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        setting, o, a = self.setting, OBSERVATIONS, ACTIONS
        taken, following = rows[..., : o + a], rows[..., o + a : 2 * o + a]
        with th.no_grad():
            clipped = (noise * setting.target_noise).clamp(-0.5, 0.5)
            actions = forward(self.actor if setting.batch_norm else self.actor_target, following).tanh()
            following = th.cat([following, (actions + clipped).clamp(-1, 1) * self.mask], 2)
        if setting.batch_norm:  # the statistics are of both halves
            values = normalized_forward(self.critic, twice(th.cat([taken, following], 1)), self.statistics, training=True)
            return values[:, : setting.batch], values[:, setting.batch :].detach()
        with th.no_grad():
            next_values = forward(self.critic_target, twice(following))
        return forward(self.critic, twice(taken)), next_values

    def slopes(self, estimates: th.Tensor, target: th.Tensor) -> th.Tensor:
        """The derivatives of the losses by the estimates."""
        (runs, batch, m), n = target.shape, estimates.shape[2]
        if n == 1:
            return 2 * (estimates - twice(target)) / batch
        errors = target.view(runs, 1, batch, 1, m) - estimates.view(runs, 2, batch, n, 1)
        fractions = ((th.arange(n, device=self.device) + 0.5) / n).view(n, 1)
        weights = th.where(errors > 0, fractions, 1 - fractions)
        return -(weights * errors.clamp(-1, 1)).sum(4).view_as(estimates) / (2 * batch * n * m)

    def update_actor(self, observations: th.Tensor) -> None:
        inputs = twice(th.cat([observations, forward(self.actor, observations).tanh() * self.mask], 2))
        critic = [p.detach() for p in self.critic]
        if self.setting.batch_norm:
            values = normalized_forward(critic, inputs, self.statistics, training=False) / 2
        elif self.setting.quantiles == 1:  # TD3's actor follows the first critic, that of quantile critics their mean
            values = forward([p[0::2] for p in critic], inputs[0::2])
        else:
            values = forward(critic, inputs) / 2
        self.adams["actor"].step(th.autograd.grad(-values.mean((1, 2)).sum(), self.actor), self.rate)
        with th.no_grad():
            for target, critic_weight in zip(self.critic_target, self.critic, strict=True):
                target.lerp_(critic_weight, twice(self.tau))
            for target, actor_weight in zip(self.actor_target, self.actor, strict=True):
                target.lerp_(actor_weight, self.tau)

    def record(self) -> None:
        """Make the CUDA graphs of an update without and with the actor. Warming up changes nothing that lasts."""
        tensors = [*self.actor, *self.critic, *self.actor_target, *self.critic_target, *self.statistics]
        tensors += [self.priorities, self.largest]
        for adam in self.adams.values():
            tensors += [*adam.moments[0], *adam.moments[1], *adam.steps]
        saved = [tensor.detach().clone() for tensor in tensors]
        self.stream, self.updated = th.cuda.Stream(), th.cuda.Event()
        self.graphs = [recorded(partial(self.update, with_actor), self.stream) for with_actor in (False, True)]
        with th.no_grad():
            th._foreach_copy_([tensor.detach() for tensor in tensors], saved)


def recorded(function: Callable[[], None], stream: Any) -> Any:
    th.cuda.synchronize()
    with th.cuda.stream(stream):
        for _ in range(3):
            function()
    th.cuda.synchronize()
    graph = th.cuda.CUDAGraph()
    with th.cuda.graph(graph, stream=stream):
        function()
    th.cuda.synchronize()
    return graph


def shared_out(tasks: list[str], workers: int) -> list[int]:
    """The worker of each environment, the slow ones first to those that have least to do."""
    load, owners = [0.0] * workers, [0] * len(tasks)
    for row in sorted(range(len(tasks)), key=lambda row: -TASKS[tasks[row]][2]):
        owners[row] = load.index(min(load))
        load[owners[row]] += TASKS[tasks[row]][2]
    return owners


class Environments:
    """Those of all runs in processes, of which each has a processor to itself; and a log of their episodes."""

    def __init__(self, tasks: list[str], python: str):
        workers = (os.cpu_count() or 2) - 1
        owners = shared_out(tasks, workers)
        envs = [(task, 10 + row, owner) for row, (task, owner) in enumerate(zip(tasks, owners, strict=True))]
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")  # files that are memory
        path = f"{self.folder.name}/exchange"
        self.exchange = Exchange(path, workers, len(envs), create=True)
        Path(path + ".json").write_text(json.dumps({"envs": envs, "workers": workers}))
        commands = [[python, str(HERE / "bullet_steps.py"), path, str(number)] for number in range(workers)]
        self.processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
        self.count, self.counted = len(envs), self.exchange.episodes.copy()
        self.log: list[Episode] = []

    def wait_for(self, number: int) -> None:
        """Until all workers are at a step; -1 is before the first."""
        spins = 0
        while not (self.exchange.done[:, 0] == number).all():
            spins += 1
            if spins % 100_000 == 0 and any(process.poll() is not None for process in self.processes):
                raise SystemExit("a worker has ended")

    def wait_until_they_are_there(self) -> None:
        self.wait_for(-1)
        os.sched_setaffinity(0, {0})  # the workers have the others

    def read(self, into: np.ndarray) -> None:
        o = OBSERVATIONS
        into[:, :o], into[:, o : 2 * o] = self.exchange.next, self.exchange.now
        into[:, -3], into[:, -2] = self.exchange.reward, self.exchange.terminated
        into[:, -1] = self.exchange.ended

    def begin(self, step: int, actions: np.ndarray) -> None:
        self.exchange.action[:] = actions
        self.exchange.command[0] = step

    def finish(self, step: int) -> None:
        self.wait_for(step)
        if (self.exchange.episodes != self.counted).any():
            for row in np.flatnonzero(self.exchange.episodes != self.counted):
                self.log.append((step, int(row), float(self.exchange.score[row]), int(self.exchange.length[row])))
            self.counted = self.exchange.episodes.copy()

    def close(self) -> None:
        self.exchange.command[0] = -1
        for process in self.processes:
            process.wait(20)


def train(runs: Runs, steps: int, seconds: float, python: str, device: str = "cuda") -> list[Episode]:
    """Make all runs; return their episodes."""
    with closing(Environments([task for group in runs.groups for task in group.tasks], python)) as environments:
        incoming = th.zeros(runs.count, 2 * OBSERVATIONS + 3, device=device)
        outgoing = th.zeros(runs.count, ACTIONS, device=device)
        pinned_in, pinned_out = incoming.cpu().pin_memory(), outgoing.cpu().pin_memory()
        for group in runs.groups:
            group.record()
        acting, acted = recorded(partial(runs.act, incoming, outgoing), th.cuda.Stream()), th.cuda.Event()
        environments.wait_until_they_are_there()
        begin, measured = time.perf_counter(), 0.0
        for step in range(1, steps + 1):
            if step % 100 == 1:
                runs.go_to(step, steps)
            environments.read(pinned_in.numpy())
            incoming.copy_(pinned_in, non_blocking=True)
            acting.replay()
            pinned_out.copy_(outgoing, non_blocking=True)
            acted.record()
            acted.synchronize()
            if step == 1:  # what was stored so far are no transitions
                runs.forget()
            environments.begin(step, pinned_out.numpy())
            for group in runs.groups:
                group.update_after(step, acted)
            environments.finish(step)
            elapsed = time.perf_counter() - begin
            if step % 2500 == 0:
                print(f"{step} steps, {elapsed:.0f} s, {elapsed / step * 1e3:.2f} ms each", flush=True)
            if step == MEASURED[0]:
                measured = elapsed
            if step == MEASURED[1]:  # the rate is to fall to 0 in the time there is
                pace = (elapsed - measured) / (MEASURED[1] - MEASURED[0])
                steps = step + int(min(steps - step, 0.97 * (seconds - elapsed) / pace))
                print(f"{steps} steps in all", flush=True)
            if step == steps or elapsed > seconds:
                break
        return environments.log


def write(log: list[Episode], names: list[str], tasks: list[str], out: Path) -> None:
    """Mean scores of the episodes that ended in each whole part of a run, weighted with their length, and their number."""
    parts: dict[tuple[Any, ...], list[tuple[float, int]]] = {}
    for step, row, score, length in log:
        setting, task = divmod(row, len(tasks))
        end = math.ceil(step / BIN) * BIN
        if end <= math.ceil(log[-1][0] / 2500) * 2500:
            parts.setdefault((names[setting], tasks[task], end), []).append((score, length))
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["setting", "task", "steps", "score", "episodes"])
        for key, found in sorted(parts.items()):
            total = sum(length for _, length in found)
            table.writerow([*key, round(sum(score * length for score, length in found) / total, 1), len(found)])


def check() -> None:
    """Print how far four updates of a run, one of a group of two, are from TD3X's."""
    import gymnasium
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    from sb3_td3x import TD3X
    from sb3_td3x.td3x.gradient_step import GradientStep

    size, acts, _ = TASKS["Hopper"]
    env: Any = gymnasium.Env()
    env.observation_space = gymnasium.spaces.Box(-5, 5, (size,))
    env.action_space = gymnasium.spaces.Box(-1, 1, (acts,))
    inputs = [*range(size), *range(OBSERVATIONS, OBSERVATIONS + acts)]
    for quantiles in (25, 1):
        group = Group([Setting(quantiles=quantiles)], ["Ant", "Hopper"], 0, "cpu")
        model = TD3X("MlpPolicy", env, learning_rate=7e-4, gamma=0.98, batch_size=128, tau=0.02, n_quantiles=quantiles,
                     policy_kwargs={"net_arch": [*HIDDEN]}, device="cpu")  # fmt: skip
        policy: Any = model.policy
        nets = [(getattr(policy, name).mu, getattr(group, name), 1, inputs[:size]) for name in ("actor", "actor_target")]
        for number in (0, 1):
            nets.append((policy.critic.q_networks[number], group.critic, 2 + number, inputs))
            nets.append((policy.critic_target.q_networks[number], group.critic_target, 2 + number, inputs))
        pairs: list[tuple[th.Tensor, Callable[[], th.Tensor]]] = []
        for theirs, ours, run, used in nets:
            for place, layer in enumerate(module for module in theirs if isinstance(module, th.nn.Linear)):
                rows, columns = used if place == 0 else slice(None), slice(layer.out_features)
                weight, bias = ours[2 * place], ours[2 * place + 1]
                pairs.append((layer.weight, lambda w=weight, i=run, r=rows, c=columns: w[i][r][:, c].T))
                pairs.append((layer.bias, lambda b=bias, i=run, c=columns: b[i, 0, c]))
        with th.no_grad():
            for parameter, value in pairs:
                parameter.copy_(value())
        step, settings = GradientStep(policy, "fp32"), model._update_settings()
        step.prepare()
        for number in range(1, 5):
            rows, noise = th.randn(2, 128, ROW), th.randn(2, 128, ACTIONS)
            rows[..., -2] = (rows[..., -2] > 1).float()
            for begin, used_size, whole in ((0, size, OBSERVATIONS), (28, acts, ACTIONS), (36, size, OBSERVATIONS)):
                rows[1, :, begin + used_size : begin + whole] = 0
            hopper = rows[1]
            batch = ReplayBufferSamples(hopper[:, :size], hopper[:, 28 : 28 + acts], hopper[:, 36 : 36 + size],
                                        hopper[:, -2:-1], hopper[:, -3:-2])  # fmt: skip
            step(batch, noise[1, :, :acts], settings, number % 2 == 0, number)
            group.update(number % 2 == 0, rows, noise)
        difference = max((parameter - value()).abs().max().item() for parameter, value in pairs)
        print(f"{quantiles} quantiles: largest difference of a weight {difference:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path, help="a file like gpu_screen.yml")
    parser.add_argument("--check", action="store_true", help="compare the updates with TD3X's")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time, also before all steps are made")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments' processes")
    args = parser.parse_args()
    if args.check:
        return check()
    plan = yaml.safe_load(args.plan.read_text())
    factors, steps, tasks = plan["factors"], plan["steps"], list(TASKS)
    chosen = [[name for name, sign in zip(factors, row, strict=True) if sign == "+"] for row in plan["settings"]]
    base = plan.get("base", {})
    settings = [Setting(**base, **{key: value for name in names for key, value in factors[name].items()}) for names in chosen]
    out = HERE / "results" / f"{args.plan.stem}.csv"
    log = train(Runs(settings, tasks, steps, "cuda"), steps, args.seconds, args.python)
    write(log, [" + ".join(names) or "none" for names in chosen], tasks, out)
    facts = {"gpu": th.cuda.get_device_name(), "steps": log[-1][0], "versions": versions()}
    out.with_suffix(".yml").write_text(yaml.safe_dump(facts, sort_keys=False))


if __name__ == "__main__":
    main()
