"""Saving a whole run and resuming it: the model and everything around it that the next step depends on."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import callback_state, env_state, log_state, replay
from sb3_td3x.checkpoint.callback_state import Callbacks
from sb3_td3x.checkpoint.store import Checkpoint, Store, require_prefix
from sb3_td3x.common import files, random_state
from sb3_td3x.common.resumable import Resumable, SelfResumable
from sb3_td3x.common.transitions import truncate_episodes
from sb3_td3x.common.validation import check_int
from sb3_td3x.common.vec_envs import explained_deaths
from sb3_td3x.errors import CheckpointError, UntrustedModelError
from sb3_td3x.saving import safe_pickle
from sb3_td3x.saving.safe_pickle import NotAllowed
from sb3_td3x.td3x import precision
from sb3_td3x.td3x.compiled import update_path
from sb3_td3x.td3x.td3x import TD3X

MODEL, STATE, MARKS, PICKLED_BUFFER = "model.zip", "state.pkl", "replay_marks.npz", "replay_buffer.pkl"
STATE_PARTS = ("generators", "env", "callbacks", "files", "log", "model")
"""What the state file holds, a dict each."""
VERSIONS = ("sb3-td3x", "stable-baselines3", "torch", "gymnasium", "numpy")

INSIDE_ROLLOUT = "the updates: training was stopped inside a rollout, after which they are due (train_freq in episodes)"

version = cache(metadata.version)  # reading a package's metadata takes a millisecond


def save_run(
    model: Resumable,
    folder: str | Path,
    callbacks: Callbacks = (),
    *,
    keep_last: int = 2,
    name_prefix: str = "td3x",
    with_replay_buffer: bool = True,
) -> Checkpoint:
    """
    Save a run so that another process can resume it.

    The checkpoint gets its name when all of it is on the disk; until then, and if anything fails, earlier checkpoints stay
    as they are. Only transitions that are new since the last save are written. Entries of the replay buffer that a user
    changes in place after a save are not noticed; another buffer in its place is.

    :param model: between two rollouts: before or after ``learn``, or in a callback's ``_on_rollout_start``
    :param folder: of this run's checkpoints, made if needed; one run per folder
    :param callbacks: those given to ``learn``; their counters, scores and histories are saved
    :param keep_last: checkpoints to keep, this one among them
    :param name_prefix: of the checkpoint's folder, ``<name_prefix>_<steps>_steps``
    :param with_replay_buffer: ``False`` saves everything else: a small checkpoint, after which a buffer has to be filled again
    :return: the checkpoint; its ``manifest`` names what will not be exact
    :raises CheckpointError: naming the file that cannot be written (the disk may be full), a state that cannot be saved, or
        another run's checkpoint, which is left alone
    :raises ValueError: inside a step (in a callback's ``_on_step``), whose transition is not stored yet; for a prefix that
        begins with a dot or names another folder
    :raises RunLockedError: if another process is saving there
    :raises EnvironmentDiedError: if the process of an environment has ended
    """
    check_int("keep_last", keep_last, minimum=1)
    require_prefix(name_prefix)
    if not model._is_stored and model._last_obs is not None:
        raise ValueError("the transition of this step is not stored yet: save in a callback's _on_rollout_start")
    store = Store(Path(folder).resolve())
    env = _env_of(model)
    with store.writing(), explained_deaths(env):
        saves = _saves.setdefault(model, {})
        _require_own(store, saves.get(store.folder))
        with store.adding(name_prefix, model.num_timesteps) as (partial, complete):
            model.save(partial / MODEL)
            environments = env_state.get(env, was_reset=not _is_before_learn(model))
            environments["complete"] = environments["complete"] and not _was_cut(model)
            logger: Logger | None = getattr(model, "_logger", None)
            state = {
                "generators": random_state.get_states(model.action_space, model.device),
                "env": environments,
                "callbacks": callback_state.state(callbacks),
                "files": _copy_in(callback_state.files(callbacks), partial),
                "log": {} if logger is None else log_state.unwritten(logger),
                "model": {name: getattr(model, name) for name in model.only_in_checkpoints},
            }
            (partial / STATE).write_bytes(_pickled(state, store.folder))
            save = saves.get(store.folder)
            manifest = {
                "total": model._total_timesteps,
                "updates": model._n_updates,
                "replay": _save_buffer(model, store, partial, save) if with_replay_buffer else {},
                "logs": {} if logger is None else log_state.lengths(logger, env, store.folder),
                "machine": _machine(model),
                "resumed": model.resumptions,
                "not_exact": _not_exact(model, environments, callbacks, with_replay_buffer),
            }
            checkpoint = complete(manifest)
        saves[store.folder] = _Save(checkpoint, checkpoint, ref(model.replay_buffer), model._rows_stored)
        store.prune(keep_last)
    return checkpoint


def resume_run(
    folder: str | Path,
    env: GymEnv,
    *,
    checkpoint: int | None = None,
    trust: bool = False,
    algorithm: type[SelfResumable] = TD3X,  # type: ignore[assignment]  # the default of a type variable
    **kwargs: Any,
) -> SelfResumable:
    """
    Load the model of a saved run, which ``learn(total, callback, resume=True)`` continues.

    Random generators, environments and the callbacks given to ``learn`` get their saved state when ``learn`` begins, so that
    what happens before does not matter. What could not be restored is then named in a warning and in later checkpoints.

    :param folder: given to ``save_run``
    :param env: built as the run's was
    :param checkpoint: environment steps of the one to use; ``None`` is the newest
    :param trust: run code from the checkpoint, see ``TD3X.load``
    :param algorithm: the saved model's class. SB3's with ``Resumable`` before it are loaded as SB3 does: with ``trust`` only
    :param kwargs: as for ``TD3X.load``: attributes to change, ``device``, ``custom_objects``
    :raises CheckpointError: if there is none or a file of it is damaged; names the file and the last whole checkpoint
    """
    store = Store(Path(folder).resolve())
    saved = store.find(checkpoint)
    with _as_checkpoint_error(saved.path / STATE):
        state = safe_pickle.loads((saved.path / STATE).read_bytes())
        if invalid := [name for name in STATE_PARTS if not isinstance(state[name], dict)]:
            raise ValueError(f"its {invalid[0]!r} is not valid")
    if issubclass(algorithm, TD3X):
        kwargs["trust"] = trust
    elif not trust:
        raise UntrustedModelError("the model", f"a {algorithm.__name__}, which SB3 loads", str(saved.path / MODEL))
    model = algorithm.load(saved.path / MODEL, env=env, force_reset=False, **kwargs)
    with _as_checkpoint_error(saved.path / STATE):
        vars(model).update({name: state["model"][name] for name in model.only_in_checkpoints})
        machine = saved.manifest["machine"]
        if isinstance(model, TD3X) and machine["processor"] == precision.processor():
            model._matrix_kernels = machine["matrix kernels"]
        env_state.set_vec(_env_of(model), state["env"], of_episodes=False)  # for code that looks at it before `learn`
    with _as_checkpoint_error(store.chunks):
        problems = _load_buffer(model, store, saved, trust) + _differences(model, saved.manifest["machine"])
        problems += [reason for reason in saved.manifest["not_exact"] if reason == INSIDE_ROLLOUT]
    _saves.setdefault(model, {})[store.folder] = _Save(
        saved, store.checkpoints()[-1], ref(model.replay_buffer), model._rows_stored
    )
    model._on_resume = _Restoration(model, saved, state, problems)
    return model


@dataclass(frozen=True)
class _Save:
    """What a model knows of a folder of checkpoints."""

    last: Checkpoint  # that it was last saved as or resumed from
    newest: Checkpoint  # in the folder at that time
    buffer: ref[ReplayBuffer]  # the one that `last` holds
    rows: int  # `model._rows_stored` at that time


_saves: WeakKeyDictionary[Resumable, dict[Path, _Save]] = WeakKeyDictionary()


def _require_own(store: Store, save: _Save | None) -> None:
    """Refuse a folder in which another run, or a process that took this one over, has saved since."""
    for newest in store.checkpoints()[-1:]:
        if newest.number > (0 if save is None else save.newest.number):
            problem = f"holds {newest.path.name}, which this run did not save"
            raise CheckpointError(store.folder, f"{problem}: use a folder per run, or continue that one with resume_run")


def _is_before_learn(model: Resumable) -> bool:
    """Whether the environments have not been reset for the model yet."""
    return model._last_obs is None and model._last_episode_starts is None


def _was_cut(model: Resumable) -> bool:
    """Whether ``learn`` ended inside a step, so that the current episodes cannot be continued."""
    return model._last_obs is None and model._last_episode_starts is not None


def _pickled(state: dict[str, Any], folder: Path) -> bytes:
    """Pickle the callbacks' states first, each alone, so that an error can name the callback; then all of it."""
    pickled = b""
    for owner, part in {**{f"callback {name}": part for name, part in state["callbacks"].items()}, "the run": state}.items():
        try:
            pickled = safe_pickle.dumps(part)
        except NotAllowed as error:
            raise CheckpointError(folder, f"cannot hold the state of {owner}: {error}") from error
    return pickled


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    """A forged file may hold anything where its checksum fits: what that makes Python raise names the file."""
    try:
        yield
    except (CheckpointError, UntrustedModelError, ConnectionError, EOFError):  # the last two: an environment's process died
        raise
    except Exception as error:
        raise CheckpointError(path, f"cannot be read: {type(error).__name__}: {error}") from error


def _env_of(model: Resumable) -> VecEnv:
    env = model.get_env()
    if env is None:
        raise ValueError("a model without an environment has no run to save: use model.save")
    return env


def _save_buffer(model: Resumable, store: Store, folder: Path, save: _Save | None) -> dict[str, Any]:
    buffer = model.replay_buffer
    # A buffer that was loaded may not be what the model, loaded from its zip, makes; then it is pickled whole
    rows = max(model.buffer_size // buffer.n_envs, 1)
    made = (model.replay_buffer_class, rows, model.optimize_memory_usage)
    if not replay.covers(buffer) or (type(buffer), buffer.buffer_size, buffer.optimize_memory_usage) != made:
        model.save_replay_buffer(folder / PICKLED_BUFFER)
        return {}
    if marks := replay.marks(buffer):
        np.savez(folder / MARKS, **marks)  # type: ignore[arg-type]
    if save is None or save.buffer() is not buffer or not save.last.manifest["replay"]:
        return replay.save(buffer, store.chunks, None, 0)
    return replay.save(buffer, store.chunks, save.last.manifest["replay"], model._rows_stored - save.rows)


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
        with _as_checkpoint_error(saved.path / MARKS):
            replay.set_marks(model.replay_buffer, files.read_arrays(saved.path / MARKS))
    return []


def _copy_in(paths: dict[str, Path], folder: Path) -> dict[str, str]:
    """Copy the callbacks' files that exist; return the names of the copies."""
    copies = {}
    for number, (owner, path) in enumerate(paths.items()):
        if path.exists():
            copies[owner] = f"{number}_{path.name}"
            shutil.copyfile(path, folder / copies[owner])
    return copies


def _not_exact(model: Resumable, environments: dict[str, Any], callbacks: Callbacks, with_replay_buffer: bool) -> list[str]:
    """What will differ from a run that was never interrupted, in words."""
    at_start = model._last_episode_starts is None or np.all(model._last_episode_starts)  # None: before the first `learn`
    reasons = {
        "the current episodes: the environments do not offer their state, so the episodes will be cut here":
            not environments["complete"] and not at_start,
        **{_forgotten(name): True for name in environments["forgets"]},
        **{f"callback {name}": not callback_state.is_known(callback) for name, callback in callback_state.named(callbacks)},
        INSIDE_ROLLOUT: model._is_inside_rollout,
        "the replay buffer, which is not saved": not with_replay_buffer,
    }  # fmt: skip
    return [reason for reason, applies in reasons.items() if applies]


def _forgotten(wrapper: str) -> str:
    return f"what {wrapper} may keep beyond an episode (a wrapper without get_run_state and set_run_state)"


def _machine(model: Resumable) -> dict[str, Any]:
    """What the rounding of a run depends on besides its settings, and the versions of what draws its random numbers."""
    described: dict[str, Any] = {name: version(name) for name in VERSIONS}
    described |= {"processor": precision.processor(), "torch threads": th.get_num_threads()}
    if isinstance(model, TD3X):
        path, _ = update_path(model.accelerate, model.policy, model._updates_since_load)
        described["update path"] = "plain" if getattr(model._updater, "_declined", None) else path
        described["matrix kernels"] = model._matrix_kernels or precision.choose_matrix_kernels()
    return described


def _differences(model: Resumable, saved: dict[str, Any]) -> list[str]:
    """Which versions, processor, threads or path of the updates differ from those of the saved run, in words."""
    pairs = {name: (saved.get(name, value), value) for name, value in _machine(model).items()}
    return [
        f"rounding or random numbers ({name} was {was}, is {value})" for name, (was, value) in pairs.items() if was != value
    ]


class _Restoration:
    """
    Gives callbacks, environments, logs and generators their saved state, as the last thing before the first step.

    Until that step is made it can be called again: nothing is lost where ``learn`` ends with an error before it.

    :param model: as it was loaded
    :param problems: what could not be restored so far
    """

    def __init__(self, model: Resumable, checkpoint: Checkpoint, state: dict[str, Any], problems: list[str]):
        self.model, self.checkpoint, self.state, self.problems = model, checkpoint, state, problems
        self.was_cut, self.is_first, self.resumptions = _was_cut(model), _is_before_learn(model), model.resumptions
        self.last_obs: Any = model._last_obs
        self.at_start = np.asarray(model._last_episode_starts, dtype=bool) & (not self.was_cut)

    def __call__(self, callback: BaseCallback) -> None:
        model, env, state, folder = self.model, _env_of(self.model), self.state, self.checkpoint.path
        callback_state.require_same_episodes(callback, state["callbacks"])
        paths = callback_state.files(callback)  # this process's: a checkpoint does not say where to write
        for owner in state["files"].keys() & paths.keys():
            if (name := state["files"][owner]) in self.checkpoint.manifest["files"]:
                files.write(paths[owner], (folder / name).read_bytes())
        with _as_checkpoint_error(folder / STATE):
            problems = self.problems + callback_state.restore(callback, state["callbacks"])
        problems += self._restore_envs(env, state["env"])
        with _as_checkpoint_error(folder / STATE):
            log_state.truncate(model.logger, env, folder.parent, self.checkpoint.manifest["logs"], model.num_timesteps)
            log_state.record(model.logger, state["log"])
            problems += random_state.set_states(state["generators"], model.action_space, model.device)
        model.resumptions = [*self.resumptions, {"steps": model.num_timesteps, "not_restored": problems}]
        for problem in problems:
            warnings.warn(f"not restored exactly: {problem}", stacklevel=4)

    def _restore_envs(self, env: VecEnv, saved: dict[str, Any]) -> list[str]:
        model, normalization = self.model, self.model.get_vec_normalize_env()
        at_start = np.broadcast_to(self.at_start, env.num_envs)
        rewinds = [self.is_first or bool(start and not saved["complete"]) for start in at_start]
        with _as_checkpoint_error(self.checkpoint.path / STATE):
            restored = env_state.set_envs(env, saved, rewinds)
        if saved["complete"] and restored:
            env_state.set_vec(env, saved)
            model._last_obs = self.last_obs
            return []
        if self.is_first:  # the reset that `learn` has made was not from the run's seeds
            env_state.set_vec(env, saved)
            env_state.rewind(env)
        first: Any = env.reset()
        if normalization is not None:
            model._last_original_obs = normalization.get_original_obs()
        model._last_obs, model._last_episode_starts = first, np.ones(env.num_envs, dtype=bool)
        if self.is_first:
            return []
        env_state.set_vec(env, saved, of_episodes=False)
        if normalization is not None:
            model._last_obs = first = normalization.normalize_obs(normalization.get_original_obs())  # by the saved statistics
        truncate_episodes(model.replay_buffer, ~at_start)
        problems = [_forgotten(name) for name in env_state.get(env)["forgets"]]
        if not at_start.all():
            return [*problems, "the current episodes, which are cut here"]
        if not _equal(first, self.last_obs):
            return [*problems, "the environments: their reset gives another observation (wrap them in EpisodeSeeds, offer "
                    "get_run_state, or take VecNormalize for NormalizeObservation)"]  # fmt: skip
        model._last_obs = self.last_obs
        return problems


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return np.array_equal(left, right)
