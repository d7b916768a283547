"""One training run from its settings to its folder: what the command, studies and benchmarks share."""

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import presets
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, log_state, resume_run
from sb3_td3x.checkpoint.run import versions
from sb3_td3x.common import files
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.signals import stopping_on_signal
from sb3_td3x.common.validation import check_choice, check_int
from sb3_td3x.common.vec_envs import close_env
from sb3_td3x.results import scores
from sb3_td3x.results.run_dir import ALGORITHM, RunDir
from sb3_td3x.runs.environments import EVALUATION, TRAINING, open_env, require_registered
from sb3_td3x.runs.evaluation import Evaluation, save_last
from sb3_td3x.td3x import policies
from sb3_td3x.td3x.td3x import TD3X, check_arguments

ARGUMENT_NAMES = {"env_id": "env", "steps": "n_timesteps", "threads": "num_threads"}  # in rl-zoo3's args.yml


@dataclass(frozen=True)
class Experiment:
    """What one run is made from. The same values give the same run."""

    env_id: str
    steps: float | None = None  # of the environments; None takes the preset's n_timesteps
    seed: int = 0  # of the networks, the exploration and every episode of the environments
    preset: str = "default"  # name of a preset, or path of a YAML file like one
    overrides: tuple[str, ...] = ()  # key=value texts that change the preset
    n_envs: int | None = None  # None takes the preset's number, which is 1 if it names none
    eval_freq: int = 5_000  # environment steps between two evaluations
    eval_episodes: int = 10
    save_freq: int = 10_000  # environment steps between two checkpoints
    device: str = "auto"
    threads: int = 1  # of torch; more help only on an otherwise idle machine and slow down a busy one
    out: Path = Path("logs")  # holds the runs
    setting: str | None = None  # name of what is tried, for plots and tables; None is the preset's name
    env_kwargs: dict[str, Any] | None = None
    video: bool = True  # whether the command makes one at the end

    def __post_init__(self) -> None:
        for name in ("eval_freq", "eval_episodes", "save_freq", "threads", "seed"):  # a file may have 1.0 or 1e4
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum=0 if name == "seed" else 1))
        if not isinstance(self.env_kwargs or {}, dict):
            raise ValueError(f"env_kwargs must be a mapping of names to values, not {self.env_kwargs!r}")

    def hyperparameters(self) -> dict[str, Any]:
        """The preset's entry with all that this run changes, in rl-zoo3's keys; ``ValueError`` if they make no run."""
        entry = presets.load(self.preset, self.env_id)
        n_envs = check_int("n_envs", entry.get("n_envs", 1) if self.n_envs is None else self.n_envs, minimum=1)
        entry |= {"n_envs": n_envs, **presets.updates_for(entry, n_envs)}
        entry = presets.override(entry, self.overrides)
        if entry["n_envs"] > 1 and "episode" in str(entry.get("train_freq")):
            raise ValueError("training after each episode (preset t3d) needs n_envs=1: episodes would end at different times")
        entry["n_timesteps"] = check_int("steps", entry["n_timesteps"] if self.steps is None else self.steps, minimum=1)
        return entry

    def arguments(self) -> dict[str, Any]:
        """The fields but ``out`` under the names of rl-zoo3's ``args.yml``, which its scripts read back."""
        return {ARGUMENT_NAMES.get(name, name): value for name, value in vars(self).items() if name != "out"}

    @classmethod
    def of_arguments(cls, folder: RunDir) -> "Experiment":
        """The settings of a run as its folder holds them; ``ValueError`` if ``td3x train`` has not made it."""
        arguments = folder.arguments()
        if not isinstance(arguments.get("overrides"), list):
            raise ValueError(f"{folder.args_file} has no list of overrides, so td3x train has not made this run")
        keys = {field.name: ARGUMENT_NAMES.get(field.name, field.name) for field in fields(cls)}
        values = {name: arguments[key] for name, key in keys.items() if key in arguments}
        return cls(**{**values, "overrides": tuple(arguments["overrides"])})


@dataclass
class Run:
    """A run that is ready to start or to resume: its folder, model and environments."""

    experiment: Experiment
    folder: RunDir
    hyperparameters: dict[str, Any]
    model: TD3X
    evaluation_env: VecEnv
    is_resumed: bool
    lock: RunLock  # of the folder
    resources: ExitStack  # closes the lock and the environments

    @property
    def total(self) -> int:
        """Environment steps in all."""
        return self.hyperparameters["n_timesteps"]


