"""One training run from its settings to its folder: what the command, studies and benchmarks share."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import presets
from sb3_td3x.common import files
from sb3_td3x.runs import environments
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, log_state, resume_run
from sb3_td3x.checkpoint.run import VERSIONS
from sb3_td3x.checkpoint.store import Checkpoint
from sb3_td3x.runs.evaluation import AfterEvaluation, AtTheEnd, Evaluation, SaveNormalization, save_normalization
from sb3_td3x.common.lock import RunLock
from sb3_td3x.results.run_dir import ALGORITHM, RunDir
from sb3_td3x.common.validation import whole
from sb3_td3x.common.signals import stopping_on_signal
from sb3_td3x.td3x.td3x import TD3X

# rl-zoo3's names in args.yml, where they are not ours
ARGUMENT_NAMES = {"env_id": "env", "steps": "n_timesteps", "threads": "num_threads"}


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
    :param save_freq: environment steps between two checkpoints
    :param threads: torch threads; more than one helps only on an otherwise idle machine and slows down badly on a busy one
    :param out: folder that holds the runs
    :param setting: name of what is tried, for plots and tables; ``None`` is the preset's name
    """

    env_id: str
    steps: float | None = None
    seed: int = 0
    preset: str = "default"
    overrides: tuple[str, ...] = ()
    n_envs: int | None = None
    eval_freq: int = 5_000
    eval_episodes: int = 10
    save_freq: int = 10_000
    device: str = "auto"
    threads: int = 1
    out: Path = Path("logs")
    setting: str | None = None

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

    @classmethod
    def of_arguments(cls, folder: RunDir) -> "Experiment":
        """
        The settings of a run as its folder holds them.

        :raises ValueError: if they are not as ``td3x train`` writes them
        """
        arguments = folder.arguments()
        if not isinstance(arguments.get("overrides"), list):
            raise ValueError(f"{folder.args_file} has no list of overrides: it is not of a run that td3x train made")
        own = {field.name: ARGUMENT_NAMES.get(field.name, field.name) for field in fields(cls) if field.name != "out"}
        values = {name: arguments[key] for name, key in own.items() if key in arguments}
        return cls(**{**values, "overrides": tuple(arguments["overrides"]), "out": folder.path.parent.parent})


@dataclass
class Run:
    """A run that is ready to start or to go on: its folder, model and environments."""

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
    """
    Check every setting that can be checked without making the environments.

    :return: the hyper-parameters
    :raises ValueError: for anything that cannot be run, in one line that says what to change
    """
    environments.require_registered(experiment.env_id)
    require_device(experiment.device)
    entry = experiment.hyperparameters()
    _with_whole_numbers(experiment)
    environments.wrappers(entry.get("env_wrapper"))
    environments.checked_normalize(entry.get("normalize"))
    presets.check(entry)
    return entry


def _with_whole_numbers(experiment: Experiment) -> Experiment:
    """Files may have them as ``1.0``."""
    least = {"eval_freq": 1, "eval_episodes": 1, "save_freq": 1, "threads": 1, "seed": 0}
    numbers: dict[str, Any] = {name: whole(name, getattr(experiment, name), minimum=low) for name, low in least.items()}
    return replace(experiment, **numbers)


def prepare(experiment: Experiment, path: Path | None = None) -> Run:
    """
    Check every setting, then make the folder, the environments and the model. If that fails, no files are left.

    :param path: the run's folder; what a run without a checkpoint left there is removed. ``None`` makes a new, numbered one
    :raises ValueError: for anything that cannot be run, in one line that says what to change
    :raises OSError: if the folder cannot be written
    """
    entry, experiment = check(experiment), _with_whole_numbers(experiment)
    th.set_num_threads(experiment.threads)
    folder = RunDir.create(experiment.out, experiment.env_id) if path is None else RunDir.at(path, experiment.env_id)
    with ExitStack() as resources:
        try:
            lock = resources.enter_context(RunLock(folder.path))
        except BaseException:
            if path is None:
                folder.path.rmdir()  # made above; nobody else knows it
            raise
        folder.require_no_run()
        try:
            folder.clear()
            folder.write_settings(entry, _arguments(experiment))
            evaluation, env = _environments(resources, experiment, entry, folder)
            arguments = presets.model_arguments(entry, env.action_space.shape or ())
            model = TD3X(entry["policy"], env, seed=experiment.seed, device=experiment.device, **arguments)
        except BaseException as error:
            resources.close()
            folder.clear()
            if path is None:
                folder.path.rmdir()
            if isinstance(error, Exception):
                raise ValueError(f"{experiment.env_id} cannot be trained: {error}") from error
            raise
        model.set_logger(log_state.configure(folder.log))
        resources.callback(model.logger.close)
        return Run(experiment, folder, entry, model, evaluation, False, lock, resources.pop_all())


