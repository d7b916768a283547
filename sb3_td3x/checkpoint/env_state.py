"""
What surrounds the learner: its environments and the layers around them.

An environment whose state can be given and taken offers two methods, ``get_run_state()`` (plain values and arrays) and
``set_run_state(state)``. Of the usual wrappers the state is known. Where all layers of an environment offer theirs, a run
goes on inside the episode; where not, it goes on with the reset that began the episode, if that reset can be repeated
(``rewind()``), or with a new episode. What a layer keeps beyond an episode is lost if its state is not known; such are named.
"""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
from gymnasium import wrappers
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from sb3_td3x.common.random_state import check_generator_state

# The attributes that change while these wrappers run; all others stay as they were made
GYMNASIUM = {
    "TimeLimit": ("_elapsed_steps",),
    "OrderEnforcing": ("_has_reset", "_has_rendered"),
    "PassiveEnvChecker": (),  # checks the first reset and step of every process
    "ClipAction": (),
    "RescaleAction": (),
    "RescaleObservation": (),  # this and TransformAction only from Gymnasium 1.0 on
    "FlattenObservation": (),
    "FilterObservation": (),
    "TransformAction": (),
    "TransformObservation": (),
    "TransformReward": (),
    "NormalizeObservation": ("obs_rms",),
    "NormalizeReward": ("return_rms", "discounted_reward", "returns"),  # the last before Gymnasium 1.0
}
LAYERS: dict[type[gym.Wrapper], tuple[str, ...]] = {
    **{getattr(wrappers, name): changing for name, changing in GYMNASIUM.items() if hasattr(wrappers, name)},
    # Not its lists of all episodes, which grow without end and which nothing but its `get_episode_...` reads
    Monitor: ("rewards", "needs_reset", "total_steps", "current_reset_info"),
}
VEC_LAYERS: dict[type[VecEnv], tuple[str, ...]] = {
    VecNormalize: ("obs_rms", "ret_rms", "returns", "old_reward", "old_obs"),
    VecMonitor: ("episode_returns", "episode_lengths", "episode_count"),
    VecTransposeImage: (),
    VecCheckNan: (),
}
PASSING = ("sb3_td3x.", "gymnasium.", "stable_baselines3.", "sb3_contrib.", "rl_zoo3.")
"""Packages whose other wrappers begin anew with each episode."""
OF_EPISODES = ("returns", "old_reward", "old_obs", "episode_returns", "episode_lengths")
"""Those of them that a reset begins anew."""


class ResumableEnv(gym.Wrapper):
    """
    The outermost layer of an environment, through which a checkpoint reaches all others, also in another process.

    :param env: with all its wrappers
    """

    def get_env_state(self) -> dict[str, Any]:
        """
        :return: ``layers``: each layer's state, outermost first, ``None`` where it offers none; ``complete``: whether all do;
            ``forgets``: the wrappers of which something may be lost that outlives an episode
        """
        found = list(_layers(self.env))
        layers = [_state_of(layer) for layer in found]
        random = getattr(self.unwrapped, "_np_random", None)
        return {
            "classes": [type(layer).__name__ for layer in found],
            "layers": layers,
            "forgets": _names(layer for layer, state in zip(found[:-1], layers, strict=False) if state is None),
            "random": None if random is None else random.bit_generator.state,
            "complete": all(state is not None for state in layers),  # not `in`: arrays have no one answer to ==
        }

    def set_env_state(self, saved: dict[str, Any], resets: bool, rewind: bool) -> bool:
        """
        :param saved: from ``get_env_state``
        :param resets: whether a reset follows, which a ``Monitor`` may not allow inside an episode
        :param rewind: let the next reset be the one that began the saved episode
        :return: whether the layers are those that were saved; if not, nothing changes
        """
        if saved["classes"] != [type(layer).__name__ for layer in _layers(self.env)]:
            return False
        for layer, state in zip(_layers(self.env), saved["layers"], strict=True):
            if state is not None:
                _set_state_of(layer, state)
        self.prepare_reset(rewind, allow=resets)
        if saved["random"] is not None:
            self.unwrapped.np_random.bit_generator.state = check_generator_state(saved["random"])
        return True

    def prepare_reset(self, rewind: bool = True, allow: bool = True) -> None:
        """
        :param rewind: let the next reset be the last one again
        :param allow: also where a ``Monitor`` does not allow it inside an episode
        """
        for layer in _layers(self.env):
            if rewind and hasattr(type(layer), "rewind"):
                layer.rewind()  # type: ignore[attr-defined]
            if allow and isinstance(layer, Monitor):
                layer.needs_reset = True


