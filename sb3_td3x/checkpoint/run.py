"""Saving a whole run and resuming it: the model and everything around it that the next step depends on."""

import shutil
import warnings
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import callback_state, env_state, log_state, replay
from sb3_td3x.checkpoint.store import MODEL, Checkpoint, Store, as_checkpoint_error, require_prefix
from sb3_td3x.common import files, random_state
from sb3_td3x.common.resumable import Resumable, SelfResumable
from sb3_td3x.common.transitions import truncate_episodes
from sb3_td3x.common.validation import check_int
from sb3_td3x.common.vec_envs import explained_deaths, hook_uses
from sb3_td3x.errors import UntrustedModelError, escaped
from sb3_td3x.saving import safe_pickle
from sb3_td3x.td3x import precision
from sb3_td3x.td3x.compiled import update_path
from sb3_td3x.td3x.td3x import TD3X
from sb3_td3x.version import __version__

PACKAGES = (
    "stable-baselines3", "sb3-contrib", "torch", "numpy", "gymnasium", "gymnasium-robotics", "mujoco", "box2d", "panda-gym",
    "pybullet", "pybullet-envs-gymnasium",
)  # fmt: skip
"""What a run may depend on; not all need to be installed."""
STATE, MARKS, PICKLED_BUFFER = "state.pkl", "replay_marks.npz", "replay_buffer.pkl"

_newest: WeakKeyDictionary[Resumable, dict[Path, int]] = WeakKeyDictionary()
"""By folder, the number of the newest checkpoint when a model was last saved there or resumed from it."""


@cache  # reading a package's metadata takes a millisecond
def versions() -> dict[str, str]:
    """Of ``PACKAGES``, as far as they are installed."""
    installed = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return {"sb3-td3x": __version__, **installed}


def save_run(
    model: Resumable,
    folder: str | Path,
    callbacks: callback_state.Callbacks = (),
    *,
    keep_last: int = 2,
    name_prefix: str = "td3x",
    save_replay_buffer: bool = True,
) -> Checkpoint:
    """
    Save a run so that another process can resume it.

    The checkpoint gets its name when all of it is on the disk; until then, and if anything fails, earlier checkpoints stay
    as they are. Only new transitions and the last, unfinished file are written. Entries of the replay buffer that a user
    changes in place after a save are not noticed; another buffer in its place is.

    :param model: between two rollouts: after ``learn`` or in a callback's ``_on_rollout_start``
    :param folder: of this run's checkpoints, made if needed; one run per folder
    :param callbacks: those given to ``learn``; their counters, scores and histories are saved
    :param keep_last: checkpoints to keep, this one among them
    :param name_prefix: of the checkpoint's folder, ``<name_prefix>_<steps>_steps``
    :param save_replay_buffer: ``False`` saves everything else: a small checkpoint, after which a buffer has to be filled again
    :return: the checkpoint, with its ``path``, ``steps`` and ``manifest``
    :raises CheckpointError: naming what cannot be written (the disk may be full), a state that cannot be saved, or
        another run's checkpoint, which is left alone
    :raises ValueError: inside a step (in a callback's ``_on_step``), whose transition is not stored yet; before ``learn`` has
        begun with the model's environments; for a prefix that begins with a dot or names another folder; for a model that is
        not ``Resumable``
    :raises RunLockedError: if another process is saving there
    :raises EnvironmentDiedError: if the process of an environment has ended
    """
    keep_last = check_int("keep_last", keep_last, minimum=1)
    require_prefix(name_prefix)
    if not isinstance(model, Resumable):
        name = type(model).__name__
        advice = "off-policy ones such as SAC can, as class Own(Resumable, SAC), with Resumable of sb3_td3x.common.resumable"
        raise ValueError(f"{name} cannot be resumed: {advice}")
    if not model._is_stored and model._last_obs is not None:
        raise ValueError("the transition of this step is not stored yet: save in a callback's _on_rollout_start")
    env = model.get_env()
    if env is None or model._on_resume is not None or model._env_hooks != hook_uses(env):
        advice = "save in or after it, or use model.save and model.save_replay_buffer"
        raise ValueError(f"learn has not begun with these environments: {advice}")
    store = Store(Path(folder).resolve())
    newest = _newest.setdefault(model, {})
    adding = store.adding(name_prefix, model.num_timesteps, newest.get(store.folder, 0))
    with adding as (partial, complete), explained_deaths(env):
        model.save(partial / MODEL)
        environments = env_state.get(env)
        # Otherwise `learn` has ended inside a step (`None`), or the environments are elsewhere by now
        environments["complete"] &= model._last_obs is not None and not model._is_env_used_by_others()
        named = model.policy.named_parameters()
        state = {
            "generators": random_state.get_states(model.action_space, model.device),
            "env": environments,
            "callbacks": callback_state.state(callbacks),
            "model": {name: getattr(model, name) for name in type(model).only_in_checkpoints},
            "plain because": getattr(getattr(model, "_updater", None), "declined", None),
            # Without what `th.compile` adds to names: a policy that it has wrapped comes back as it was
            "frozen": [key.replace("_orig_mod.", "") for key, part in named if not part.requires_grad],
        }
        with as_checkpoint_error(store.folder, "cannot hold the state of the run"):
            pickled = safe_pickle.dumps(state)
        (partial / STATE).write_bytes(pickled)
        for name, path in callback_state.files(callbacks).items():
            if path.exists():
                shutil.copyfile(path, partial / name)
        manifest: dict[str, Any] = {
            "replay": _save_buffer(model, store, partial) if save_replay_buffer else {},
            "logs": log_state.lengths(model.logger, env, store.folder),
            "machine": _machine(model),
            "resumed": model.resumptions,
            "inside rollout": model._stopped_in_rollout,
        }
        checkpoint = complete(manifest)
        newest[store.folder] = checkpoint.manifest["number"]
        store.prune(keep_last)
    return checkpoint


