"""Environments in Ray actors, on any machine of a cluster, behind SB3's ``VecEnv``."""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_td3x.common import validation
from sb3_td3x.common.vec_envs import explained_deaths, hook_uses
from sb3_td3x.errors import EnvironmentDiedError

try:
    import ray

    DEATHS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OutOfMemoryError)
except (ImportError, AttributeError):  # an error in the constructor: this module can be imported and documented without Ray
    ray = None  # type: ignore[assignment]

REBUILT = "environment_rebuilt"  # key in the `info` of a step whose environment died and was rebuilt
CLOSE_TIMEOUT = 10.0


class RayVecEnv(VecEnv):
    """
    Environments in Ray actors, which step in parallel and return the same numbers as in SB3's ``DummyVecEnv``.

    Ray is started if it is not running, and left running. If an environment dies, ``EnvironmentDiedError`` is raised. With
    ``max_restarts`` the environment is rebuilt instead: its episode ends as by a time limit, at the last observation and with
    a reward of 0, ``info["environment_rebuilt"]`` is ``True``, and the run continues.

    :param env_fns: functions that build one environment each
    :param envs_per_actor: number of environments that share an actor and one message per step; they are rebuilt together
    :param vec_env_cls: class that runs the environments of an actor: SB3's ``DummyVecEnv`` in sequence, ``SubprocVecEnv`` in
        parallel processes on the actor's machine
    :param num_cpus: CPUs per actor, possibly a fraction, by which Ray places actors. It does not limit what they use
    :param max_restarts: how often an actor that died is rebuilt; -1 is without limit
    :param start_timeout: seconds to wait until the cluster has room and the environments are built
    :param actor_options: other options of Ray's actors, such as ``num_gpus``, ``resources``, ``scheduling_strategy`` and
        ``runtime_env``
    :raises EnvironmentDiedError: if an environment cannot be built, or later dies and is not rebuilt
    :raises ValueError: if the actors have not started in time
    """

    def __init__(
        self,
        env_fns: list[Callable[[], gym.Env]],
        envs_per_actor: int = 1,
        vec_env_cls: Callable[[list[Callable[[], gym.Env]]], VecEnv] = DummyVecEnv,
        num_cpus: float = 1.0,
        max_restarts: int = 0,
        start_timeout: float = 120.0,
        actor_options: dict[str, Any] | None = None,
    ):
        if ray is None:
            raise ImportError("RayVecEnv needs Ray: pip install ray")
        if not ray.is_initialized():
            ray.init()
        self.num_envs = len(env_fns)
        self._per_actor = validation.check_int("envs_per_actor", envs_per_actor, minimum=1)
        self._parts = [slice(start, start + self._per_actor) for start in range(0, self.num_envs, self._per_actor)]
        # Ray repeats the call in which an actor died after it has rebuilt the actor; see _Environments.step
        retries = {"max_restarts": max_restarts, "max_task_retries": -1 if max_restarts else 0}
        actor_options = {"num_cpus": num_cpus, **retries, **(actor_options or {})}
        remote = ray.remote(**actor_options)(_Environments)
        # Actors only know the environments of Gymnasium
        registered = {name: spec for name, spec in gym.registry.items() if not str(spec.entry_point).startswith("gymnasium.")}
        makers = [partial(_make, env_fn, registered) for env_fn in env_fns]
        self._actors: list[Any] = [remote.remote(makers[part], vec_env_cls) for part in self._parts]
        self._last_obs: VecEnvObs | None = None
        self._stepping: list[ray.ObjectRef] = []
        try:
            calls = [actor.spaces.remote() for actor in self._actors]
            _, late = ray.wait(calls, num_returns=len(calls), timeout=start_timeout)
            if late:
                has = f"They need {actor_options}; Ray has {ray.available_resources()} left"
                advice = "Lower num_cpus, add machines, or raise start_timeout"
                raise ValueError(f"{len(late)} of {len(calls)} actors are not up after {start_timeout:g} s. {has}. {advice}")
            super().__init__(self.num_envs, *self._get(calls)[0])
        except BaseException:
            self._end_actors()  # `close` would wait for those that have not started
            raise

    def step_async(self, actions: np.ndarray) -> None:
        self._stepping = [actor.step.remote(actions[part]) for actor, part in zip(self._actors, self._parts, strict=True)]

    def step_wait(self) -> VecEnvStepReturn:
        observations_of_actors, rewards, dones, infos_of_actors, reset_infos = zip(*self._get(self._stepping), strict=True)
        observations, infos = _joined(observations_of_actors), list(chain(*infos_of_actors))
        if rebuilt := [index for index, info in enumerate(infos) if info.get(REBUILT)]:
            # There is no observation before the first step of a run that was resumed inside an episode
            before = observations if self._last_obs is None else self._last_obs
            for index in rebuilt:
                last = {key: part[index] for key, part in before.items()} if isinstance(before, dict) else before[index]
                infos[index]["terminal_observation"] = last
            # Logged, because Python shows a warning of the same text only once
            logging.getLogger(__name__).warning("rebuilt after a death, episode cut: environment %s", str(rebuilt)[1:-1])
        self._last_obs = observations
        self.reset_infos = list(chain(*reset_infos))
        return observations, np.concatenate(rewards), np.concatenate(dones), infos

    def reset(self) -> VecEnvObs:
        parts = zip(self._actors, self._parts, strict=True)
        calls = [actor.reset.remote(self._seeds[part], self._options[part]) for actor, part in parts]
        observations_of_actors, reset_infos = zip(*self._get(calls), strict=True)
        self._reset_seeds()
        self._reset_options()
        self._last_obs = _joined(observations_of_actors)
        self.reset_infos = list(chain(*reset_infos))
        return self._last_obs

    def close(self) -> None:
        if self._actors and ray.is_initialized():
            closing = [actor.call.options(max_task_retries=0).remote("close") for actor in self._actors]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT)  # a dead actor's call is ready too
            self._end_actors()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return list(chain(*self._each_actor("get_images")))

    def has_attr(self, attr_name: str) -> bool:
        return all(self._each_actor("has_attr", attr_name))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [value for (value,) in self._each_env("get_attr", indices, attr_name)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        self._each_env("set_attr", indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        return [value for (value,) in self._each_env("env_method", indices, method_name, *method_args, **method_kwargs)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return [value for (value,) in self._each_env("env_is_wrapped", indices, wrapper_class)]

    def _end_actors(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _each_actor(self, _name: str, *args: Any) -> list[Any]:
        """Call a method of each actor's ``VecEnv``."""
        return self._get([actor.call.remote(_name, *args) for actor in self._actors])

    def _each_env(self, _name: str, _indices: VecEnvIndices, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment's ``VecEnv`` with the index of that environment alone."""
        places = [divmod(range(self.num_envs)[index], self._per_actor) for index in self._get_indices(_indices)]
        calls = [self._actors[actor].call.remote(_name, *args, **kwargs, indices=[inner]) for actor, inner in places]
        return self._get(calls, [actor for actor, _ in places])

    def _get(self, calls: list["ray.ObjectRef"], actors: Sequence[int] | None = None) -> list[Any]:
        """The results of one call to each of these actors, by default to each of all."""
        try:
            return ray.get(calls)
        except DEATHS as error:
            called = zip(calls, range(len(self._actors)) if actors is None else actors, strict=True)
            dead = sorted({actor for call, actor in called if isinstance(call.future().exception(), DEATHS)})
            which = [index for actor in dead for index in range(self.num_envs)[self._parts[actor]]]
            raise EnvironmentDiedError(which, f"ended: {str(error).splitlines()[-1]}") from error


class _Environments:
    """The actor: a ``VecEnv`` of SB3, which gets copies, because the arrays that Ray hands over are read-only."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]], vec_env_cls: Callable[..., VecEnv]):
        self.env = vec_env_cls(env_fns)
        hook_uses(self.env)  # which copies terminal observations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
            self.lost_episodes = ray.get_runtime_context().was_current_actor_reconstructed

    def spaces(self) -> tuple[gym.Space, gym.Space]:
        return self.env.observation_space, self.env.action_space

    def call(self, _name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the ``VecEnv``. If a process of it has ended, end this one too, so that Ray rebuilds it."""
        try:
            with explained_deaths(self.env):
                return getattr(self.env, _name)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        except EnvironmentDiedError as error:
            logging.getLogger(__name__).error("%s", error)  # Ray prints it in the process that runs the training
            os._exit(1)

    def reset(self, seeds: list[int | None], options: list[dict[str, Any]]) -> tuple[VecEnvObs, list[dict[str, Any]]]:
        self.lost_episodes = False
        self.env._seeds, self.env._options = seeds, copy.deepcopy(options)
        return self.call("reset"), list(self.env.reset_infos)

    def step(self, actions: np.ndarray) -> tuple[VecEnvObs, np.ndarray, np.ndarray, list[dict], list[dict]]:
        """Make a step, or after a restart of the actor end the lost episodes and begin new ones."""
        if self.lost_episodes:
            count = self.env.num_envs
            observations, reset_infos = self.reset([None] * count, [{}] * count)
            infos: list[dict] = [{REBUILT: True, "TimeLimit.truncated": True} for _ in range(count)]
            return observations, np.zeros(count, np.float32), np.ones(count, bool), infos, reset_infos
        observations, rewards, dones, infos = self.call("step", actions)
        return observations, rewards, dones, list(infos), list(self.env.reset_infos)


def _make(env_fn: Callable[[], gym.Env], registered: dict[str, EnvSpec]) -> gym.Env:
    for name, spec in registered.items():
        gym.registry.setdefault(name, spec)
    return env_fn()


def _joined(observations: Sequence[VecEnvObs]) -> VecEnvObs:
    first = observations[0]
    if isinstance(first, dict):
        return {key: np.concatenate([part[key] for part in observations]) for key in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):  # TD3X takes none, but SB3's own tests of vectorized environments do (`make soak`)
        return tuple(map(np.concatenate, zip(*observations, strict=True)))
    return np.concatenate(observations)  # type: ignore[arg-type]
