"""
Make the runs behind docs/results.md: a study, as ``td3x study`` makes it, that may also hold SB3's TD3, TQC and CrossQ.

Writes one CSV of evaluation scores per run. A run whose CSV is there is skipped and one that was interrupted resumes from its
last checkpoint (in ``runs/``), so the same command finishes an interrupted study.
Usage: ``python benchmarks/returns.py FILE.yml [--jobs 2] [--ray ADDRESS] [--only TEXT]``
"""

import argparse
import signal
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
import yaml
from results import RETURNS, versions
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x import presets
from sb3_td3x.checkpoint import Store, TD3XCheckpointCallback, log_state, resume_run
from sb3_td3x.common.lock import RunLock
from sb3_td3x.common.resumable import Resumable
from sb3_td3x.common.signals import stopping_on_signal
from sb3_td3x.common.validation import check_choice
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import environments, runners, study
from sb3_td3x.runs.evaluation import Evaluation
from sb3_td3x.runs.study import StudyFolder, StudyRun
from sb3_td3x.td3x import precision

FOLDER = StudyFolder(Path(__file__).parent.parent / "runs", RETURNS)  # the runs are not under version control
SAVE_FREQ = 10_000
ALGORITHMS = ("td3x", "sb3_td3", "sb3_tqc", "sb3_crossq")
SB3_OPTIONS = ("steps", "eval_freq", "eval_episodes", "arguments", "noise_std", "kernels")


def sb3_algorithm(name: str) -> type[Resumable]:
    """SB3's algorithm, unchanged but resumable from a checkpoint."""
    if name == "sb3_td3":
        from stable_baselines3 import TD3 as SB3
    elif name == "sb3_tqc":
        from sb3_contrib import TQC as SB3
    else:
        from sb3_contrib import CrossQ as SB3
    return type(f"Resumable{SB3.__name__}", (Resumable, SB3), {})


def train(run: StudyRun, folder: Path) -> bool:
    """Train one run to its end, resuming from its last checkpoint, and note what it was made with."""
    is_finished = study.train_td3x(run, folder) if run.algo == "td3x" else train_sb3(run, folder)
    if is_finished:
        RETURNS.mkdir(parents=True, exist_ok=True)
        resumed = Store(RunDir(folder, run.env).checkpoints).checkpoints()[-1].manifest["resumed"]
        facts = {"run": asdict(run), "versions": versions(), "resumed": resumed}
        if run.algo == "td3x":
            facts["config"] = RunDir(folder, run.env).config()
        FOLDER.table(run).with_suffix(".yml").write_text(yaml.safe_dump(facts, sort_keys=False))
    return is_finished


