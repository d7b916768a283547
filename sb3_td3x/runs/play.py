"""A trained run's model at work: evaluated, recorded as a video, shown in a window."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.common import files
from sb3_td3x.common.validation import check_int
from sb3_td3x.errors import ModelFileError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import score_text
from sb3_td3x.runs.environments import AFTERWARDS, open_env, require_no_arguments, require_registered
from sb3_td3x.runs.experiment import require_device
from sb3_td3x.saving.pickle_files import load_vecnormalize
from sb3_td3x.td3x.td3x import TD3X


class Video(NamedTuple):
    """What a video shows: the return and the environment steps in it, and whether the episode ends in it."""

    total: float
    steps: int
    is_whole: bool

    def __str__(self) -> str:
        what = "one episode" if self.is_whole else f"the first {self.steps:,} steps of one"
        return f"{what}, return {score_text(self.total)}"


def load_model(folder: RunDir, env: VecEnv, device: str = "auto", trust: bool = False) -> TD3X:
    """
    The best model of a run, else its last; without memory for a replay buffer.

    :param env: environment from ``open_evaluation_env``, which the model has to fit
    :param trust: load a model that holds objects of its author's, which runs their code
    :raises UntrustedModelError: for such a model, without ``trust``
    :raises ModelFileError: for a damaged file
    """
    require_device(device)
    return TD3X.load(folder.model(), env=env, device=device, buffer_size=1, trust=trust)


def open_evaluation_env(folder: RunDir, seed: int, render_mode: str | None = None, trust: bool = False) -> VecEnv:
    """
    An environment as the run's evaluations had it, with the normalization that belongs to the run's model.

    :param seed: determines the episodes
    :param trust: import the module that the environment's name may have, pass the environment the keyword arguments that the
        folder names, and load normalization statistics as SB3 does, which runs whatever code their file holds
    """
    entry, statistics, arguments = folder.config(), folder.model_normalization(), folder.arguments()
    entry = {**entry, "n_envs": 1, "normalize": None if statistics is None else entry.get("normalize")}
    require_registered(folder.env_id, may_import=trust)
    env_kwargs = arguments.get("env_kwargs") or None
    if not trust:
        require_no_arguments(env_kwargs)
    env = open_env(folder.env_id, seed, AFTERWARDS, entry, render_mode=render_mode, env_kwargs=env_kwargs)
    if statistics is None:
        return env
    inside = env.venv if isinstance(env, VecNormalize) else env  # with images transposed, or not, as in training
    loaded = load_vecnormalize(statistics, inside, trust)
    loaded.training = loaded.norm_reward = False
    return loaded


def evaluate(folder: RunDir, episodes: int, seed: int, device: str = "auto", trust: bool = False) -> np.ndarray:
    """
    Returns of fresh episodes of a run's model, without exploration noise.

    :param seed: determines the episodes
    :param trust: run the code that the run's files may hold
    :return: ``(episodes,)``
    """
    env = open_evaluation_env(folder, seed, trust=trust)
    try:
        model = load_model(folder, env, device, trust)
        returns, _ = evaluate_policy(model, env, check_int("episodes", episodes, minimum=1), return_episode_rewards=True)
    finally:
        env.close()
    return np.asarray(returns)


def record_video(folder: RunDir, out: Path, seed: int = 0, max_steps: int = 2000, trust: bool = False) -> Video:
    """
    Record one episode of a run's model.

    :param out: the ``.mp4`` to write, replaced in one step
    :param max_steps: the video ends here at the latest; the longest episode of Gymnasium's own tasks has as many
    :param trust: run the code that the run's files may hold
    :raises ValueError: if the packages for it are missing or the environment cannot draw itself
    """
    if out.suffix != ".mp4":
        raise ValueError(f"a video is written as .mp4, not as {out.name}")
    if find_spec("imageio") is None or find_spec("imageio_ffmpeg") is None:
        raise ValueError('a video needs imageio: pip install "imageio[ffmpeg]"')
    files.require_writable(out)
    if not has_display():  # SDL, which draws Gymnasium's own tasks, would look for one and print an error
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    env = None
    try:
        env = open_evaluation_env(folder, seed, "rgb_array", trust)
        model = load_model(folder, env, "cpu", trust)
        with files.replacing(out) as beside:
            return _write_video(model, env, beside, max_steps)
    except ModelFileError:
        raise
    except Exception as error:  # whatever the drawing of an environment raises
        raise ValueError(f"no video can be made of {folder.env_id}: {error}") from error
    finally:
        if env is not None:
            env.close()


def _write_video(model: TD3X, env: VecEnv, path: Path, max_steps: int) -> Video:
    import imageio.v2 as imageio

    fps = env.unwrapped.metadata.get("render_fps") or 30  # SB3's wrappers around it may have other metadata
    total, steps, is_whole = 0.0, 0, False
    # Sides have to be even for H.264; imageio's own choice of 16 would resample most pictures
    with imageio.get_writer(path, fps=fps, macro_block_size=2) as writer:
        observation: Any = env.reset()
        while steps < max_steps and not is_whole:
            frame = env.render()
            if frame is None:
                raise ValueError("the environment draws no picture")
            writer.append_data(np.asarray(frame))  # type: ignore[attr-defined]
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, done, _ = env.step(action)
            total, steps, is_whole = total + float(reward[0]), steps + 1, bool(done[0])
    return Video(total, steps, is_whole)


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show(folder: RunDir, episodes: int, seed: int, trust: bool = False) -> Iterator[float]:
    """Play episodes in a window and yield the return of each when it ends; ``trust`` as for ``record_video``."""
    env = open_evaluation_env(folder, seed, "human", trust)
    try:
        model = load_model(folder, env, "cpu", trust)
        observation: Any = env.reset()
        for _ in range(episodes):
            total, is_over = 0.0, False
            while not is_over:  # SB3's evaluate_policy would reset again, so that every second episode would be seen
                action, _ = model.predict(observation, deterministic=True)
                observation, reward, done, _ = env.step(action)
                total, is_over = total + float(reward[0]), bool(done[0])
            yield total
    finally:
        env.close()