def check(experiment: Experiment) -> dict[str, Any]:
    """The hyperparameters, after every check that needs no environments; a ``ValueError`` says what to change."""
    require_registered(experiment.env_id)
    require_device(experiment.device)
    entry = experiment.hyperparameters()
    presets.check(entry)
    check_arguments(entry.get("policy", "MlpPolicy"), **presets.model_arguments(entry))
    return entry


def prepare(experiment: Experiment, path: Path | None = None, command: str | None = None) -> Run:
    """
    Check every setting, then make the environments, the folder and the model. If that fails, no new numbered folder is left.

    :param path: the run's folder, in which a run may have begun that never made a step. ``None`` makes a new, numbered one
    :param command: the command line that makes the run, kept in ``args.yml``
    :raises ValueError: for anything that cannot be run, in one line that says what to change
    """
    entry = check(experiment)
    _use_threads(experiment.threads)
    with ExitStack() as resources:
        # In this process: what is wrong with the environment is said here, not by a worker
        evaluation_env = _opened(resources, experiment, entry, EVALUATION)
        entry["policy"] = entry.get("policy") or policies.name_for(evaluation_env.observation_space)
        written = resources.enter_context(ExitStack())
        if path is None:
            folder = RunDir.create(experiment.out, experiment.env_id)
            written.callback(shutil.rmtree, folder.path, ignore_errors=True)
        else:
            folder = RunDir(files.make_folder(path), experiment.env_id)
            folder.require_no_links()
        lock = resources.enter_context(RunLock(folder.path))
        folder.require_no_run()
        arguments = {"algo": ALGORITHM, **experiment.arguments(), "versions": versions(), "command": command}
        folder.write_settings(entry, arguments)
        for left in (folder.log, folder.last_model, folder.normalization):  # all else is overwritten, or without content yet
            left.unlink(missing_ok=True)
        env = _opened(resources, experiment, entry, TRAINING, monitor_folder=folder.path)
        model_arguments = presets.model_arguments(entry, env.action_space.shape or ())
        try:
            model = TD3X(entry["policy"], env, seed=experiment.seed, device=experiment.device, **model_arguments)
        except (TypeError, AssertionError, LookupError, NotImplementedError) as error:  # SB3's and torch's
            raise ValueError(f"these settings make no model: {error}") from error
        model.set_logger(log_state.configure(folder.log))
        resources.callback(model.logger.close)
        written.pop_all()
        return Run(experiment, folder, entry, model, evaluation_env, False, lock, resources.pop_all())


def resume(
    folder: RunDir,
    steps: float | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
    env_kwargs: dict[str, Any] | None = None,
    device: str | None = None,
    threads: int | None = None,
) -> Run:
    """
    A run that resumes from its newest checkpoint, or that of ``checkpoint`` steps, with the settings in its folder.

    :param steps: environment steps in all; ``None`` is what the run was planned for. More extend it, fewer shorten it
    :param trust: run code from the checkpoint, see ``TD3X.load``, import the module that the environment's name may have, pass
        the environment the keyword arguments that the folder names, and follow links out of the folder
    :param env_kwargs: keyword arguments of the environment that need no trust, because the caller names them too
    :param device: like ``threads``, ``None`` is what the run began with
    :raises CheckpointError: if there is no checkpoint, or it is damaged; a ``RunLockedError`` if another process writes there
    :raises ValueError: if nothing is left to do
    """
    experiment = Experiment.of_arguments(folder)
    require_registered(experiment.env_id, trust, None if env_kwargs == experiment.env_kwargs else experiment.env_kwargs)
    folder.require_no_links(trust)
    require_device(device := device or experiment.device)
    with ExitStack() as resources:
        lock = resources.enter_context(RunLock(folder.path))
        saved = Store(folder.checkpoints).find(checkpoint)
        # From the settings, not the checkpoint: a run that was extended may not have made one since
        planned = check_int("n_timesteps", folder.config().get("n_timesteps"), minimum=0)
        entry = {**folder.config(), "n_timesteps": planned if steps is None else check_int("steps", steps, minimum=1)}
        n_envs, had = check_int("n_envs", entry.get("n_envs", 1), minimum=1), saved.manifest["replay"].get("n_envs")
        if had not in (None, n_envs):  # before so many processes are started
            raise ValueError(f"the run's settings ask for n_envs {n_envs:,}, but its checkpoint was made with {had}")
        is_made = saved.steps >= entry["n_timesteps"] and is_evaluated(folder, saved.steps)
        if is_made or entry["n_timesteps"] < min(saved.steps, planned):
            made = f"{folder.path} has made {saved.steps:,} steps, and {entry['n_timesteps']:,} were asked for"
            raise ValueError(f"{made}: --steps extends it and counts from the beginning")
        _use_threads(check_int("threads", experiment.threads if threads is None else threads, minimum=1))
        evaluation_env = _opened(resources, experiment, entry, EVALUATION)
        env = _opened(resources, experiment, entry, TRAINING, monitor_folder=folder.path)
        model = resume_run(folder.checkpoints, env, checkpoint=checkpoint, trust=trust, device=device)
        model.set_logger(log_state.configure(folder.log))
        resources.callback(model.logger.close)
        return Run(experiment, folder, entry, model, evaluation_env, True, lock, resources.pop_all())