def get(env: VecEnv, was_reset: bool = True) -> dict[str, Any]:
    """
    The state of all environments and of the layers around them.

    :param was_reset: ``False`` before the first reset, where the environments may not have a state to offer
    :return: ``envs``: one entry per environment, or ``None`` where they cannot be reached; ``vec``: the layers' states;
        ``complete``: whether the next step can follow from it; ``forgets``: wrappers of which something may be lost that
        outlives an episode; ``seeds``: of the next reset
    """
    layers = list(_vec_layers(env))
    envs = _call(layers[-1], "get_env_state") if was_reset else None
    unknown = [layer for layer in layers[:-1] if type(layer) not in VEC_LAYERS]
    return {
        "envs": envs,
        "vec": [_plain(layer) for layer in layers[:-1]],
        "complete": envs is not None and all(one["complete"] for one in envs) and not unknown,
        "forgets": sorted({*_names(unknown), *(name for one in envs or [] for name in one["forgets"])}),
        "seeds": list(layers[-1]._seeds),  # for the next reset, where there was none yet
    }


def set_envs(env: VecEnv, saved: dict[str, Any], rewind: list[bool]) -> bool:
    """
    Give the environments their saved state. Where it is not complete, a reset has to follow.

    :param rewind: for each environment, whether its next reset is to be the one that began the saved episode
    :return: whether that was possible: not for environments that cannot be reached or are built differently
    """
    innermost = list(_vec_layers(env))[-1]
    seeds = saved.get("seeds")
    if seeds is not None and len(seeds) == env.num_envs:
        innermost._seeds = list(seeds)
    if saved["envs"] is None or len(saved["envs"]) != env.num_envs:
        return False
    arguments = [(one, not saved["complete"], again) for one, again in zip(saved["envs"], rewind, strict=True)]
    return all(_call(innermost, "set_env_state", arguments) or [False])


def rewind(env: VecEnv) -> None:
    """Let the next reset of every environment that can be reached be its last one again."""
    _call(list(_vec_layers(env))[-1], "prepare_reset")


def set_vec(env: VecEnv, saved: dict[str, Any], of_episodes: bool = True) -> None:
    """
    Give the layers around the environments their saved state; after a reset, which changes it.

    :param of_episodes: also what belongs to the episodes under way
    """
    layers = list(_vec_layers(env))[:-1]
    for layer, state in zip(layers, saved["vec"], strict=False):
        if state is not None and state["class"] == type(layer).__name__:
            _set_plain(layer, {name: value for name, value in state.items() if of_episodes or name not in OF_EPISODES})


def is_complete(env: VecEnv) -> bool:
    """Whether a run can go on inside an episode of these environments."""
    return get(env)["complete"]


def monitor_files(env: VecEnv) -> list[str]:
    """The ``monitor.csv`` files that the environments and a ``VecMonitor`` around them write."""
    envs = get(env)["envs"] or []
    layers = [pair for one in envs for pair in zip(one["classes"], one["layers"], strict=True)]
    inner = [state["file"] for name, state in layers if name == Monitor.__name__ and state is not None and state["file"]]
    around = [layer.results_writer for layer in _vec_layers(env) if isinstance(layer, VecMonitor)]
    return inner + [os.path.realpath(writer.file_handler.name) for writer in around if writer is not None]


