"""Saving a whole run and going on with it: the model and everything around it that the next step depends on."""

import copy
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.checkpoint import callback_state as callback_states
from sb3_td3x.checkpoint import env_state, generators, log_state, replay, rounding, shapes
from sb3_td3x.checkpoint import lineage as lineages
from sb3_td3x.checkpoint.lineage import Lineage
from sb3_td3x.checkpoint.store import Checkpoint, Store, require_prefix
from sb3_td3x.common import files
from sb3_td3x.common.resumable import Resumable, SelfResumable, explained_deaths
from sb3_td3x.common.transitions import cut
from sb3_td3x.common.validation import whole
from sb3_td3x.errors import CheckpointError, UntrustedModelError
from sb3_td3x.saving import plain
from sb3_td3x.td3x.loading import Loadable
from sb3_td3x.td3x.td3x import TD3X

Callbacks = MaybeCallback | Sequence[BaseCallback]

MODEL, STATE, MARKS, WHOLE_BUFFER = "model.zip", "state.json", "replay_marks.npz", "replay_buffer.pkl"


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
    Save a run so that another process can go on with it.

    The checkpoint gets its name when all of it is on the disk; until then, and if anything fails, the ones before it stay as
    they are. Only the transitions that are new since the last save are written.

    :param model: between two rollouts: before or after ``learn``, or in a callback's ``_on_rollout_start``
    :param folder: of this run's checkpoints, made if needed; one run per folder
    :param callbacks: those given to ``learn``; their counters, scores and histories are saved
    :param keep_last: checkpoints to keep, this one among them
    :param name_prefix: of the checkpoint's folder, ``<name_prefix>_<steps>_steps``
    :param with_replay_buffer: ``False`` saves the rest: small, but learning has to fill a buffer again
    :return: the checkpoint; its ``manifest`` names what will not be exact
    :raises CheckpointError: naming the file that cannot be written (the disk may be full), what is no plain value, or another
        run's checkpoint, which is left alone
    :raises ValueError: inside a step (in a callback's ``_on_step``), whose transition is not stored yet; for a prefix that
        begins with a dot or names another folder
    :raises RunLockedError: if another process is saving there
    :raises EnvironmentDiedError: if the process of an environment has ended
    """
    whole("keep_last", keep_last, minimum=1)
    require_prefix(name_prefix)
    if not model._is_stored and model._last_obs is not None:
        raise ValueError("the transition of this step is not stored yet: save in a callback's _on_rollout_start")
    store = Store(Path(folder).resolve())
    env = _env_of(model)
    with store.writing(), explained_deaths(env):
        lineage = lineages.of(model, store)
        lineage.require_newest(store)
        lineage.last = _add(store, lineage, model, env, callbacks, name_prefix, with_replay_buffer)
        store.prune(keep_last)
    return lineage.last


def _add(
    store: Store,
    lineage: Lineage,
    model: Resumable,
    env: VecEnv,
    callbacks: Callbacks,
    name_prefix: str,
    with_replay_buffer: bool,
) -> Checkpoint:
    with store.adding(name_prefix, model.num_timesteps) as (partial_folder, complete):
        model.save(partial_folder / MODEL)
        surroundings = env_state.get(env, was_reset=not _is_before_learn(model))
        logger: Logger | None = getattr(model, "_logger", None)
        if _was_cut(model):
            surroundings["complete"] = False
        state = {
            "generators": generators.state(model.action_space, model.device),
            "world": surroundings,
            "callbacks": callback_states.state(callbacks),
            "files": _copy_in(callback_states.files(callbacks), partial_folder),
            "log": {} if logger is None else log_state.unwritten(logger),
        }
        (partial_folder / STATE).write_text(json.dumps(_encoded(state, store.folder), allow_nan=False))
        described = _save_buffer(model, store, lineage, partial_folder) if with_replay_buffer else {}
        return complete(
            {
                "writer": lineage.writer,
                "total": model._total_timesteps,
                "updates": model._n_updates,
                "replay": described,
                "logs": {} if logger is None else log_state.lengths(logger, env, store.folder),
                **rounding.facts(model),
                "resumed": model.resumptions,
                "not_exact": _not_exact(model, surroundings, callbacks, with_replay_buffer),
            }
        )


def resume_run(
    folder: str | Path,
    env: GymEnv,
    *,
    checkpoint: int | None = None,
    trust: bool = False,
    drop_damaged: bool = False,
    algorithm: type[SelfResumable] = TD3X,  # type: ignore[assignment]  # the default of a type variable
    **kwargs: Any,
) -> SelfResumable:
    """
    The model of a saved run, on which ``learn(total, callback, resume=True)`` goes on.

    Random generators, environments and the callbacks given to ``learn`` get their saved state when ``learn`` begins, so that
    what happens before does not matter. What could not be restored is then named in a warning and in later checkpoints.

    :param folder: given to ``save_run``
    :param env: built as the run's was
    :param checkpoint: environment steps of the one to use; ``None`` is the newest
    :param trust: run code from the checkpoint, see ``TD3X.load``
    :param drop_damaged: go on without the transitions of damaged files
    :param algorithm: the saved model's class. SB3's with ``Resumable`` before it are loaded as SB3 does: with ``trust`` only
    :param kwargs: as for ``TD3X.load``: attributes to change, ``device``, ``custom_objects``
    :raises CheckpointError: if there is none or a file of it is damaged; names the file and the last one that is whole
    """
    store = Store(Path(folder).resolve())
    found = store.find(checkpoint)
    state = _read_state(found)
    model = _load_model(algorithm, found.path / MODEL, trust, env=env, force_reset=False, **kwargs)
    problems = _load_buffer(model, store, found, trust, drop_damaged) + rounding.differences(model, found.manifest)
    lineages.take_up(model, store, found)
    env_state.set_vec(_env_of(model), state["world"], of_episodes=False)  # for who looks at it before `learn`
    model._on_continue = _Continuation(model, found, state, problems)
    return model


def _is_before_learn(model: Resumable) -> bool:
    """Whether the environments have not been reset for the model yet."""
    return model._last_obs is None and model._last_episode_starts is None


def _was_cut(model: Resumable) -> bool:
    """Whether ``learn`` was ended inside a step, so that the episodes under way do not go on."""
    return model._last_obs is None and model._last_episode_starts is not None


def _encoded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As ``plain.encode``, but it is said which callback or other part is not plain."""

    def encode(name: str, part: Any) -> Any:
        try:
            return plain.encode(part)
        except plain.NotPlain as error:
            raise CheckpointError(folder, f"cannot hold the state of {name}: {error}") from error

    callbacks = {name: encode(f"callback {name}", one) for name, one in state["callbacks"].items()}
    return {name: callbacks if name == "callbacks" else encode(name, part) for name, part in state.items()}


def _env_of(model: Resumable) -> VecEnv:
    env = model.get_env()
    if env is None:
        raise ValueError("a model without an environment has no run to save: use model.save")
    return env


def _load_model(algorithm: type[SelfResumable], path: Path, trust: bool, **kwargs: Any) -> SelfResumable:
    if issubclass(algorithm, Loadable):
        return algorithm.load(path, trust=trust, **kwargs)
    if not trust:
        raise UntrustedModelError("the model", f"a {algorithm.__name__}, which SB3 loads", str(path))
    return algorithm.load(path, **kwargs)


def _save_buffer(model: Resumable, store: Store, lineage: Lineage, folder: Path) -> dict[str, Any]:
    buffer = model.replay_buffer
    if not replay.covers(buffer) or not _is_made_by(model, buffer):
        model.save_replay_buffer(folder / WHOLE_BUFFER)
        return {}
    if marks := replay.marks(buffer):
        np.savez(folder / MARKS, **marks)  # type: ignore[arg-type]
    if lineage.last is None or not lineage.last.manifest["replay"]:
        return replay.save(buffer, store.segments, None, 0)
    new_rows = (model.num_timesteps - lineage.last.steps) // buffer.n_envs
    return replay.save(buffer, store.segments, lineage.last.manifest["replay"], new_rows)


def _is_made_by(model: Resumable, buffer: ReplayBuffer) -> bool:
    """Whether the model, made anew from its zip, has such a buffer; one that was loaded into it may be another."""
    rows = max(model.buffer_size // buffer.n_envs, 1)  # as SB3's buffers divide what they are asked for
    wanted = (model.replay_buffer_class, rows, model.optimize_memory_usage)
    return (type(buffer), buffer.buffer_size, buffer.optimize_memory_usage) == wanted


def _load_buffer(model: Resumable, store: Store, found: Checkpoint, trust: bool, drop_damaged: bool) -> list[str]:
    if (whole := found.path / WHOLE_BUFFER).exists():
        own: dict[str, Any] = {"trust": trust} if isinstance(model, Loadable) else {}
        model.load_replay_buffer(whole, truncate_last_traj=False, **own)
        return []
    if not found.manifest["replay"]:
        return ["the replay buffer (it was not saved)"]
    replay.require_kind(model.replay_buffer, store.segments, found.manifest["replay"])
    try:
        missing, held = replay.load(model.replay_buffer, store.segments, found.manifest["replay"], drop_damaged)
    except CheckpointError as error:
        raise CheckpointError(error.path, f"{error.problem}. It holds transitions; to go on without them, "
                              "drop_damaged=True (td3x train --resume RUN --drop-damaged)") from error  # fmt: skip
    if (found.path / MARKS).exists():
        marks = replay.read_arrays(found.path / MARKS)
        try:
            replay.set_marks(model.replay_buffer, marks, is_complete=not missing)
        except (ValueError, TypeError) as error:
            raise CheckpointError(found.path / MARKS, f"does not fit the replay buffer: {error}") from error
    if missing and isinstance(model.replay_buffer, HerReplayBuffer):
        replay.forget_broken_episodes(model.replay_buffer, held)
    return missing


def _copy_in(paths: dict[str, Path], folder: Path) -> dict[str, str]:
    """Copy the callbacks' files that are there; return the copies' names."""
    copies = {}
    for number, (owner, path) in enumerate(paths.items()):
        if path.exists():
            copies[owner] = f"{number}_{path.name}"
            shutil.copyfile(path, folder / copies[owner])
    return copies


def _copy_back(copies: dict[str, str], found: Checkpoint, paths: dict[str, Path]) -> None:
    """
    Put the callbacks' files back where the callbacks of this process have them: a checkpoint, which may be a stranger's, does
    not say where to write.
    """
    for owner, name in copies.items():
        if owner in paths and name in found.manifest["files"]:
            files.write(paths[owner], (found.path / name).read_bytes())


def _read_state(found: Checkpoint) -> dict[str, Any]:
    path = found.path / STATE
    try:
        state = plain.decode(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"cannot be read: {error}") from error
    if (part := shapes.unlike(state, shapes.STATE)) is not None:
        raise CheckpointError(path, f"has no valid {part!r}, as states have")
    return state


def _not_exact(model: Resumable, surroundings: dict[str, Any], callbacks: Callbacks, with_replay_buffer: bool) -> list[str]:
    """What will differ from a run that was never interrupted, in words."""
    reasons = []
    at_start = model._last_episode_starts is None or np.all(model._last_episode_starts)  # None: before the first `learn`
    if not surroundings["complete"] and not at_start:
        reasons.append("the episodes under way: the environments do not offer their state, so they will be cut here")
    reasons += [_forgotten(name) for name in surroundings["forgets"]]
    reasons += [f"callback {name}" for name, one in callback_states.named(callbacks) if not callback_states.is_known(one)]
    if not with_replay_buffer:
        reasons.append("the replay buffer, which is not saved")
    return reasons


def _forgotten(wrapper: str) -> str:
    return f"what {wrapper} may keep beyond an episode (a wrapper without get_run_state and set_run_state)"


class _Continuation:
    """
    Gives callbacks, environments, logs and generators their saved state, as the last thing before the first step.

    Until that step is made it can be called again: nothing is lost where ``learn`` ends with an error before it.

    :param problems: what could not be restored so far
    """

    def __init__(self, model: Resumable, found: Checkpoint, state: dict[str, Any], problems: list[str]):
        self.model, self.found, self.state, self.problems = model, found, state, problems
        self.was_cut, self.is_first = _was_cut(model), _is_before_learn(model)
        self.resumptions = model.resumptions
        self.reached: tuple[Any, Any] | None = None  # the environments' last observation and whether it began an episode

    def __call__(self, callback: BaseCallback) -> None:
        model, env = self.model, _env_of(self.model)
        self.reached = self.reached or copy.deepcopy((model._last_obs, model._last_episode_starts))
        _copy_back(self.state["files"], self.found, callback_states.files(callback))
        problems = [*self.problems, *rounding.other_path(model), *callback_states.restore(callback, self.state["callbacks"])]
        problems += self._world(env, self.state["world"], *self.reached)
        log_state.go_on(model.logger, env, self.found.path.parent, self.found.manifest["logs"], model.num_timesteps)
        log_state.record(model.logger, self.state.get("log") or {})
        problems += generators.restore(self.state["generators"], model.action_space, model.device)
        model.resumptions = [*self.resumptions, {"steps": model.num_timesteps, "not_restored": problems}]
        for problem in problems:
            warnings.warn(f"not restored exactly: {problem}", stacklevel=4)

    def _world(self, env: VecEnv, saved: dict[str, Any], last_obs: Any, episode_starts: Any) -> list[str]:
        model, at_start = self.model, np.asarray(episode_starts, dtype=bool) & (not self.was_cut)
        reached = env_state.set_envs(env, saved, rewind=[bool(one) and not saved["complete"] for one in at_start])
        if saved["complete"] and reached:
            env_state.set_vec(env, saved)
            model._last_obs = last_obs
            return []
        if self.is_first:
            return self._begin(env, saved)
        first: Any = env.reset()
        env_state.set_vec(env, saved, of_episodes=False)
        normalization = model.get_vec_normalize_env()
        if normalization is not None:
            model._last_original_obs = normalization.get_original_obs()
            first = normalization.normalize_obs(model._last_original_obs)  # with the saved statistics
        cut(model.replay_buffer, ~at_start)
        model._last_episode_starts = np.ones(env.num_envs, dtype=bool)
        is_equal = _equal(first, last_obs)
        model._last_obs = last_obs if is_equal and at_start.all() else first
        problems = [_forgotten(name) for name in env_state.lost(env, saved)]
        if not at_start.all():
            return [*problems, "the episodes that were under way, which are cut here"]
        if not is_equal:
            return [*problems, "the environments: their reset gives another observation (wrap them in EpisodeSeeds, offer "
                    "get_run_state, or take VecNormalize for NormalizeObservation)"]  # fmt: skip
        return problems

    def _begin(self, env: VecEnv, saved: dict[str, Any]) -> list[str]:
        """The run's first reset: the one that ``learn`` has made was not from its seeds, and is forgotten."""
        env_state.set_vec(env, saved)
        env_state.rewind(env)
        self.model._last_obs = env.reset()  # type: ignore[assignment]
        if (normalization := self.model.get_vec_normalize_env()) is not None:
            self.model._last_original_obs = normalization.get_original_obs()
        return []


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return np.array_equal(left, right)
