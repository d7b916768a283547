"""A trained run's model at work: evaluated, recorded as a video, shown in a window."""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_td3x.common import files
from sb3_td3x.errors import ModelFileError
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import score_text
from sb3_td3x.runs.environments import AFTERWARDS, is_bullet, open_env, require_registered
from sb3_td3x.runs.experiment import require_device
from sb3_td3x.saving.pickle_files import load_vecnormalize
from sb3_td3x.td3x.td3x import TD3X


def load_model(folder: RunDir, env: VecEnv, device: str = "auto", trust: bool = False) -> TD3X:
    """The best model of a run, else its last; without memory for a replay buffer. Errors as of ``TD3X.load``."""
    require_device(device)
    return TD3X.load(folder.model(), env=env, device=device, buffer_size=1, trust=trust)


def open_evaluation_env(folder: RunDir, seed: int, render_mode: str | None = None, trust: bool = False) -> VecEnv:
    """An environment as the run's evaluations had it, with its model's normalization; ``trust``: see ``experiment.resume``."""
    statistics, env_kwargs = folder.model_normalization(), folder.env_kwargs()
    require_registered(folder.env_id, trust, env_kwargs)
    env = open_env(folder.env_id, seed, AFTERWARDS, folder.config(), render_mode=render_mode, env_kwargs=env_kwargs)
    if statistics is None:
        return env
    inside = env.venv if isinstance(env, VecNormalize) else env  # with images transposed, or not, as in training
    loaded = load_vecnormalize(statistics, inside, trust=trust)
    loaded.training = loaded.norm_reward = False
    return loaded


def evaluate(
    folder: RunDir,
    episodes: int,
    seed: int,
    device: str = "auto",
    trust: bool = False,
    render_mode: str | None = None,
    callback: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
) -> np.ndarray:
    """Returns ``(episodes,)`` without noise, in a window with ``"human"``; ``callback`` as of SB3's ``evaluate_policy``."""
    with closing(open_evaluation_env(folder, seed, render_mode, trust)) as env:
        model = load_model(folder, env, device, trust)
        # Gymnasium's own tasks draw in `step`; PyBullet's follow the robot and keep time in `render` alone
        renders = render_mode == "human" and is_bullet(folder.env_id)
        returns, _ = evaluate_policy(model, env, episodes, render=renders, callback=callback, return_episode_rewards=True)
    return np.asarray(returns)


def record_video(folder: RunDir, out: Path, seed: int = 0, max_steps: int = 2000, trust: bool = False) -> str:
    """Record one episode of at most ``max_steps`` to an ``.mp4``; what it shows, or a ``ValueError`` if it cannot be made."""
    if out.suffix != ".mp4":
        raise ValueError(f"a video is written as .mp4, not as {out.name}")
    if find_spec("imageio") is None or find_spec("imageio_ffmpeg") is None:
        raise ValueError('a video needs imageio: pip install "imageio[ffmpeg]"')
    if not has_display():  # SDL, which draws Gymnasium's own tasks, would look for one and print an error
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("MUJOCO_GL", "egl")  # its first choice, GLFW, needs a display
    try:
        with closing(open_evaluation_env(folder, seed, "rgb_array", trust)) as env:
            model = load_model(folder, env, "cpu", trust)
            with files.replacing(out) as partial:
                return _write_video(model, env, partial, max_steps)
    except ModelFileError:
        raise
    except Exception as error:  # whatever the drawing of an environment raises
        raise ValueError(f"no video of {folder.env_id}: {str(error) or repr(error)}") from error


def _write_video(model: TD3X, env: VecEnv, path: Path, max_steps: int) -> str:
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
            # A PyBullet that was compiled without NumPy gives int64, whose range imageio would stretch, frame by frame
            picture = np.asarray(frame)
            writer.append_data(picture.astype(np.uint8) if picture.dtype.kind in "iu" else picture)  # type: ignore[attr-defined]
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, done, _ = env.step(action)
            total, steps, is_whole = total + float(reward[0]), steps + 1, bool(done[0])
    what = "one episode" if is_whole else f"the first {steps:,} steps of one"
    return f"{what}, return {score_text(total)}"


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
