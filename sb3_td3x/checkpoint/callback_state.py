"""The state of callbacks: counters, best scores and histories, which SB3 begins anew with every process."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common import callbacks as sb3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_td3x.checkpoint import env_state

Callbacks = MaybeCallback | Sequence[BaseCallback]
EVALUATIONS = ("evaluations_results", "evaluations_timesteps", "evaluations_length", "evaluations_successes")
SB3_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((sb3.EventCallback, sb3.CheckpointCallback, sb3.StopTrainingOnRewardThreshold), ()),
    **dict.fromkeys((sb3.ProgressBarCallback, sb3.LogEveryNTimesteps, sb3.CallbackList), ()),
    sb3.BaseCallback: ("n_calls",),
    sb3.EveryNTimesteps: ("last_time_trigger",),
    sb3.StopTrainingOnMaxEpisodes: ("n_episodes",),
    sb3.StopTrainingOnNoModelImprovement: ("last_best_mean_reward", "no_improvement_evals"),
    sb3.EvalCallback: ("best_mean_reward", "last_mean_reward", *EVALUATIONS),
}
"""The attributes that change while SB3's callbacks run. A user's class names its own in the class attribute ``resumable``."""


def state(callbacks: Callbacks) -> dict[str, Any]:
    """By name: the attributes of each callback, whether they matter, and the state of its environments for evaluation."""
    return {
        name: {
            "attributes": {attribute: getattr(callback, attribute) for attribute in _names(callback)},
            "matters": _matters(callback),
            # Before the first evaluation nobody has reset the environments, which may not have a state yet
            "env": env_state.get(callback.eval_env)
            if isinstance(callback, sb3.EvalCallback) and callback.last_mean_reward != -math.inf
            else None,
        }
        for name, callback in named(callbacks)
    }


def restore(callbacks: Callbacks, saved: dict[str, Any]) -> list[str]:
    """Set what ``state`` gave, by class and order of the callbacks; return what could not be restored, in words."""
    problems = []
    present = dict(named(callbacks))
    for name, callback in present.items():
        if name not in saved:
            problems += [f"callback {name} (it was not saved)"] if _matters(callback) else []
            continue
        attributes, envs = saved[name]["attributes"], saved[name]["env"]
        history = attributes.get("evaluations_results")
        asked = callback.n_eval_episodes if isinstance(callback, sb3.EvalCallback) and callback.log_path else None
        if asked and history and len(history[-1]) != asked:
            episodes = f"has evaluated over {len(history[-1])} episodes so far, not {asked}"
            raise ValueError(f"{name} {episodes}, which SB3 cannot write down: give it n_eval_episodes={len(history[-1])}")
        for attribute in set(_names(callback)) & attributes.keys():  # a forged state may name others
            setattr(callback, attribute, attributes[attribute])
        if envs is not None:
            env = callback.eval_env  # type: ignore[attr-defined]
            if not env_state.set_envs(env, envs, [False] * env.num_envs) or envs["forgets"]:
                problems.append(f"the environments of callback {name}")
        if _is_unknown(callback):
            problems.append(f"callback {name} (its class does not name its state in `resumable`)")
    missing = saved.keys() - present.keys()
    return problems + [f"callback {name} (it was not given)" for name in missing if saved[name]["matters"]]


def files(callbacks: Callbacks) -> dict[str, Path]:
    """The files that callbacks write and that belong to their state, by name in a checkpoint; they need not exist yet."""
    paths: dict[str, Path] = {}
    for name, callback in named(callbacks):
        written = {str(number): Path(path) for number, path in enumerate(getattr(callback, "resumable_files", list)())}
        if isinstance(callback, sb3.EvalCallback):  # by kind: each of the two may be given or not when the run is resumed
            written |= {"scores": Path(f"{callback.log_path}.npz")} if callback.log_path else {}
            best = callback.best_model_save_path
            written |= {"best_model": Path(best) / "best_model.zip"} if best else {}
        paths |= {f"{name}.{kind}": path for kind, path in written.items()}
    return paths


def named(callbacks: Callbacks, within: str = "") -> Iterator[tuple[str, BaseCallback]]:
    """Every callback under the name and number of its class, with those in lists and inside others."""
    seen: Counter[str] = Counter()
    for callback in _flat(callbacks):
        name = f"{within}{type(callback).__name__}"
        numbered = f"{name}[{seen[name]}]"
        seen[name] += 1
        yield numbered, callback
        if isinstance(callback, sb3.LogEveryNTimesteps):
            continue  # inside it is a method of its own
        for child in ("callback_on_new_best", "callback"):  # of an EvalCallback, of an EventCallback
            yield from named(getattr(callback, child, None), f"{numbered}.{child}.")


def _flat(callbacks: Any) -> Iterator[BaseCallback]:
    if isinstance(callbacks, sb3.CallbackList):
        if type(callbacks) is not sb3.CallbackList:
            yield callbacks
        callbacks = callbacks.callbacks
    if isinstance(callbacks, sb3.ConvertCallback) and callbacks.callback is None:
        return  # what SB3 makes of no callback
    if isinstance(callbacks, BaseCallback):
        yield callbacks
    elif isinstance(callbacks, (list, tuple)):
        for callback in callbacks:
            yield from _flat(callback)


def _attributes(cls: type) -> tuple[str, ...] | None:
    names = SB3_ATTRIBUTES.get(cls, vars(cls).get("resumable"))
    return (names,) if isinstance(names, str) else names  # without its comma ("name",) is a text


def _names(callback: BaseCallback) -> list[str]:
    return [name for cls in type(callback).__mro__ for name in _attributes(cls) or ()]


def _is_unknown(callback: BaseCallback) -> bool:
    return any(_attributes(cls) is None for cls in type(callback).__mro__ if issubclass(cls, BaseCallback))


def _matters(callback: BaseCallback) -> bool:
    """Whether the run may differ without its state: it has more than its count of calls, and does not only save."""
    return (len(_names(callback)) > 1 or _is_unknown(callback)) and not isinstance(callback, sb3.CheckpointCallback)
