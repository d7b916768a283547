"""
Saved models: the zip that SB3 writes, read without running code of whoever made it.

SB3 writes attributes as JSON, pickling those that JSON cannot hold, and tensors with ``torch.save``. Here all of them go
through ``safe_pickle``. SB3's ``load`` then gets a zip that holds only the attributes' names, and their values beside it.
"""

import base64
import copy
import inspect
import io
import json
import os
import pathlib
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch as th
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_zip_file, recursive_getattr

from sb3_td3x.common import files, validation
from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from sb3_td3x.common.random_state import torch_state
from sb3_td3x.errors import ModelFileError, UntrustedModelError, escaped
from sb3_td3x.saving import safe_pickle

FORMAT_VERSION = 1  # in every saved model; raised when an older program can no longer read what a newer one writes

SB3_VALUES: dict[str, Any] = {
    "n_quantiles": 1, "qf_learning_rate": None, "max_grad_norm": None, "prioritization": None, "action_noise": None,
    "learning_starts": 100,
}  # fmt: skip
"""The values of SB3's TD3: for its saved models without these keywords, whatever today's defaults are."""

AUTOMATIC_CLASSES = (ReplayBuffer, DictReplayBuffer, NStepReplayBuffer, PrioritizedReplayBuffer)  # if the user names none
VARIABLES = "pytorch_variables.pth"  # tensors of a subclass beside the networks, which SB3 sets in the loaded model
LOGGED = ("ep_info_buffer", "ep_success_buffer")  # with what users' `info_keywords` name, of any type
NOT_FOR_LOAD = {"policy", "env", "lr_schedule", "_init_setup_model"}
"""What ``load`` does not take as keywords: it has an ``env`` of its own, and ``learning_rate`` makes the schedule."""
EXECUTION_OPTIONS = ("fused", "foreach", "capturable", "differentiable")
"""Options of an optimizer that say how its step is computed: this model's stay when saved states are loaded."""

PathOrFile = str | pathlib.Path | io.BufferedIOBase


class DoesNotFit(ModelFileError, RuntimeError):
    """Tensors of another network or optimizer; a ``RuntimeError`` too, as torch raises for them."""


@dataclass(frozen=True)
class ModelFile:
    """A saved model, of which nothing has been unpickled."""

    name: str  # for errors
    content: bytes  # of the whole file
    attributes: dict[str, Any]  # SB3's member ``data``: plain values, and of everything else a description with its pickle
    members: dict[str, bytes]  # the tensors and the description of the system that saved them

    def tensors(self) -> dict[str, Any]:
        """The state dicts by the names that ``set_parameters`` takes."""
        states = {}
        for member in filter(lambda name: name.endswith(".pth"), self.members):
            try:
                states[member.removesuffix(".pth")] = safe_pickle.load_tensors(self.members[member])
            except (safe_pickle.NotAllowed, ModelFileError) as error:
                raise ModelFileError(f"{self.name} cannot be loaded: {member}: {error}") from error
        if states.pop("pytorch_variables", None):
            advice = "if it is yours, load it with trust=True"
            raise ModelFileError(f"{self.name} cannot be loaded: it has tensors beside the networks; {advice}")
        return states


