"""
Write a golden saved model with the installed program: ``python -m tests.golden.make td3x_1``.

Golden files stay as they were written. A new one is added when the format changes.
"""

import json
import sys
from pathlib import Path

from stable_baselines3 import TD3

from sb3_td3x import TD3X
from tests.tools import OBSERVATIONS, SMALL, model

SETTINGS = {"td3x_1": {"n_quantiles": 5, "policy_kwargs": {**SMALL, "normalize_observations": True}}}
"""What the models were made with where it is not the tests' default."""


def main(name: str) -> None:
    algorithm = model(cls=TD3 if name.startswith("sb3") else TD3X, **SETTINGS.get(name, {})).learn(60)
    path = Path(__file__).with_name(f"{name}.zip")
    algorithm.save(path)
    actions = algorithm.predict(OBSERVATIONS)[0].flatten().tolist()
    path.with_suffix(".json").write_text(json.dumps({"actions": actions, "num_timesteps": algorithm.num_timesteps}))


if __name__ == "__main__":
    main(sys.argv[1])
