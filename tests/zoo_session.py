"""
What takes rl-zoo3 into its process, which changes gymnasium for all that follow: ``python -m tests.zoo_session FILE.json``.

The file holds a list of argument lists. Each is run as ``python -m sb3_td3x.zoo`` would, or as the function of that name here.
What it prints goes to ``<number>.txt`` beside the file, and the file is replaced by the list of those that failed.
"""

import argparse
import contextlib
import json
import sys
import traceback
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X, presets, zoo
from tests.tools import LineEnv

SMALL_IMAGE = spaces.Box(0, 255, (36, 36, 3), np.uint8)


class DivergesOnce(LineEnv):
    """The first step in a process gives a NaN for a reward: the first trial of a search meets it, later ones do not."""

    has_diverged = False

    def step(self, action):
        observation, reward, *rest = super().step(action)
        reward, DivergesOnce.has_diverged = (reward if DivergesOnce.has_diverged else float("nan")), True
        return observation, reward, *rest


gym.register("Line-v0", LineEnv)
gym.register("DivergesOnce-v0", DivergesOnce)


def settings(model):
    """All that the constructor was told, in values that can be compared."""
    values = {name: getattr(model, name) for name in presets.MODEL_KEYS if name != "stats_window_size"}
    values["learning_rate"] = [model.lr_schedule(left) for left in (1.0, 0.5)]
    noise = model.action_noise
    sigma = np.zeros(1) if noise is None else noise._sigma
    values["action_noise"] = [type(noise).__name__, sigma.tolist()] if sigma.any() else None
    values["learning_starts"] = model._learning_starts_request
    values["replay_buffer_class"] = type(model.replay_buffer)
    return values | {name: tuple(tensor.shape) for name, tensor in model.policy.state_dict().items()}


def presets_agree():
    """A preset's entry makes the same model through rl-zoo3 as through ``td3x train``."""
    from rl_zoo3.exp_manager import ExperimentManager

    manager = ExperimentManager(argparse.Namespace(), "td3x", "Line-v0", "logs", verbose=0)
    for preset in presets.names():
        for env_id, entry in presets.table(preset).items():
            is_image = entry["policy"] == "CnnPolicy"
            env = DummyVecEnv([lambda is_image=is_image: LineEnv(SMALL_IMAGE if is_image else None)])
            known = zoo.readable(entry)
            given, *_ = manager._preprocess_hyperparams(dict(known))
            given = manager._preprocess_action_noise(given, {}, env)
            theirs = TD3X(env=env, device="cpu", **given)
            ours = TD3X(entry["policy"], env, device="cpu", **presets.model_arguments({**entry, **known}))
            assert settings(theirs) == settings(ours), (preset, env_id)


def samples_are_accepted():
    """TD3X takes whatever is drawn, and a stored trial makes the model that was tried."""
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    noises = set()
    for _ in range(24):
        trial = study.ask()
        drawn = zoo.sample(trial, 1, 1, {"using_her_replay_buffer": False, "her_kwargs": {}})
        stored = presets.model_arguments(zoo.convert(trial.params))
        tried, again = (TD3X("MlpPolicy", LineEnv(), buffer_size=100, device="cpu", **given) for given in (drawn, stored))
        assert settings(tried) == settings(again)
        noises.add(trial.params["noise_type"])
    assert noises == {"normal", "ornstein-uhlenbeck", None}


def run(arguments):
    if arguments[0] in globals():
        return globals()[arguments[0]]()
    sys.argv[1:] = arguments
    zoo.main()
    if "matplotlib.pyplot" in sys.modules:
        pyplot = sys.modules["matplotlib.pyplot"]
        axes = [axis for number in pyplot.get_fignums() for axis in pyplot.figure(number).axes]
        print("points drawn:", *(len(line.get_xdata()) for axis in axes for line in axis.lines))
        pyplot.close("all")


def main(file):
    zoo.register()
    failed = []
    for number, arguments in enumerate(json.loads(file.read_text())):
        with file.with_name(f"{number}.txt").open("w") as output, contextlib.redirect_stdout(output):
            try:
                run(arguments)
            except BaseException:  # also the SystemExit of an argument that is refused
                traceback.print_exc(file=output)
                failed.append(number)
    file.write_text(json.dumps(failed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
