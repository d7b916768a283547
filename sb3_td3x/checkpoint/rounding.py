"""What a run's rounding depends on beside its settings: versions, processor, threads, and how updates are made."""

from functools import cache
from importlib import metadata
from typing import Any

import torch as th

from sb3_td3x.common.resumable import Resumable
from sb3_td3x.td3x import precision
from sb3_td3x.td3x.compiled import Accelerated

VERSIONS = ("sb3-td3x", "stable-baselines3", "torch", "gymnasium", "numpy")

version = cache(metadata.version)  # reading a package's metadata takes a millisecond
processor = cache(precision.processor)


def facts(model: Resumable) -> dict[str, Any]:
    """
    :return: for a manifest: ``versions``, ``machine`` (processor, threads, and the matrix kernels of compiled updates) and
        ``path``, which the updates are made on
    """
    path = getattr(model, "update_path", None)
    machine = {"processor": processor(), "torch threads": th.get_num_threads()}
    if path == "compiled" and model.device.type == "cpu":
        machine["matrix kernels"] = precision.choose_matrix_kernels()
    return {"versions": {name: version(name) for name in VERSIONS}, "machine": machine, "path": path}


def differences(model: Resumable, manifest: dict[str, Any]) -> list[str]:
    """
    :param model: of the manifest's run
    :return: what is otherwise here, in words
    """
    here, saved = facts(model), {"machine": {}, **manifest}  # older manifests have no machine
    other_versions = [f"rounding and random numbers ({name} was {saved['versions'].get(name)}, is {own})"
                      for name, own in here["versions"].items() if saved["versions"].get(name) != own]  # fmt: skip
    other_machine = [f"rounding ({name}: was {saved['machine'][name]}, is {own})"
                     for name, own in here["machine"].items() if saved["machine"].get(name, own) != own]  # fmt: skip
    return other_versions + other_machine


def other_path(model: Resumable) -> list[str]:
    """
    :param model: that is about to go on
    :return: which path its updates were made on and which one they will be made on, in words, if these differ
    """
    if not isinstance(model, Accelerated) or model.update_path is None or not model._n_updates:
        return []
    path, reason = model.path_ahead()
    return [] if path == model.update_path else [f"rounding (updates were {model.update_path}, are {path}: {reason})"]
