"""
Score the actors that runs return, on episodes that neither training nor its evaluations have seen.

They are the actor that learned and the best by evaluations (SB3's ``best_model.zip``). Writes one JSON of returns per run.
Usage: ``python benchmarks/actors.py runs/td3x_default_HopperBulletEnv-v0_s0 ...``
"""

from collections.abc import Iterator
from typing import Any

from results import ACTORS, write_facts
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_td3x import TD3X
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs.play import open_evaluation_env

EPISODES = 100
SEED = 1_000  # as for `td3x eval`; evaluations during training have the run's


def actors(run: RunDir) -> Iterator[tuple[str, BaseAlgorithm]]:
    yield "live", TD3X.load(run.last_model, device="cpu", buffer_size=1)
    yield "best by evaluations", TD3X.load(run.best_model, device="cpu", buffer_size=1)


def returns(run: RunDir, actor: BaseAlgorithm) -> list[float]:
    """Of ``EPISODES`` episodes, the same ones for every actor."""
    env = open_evaluation_env(run, SEED)
    try:
        each, _ = evaluate_policy(actor, env, EPISODES, return_episode_rewards=True)
    finally:
        env.close()
    return [round(one, 3) for one in each]


def facts(run: RunDir) -> dict[str, Any]:
    return {"episodes_seed": SEED, "returns": {name: returns(run, actor) for name, actor in actors(run)}}


if __name__ == "__main__":
    write_facts(__doc__, ACTORS, facts)
