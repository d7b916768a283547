"""
The state of the environments and of the layers around them.

The state of the usual wrappers is known; others may offer it, as ``ResumableEnv`` says. If every layer does, a run resumes
inside the episode. Otherwise it resumes with the reset that began the episode, if that can be repeated, or with a new episode.
A wrapper that keeps something beyond an episode and does not offer its state is named as a loss.
"""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers
from stable_baselines3.common import vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor

from sb3_td3x.common.random_state import BIT_GENERATORS, check_generator_state
from sb3_td3x.common.transitions import running_mean_stds
from sb3_td3x.common.vec_envs import vec_layers, without_hooks

# The attributes of these wrappers that change during a run; all others stay as they were made
WRAPPER_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((wrappers.ClipAction, wrappers.RescaleAction, wrappers.TransformAction), ()),
    **dict.fromkeys((wrappers.FilterObservation, wrappers.FlattenObservation, wrappers.RescaleObservation), ()),
    **dict.fromkeys((wrappers.TransformObservation, wrappers.TransformReward, wrappers.PassiveEnvChecker), ()),
    **dict.fromkeys((wrappers.ClipReward, wrappers.DtypeObservation, wrappers.ReshapeObservation), ()),
    **dict.fromkeys((vec_env.VecTransposeImage, vec_env.VecCheckNan, vec_env.VecExtractDictObs), ()),
    wrappers.TimeLimit: ("_elapsed_steps",),
    wrappers.OrderEnforcing: ("_has_reset",),
    wrappers.NormalizeObservation: ("obs_rms", "update_running_mean"),
    wrappers.NormalizeReward: ("return_rms", "discounted_reward", "update_running_mean"),
    # Without its lists of all episodes, which grow without end and which only its `get_episode_...` methods read
    Monitor: ("rewards", "needs_reset", "total_steps", "current_reset_info"),
    vec_env.VecNormalize: ("training", "obs_rms", "ret_rms", "returns", "old_reward", "old_obs"),
    VecMonitor: ("episode_returns", "episode_lengths", "episode_count"),
}
EPISODIC_PACKAGES = ("sb3_td3x.", "gymnasium.", "stable_baselines3.", "sb3_contrib.", "rl_zoo3.")
"""Packages whose other wrappers keep at most statistics beyond an episode."""
OF_EPISODES = ("returns", "old_reward", "old_obs", "episode_returns", "episode_lengths")
"""Attributes of the layers around the environments that a reset begins anew."""


class ResumableEnv(gym.Wrapper):
    """
    The outermost layer of an environment, through which a checkpoint reaches all others, also in another process.

    An environment or wrapper of your own offers its state by two methods: ``get_run_state()`` returns plain values and arrays,
    and ``set_run_state(state)`` takes them. After ``rewind()``, which it may have, its next reset repeats the last one.

    :param env: with all its wrappers
    """

    def get_env_state(self, was_reset: bool = True) -> dict[str, Any]:
        """Each layer's state, outermost first, ``None`` where it offers none, and what ``get`` says of them all."""
        layers = list(_layers(self.env))
        states = [_get_state(layer, was_reset) for layer in layers]
        generator = getattr(self.unwrapped, "_np_random", None)
        random = getattr(generator, "bit_generator", None)  # not of numpy's older kind
        without_state = [layer for layer, state in zip(layers[:-1], states, strict=False) if state is None and was_reset]
        return {
            "classes": [type(layer).__name__ for layer in layers],
            "layers": states,
            "forgets": _names(without_state),
            "random": None if random is None else random.state,
            # Not `in`, which compares arrays with ==
            "complete": all(state is not None for state in states) and (generator is None or random is not None),
        }

    def set_env_state(self, saved: dict[str, Any], resets: bool, rewind: bool) -> bool:
        """Set what ``get_env_state`` gave if the layers are the same. ``rewind``: a reset begins the saved episode again."""
        layers = list(_layers(self.env))
        if saved["classes"] != [type(layer).__name__ for layer in layers]:
            return False
        for layer, state in zip(layers, saved["layers"], strict=True):
            if state is not None:
                _set_state(layer, state)
            if resets and rewind and hasattr(type(layer), "rewind"):
                layer.rewind()  # type: ignore[attr-defined]
            if resets and isinstance(layer, Monitor):
                layer.needs_reset = True  # otherwise it may not allow one inside an episode
        if saved["random"] is not None:
            bit_generator_class = BIT_GENERATORS[saved["random"]["bit_generator"]]
            generator = getattr(self.unwrapped, "_np_random", None)
            if not isinstance(getattr(generator, "bit_generator", None), bit_generator_class):
                generator = self.unwrapped._np_random = np.random.Generator(bit_generator_class())
            generator.bit_generator.state = check_generator_state(saved["random"])  # type: ignore[union-attr]
        return True


def get(env: VecEnv, was_reset: bool = True) -> dict[str, Any]:
    """
    The state of all environments and of the layers around them.

    :param was_reset: ``False`` before the first reset, where others than the usual wrappers may not have a state yet
    :return: ``complete``: whether the next step can follow from it; ``forgets``: wrappers of which something that outlives an
        episode may be lost; ``envs``: ``None`` if the environments cannot be reached
    """
    *around, innermost = vec_layers(env)
    envs = _call(innermost, "get_env_state", [(was_reset,)] * env.num_envs)
    unknown = [layer for layer in around if type(layer) not in WRAPPER_ATTRIBUTES]
    return {
        "envs": envs,
        "vec": [(type(layer).__name__, _get_state(layer)) for layer in around],
        "complete": envs is not None and all(state["complete"] for state in envs) and not unknown,
        "forgets": sorted({*_names(unknown), *(name for state in envs or [] for name in state["forgets"])}),
        "seeds": list(vars(innermost).get("_seeds", ())),  # used by the next reset, if there was none yet
    }


