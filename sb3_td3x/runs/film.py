"""A film of a trained model."""

from pathlib import Path
from typing import NamedTuple

import imageio.v2 as imageio
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.common import files
from sb3_td3x.results.scores import score_text
from sb3_td3x.td3x.td3x import TD3X


class Filmed(NamedTuple):
    """What is to be seen: its return, its environment steps, and whether the episode ends in it."""

    total: float
    steps: int
    is_whole: bool

    def __str__(self) -> str:
        what = "one episode" if self.is_whole else f"the first {self.steps:,} steps of one"
        return f"{what}, return {score_text(self.total)}"


def record(model: TD3X, env: VecEnv, out: Path, max_steps: int = 2000) -> Filmed:
    """
    Film one episode.

    :param model: acts without exploration noise
    :param env: one environment made with ``render_mode="rgb_array"``
    :param out: the ``.mp4`` to write
    :param max_steps: the film ends here at the latest; the longest episode of Gymnasium's own tasks has as many
    """
    with files.replacing(out) as beside:
        return _write(model, env, beside, max_steps)


def _write(model: TD3X, env: VecEnv, path: Path, max_steps: int) -> Filmed:
    fps = env.unwrapped.metadata.get("render_fps") or 30  # SB3's wrappers around it may have other metadata
    total, steps, is_whole = 0.0, 0, False
    # Sides have to be even for H.264; imageio's own choice of 16 would resample most pictures
    with imageio.get_writer(path, fps=fps, macro_block_size=2) as writer:
        observation = env.reset()
        while steps < max_steps and not is_whole:
            frame = env.render()
            if frame is None:
                raise ValueError("the environment draws no picture")
            writer.append_data(np.asarray(frame))  # type: ignore[attr-defined]
            action, _ = model.predict(observation, deterministic=True)  # type: ignore[arg-type]
            observation, reward, done, _ = env.step(action)
            total, steps, is_whole = total + float(reward[0]), steps + 1, bool(done[0])
    return Filmed(total, steps, is_whole)
