"""One training run from its settings to its folder: what the command, studies and benchmarks share."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import environments, presets
from sb3_td3x.errors import ModelFileError
from sb3_td3x.pickled import load_vecnormalize
from sb3_td3x.rundir import ALGORITHM, RunDir
from sb3_td3x.settings import whole
from sb3_td3x.td3x import TD3X


@dataclass(frozen=True)
class Experiment:
    """
    What one run is made from. The same values give the same run.

    :param env_id: registered name of the environment
    :param steps: environment steps; ``None`` takes the preset's ``n_timesteps``
    :param seed: of the networks, the exploration and every episode of the environments
    :param preset: name of a preset
    :param overrides: ``key=value`` texts that change the preset
    :param n_envs: environments side by side; above 1 there are as many updates as environment steps.
        ``None`` takes the preset's number, which is 1 if it names none
    :param eval_freq: environment steps between two evaluations
    :param eval_episodes: episodes of an evaluation, 1 or more
    :param device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    :param threads: torch threads; more than one helps only on an otherwise idle machine and slows down badly on a busy one
    :param out: folder that holds the runs
    """

    env_id: str
    steps: float | None = None
    seed: int = 0
    preset: str = "default"
    overrides: tuple[str, ...] = ()
    n_envs: int | None = None
    eval_freq: int = 5_000
    eval_episodes: int = 10
    device: str = "auto"
    threads: int = 1
    out: Path = Path("logs")

    def hyperparameters(self) -> dict[str, Any]:
        """
        The preset's entry with all that this run changes, in rl-zoo3's keys.

        :raises ValueError: for an unknown preset or key, or settings that exclude each other
        """
        entry = presets.load(self.preset, self.env_id)
        entry["n_envs"] = whole("n_envs", entry.get("n_envs", 1) if self.n_envs is None else self.n_envs, minimum=1)
        if entry["n_envs"] > 1:
            # One update per environment step, as with one environment: SB3 would make one per step of all together
            entry["gradient_steps"] = -1
        entry = presets.override(entry, self.overrides)
        if entry["n_envs"] > 1 and "episode" in str(entry.get("train_freq")):
            raise ValueError("training after each episode (preset t3d) needs n_envs=1: episodes would end at different times")
        entry["n_timesteps"] = whole("steps", entry["n_timesteps"] if self.steps is None else self.steps, minimum=1)
        return entry


@dataclass
class Run:
    """A run that is ready to start: its folder, model and environments."""

    experiment: Experiment
    folder: RunDir
    hyperparameters: dict[str, Any]
    model: TD3X
    evaluation_env: VecEnv

    def close(self) -> None:
        env = self.model.get_env()
        if env is not None:
            env.close()
        self.evaluation_env.close()


def prepare(experiment: Experiment) -> Run:
    """
    Check every setting, then make the folder, the environments and the model. If that fails, no folder is left.

    :raises ValueError: for anything that cannot be run, in one line that says what to change
    :raises OSError: if the folder cannot be written
    """
    environments.require_registered(experiment.env_id)
    require_device(experiment.device)
    entry = experiment.hyperparameters()
    for name in ("eval_freq", "eval_episodes"):
        whole(name, getattr(experiment, name), minimum=1)
    th.set_num_threads(whole("threads", experiment.threads, minimum=1))
    folder = RunDir.create(experiment.out, experiment.env_id)
    opened: list[VecEnv] = []
    try:
        # First the evaluation's one environment, in this process: what is wrong with it is said here, not in a worker
        evaluation = _environment(experiment.env_id, {**entry, "n_envs": 1}, experiment.seed, environments.EVALUATION)
        opened.append(evaluation)
        env = _environment(experiment.env_id, entry, experiment.seed, environments.TRAINING, folder)
        opened.append(env)
        arguments = presets.model_arguments(entry, env.action_space.shape or ())
        model = TD3X(entry["policy"], env, seed=experiment.seed, device=experiment.device, **arguments)
        folder.write_settings(entry, _arguments(experiment))
    except BaseException as error:
        for made in opened:
            made.close()
        shutil.rmtree(folder.path)
        if isinstance(error, Exception):
            raise ValueError(f"{experiment.env_id} cannot be trained: {error}") from error
        raise
    logs = ["csv", "tensorboard"] if find_spec("tensorboard") is not None else ["csv"]
    model.set_logger(configure(str(folder.path), logs))
    return Run(experiment, folder, entry, model, evaluation)


def train(
    run: Run, callbacks: Sequence[BaseCallback] = (), on_evaluation: Callable[[EvalCallback], None] = lambda _: None
) -> bool:
    """
    Train to the end, or to the first Ctrl-C or SIGTERM. In either case, and after an error, the last model is saved.

    :param run: from ``prepare``; its environments are closed
    :param callbacks: called at every step, after the evaluation
    :param on_evaluation: called after every evaluation with the callback that made it
    :return: whether the run reached its last step
    """
    stop = StopOnSignal()
    evaluation = Evaluation(
        run.evaluation_env,
        n_eval_episodes=run.experiment.eval_episodes,
        eval_freq=max(run.experiment.eval_freq // run.model.n_envs, 1),
        log_path=str(run.folder.path),
        best_model_save_path=str(run.folder.path),
        callback_on_new_best=SaveNormalization(run.folder.best_normalization),
        callback_after_eval=AfterEvaluation(run.folder, on_evaluation),
        verbose=0,
    )
    try:
        with stop.listening():
            run.model.learn(run.hyperparameters["n_timesteps"], callback=CallbackList([evaluation, *callbacks, stop]))
    finally:
        run.model.save(run.folder.last_model)
        save_normalization(run.model, run.folder.normalization)
        run.close()
    return not stop.requested


def load_model(folder: RunDir, env: VecEnv, device: str = "auto", trust: bool = False) -> TD3X:
    """
    The best model of a run, else its last; for acting, so without memory for a replay buffer.

    :param env: from ``open_evaluation_env``; the model has to fit it
    :param trust: read a model that holds objects of its author's, which runs their code
    :raises UntrustedModelError: for such a model, without ``trust``
    """
    require_device(device)
    return TD3X.load(folder.model(), env=env, device=device, buffer_size=1, trust=trust)


def open_evaluation_env(folder: RunDir, seed: int, render_mode: str | None = None, trust: bool = False) -> VecEnv:
    """
    An environment as the run's evaluations had it, with the normalisation that belongs to the run's model.

    :param trust: read normalisation statistics as SB3 does, which runs whatever code their file holds
    """
    entry = {**folder.config(), "n_envs": 1, "normalize": None}
    environments.require_registered(folder.env_id)
    env = _environment(folder.env_id, entry, seed, environments.EVALUATION, render_mode=render_mode)
    best = folder.model() == folder.best_model and folder.best_normalization.exists()
    statistics = folder.best_normalization if best else folder.normalization
    if not statistics.exists():
        return env
    loaded = load_vecnormalize(statistics, env, trust)
    loaded.training = loaded.norm_reward = False
    return loaded


def evaluate(folder: RunDir, episodes: int, seed: int, device: str = "auto", trust: bool = False) -> np.ndarray:
    """
    Returns of fresh episodes of a run's model.

    :param seed: the episodes are determined by it
    :param trust: run the code that the run's files may hold
    :return: ``(episodes,)``
    """
    env = open_evaluation_env(folder, seed, trust=trust)
    try:
        returns, _ = evaluate_policy(
            load_model(folder, env, device, trust), env, whole("episodes", episodes, minimum=1), return_episode_rewards=True
        )
    finally:
        env.close()
    return np.asarray(returns)


def film(folder: RunDir, out: Path, seed: int = 0, max_steps: int = 1000, trust: bool = False) -> float:
    """
    Film one episode of a run's model.

    :param trust: run the code that the run's files may hold
    :return: its return
    :raises ValueError: if there is nothing to film with or the environment cannot draw itself
    """
    if find_spec("imageio") is None or find_spec("imageio_ffmpeg") is None:
        raise ValueError('a film needs imageio: pip install "imageio[ffmpeg]"')
    from sb3_td3x.film import record

    env = None
    try:
        env = open_evaluation_env(folder, seed, "rgb_array", trust)
        return record(load_model(folder, env, "cpu", trust), env, out, max_steps)
    except ModelFileError:
        raise
    except Exception as error:  # whatever an environment's drawing raises
        raise ValueError(f"{folder.env_id} cannot be filmed: {error}") from error
    finally:
        if env is not None:
            env.close()


def show(folder: RunDir, episodes: int, seed: int, trust: bool = False) -> Iterator[float]:
    """Play episodes in a window, giving each one's return when it ends; ``trust`` as for ``film``."""
    env = open_evaluation_env(folder, seed, "human", trust)
    try:
        model = load_model(folder, env, "cpu", trust)
        for _ in range(episodes):
            yield evaluate_policy(model, env, 1)[0]  # type: ignore[misc]
    finally:
        env.close()


