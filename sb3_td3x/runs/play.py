"""A finished run's model at work: scored, filmed, shown."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.common import files
from sb3_td3x.runs import environments
from sb3_td3x.errors import ModelFileError
from sb3_td3x.runs.experiment import open_env, require_device
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.saving.pickle_files import load_vecnormalize
from sb3_td3x.common.validation import whole
from sb3_td3x.td3x.td3x import TD3X

if TYPE_CHECKING:  # it imports imageio, which is optional
    from sb3_td3x.runs.film import Filmed


def load_model(folder: RunDir, env: VecEnv, device: str = "auto", trust: bool = False) -> TD3X:
    """
    The best model of a run, else its last; for acting, so without memory for a replay buffer.

    :param env: from ``open_evaluation_env``; the model has to fit it
    :param trust: read a model that holds objects of its author's, which runs their code
    :raises UntrustedModelError: for such a model, without ``trust``
    """
    require_device(device)
    return TD3X.load(folder.model(), env=env, device=device, buffer_size=1, trust=trust)


def open_evaluation_env(
    folder: RunDir, seed: int, render_mode: str | None = None, trust: bool = False, may_lead_out: bool = False
) -> VecEnv:
    """
    An environment as the run's evaluations had it, with the normalisation that belongs to the run's model.

    :param trust: import the module that the environment's name may have, and read normalisation statistics as SB3 does, which
        runs whatever code their file holds
    :param may_lead_out: follow links to files outside of the run's folder, as ``trust`` does too
    """
    if not (trust or may_lead_out):
        folder.require_own()
    entry, statistics = folder.config(), folder.model_normalization()
    entry |= {"n_envs": 1, "normalize": None if statistics is None else entry.get("normalize")}
    environments.require_registered(folder.env_id, may_import=trust)
    env = open_env(folder.env_id, entry, seed, environments.AFTERWARDS, render_mode=render_mode)
    if statistics is None:
        return env
    inside = env.venv if isinstance(env, VecNormalize) else env  # with images turned, or not, as in training
    loaded = load_vecnormalize(statistics, inside, trust)
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


def film(folder: RunDir, out: Path, seed: int = 0, max_steps: int = 2000, trust: bool = False) -> "Filmed":
    """
    Film one episode of a run's model.

    :param max_steps: the film ends here at the latest
    :param trust: run the code that the run's files may hold
    :raises ValueError: if there is nothing to film with or the environment cannot draw itself
    """
    if out.suffix != ".mp4":
        raise ValueError(f"a film is written as .mp4, not as {out.name}")
    if find_spec("imageio") is None or find_spec("imageio_ffmpeg") is None:
        raise ValueError('a film needs imageio: pip install "imageio[ffmpeg]"')
    from sb3_td3x.runs.film import record

    files.require_writable(out)
    if not has_display():  # SDL, which draws Gymnasium's own tasks, would look for one and print an error
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
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


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show(folder: RunDir, episodes: int, seed: int, trust: bool = False) -> Iterator[float]:
    """Play episodes in a window, giving each one's return when it ends; ``trust`` as for ``film``."""
    env = open_evaluation_env(folder, seed, "human", trust)
    try:
        model = load_model(folder, env, "cpu", trust)
        observation = env.reset()
        for _ in range(episodes):
            total, is_over = 0.0, False
            while not is_over:  # not SB3's evaluate_policy, which resets again: every second episode would be seen
                action, _ = model.predict(observation, deterministic=True)  # type: ignore[arg-type]
                observation, reward, done, _ = env.step(action)
                total, is_over = total + float(reward[0]), bool(done[0])
            yield total
    finally:
        env.close()