def set_envs(env: VecEnv, saved: dict[str, Any], rewind: Iterable[bool]) -> bool:
    """
    Give the environments the state that ``get`` gave, if they can be reached and are built alike. If it is not complete, a
    reset has to follow: in each environment to ``rewind`` the one that began the saved episode.
    """
    innermost = vec_layers(env)[-1]
    if len(saved["seeds"]) == env.num_envs:
        innermost._seeds = list(saved["seeds"])
    if saved["envs"] is None or len(saved["envs"]) != env.num_envs:
        return False
    arguments = [(state, not saved["complete"], again) for state, again in zip(saved["envs"], rewind, strict=True)]
    return all(_call(innermost, "set_env_state", arguments) or [False])


def set_vec(env: VecEnv, saved: dict[str, Any], of_episodes: bool = True) -> list[str]:
    """Give the layers around the environments what ``get`` gave, by class, and return what could not be restored, in words."""
    states: dict[str, list[Any]] = {name: [] for name, _ in saved["vec"]}  # there may be several of a class
    for name, state in saved["vec"]:
        states[name].append(state)
    for layer in vec_layers(env)[:-1]:
        if (of_class := states.get(type(layer).__name__)) and (state := of_class.pop(0)) is not None:
            _set_state(layer, {key: state[key] for key in state if of_episodes or key not in OF_EPISODES})
    left = [name for name, of_class in states.items() if any(of_class)]
    return [f"the state of {name}, which is not around these environments" for name in left]


def monitor_files(env: VecEnv) -> list[str]:
    """The ``monitor.csv`` files that the environments and a ``VecMonitor`` around them write."""
    envs = get(env, was_reset=False)["envs"] or []
    layers = [pair for state in envs for pair in zip(state["classes"], state["layers"], strict=True)]
    inner = [state["file"] for name, state in layers if name == Monitor.__name__ and state is not None and state["file"]]
    around = [layer.results_writer for layer in vec_layers(env) if isinstance(layer, VecMonitor)]
    return inner + [os.path.realpath(writer.file_handler.name) for writer in around if writer is not None]


def _names(layers: Iterable[gym.Env | VecEnv]) -> list[str]:
    """The classes of layers whose state is not known, without those that keep nothing beyond an episode."""
    return [type(layer).__name__ for layer in layers if not type(layer).__module__.startswith(EPISODIC_PACKAGES)]


def _layers(env: gym.Env) -> Iterator[gym.Env]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _call(env: VecEnv, name: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
    """Call a method of every environment's ``ResumableEnv``; a ``DummyVecEnv`` does not need to have them."""
    if isinstance(env, DummyVecEnv):
        outermost = [inner if isinstance(inner, ResumableEnv) else ResumableEnv(inner) for inner in env.envs]
        return [getattr(inner, name)(*values) for inner, values in zip(outermost, arguments, strict=True)]
    if isinstance(env, VecEnvWrapper):  # around something of another library
        return None
    try:
        if not all(env.env_is_wrapped(ResumableEnv)):  # an environment may have methods of these names
            return None
        return [env.env_method(name, *values, indices=[index])[0] for index, values in enumerate(arguments)]
    except NotImplementedError:
        return None


def _get_state(layer: gym.Env | VecEnv, was_reset: bool = True) -> Any:
    if hasattr(type(layer), "get_run_state"):
        # It may give its attributes, and hooks are among them
        return without_hooks(layer.get_run_state()) if was_reset or hasattr(type(layer), "rewind") else None  # type: ignore[union-attr]
    if type(layer) not in WRAPPER_ATTRIBUTES:
        return None
    state = {}
    for name in WRAPPER_ATTRIBUTES[type(layer)]:
        if hasattr(layer, name):
            value = getattr(layer, name)
            state[name] = [dict(vars(moments)) for moments in running_mean_stds(value)] or value
    if isinstance(layer, Monitor):
        file = None if layer.results_writer is None else os.path.realpath(layer.results_writer.file_handler.name)
        return {**state, "elapsed": time.time() - layer.t_start, "file": file}
    return state


def _set_state(layer: gym.Env | VecEnv, state: dict[str, Any]) -> None:
    if hasattr(type(layer), "set_run_state"):
        layer.set_run_state(state)  # type: ignore[union-attr]
        return
    for name in state.keys() & WRAPPER_ATTRIBUTES[type(layer)]:
        if present := running_mean_stds(getattr(layer, name, None)):
            for moments, values in zip(present, state[name], strict=True):
                vars(moments).update({key: values[key] for key in vars(moments)})
        else:
            setattr(layer, name, state[name])
    if isinstance(layer, Monitor):
        layer.t_start = time.time() - state["elapsed"]  # the time between two processes does not count
    if isinstance(layer, wrappers.PassiveEnvChecker):  # it would compare the next step with a reset of this process
        vars(layer).update({name: True for name in vars(layer) if name.startswith("checked_")})