def require_device(device: str) -> None:
    """
    Refuse a device that is not there; SB3 would silently take the CPU for a missing CUDA device.

    :raises ValueError: for an unknown name, or CUDA where there is none
    """
    if device == "auto":
        return
    try:
        th.zeros((), device=device)
        kind = th.device(device).type
    except Exception as error:  # each back end has its own
        raise ValueError(f"there is no device {device!r} here, use auto or cpu: {error}") from error
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"SB3 runs on cpu and cuda, not on {device!r}")


def save_normalization(model: BaseAlgorithm, path: Path) -> None:
    """Write ``VecNormalize``'s statistics, if there are any; a NaN that has spoilt them never replaces good ones."""
    normalization = model.get_vec_normalize_env()
    if normalization is None:
        return
    statistics = normalization.obs_rms
    for one in statistics.values() if isinstance(statistics, dict) else [statistics]:
        if not (np.isfinite(one.mean).all() and np.isfinite(one.var).all()):
            return
    beside = path.with_suffix(".partial")
    normalization.save(str(beside))
    beside.replace(path)


class SaveNormalization(BaseCallback):
    """Keep the normalisation that belongs to the best model."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def _on_step(self) -> bool:
        save_normalization(self.model, self.path)
        return True


class Evaluation(EvalCallback):
    """Also evaluates where training ends, so that even the shortest run has a score, a best model and a curve."""

    def _on_training_end(self) -> None:
        if self.evaluations_timesteps[-1:] != [self.num_timesteps]:
            self.eval_freq = 1
            self._on_step()


class AfterEvaluation(BaseCallback):
    """Redraw the curve and tell the caller."""

    parent: EvalCallback

    def __init__(self, folder: RunDir, on_evaluation: Callable[[EvalCallback], None]):
        super().__init__()
        self.folder = folder
        self.on_evaluation = on_evaluation

    def _on_step(self) -> bool:
        if find_spec("matplotlib") is not None:
            from sb3_td3x.curves import draw

            draw([self.folder], self.folder.curve)
        self.on_evaluation(self.parent)
        return True


class StopOnSignal(BaseCallback):
    """The first Ctrl-C or SIGTERM ends training at the next step; a second Ctrl-C aborts."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals
            return
        before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_step(self) -> bool:
        return not self.requested


