"""A film of a trained model."""

from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x import files
from sb3_td3x.td3x import TD3X


def record(model: TD3X, env: VecEnv, out: Path, max_steps: int = 1000) -> float:
    """
    Film one episode.

    :param model: acts without exploration noise
    :param env: one environment made with ``render_mode="rgb_array"``
    :param out: the ``.mp4`` to write
    :param max_steps: the film ends here at the latest
    :return: the return of what was filmed
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(out) as beside:
        return _write(model, env, beside, max_steps)


def _write(model: TD3X, env: VecEnv, path: Path, max_steps: int) -> float:
    fps = env.metadata.get("render_fps") or 30
    total = 0.0
    with imageio.get_writer(path, fps=fps, macro_block_size=16) as writer:
        observation = env.reset()
        for _ in range(max_steps):
            frame = env.render()
            if frame is None:
                raise ValueError("the environment draws no picture")
            writer.append_data(np.asarray(frame))  # type: ignore[attr-defined]
            action, _ = model.predict(observation, deterministic=True)  # type: ignore[arg-type]
            observation, reward, done, _ = env.step(action)
            total += float(reward[0])
            if done[0]:
                break
    return total