def resume(
    folder: RunDir,
    steps: float | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
) -> Run:
    """
    A run that goes on from its newest checkpoint, with the settings in its folder.

    :param folder: of the run
    :param steps: environment steps in all; ``None`` is what the run was planned for. More extend it
    :param checkpoint: steps of the checkpoint to go on from; ``None`` is the newest
    :param trust: run code from the checkpoint, see ``TD3X.load``, and import the module that the environment's name may have
    :raises CheckpointError: if there is none, or it is damaged
    :raises RunLockedError: if another process writes there
    :raises ValueError: if nothing is left to do
    """
    if not trust:
        folder.require_own()
    experiment = _with_whole_numbers(Experiment.of_arguments(folder))
    environments.require_registered(experiment.env_id, may_import=trust)
    require_device(experiment.device)
    th.set_num_threads(experiment.threads)
    with ExitStack() as resources:
        lock = resources.enter_context(RunLock(folder.path))
        found = Store(folder.checkpoints).find(checkpoint)
        planned = _planned_steps(folder, found)
        entry = {**folder.config(), "n_timesteps": planned if steps is None else whole("steps", steps, minimum=1)}
        entry["n_envs"] = whole("n_envs", entry.get("n_envs", 1), minimum=1)
        if found.steps >= entry["n_timesteps"]:
            done = f"{folder.path} has made {found.steps:,} steps"
            raise ValueError(
                f"{done} of {entry['n_timesteps']:,}: --steps extends it" if steps is None
                else f"{done}: --steps counts from the beginning and must be above that, not {entry['n_timesteps']:,}"
            )  # fmt: skip
        evaluation, env = _environments(resources, experiment, entry, folder, append=True)
        model: TD3X = resume_run(
            folder.checkpoints, env, checkpoint=checkpoint, trust=trust, device=experiment.device
        )
        if entry["n_timesteps"] != planned:
            _note_new_length(folder, entry, planned, found.steps)
        model.set_logger(log_state.configure(folder.log))
        resources.callback(model.logger.close)
        return Run(experiment, folder, entry, model, evaluation, True, lock, resources.pop_all())


def _note_new_length(folder: RunDir, entry: dict[str, Any], planned: int, steps: int) -> None:
    """Up to ``steps`` the run's schedule and warm-up were those of a run of ``planned`` steps."""
    arguments = folder.arguments()
    before = arguments.get("earlier_lengths")
    lengths = [*(before if isinstance(before, list) else []), {"planned": planned, "until": steps}]
    folder.write_settings(entry, {**arguments, "n_timesteps": entry["n_timesteps"], "earlier_lengths": lengths})


def unfinished(experiment: Experiment) -> list[RunDir]:
    """The runs of these settings that have a checkpoint and have not made all steps, newest last."""
    wanted = _settings(_arguments(experiment))
    return [folder for folder, theirs in _all_unfinished(experiment) if theirs == wanted]


def differing_settings(experiment: Experiment) -> dict[str, list[str]]:
    """For each run that could be resumed but for its settings: what differs, as ``name: theirs, not ours``."""
    wanted = _settings(_arguments(experiment))
    return {
        folder.path.name: [
            f"{name}: {theirs.get(name)}, not {ours}" for name, ours in wanted.items() if theirs.get(name) != ours
        ]
        for folder, theirs in _all_unfinished(experiment)
    }


def _all_unfinished(experiment: Experiment) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """The runs of an environment that could be resumed, with their settings; those that cannot be read are left out."""
    for folder in RunDir.all(experiment.out, experiment.env_id):
        checkpoints = Store(folder.checkpoints).checkpoints()
        with suppress(ValueError, OSError):
            if checkpoints and checkpoints[-1].steps < _planned_steps(folder, checkpoints[-1]):
                yield folder, _settings(folder.arguments())


def _planned_steps(folder: RunDir, found: Checkpoint) -> int:
    """The settings know it better than a checkpoint: a run that is extended may not have made one since."""
    return whole("n_timesteps", folder.config().get("n_timesteps", found.total), minimum=0)