def _environment(
    env_id: str,
    entry: dict[str, Any],
    seed: int,
    stream: int,
    monitor: RunDir | None = None,
    render_mode: str | None = None,
) -> VecEnv:
    env = environments.build(
        env_id,
        seed,
        stream,
        entry["n_envs"],
        wrapper=entry.get("env_wrapper"),
        monitor_folder=None if monitor is None else monitor.path,
        render_mode=render_mode,
    )
    training = stream == environments.TRAINING
    return environments.normalized(env, entry.get("normalize"), entry.get("gamma", 0.99), training)


def _arguments(experiment: Experiment) -> dict[str, Any]:
    """The command's arguments under the names of rl-zoo3's ``args.yml``, which its scripts read back."""
    return {
        "algo": ALGORITHM,
        "env": experiment.env_id,
        "seed": experiment.seed,
        "preset": experiment.preset,
        "overrides": list(experiment.overrides),
        "n_timesteps": experiment.steps,
        "n_envs": experiment.n_envs,
        "eval_freq": experiment.eval_freq,
        "eval_episodes": experiment.eval_episodes,
        "device": experiment.device,
        "num_threads": experiment.threads,
        "env_kwargs": None,
        "versions": {name: version(name) for name in ("sb3-td3x", "stable-baselines3", "torch", "gymnasium", "numpy")},
    }