@overload
def resume_run(folder: str | Path, env: GymEnv, *, algorithm: type[SelfResumable], **kwargs: Any) -> SelfResumable: ...
@overload
def resume_run(
    folder: str | Path, env: GymEnv, *, checkpoint: int | None = None, trust: bool = False, **kwargs: Any
) -> TD3X: ...
def resume_run(
    folder: str | Path,
    env: GymEnv,
    *,
    checkpoint: int | None = None,
    trust: bool = False,
    algorithm: type[Resumable] = TD3X,
    **kwargs: Any,
) -> Resumable:
    """
    Load the model of a saved run, which ``learn(total, callback, resume=True)`` continues.

    Random generators, environments and the callbacks given to ``learn`` get their saved state when ``learn`` begins, so that
    what happens before does not matter. What could not be restored is then named in a warning, in ``model.resumptions`` and in
    later checkpoints.

    :param folder: given to ``save_run``
    :param env: built as the run's was
    :param checkpoint: environment steps of the one to use; ``None`` is the newest
    :param trust: run code from the checkpoint, see ``TD3X.load``
    :param algorithm: the saved model's class. SB3's with ``Resumable`` before it are loaded as SB3 does: with ``trust`` only
    :param kwargs: as for ``TD3X.load``: attributes to change, ``custom_objects``, and ``device``, of which ``"auto"`` is the
        CPU for a run that was there
    :raises CheckpointError: if there is none or a file of it is damaged; names the file and the last whole checkpoint
    :raises UntrustedModelError: without ``trust``, if the model needs it
    :raises ValueError: for a ``seed``, or an ``algorithm`` that is not ``Resumable``
    """
    if kwargs.get("seed") is not None:
        raise ValueError("a resumed run continues with the saved states of its random generators: it takes no seed")
    store = Store(Path(folder).resolve())
    known = store.checkpoints()  # before one is chosen: one that is saved later is of a run that lives
    saved = store.find(checkpoint)
    with as_checkpoint_error(saved.path / STATE):
        state = safe_pickle.loads((saved.path / STATE).read_bytes())
        if kwargs.get("device", "auto") == "auto" and not state["generators"]["cuda"]:
            kwargs["device"] = "cpu"  # not a GPU, whose rounding is another
    if issubclass(algorithm, TD3X):
        kwargs["trust"] = trust
    elif not issubclass(algorithm, Resumable):
        raise ValueError(f"algorithm={algorithm.__name__} is not the saved model's class, such as class Own(Resumable, SAC)")
    elif not trust:
        raise UntrustedModelError("the model", f"a {algorithm.__name__} for SB3's load", str(saved.path / MODEL))
    model = algorithm.load(saved.path / MODEL, env=env, force_reset=False, **kwargs)
    with as_checkpoint_error(saved.path / STATE):
        vars(model).update({name: state["model"][name] for name in type(model).only_in_checkpoints})
        for name, parameter in model.policy.named_parameters():
            parameter.requires_grad_(name.replace("_orig_mod.", "") not in state["frozen"])
        machine = saved.manifest["machine"]
        if isinstance(model, TD3X) and machine["processor"] == precision.processor():
            kernels = machine["matrix kernels"]
            model._matrix_kernels = kernels if precision.is_accurate(kernels) else "default"
        # `VecNormalize`'s, for code that uses it before `learn`
        env_state.set_vec(model.env, state["env"], of_episodes=False)  # type: ignore[arg-type]
    with as_checkpoint_error(store.chunks):
        problems = _load_buffer(model, store, saved, trust)
        if saved.manifest["inside rollout"]:
            problems.append("the updates: the run was stopped or saved inside a rollout, or before all updates after one")
    problems += [f"rounding or random numbers ({name} was {machine[name]}, is {value})"
                 for name, value in _machine(model).items() if machine.get(name, value) != value]  # fmt: skip
    if model.use_sde:  # SB3 draws it before a rollout's checkpoint is made
        problems.append("random numbers: the noise of gSDE (use_sde) is drawn anew")
    _newest[model] = {store.folder: max(each.manifest["number"] for each in (*known, saved))}
    model._on_resume = _Restoration(model, saved, state, problems)
    return model