def train(
    run: Run, callbacks: Sequence[BaseCallback] = (), on_evaluation: Callable[[EvalCallback], None] = lambda _: None
) -> bool:
    """
    Train to the end, or to the first Ctrl-C or SIGTERM. In either case, and after an error, the last model is saved.

    :param run: from ``prepare`` or ``resume``; its environments are closed
    :param callbacks: called at every step, after the evaluation
    :param on_evaluation: called after every evaluation with the callback that made it
    :return: whether the run reached its last step
    """
    n_envs = run.model.n_envs
    evaluation = Evaluation(
        run.evaluation_env,
        n_eval_episodes=run.experiment.eval_episodes,
        eval_freq=max(run.experiment.eval_freq // n_envs, 1),
        log_path=str(run.folder.path),
        best_model_save_path=str(run.folder.path),
        callback_on_new_best=SaveNormalization(run.folder.best_normalization),
        callback_after_eval=AfterEvaluation(run.folder, on_evaluation),
        verbose=0,
        lock=run.lock,
    )
    save_last = partial(_save_last, run)
    save_freq = max(run.experiment.save_freq // n_envs, 1)
    checkpoint = TD3XCheckpointCallback(save_freq, run.folder.checkpoints, lock=run.lock)
    if run.model.learning_starts >= run.total:
        begins = f"learning begins after {run.model.learning_starts:,} steps (learning_starts)"
        warnings.warn(f"nothing will be learned: {begins}, and this run has {run.total:,}", stacklevel=2)
    with run.resources:
        try:
            with files.explained(run.folder.path, only_full=True), stopping_on_signal(checkpoint.save_and_stop):
                every = [evaluation, *callbacks, AtTheEnd(save_last), checkpoint]
                run.model.learn(run.total, CallbackList(every), resume=run.is_resumed)
        except BaseException as error:
            try:
                save_last()  # as at the end
            except Exception as failed:
                raise error from failed  # what ended the run is what its owner needs to know
            raise
    return run.model.num_timesteps >= run.total


def _save_last(run: Run) -> None:
    run.lock.require_ours()
    with files.explained(run.folder.last_model):
        run.model.save(run.folder.last_model)
    save_normalization(run.model, run.folder.normalization)


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


def _environments(
    resources: ExitStack, experiment: Experiment, entry: dict[str, Any], folder: RunDir, append: bool = False
) -> tuple[VecEnv, VecEnv]:
    """The evaluation's one environment and the training's, closed with ``resources``."""
    # First the evaluation's, in this process: what is wrong with it is said here, not in a worker
    evaluation = open_env(experiment.env_id, {**entry, "n_envs": 1}, experiment.seed, environments.EVALUATION)
    resources.callback(_close, evaluation)
    env = open_env(experiment.env_id, entry, experiment.seed, environments.TRAINING, folder, append=append)
    resources.callback(_close, env)
    return evaluation, env


def _close(env: VecEnv) -> None:
    """Also where a process of it has died."""
    with suppress(EOFError, ConnectionError):
        env.close()


def open_env(
    env_id: str,
    entry: dict[str, Any],
    seed: int,
    stream: int,
    monitor: RunDir | None = None,
    render_mode: str | None = None,
    append: bool = False,
) -> VecEnv:
    """
    The environments of a run, normalised as its settings say.

    :param entry: hyper-parameters in rl-zoo3's keys
    :param stream: ``environments.TRAINING``, ``EVALUATION`` or ``AFTERWARDS``
    :param monitor: where their Monitor files go
    """
    env = environments.build(
        env_id,
        seed,
        stream,
        entry["n_envs"],
        wrapper=entry.get("env_wrapper"),
        monitor_folder=None if monitor is None else monitor.path,
        render_mode=render_mode,
        append=append,
    )
    training = stream == environments.TRAINING
    return environments.normalized(env, entry.get("normalize"), entry.get("gamma", 0.99), training)


def _arguments(experiment: Experiment) -> dict[str, Any]:
    """The command's arguments under the names of rl-zoo3's ``args.yml``, which its scripts read back."""
    values = {field.name: getattr(experiment, field.name) for field in fields(experiment) if field.name != "out"}
    return {
        "algo": ALGORITHM,
        **{ARGUMENT_NAMES.get(name, name): value for name, value in values.items()},
        "overrides": list(experiment.overrides),
        "env_kwargs": None,
        "versions": {name: version(name) for name in VERSIONS},
    }


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make one run another."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in ("versions", "env_kwargs", "setting", "earlier_lengths")
    }
