"""The state of callbacks: counters, best scores and histories, which SB3 starts anew with every process."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common import callbacks as sb3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_td3x.checkpoint import env_state

# What changes while SB3's callbacks run. A class of your own names its attributes in `resumable`
RESUMABLE: dict[type, tuple[str, ...]] = {
    sb3.BaseCallback: ("n_calls",),
    sb3.EventCallback: (),
    sb3.CheckpointCallback: (),
    sb3.StopTrainingOnRewardThreshold: (),
    sb3.ProgressBarCallback: (),
    sb3.LogEveryNTimesteps: (),
    sb3.EveryNTimesteps: ("last_time_trigger",),
    sb3.StopTrainingOnMaxEpisodes: ("n_episodes",),
    sb3.StopTrainingOnNoModelImprovement: ("last_best_mean_reward", "no_improvement_evals"),
    sb3.EvalCallback: (
        "best_mean_reward",
        "last_mean_reward",
        "evaluations_results",
        "evaluations_timesteps",
        "evaluations_length",
        "evaluations_successes",
    ),
}


def state(callbacks: MaybeCallback | Sequence[BaseCallback]) -> dict[str, Any]:
    """
    :return: by name: the attributes of each callback, and the state of the environments that it evaluates in
    """
    return {name: _state_of(callback) for name, callback in named(callbacks)}


def restore(callbacks: MaybeCallback | Sequence[BaseCallback], saved: dict[str, Any]) -> list[str]:
    """
    :param callbacks: of the same classes, in the same order as the saved ones
    :param saved: from ``state``
    :return: what could not be restored, in words
    """
    problems = []
    given = dict(named(callbacks))
    for name, callback in given.items():
        if name not in saved:
            if _matters(callback):
                problems.append(f"callback {name} (it was not saved)")
            continue
        attributes = saved[name]["attributes"]
        for attribute in set(_names(callback)) & attributes.keys():  # a forged state may name others
            setattr(callback, attribute, attributes[attribute])
        if saved[name]["env"] is not None:
            env = callback.eval_env  # type: ignore[attr-defined]
            if not env_state.set_envs(env, saved[name]["env"], [False] * env.num_envs):
                problems.append(f"the environments of callback {name}")
        if not is_known(callback):
            problems.append(f"callback {name} (its class does not name its state in `resumable`)")
    for name in saved.keys() - given.keys():
        if saved[name]["matters"]:
            problems.append(f"callback {name} (it was not given)")
    return problems


def require_same_episodes(callbacks: MaybeCallback | Sequence[BaseCallback], saved: dict[str, Any]) -> None:
    """
    :raises ValueError: if an evaluation would have another number of episodes than those before, which SB3 cannot write down
    """
    for name, callback in named(callbacks):
        if not isinstance(callback, sb3.EvalCallback) or name not in saved:
            continue
        history = saved[name]["attributes"].get("evaluations_results")
        if history and len(history[-1]) != callback.n_eval_episodes:
            raise ValueError(
                f"{name} has evaluated over {len(history[-1])} episodes so far, not {callback.n_eval_episodes}: "
                f"give it n_eval_episodes={len(history[-1])}"
            )


def files(callbacks: MaybeCallback | Sequence[BaseCallback]) -> dict[str, Path]:
    """
    :return: the files that callbacks write and that belong to their state, by owner; they need not be there yet
    """
    return {f"{name}.{number}": path for name, one in named(callbacks) for number, path in enumerate(_files_of(one))}


def is_known(callback: BaseCallback) -> bool:
    """Whether all that changes in a callback is known."""
    return all(_attributes(cls) is not None for cls in type(callback).__mro__ if issubclass(cls, BaseCallback))


def named(callbacks: MaybeCallback | Sequence[BaseCallback], within: str = "") -> Iterator[tuple[str, BaseCallback]]:
    """Every callback, lists resolved and those inside others included, under its class's name and number."""
    seen: Counter[str] = Counter()
    for callback in _flat(callbacks):
        kind = f"{within}{type(callback).__name__}"
        name = f"{kind}[{seen[kind]}]"
        seen[kind] += 1
        yield name, callback
        for child in ("callback_on_new_best", "callback"):  # of an EvalCallback, of an EventCallback
            yield from named(getattr(callback, child, None), f"{name}.{child}.")


def _flat(callbacks: Any) -> Iterator[BaseCallback]:
    if isinstance(callbacks, sb3.CallbackList):
        callbacks = callbacks.callbacks
    if isinstance(callbacks, sb3.ConvertCallback) and callbacks.callback is None:
        return  # what SB3 makes of no callback
    if isinstance(callbacks, BaseCallback):
        yield callbacks
    elif isinstance(callbacks, (list, tuple)):
        for one in callbacks:
            yield from _flat(one)


def _attributes(cls: type) -> tuple[str, ...] | None:
    return RESUMABLE.get(cls, vars(cls).get("resumable"))


def _files_of(callback: BaseCallback) -> Iterator[Path]:
    if isinstance(callback, sb3.EvalCallback):
        if callback.log_path is not None:
            yield Path(f"{callback.log_path}.npz")
        if callback.best_model_save_path is not None:
            yield Path(callback.best_model_save_path) / "best_model.zip"
    if hasattr(callback, "resumable_files"):
        yield from map(Path, callback.resumable_files())


def _names(callback: BaseCallback) -> list[str]:
    return [name for cls in type(callback).__mro__ for name in _attributes(cls) or ()]


def _matters(callback: BaseCallback) -> bool:
    """Whether the run differs without its state: it has more than its count of calls, and does not only save or show."""
    only_shows = getattr(callback, "only_shows", False)
    return len(_names(callback)) > 1 and not only_shows and not isinstance(callback, sb3.CheckpointCallback)


def _state_of(callback: BaseCallback) -> dict[str, Any]:
    # Before its first evaluation nobody has reset the environment, which may not have a state yet
    evaluates = isinstance(callback, sb3.EvalCallback) and callback.last_mean_reward > -math.inf
    return {
        "attributes": {name: getattr(callback, name) for name in _names(callback)},
        "matters": _matters(callback),
        "env": env_state.get(callback.eval_env) if evaluates else None,  # type: ignore[attr-defined]
    }