def _save_buffer(model: Resumable, store: Store, folder: Path) -> dict[str, Any]:
    buffer = model.replay_buffer
    # A buffer that was loaded may not be what the model, loaded from its zip, makes; then it is pickled whole
    rows = max(model.buffer_size // buffer.n_envs, 1)
    time_limits = (model.replay_buffer_kwargs or {}).get("handle_timeout_termination", True)
    made = (model.replay_buffer_class, rows, model.optimize_memory_usage, time_limits)
    is_own = type(buffer) in replay.COVERED and made == (
        type(buffer), buffer.buffer_size, buffer.optimize_memory_usage, buffer.handle_timeout_termination
    )  # fmt: skip
    if not is_own or getattr(buffer, "copy_info_dict", False):
        model.save_replay_buffer(folder / PICKLED_BUFFER)
        return {}
    if marks := replay.marks(buffer):
        np.savez(folder / MARKS, **marks)  # type: ignore[arg-type]
    return replay.save(buffer, store.chunks, model.num_timesteps)


def _load_buffer(model: Resumable, store: Store, saved: Checkpoint, trust: bool) -> list[str]:
    """Fill the model's replay buffer; return what could not be restored."""
    if (pickled := saved.path / PICKLED_BUFFER).exists():
        options: dict[str, Any] = {"trust": trust} if isinstance(model, TD3X) else {}
        model.load_replay_buffer(pickled, truncate_last_traj=False, **options)
        return []
    if not saved.manifest["replay"]:
        return ["the replay buffer (it was not saved)"]
    replay.load(model.replay_buffer, store.chunks, saved.manifest["replay"])
    if replay.marks(model.replay_buffer):
        with as_checkpoint_error(saved.path / MARKS):
            replay.set_marks(model.replay_buffer, files.read_arrays(saved.path / MARKS))
    return []


def _machine(model: Resumable) -> dict[str, Any]:
    """What the rounding of a run depends on besides its settings, and the versions of what draws its random numbers."""
    described: dict[str, Any] = {"algorithm": type(model).__name__, **versions()}
    described |= {"device": model.device.type, "processor": precision.processor(), "torch threads": th.get_num_threads()}
    if isinstance(model, TD3X):
        described["update path"] = update_path(model.accelerate, model.policy, model._updates_since_load)
        described["matrix kernels"] = model._matrix_kernels or precision.choose_matrix_kernels()
    return described


class _Restoration:
    """Gives all around the model its saved state right before the first step; until that is made it can be called again."""

    def __init__(self, model: Resumable, checkpoint: Checkpoint, state: dict[str, Any], problems: list[str]):
        self.model, self.checkpoint, self.state = model, checkpoint, state
        self.problems = problems  # what could not be restored so far
        self.last_obs: Any = model._last_obs  # `None` if `learn` ended inside a step
        self.at_start = np.asarray(model._last_episode_starts, dtype=bool) & (self.last_obs is not None)
        if self.last_obs is None:
            model._last_obs = {}  # so that only the restoration resets the environments, not SB3 before it
        self.resumptions = model.resumptions

    def __call__(self, callback: BaseCallback) -> None:
        model, state, folder = self.model, self.state, self.checkpoint.path
        env: Any = model.env
        with as_checkpoint_error(folder / STATE):
            problems = self.problems + callback_state.restore(callback, state["callbacks"])
            for name, path in callback_state.files(callback).items():  # a checkpoint does not say where to write
                if name in self.checkpoint.manifest["files"]:
                    files.write(path, (folder / name).read_bytes())
        problems += self._restore_envs(env, state["env"])
        with as_checkpoint_error(folder / STATE):
            log_state.truncate(model.logger, env, folder.parent, self.checkpoint.manifest["logs"], model.num_timesteps)
            if isinstance(model, TD3X) and model.accelerate == "auto" and state["plain because"]:  # compiled, it would differ
                model._get_updater().decline(escaped(state["plain because"]))
            problems += random_state.set_states(state["generators"], model.action_space, model.device)
        model.resumptions = [*self.resumptions, {"steps": model.num_timesteps, "not_restored": problems}]
        for problem in problems:
            warnings.warn(f"not restored exactly: {escaped(problem)}", stacklevel=7)

    def _restore_envs(self, env: VecEnv, saved: dict[str, Any]) -> list[str]:
        model, normalization = self.model, self.model.get_vec_normalize_env()
        at_start = np.resize(self.at_start, env.num_envs)  # without a saved buffer there may be more or fewer of them now
        with as_checkpoint_error(self.checkpoint.path / STATE):
            restored = env_state.set_envs(env, saved, at_start)
        if saved["complete"] and restored:
            model._last_obs = self.last_obs
            return env_state.set_vec(env, saved)
        first: Any = env.reset()
        problems = env_state.set_vec(env, saved, of_episodes=False)
        if normalization is not None:
            model._last_original_obs = normalization.get_original_obs()
            first = normalization.normalize_obs(model._last_original_obs)  # by the saved statistics
        model._last_obs, model._last_episode_starts = first, np.ones(env.num_envs, dtype=bool)
        truncate_episodes(model.replay_buffer, ~at_start)
        problems += [f"what {name} may keep beyond an episode (a wrapper without get_run_state and set_run_state)"
                     for name in env_state.get(env)["forgets"]]  # fmt: skip
        if not at_start.all():
            if model.action_noise is not None:
                model.action_noise.reset()
            return [*problems, "the current episodes, which are cut here"]
        drawn = [inner["random"] for inner in env_state.get(env)["envs"] or ()]
        as_saved = [inner["random"] for inner in saved["envs"] or ()]
        if not (restored and _equal(first, self.last_obs) and all(map(_equal, drawn, as_saved))):
            return [*problems, "the environments: their reset gives another episode (wrap them in EpisodeSeeds, offer "
                    "get_run_state, or take VecNormalize for NormalizeObservation)"]  # fmt: skip
        model._last_obs = self.last_obs
        return problems


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return np.array_equal(left, right)