def load(
    sb3_load: Any, cls: type, path: PathOrFile, env: Any, custom_objects: dict[str, Any], trust: bool, changes: dict[str, Any]
) -> Any:
    """The body of ``TD3X.load``, around SB3's ``load`` bound to the class ``cls`` and to the arguments that only it reads."""
    file = read(path)
    _check_changes(cls, changes, file.attributes)
    saved: Any
    with explained_errors(file.name):
        if trust:
            saved, tensors, _ = load_from_zip_file(io.BytesIO(file.content), True, custom_objects, "cpu")
            # SB3 leaves out what it cannot read, and a default would take its place
            if lost := sorted(file.attributes.keys() - saved.keys() - changes.keys() - {"lr_schedule"}):
                raise ModelFileError(f"SB3 cannot read {lost[0]}: give it as custom_objects={{{lost[0]!r}: ...}}")
        else:
            saved, tensors = _checked(file, cls, custom_objects, changes), file.tensors()
    if env is not None:
        env = cls._wrap_env(env)  # type: ignore[attr-defined]  # here, because what it raises is no error of the file
    with explained_errors(file.name), th.random.fork_rng(devices=[]):
        if env is None and saved.get("n_envs", 1) > 100_000:  # each gets a copy of the noise
            raise ValueError(f"{saved['n_envs']} are more environments than any model has")
        # SB3 does not unpickle custom objects
        zipped, changed = _zip_of_names(file, saved, trust), _with_consequences(changes, saved)
        model = sb3_load(zipped, env, custom_objects=saved, _loaded_tensors=tensors, **changed)
        state, model.noise_generator = model.noise_generator, th.Generator()
        if "noise_generator" in saved:
            model.noise_generator.set_state(torch_state(state))
        elif changes.get("seed") is None:
            model._seed_noise(model.seed)
    del model._loaded_tensors, model.set_parameters
    if "learning_starts" in (requested := {**custom_objects, **changes}):
        model.learning_starts = requested["learning_starts"]
    if changes.get("seed") is not None:
        model.set_random_seed(model.seed)
    return model


def save(sb3_save: Any, model: Any, policy_class: type, path: PathOrFile, *exclude_include: Iterable[str] | None) -> None:
    """The body of ``TD3X.save``. The file names ``policy_class``; a process that is killed leaves the file that was there."""
    # SB3 saves a stand-in with copies of the tensors: another thread may be training the model itself
    parameters = copy.deepcopy(model.get_parameters())
    stand_in: Any = object.__new__(type("StandIn", (type(model),), {"get_parameters": lambda self: parameters}))
    noise_state = model.noise_generator.get_state().numpy()
    vars(stand_in).update({**vars(model), "policy_class": policy_class, "noise_generator": noise_state})
    zipped = io.BytesIO()
    sb3_save.__func__(stand_in, zipped, *exclude_include)
    if not isinstance(path, (str, pathlib.Path)):
        path.write(zipped.getbuffer())
        return
    path = pathlib.Path(path)
    path = (path if path.suffix else pathlib.Path(f"{path}.zip")).resolve()  # as SB3 names it; a link stays one
    with files.replacing(path) as partial:
        partial.write_bytes(zipped.getbuffer())


def set_parameters(sb3_set_parameters: Callable[..., None], model: Any, source: Any, exact_match: bool) -> None:
    """The body of ``TD3X.set_parameters``: all of the parameters fit, or none is taken."""
    if not isinstance(source, dict):
        source = read(source).tensors()
    names = model._get_torch_save_params()[0]
    if exact_match and source.keys() != set(names):
        raise DoesNotFit(f"there must be parameters of {', '.join(names)}, not of {', '.join(map(str, source)) or 'none'}")
    before = copy.deepcopy(model.get_parameters())
    try:
        copies = {name: copy.deepcopy(part) if "param_groups" in part else part for name, part in source.items()}
        sb3_set_parameters(copies, exact_match)  # optimizers keep the tensors that they are given
        for name in source:
            if isinstance(optimizer := recursive_getattr(model, name), th.optim.Optimizer):
                _check_optimizer(name, optimizer, before[name]["param_groups"])
    except Exception as error:
        sb3_set_parameters(before)
        raise DoesNotFit(f"the parameters do not fit the model: {error}") from error


