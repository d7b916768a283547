"""Checking saved tensors against the networks and optimisers that they are for, before any of them is changed."""

import copy
from collections.abc import Mapping, Sized
from typing import Any

import torch as th
from torch import nn

from sb3_td3x.errors import ModelFileError


class DoesNotFit(ModelFileError, RuntimeError):
    """Tensors of another network or optimiser; a ``RuntimeError`` too, as torch raises for them."""


def require_fit(saved: Mapping[str, Any], objects: Mapping[str, Any], is_whole: bool = True) -> None:
    """
    Refuse tensors that do not fit, so that a model is never left with half of them.

    :param saved: state dicts by name
    :param objects: the module or optimiser of each name
    :param is_whole: refuse a module's state dict, too, that has not all of its tensors or others
    :raises DoesNotFit: naming the tensor and what is wrong with it
    """
    for name, state in saved.items():
        if isinstance(objects[name], nn.Module):
            require_module(name, state, objects[name].state_dict(), is_whole)
        elif isinstance(objects[name], th.optim.Optimizer):
            _require_optimizer(name, state, objects[name])


def require_policy(state: Any, kind: type[nn.Module], arguments: Mapping[str, Any]) -> None:
    """
    Refuse tensors that are not those of the policy that the arguments describe.

    That policy is made without memory: a file of a few bytes could otherwise ask for networks of any size.

    :param state: the saved state dict
    :param kind: the policy's class
    :param arguments: of its constructor
    :raises DoesNotFit: naming the tensor and what is wrong with it
    """
    if not isinstance(state, Mapping):
        raise DoesNotFit("the policy is no table of tensors")
    if isinstance(critics := arguments.get("n_critics", 2), int) and critics > len(state):
        raise DoesNotFit(f"the policy asks for {critics} critics and has {len(state)} tensors")
    if (layers := _layers(arguments.get("net_arch"), critics)) > len(state):
        raise DoesNotFit(f"the policy asks for {layers} layers and has {len(state)} tensors")
    space = copy.deepcopy(arguments["observation_space"])  # making a network for images draws from it
    sketched = type(kind.__name__, (kind,), {"device": th.device("meta")})
    with th.device("meta"), th.random.fork_rng(devices=[]):
        policy = sketched(**{**arguments, "observation_space": space})
    require_module("policy", state, policy.state_dict())


def _layers(net_arch: Any, critics: Any) -> int:
    """How many hidden layers SB3 would make one by one, each with tensors of its own."""
    each = [net_arch.get(network) for network in ("pi", "qf")] if isinstance(net_arch, Mapping) else [net_arch] * 2
    actor, critic = (len(sizes) if isinstance(sizes, Sized) else 0 for sizes in each)
    return actor + critic * (critics if isinstance(critics, int) else 1)


def require_module(name: str, state: Any, own: Mapping[str, Any], is_whole: bool = True) -> None:
    """
    Refuse a saved state dict that is not that of a module.

    :param own: the module's state dict
    :param is_whole: refuse one, too, that has not all of its tensors or others
    :raises DoesNotFit: naming the tensor and what is wrong with it
    """
    if not isinstance(state, Mapping):
        raise DoesNotFit(f"{name} is no table of tensors")
    if is_whole and state.keys() != own.keys():
        different = sorted(map(str, state.keys() ^ own.keys()))
        raise DoesNotFit(f"{name} has not the model's tensors: {different[0]} is in one of them only")
    for key, tensor in state.items():
        if key in own:
            _require_tensor(f"{name}.{key}", tensor, own[key].shape, own[key].dtype)


def _require_tensor(name: str, tensor: Any, shape: tuple[int, ...], dtype: th.dtype) -> None:
    if not isinstance(tensor, th.Tensor) or tensor.layout is not th.strided or tensor.is_meta:
        raise DoesNotFit(f"{name} is no tensor with values")
    if tensor.shape != shape:
        raise DoesNotFit(f"{name} has the shape {tuple(tensor.shape)}, the model needs {tuple(shape)}")
    if tensor.dtype != dtype:
        raise DoesNotFit(f"{name} has the type {tensor.dtype}, the model needs {dtype}")


def _require_optimizer(name: str, state: Any, optimizer: th.optim.Optimizer) -> None:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        raise DoesNotFit(f"{name} is no optimiser's state")
    if len(groups) != len(optimizer.param_groups):
        raise DoesNotFit(f"{name} has {len(groups)} groups of parameters, the model has {len(optimizer.param_groups)}")
    shapes: dict[Any, Any] = {}
    for saved, own in zip(groups, optimizer.param_groups, strict=True):
        if not isinstance(saved, Mapping) or len(saved.get("params", ())) != len(own["params"]):
            raise DoesNotFit(f"{name} is for another number of parameters than the model has")
        shapes |= zip(saved["params"], own["params"], strict=True)
        _require_options(name, saved, own)
    for index, values in state["state"].items():
        if index not in shapes or not isinstance(values, Mapping):
            raise DoesNotFit(f"{name} has a state for a parameter that it does not list")
        for key, value in values.items():
            _require_state(f"{name}.{index}.{key}", value, shapes[index])


def _require_options(name: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key in saved.keys() & own.keys() - {"params"}:
        if not _alike(saved[key], own[key]):
            raise DoesNotFit(f"{name} has another kind of {key} than the model's {own[key]!r}")


def _alike(saved: Any, own: Any) -> bool:
    """Switches and things that may be None are one kind, numbers another."""
    if isinstance(own, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(own) and all(map(_alike, saved, own))
    if own is None or isinstance(own, bool):
        return saved is None or isinstance(saved, bool)
    return (_is_number(saved) and _is_number(own)) or isinstance(saved, type(own))


def _is_number(value: Any) -> bool:
    if isinstance(value, th.Tensor):
        return value.numel() == 1 and not value.is_meta
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require_state(name: str, value: Any, parameter: th.Tensor) -> None:
    if isinstance(value, th.Tensor):
        shape = parameter.shape if value.dim() else value.shape  # a count of steps is a tensor of no dimensions
        _require_tensor(name, value, shape, parameter.dtype if value.dim() else value.dtype)
    elif value is not None and not _is_number(value):
        raise DoesNotFit(f"{name} is neither a tensor nor a number")