def is_evaluated(folder: RunDir, steps: int) -> bool:
    """Whether the evaluation after so many steps was made; a run that was stopped in its last one makes it when resumed."""
    try:
        evaluated = scores.of_run(folder)
        return evaluated.steps[-1] >= steps and evaluated.seconds[-1] >= 0  # NaN if its line, written last, is missing
    except ValueError:
        return False


def _opened(resources: ExitStack, experiment: Experiment, entry: dict[str, Any], stream: int, **kwargs: Any) -> VecEnv:
    """Environments that are closed with ``resources``."""
    env = open_env(experiment.env_id, experiment.seed, stream, entry, env_kwargs=experiment.env_kwargs, **kwargs)
    resources.callback(close_env, env)
    return env


def train(
    run: Run, callbacks: Sequence[BaseCallback] = (), on_evaluation: Callable[[EvalCallback], None] = lambda _: None
) -> bool:
    """
    Train to the end, or to the first signal to stop. The last model is saved then, and if possible after an error.

    :param run: from ``prepare`` or ``resume``; its environments are closed
    :param callbacks: called at every step, after the evaluation
    :param on_evaluation: called after every evaluation with the callback that made it
    :return: whether the run reached its last step and was evaluated there
    """

    def after_evaluation(evaluation: EvalCallback) -> None:
        if find_spec("matplotlib") is not None:
            from sb3_td3x.results.plots import draw

            draw([scores.of_run(run.folder)], run.folder.curve)
        on_evaluation(evaluation)

    n_envs, experiment = run.model.n_envs, run.experiment
    checkpoint = TD3XCheckpointCallback(max(experiment.save_freq // n_envs, 1), run.folder.checkpoints, lock=run.lock)
    evaluation = Evaluation(
        run.evaluation_env,
        n_eval_episodes=experiment.eval_episodes,
        eval_freq=max(experiment.eval_freq // n_envs, 1),
        folder=run.folder,
        lock=run.lock,
        is_stopping=lambda: checkpoint.is_stopping,
        on_evaluation=after_evaluation,
    )
    if run.model.learning_starts >= run.total:
        begins = f"learning begins after {run.model.learning_starts:,} steps (learning_starts)"
        warnings.warn(f"nothing will be learned: {begins}, and this run has {run.total:,}", stacklevel=2)
    with files.explained(run.folder.path, only_full=True), run.resources:  # closing a log writes what is left of it
        if run.total != run.folder.config()["n_timesteps"]:  # another length, which nothing has refused
            planned_anew = {"n_timesteps": run.total, "command": None}  # which no longer makes this run
            run.folder.write_settings(run.hyperparameters, {**run.folder.arguments(), **planned_anew})
        try:
            with stopping_on_signal(checkpoint.save_and_stop):
                total = max(run.total, run.model.num_timesteps)  # the last rollout may have passed the end
                run.model.learn(total, [evaluation, *callbacks, checkpoint], resume=run.is_resumed)
        except BaseException as error:
            with suppress(Exception):  # what ended the run is what its owner needs to know
                save_last(run.model, run.folder, run.lock)  # as at the end
            if isinstance(error, (SystemExit, EOFError)):  # at which a command ends without a word
                raise RuntimeError(f"the environment ended the program: {error!r}") from error
            raise
    return run.model.num_timesteps >= run.total and is_evaluated(run.folder, run.model.num_timesteps)


def _use_threads(threads: int) -> None:
    """At most one per core, because OpenMP ends a process that asks for very many."""
    th.set_num_threads(min(threads, os.cpu_count() or 1))


def require_device(device: str) -> None:
    """``ValueError`` for a device that is not there; SB3 would silently take the CPU for a missing CUDA device."""
    if device not in ("auto", "cpu"):
        gpus = [f"cuda:{number}" for number in range(th.cuda.device_count())]
        check_choice("device on this machine", device, ["auto", "cpu", *(["cuda", *gpus] if gpus else [])])