def read(path: PathOrFile) -> ModelFile:
    """Read a saved model as far as that unpickles nothing; a damaged, newer or foreign file gives a ``ModelFileError``."""
    with opened(path, suffix="zip") as file:
        content = file.read()
    with explained_errors(path) as name, zipfile.ZipFile(io.BytesIO(content)) as archive:
        if missing := sorted({"data", "policy.pth"} - set(archive.namelist())):
            raise ModelFileError(f"{name} is not a TD3 model, or is cut off: it lacks {', '.join(missing)}")
        members = files.unpacked(archive, len(content))
        attributes = json.loads(members.pop("data"))
        if not isinstance(attributes, dict) or "policy_delay" not in attributes:
            raise ModelFileError(f"{name} was not saved by TD3X or SB3's TD3 (resume_run takes another class as algorithm=)")
        version = attributes.get("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ModelFileError(f"{name} has format {version}; this sb3_td3x reads up to {FORMAT_VERSION}: please upgrade it")
    return ModelFile(name, content, attributes, members)


def opened(path: PathOrFile, suffix: str) -> AbstractContextManager[Any]:
    """Open a file to read. To a name of no file ``suffix`` is appended if that makes it one, as SB3 does where it saves."""
    if not isinstance(path, (str, os.PathLike)):
        path.seek(0)
        return nullcontext(path)  # the user's to close
    path, suffixed = pathlib.Path(path), pathlib.Path(f"{path}.{suffix}")
    path = suffixed if suffixed.is_file() and not path.is_file() else path
    if path.exists() and not path.is_file():  # opening or reading a pipe or a device may never end
        raise ModelFileError(f"{path} is not a file")
    return path.open("rb")


@contextmanager
def explained_errors(path: Any, what: str = "the model") -> Iterator[str]:
    """Turn what reading a bad file raises into the two documented errors, which name the file, and ``what`` needs trust."""
    name = str(path) if isinstance(path, (str, pathlib.Path)) else "the file"
    try:
        yield name
    except OSError:
        raise
    except safe_pickle.NotAllowed as error:
        raise UntrustedModelError(what, str(error), name) from error
    except ModelFileError as error:
        if str(error).startswith(escaped(name)):
            raise
        raise ModelFileError(f"{name} cannot be loaded: {error}") from error
    except Exception as error:
        if "spaces do not match" in str(error):  # SB3's, of the environment that the user gives
            raise
        raise ModelFileError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _check_changes(cls: type, changes: dict[str, Any], saved: dict[str, Any]) -> None:
    """Check the keywords of ``load``: SB3 would set any attribute, and learning would ignore a misspelled one."""
    known = set(saved)
    for parent in cls.__mro__:  # with the arguments that a subclass passes on as ``**kwargs``
        if "__init__" in vars(parent):
            arguments = inspect.signature(parent).parameters.values()
            known |= {argument.name for argument in arguments}
            if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
                break
    known -= NOT_FOR_LOAD
    for name in changes:
        if name not in known:
            raise TypeError(f"{cls.__name__} has no {name!r} to load with{validation.did_you_mean(name, known)}")
        if name in validation.CHECKS:
            validation.CHECKS[name](name, changes[name])
    n_quantiles = saved.get("n_quantiles", SB3_VALUES["n_quantiles"])
    if changes.get("n_quantiles", n_quantiles) not in (n_quantiles, validation.AUTO):
        raise ValueError(f"n_quantiles cannot be {changes['n_quantiles']!r}: the critics in the file have {n_quantiles}")
    if changes.get("stats_window_size") is not None:
        validation.check_int("stats_window_size", changes["stats_window_size"], minimum=1)
    if isinstance(changes.get("action_noise"), (int, float)):
        validation.check_not_negative("action_noise", changes["action_noise"])


def _checked(file: ModelFile, cls: type, custom_objects: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The saved attributes, read through the allow-list where ``custom_objects`` does not replace them."""
    attributes: dict[str, Any] = {}
    # Excluded is ``env`` too: SB3 would import the module that a string there names
    stub: Any = object.__new__(cls)
    vars(stub).update(file.attributes)  # a subclass may ask for its own
    excluded: list[str] = stub._excluded_save_params()
    for name, value in file.attributes.items():
        if name in excluded or callable(getattr(cls, name, None)):
            advice = "if it is yours, saved with include=, load it with trust=True"
            raise ModelFileError(f"{file.name} sets {name}, which is no saved attribute of a model: {advice}")
        if name in custom_objects or name == "lr_schedule":  # SB3 saves the schedule and makes it anew from ``learning_rate``
            value = custom_objects.get(name)
        elif isinstance(value, dict) and ":serialized:" in value:
            try:
                value = safe_pickle.loads(base64.b64decode(value[":serialized:"], validate=True))
            except safe_pickle.NotAllowed as error:
                if name in changes:
                    value = changes[name]
                elif name in LOGGED:
                    value = None
                    warnings.warn(f"{file.name}: the log's averages begin anew, for {name} holds {error}", stacklevel=4)
                else:
                    raise UntrustedModelError(name, str(error), file.name) from error
        attributes[name] = value
    return attributes


def _zip_of_names(file: ModelFile, attributes: dict[str, Any], trust: bool) -> io.BytesIO:
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data", json.dumps(dict.fromkeys(attributes)))
        # SB3 prints it: no control characters that an untrusted file may hold
        lines = file.members.get("system_info.txt", b"").decode(errors="replace").splitlines()
        archive.writestr("system_info.txt", "\n".join(ascii(line)[1:-1] for line in lines))
        if trust and VARIABLES in file.members:
            archive.writestr(VARIABLES, file.members[VARIABLES])
    return zipped


def _with_consequences(changes: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The attributes to change, with those that follow from them and from what the file has or lacks."""
    changes = {name: value for name, value in changes.items() if name != "learning_starts"}
    n_quantiles = saved.get("n_quantiles", SB3_VALUES["n_quantiles"])
    if (window := changes.pop("stats_window_size", None)) is not None:
        changes |= {"_stats_window_size": int(window), "ep_info_buffer": None}  # SB3 makes a new one
    buffer_class, buffer_kwargs = saved.get("replay_buffer_class"), saved.get("replay_buffer_kwargs") or {}
    has_models_n_steps = buffer_class is not NStepReplayBuffer or buffer_kwargs.get("n_steps") == saved.get("n_steps", 1) > 1
    keeps_steps = issubclass(changes.get("replay_buffer_class") or ReplayBuffer, NStepReplayBuffer)
    if buffer_class in AUTOMATIC_CLASSES and has_models_n_steps and not keeps_steps:
        # SB3 saves its choice, with two arguments that follow from the settings: choose again, by the changed settings
        others = {name: value for name, value in buffer_kwargs.items() if name not in ("n_steps", "gamma")}
        changes = {"replay_buffer_class": None, "replay_buffer_kwargs": others, **changes}
    if "replay_buffer_kwargs" in changes:
        changes["replay_buffer_kwargs"] = dict(changes["replay_buffer_kwargs"] or {})  # SB3 writes into it
    missing = {name: value for name, value in SB3_VALUES.items() if name not in saved and "format_version" not in saved}
    # SB3's files hold the number of steps alone: that is what the program did, whatever today's default is
    request = saved.get("_learning_starts_request", {**missing, **saved}.get("learning_starts", validation.AUTO))
    return {**missing, **changes, "n_quantiles": n_quantiles, "_learning_starts_request": request}


SCALARS = ("step", "eta", "mu", "mu_product")  # of an optimizer's state; all else is read as far as its parameter goes


def _check_optimizer(name: str, optimizer: th.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Keep how steps are computed, and check the shapes of the state, which torch checks only when it makes a step."""
    for before, group in zip(groups, optimizer.param_groups, strict=True):
        group.update({option: before[option] for option in EXECUTION_OPTIONS if option in before})
    if safe_pickle.is_known(type(optimizer)):  # another takes trust, as Adafactor: its state may have any shape
        for parameter, values in optimizer.state.items():
            values.update({key: value.clone() for key, value in values.items() if isinstance(value, th.Tensor)})  # may be one
            for key, value in values.items():
                if isinstance(value, th.Tensor) and value.shape != (() if key in SCALARS else parameter.shape):
                    raise ModelFileError(f"{name} has the shape {tuple(value.shape)} of {key}, not {tuple(parameter.shape)}")