def train_sb3(run: StudyRun, folder: Path) -> bool:
    th.set_num_threads(1)
    place = RunDir(folder, run.env)
    algorithm, options = sb3_algorithm(run.algo), run.options
    with RunLock(folder) as lock:
        train_env = environments.open_env(run.env, run.seed, environments.TRAINING)
        eval_env = environments.open_env(run.env, run.seed, environments.EVALUATION)
        saved = Store(place.checkpoints).checkpoints()
        if saved and saved[-1].steps >= options["steps"]:
            return True
        if saved:
            model = resume_run(place.checkpoints, train_env, trust=True, algorithm=algorithm, device="cpu")
        else:
            arguments = presets.model_arguments(options["arguments"])
            if "noise_std" in options:
                size = train_env.action_space.shape[0]
                arguments["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, options["noise_std"]))
            model = algorithm("MlpPolicy", train_env, seed=run.seed, device="cpu", **arguments)
        model.set_logger(log_state.configure(place.log))
        episodes, every = options["eval_episodes"], options["eval_freq"]
        evaluation = Evaluation(eval_env, eval_freq=every, n_eval_episodes=episodes, folder=place, lock=lock)
        saving = TD3XCheckpointCallback(SAVE_FREQ, place.checkpoints)
        asked = options.get("kernels", "default")
        check_choice("kernels", asked, ("default", "fastest"))
        if asked == "fastest" and run.algo != "sb3_td3":
            compile_networks(model)
        kernels = precision.choose_matrix_kernels() if asked == "fastest" else "default"
        flushed = precision.denormals_flushed() if asked == "fastest" else nullcontext()
        with precision.matrix_kernels(kernels), flushed, stopping_on_signal(saving.save_and_stop):
            model.learn(options["steps"], [evaluation, saving], resume=bool(saved))
    return model.num_timesteps >= options["steps"]


def compile_networks(model: OffPolicyAlgorithm) -> None:
    """
    Compile TQC's networks and loss, or CrossQ's critics, and fuse Adam: the same sums in less time.

    Of TQC 18 ms an update, not 31 (Xeon, one thread), of CrossQ 50, not 80 (two threads).
    """
    from sb3_contrib.common.torch_layers import BatchRenorm
    from sb3_contrib.tqc import tqc

    BatchRenorm.forward = batch_renorm
    if isinstance(model, tqc.TQC):
        tqc.quantile_huber_loss = th.compile(tqc.quantile_huber_loss, dynamic=False)
        model.actor.action_log_prob = th.compile(model.actor.action_log_prob, dynamic=False)
        model.critic_target.forward = th.compile(model.critic_target.forward, dynamic=False)
    model.critic.forward = th.compile(model.critic.forward, dynamic=False)
    for optimizer in (model.actor.optimizer, model.critic.optimizer):
        optimizer.param_groups[0]["fused"] = True


def batch_renorm(self: Any, x: th.Tensor) -> th.Tensor:
    """The ``forward`` of CrossQ's ``BatchRenorm`` without its ``if`` on a tensor, which would split the compiled critics."""
    mean, variance = self.ra_mean, self.ra_var
    if self.training:
        batch_mean, batch_variance = x.mean(dim=0), x.var(dim=0)
        deviation = (variance + self.eps).sqrt()
        r = ((batch_variance + self.eps).sqrt() / deviation).detach().clamp(1 / self.rmax, self.rmax)
        d = ((batch_mean - mean) / deviation).detach().clamp(-self.dmax, self.dmax)
        is_warm = self.steps > self.warmup_steps
        r, d = th.where(is_warm, r, 1.0), th.where(is_warm, d, 0.0)
        self.ra_mean += self.momentum * (batch_mean.detach() - self.ra_mean)
        self.ra_var += self.momentum * (batch_variance.detach() - self.ra_var)
        self.steps += 1
        mean, variance = batch_mean - d * batch_variance.sqrt() / r, batch_variance / r**2
    return self.scale * ((x - mean) / (variance + self.eps).sqrt()) + self.bias


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a study file such as benchmarks/returns.yml")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time on this machine (default: 2)")
    parser.add_argument("--ray", metavar="ADDRESS", help="make the runs on a Ray cluster")
    parser.add_argument("--only", default="", help="only runs whose name contains this text")
    args = parser.parse_args()
    runs = [run for run in study.read(args.file, (*study.OPTIONS, *SB3_OPTIONS), ALGORITHMS) if args.only in run.name]
    for run in runs:
        if unknown := run.options.keys() - set(study.OPTIONS if run.algo == "td3x" else SB3_OPTIONS):
            parser.error(f"{run.name} has options that {run.algo} does not take: {', '.join(sorted(unknown))}")
    if not runs:
        parser.error(f"{args.file} has no runs whose name contains {args.only!r}")
    study.check([run for run in runs if run.algo == "td3x"], FOLDER)
    runner = runners.on_ray(args.ray) if args.ray else runners.local(args.jobs)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell lets its background jobs ignore it
        signal.signal(number, signal.default_int_handler)
    print(f"{sum(not FOLDER.is_finished(run) for run in runs)} of {len(runs)} runs to do")
    left = 0
    try:
        with closing(runners.drive(runs, FOLDER, train, runner)) as ended:
            for run, error in ended:
                left += not FOLDER.is_finished(run)
                print(f"{run.name}: {'done' if FOLDER.is_finished(run) else error or 'stopped'}", flush=True)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command resumes it") from None
    if left:
        raise SystemExit(f"{left} runs are not done; the same command resumes them")


if __name__ == "__main__":
    main()