def _names(layers: Iterable[gym.Env | VecEnv]) -> list[str]:
    """The classes of layers whose state is not known, without those that keep nothing beyond an episode."""
    return [type(layer).__name__ for layer in layers if not type(layer).__module__.startswith(PASSING)]


def _layers(env: gym.Env) -> Iterator[gym.Env]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _vec_layers(env: VecEnv) -> Iterator[VecEnv]:
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv
    yield env


def _call(env: VecEnv, name: str, arguments: list[tuple[Any, ...]] | None = None) -> list[Any] | None:
    """Call a method of every environment's ``ResumableEnv``; a ``DummyVecEnv`` does not need to have them."""
    each = arguments or [()] * env.num_envs
    if isinstance(env, DummyVecEnv):
        found = [one if isinstance(one, ResumableEnv) else ResumableEnv(one) for one in env.envs]
        return [getattr(one, name)(*own) for one, own in zip(found, each, strict=True)]
    if not env.has_attr(name):
        return None
    return [env.env_method(name, *own, indices=[index])[0] for index, own in enumerate(each)]


def _state_of(layer: gym.Env) -> Any:
    if hasattr(type(layer), "get_run_state"):
        return layer.get_run_state()  # type: ignore[attr-defined]
    if type(layer) not in LAYERS:
        return None
    state = {name: _statistics(getattr(layer, name)) for name in LAYERS[type(layer)] if hasattr(layer, name)}  # type: ignore[index]
    if isinstance(layer, Monitor):
        writer = layer.results_writer
        file = None if writer is None else os.path.realpath(writer.file_handler.name)
        return {**state, "elapsed": time.time() - layer.t_start, "file": file}
    return state


def _set_state_of(layer: gym.Env, state: dict[str, Any]) -> None:
    if hasattr(type(layer), "set_run_state"):
        layer.set_run_state(state)  # type: ignore[attr-defined]
        return
    for name in LAYERS[type(layer)]:  # type: ignore[index]
        if name in state:
            _set_statistics(layer, name, getattr(layer, name, None), state[name])
    if isinstance(layer, Monitor):
        layer.t_start = time.time() - state["elapsed"]  # the time between two sessions is nobody's


def _plain(layer: VecEnv) -> dict[str, Any] | None:
    """A vectorised layer's state, in arrays and numbers."""
    if type(layer) not in VEC_LAYERS:
        return None
    state = {name: getattr(layer, name, None) for name in VEC_LAYERS[type(layer)]}
    return {"class": type(layer).__name__, **{name: _statistics(value) for name, value in state.items()}}


def _are_moments(value: Any) -> bool:
    """Whether it is a ``RunningMeanStd``, SB3's or Gymnasium's."""
    return all(hasattr(value, name) for name in ("mean", "var", "count"))


def _statistics(value: Any) -> Any:
    if _are_moments(value):
        return {"mean": value.mean, "var": value.var, "count": value.count}
    if isinstance(value, dict):
        return {key: _statistics(one) for key, one in value.items()}
    return value


def _set_plain(layer: VecEnv, state: dict[str, Any]) -> None:
    for name in VEC_LAYERS[type(layer)]:
        if state.get(name) is not None:
            _set_statistics(layer, name, getattr(layer, name, None), state[name])


def _set_statistics(layer: gym.Env | VecEnv, name: str, present: Any, saved: Any) -> None:
    if _are_moments(present):
        present.mean, present.var, present.count = saved["mean"], saved["var"], saved["count"]
    elif isinstance(present, dict) and any(map(_are_moments, present.values())):
        for key, one in present.items():
            one.mean, one.var, one.count = saved[key]["mean"], saved[key]["var"], saved[key]["count"]
    else:
        setattr(layer, name, saved)
