"""
Write the trained agents of ``agents/`` from run folders: the best actor of each run with its scores, settings and checksums.

Usage: ``python benchmarks/agents.py runs/td3x_default_Walker2DBulletEnv-v0_s0 ...``

Only the actor is kept. The critics of the saved models are as small as critics can be, so that each model is an ordinary one
that ``TD3X.load`` and ``td3x enjoy`` read.
"""

import argparse
import io
import shutil
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch as th
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import TD3X, presets
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import play

AGENTS = Path(__file__).parent.parent / "agents"
SEED = 1_000


def actor_only(run: RunDir, env: VecEnv) -> TD3X:
    """A model with the actor of a run's best one, and critics of one unit. Only tensors are read, so any version will do."""
    with zipfile.ZipFile(run.best_model) as archive:
        tensors = th.load(io.BytesIO(archive.read("policy.pth")), map_location="cpu", weights_only=True)
    actor = {name.removeprefix("actor."): tensor for name, tensor in tensors.items() if name.startswith("actor.")}
    layers = [len(tensor) for name, tensor in actor.items() if name.endswith(".bias")][:-1]
    of_run = presets.model_arguments(run.config()).get("policy_kwargs", {})
    kwargs = {**of_run, "net_arch": {"pi": layers, "qf": [1]}, "n_critics": 1}
    model = TD3X("MlpPolicy", env, policy_kwargs=kwargs, n_quantiles=1, buffer_size=1, seed=0, device="cpu")
    model.actor.load_state_dict(actor)
    for target, source in zip(model.actor_target.parameters(), model.actor.parameters(), strict=True):
        target.data = source.data  # one tensor for both, which is saved once
    return model


def write(run: RunDir, out: Path, episodes: int) -> str:
    """:return: the agent's line of the table"""
    agent = RunDir(out / run.env_id, run.env_id)
    shutil.rmtree(agent.path, ignore_errors=True)
    agent.path.mkdir(parents=True)
    arguments = {name: value for name, value in run.arguments().items() if name != "command"}  # it may name private folders
    agent.write_settings(run.config(), arguments)
    for name in ("scores.csv", "evaluations.npz"):
        shutil.copyfile(run.path / name, agent.path / name)
    if (statistics := run.model_normalization()) is not None:
        shutil.copyfile(statistics, agent.normalization)
    env = play.open_evaluation_env(run, seed=0)
    actor_only(run, env).save(agent.best_model)
    env.close()
    returns = play.evaluate(agent, episodes, SEED, "cpu")
    steps, scores = run.scores()
    sums = {path: sha256(path.read_bytes()).hexdigest() for path in sorted(agent.path.rglob("*")) if path.is_file()}
    lines = [f"{digest}  {path.relative_to(agent.path).as_posix()}" for path, digest in sums.items()]
    (agent.path / "SHA256SUMS").write_text("\n".join(lines) + "\n")
    made = f"{arguments.get('setting') or arguments.get('preset')}, seed {arguments['seed']}"
    best = f"{steps[scores.mean(axis=1).argmax()]:,}"
    score = f"{returns.mean():.0f} ± {np.std(returns):.0f} | {episodes}"
    return f"| {run.env_id} | {score} | {made} | {best} | `{sums[agent.best_model]}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="one run folder per task")
    parser.add_argument("--episodes", type=int, default=100, help="of the evaluation")
    arguments = parser.parse_args()
    runs, readme = [RunDir.open(path) for path in arguments.runs], AGENTS / "README.md"
    head, bar, rows = readme.read_text().rpartition("|---|\n")
    lines = {row.split()[1]: row for row in rows.splitlines()}  # those of other tasks stay
    lines |= {run.env_id: write(run, AGENTS, arguments.episodes) for run in runs}
    readme.write_text(head + bar + "\n".join(line for _, line in sorted(lines.items())) + "\n")


if __name__ == "__main__":
    main()
