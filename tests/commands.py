"""Calling the td3x command, in a process of its own or in this one, on runs that are quick."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sb3_td3x.checkpoint import TD3XCheckpointCallback
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment

FAST = ("policy_kwargs.net_arch=[16,16]", "learning_starts=50")
QUICK = ["--set", FAST[0], "--set", FAST[1], "--eval-freq", "100", "--eval-episodes", "2"]


def prepared(tmp_path, env_id, overrides=FAST, **kwargs):
    return experiment.prepare(experiment.Experiment(env_id, overrides=overrides, out=tmp_path, device="cpu", **kwargs))


def td3x(*arguments, **kwargs):
    """Run the command, or another program, in a process of its own, and return what it printed."""
    result = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs)
    out, err = result.communicate(timeout=300)
    assert result.returncode == 0, out + err
    return out + err


def start(*arguments, program=("-m", "sb3_td3x"), **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    environment.pop("DISPLAY", None), environment.pop("WAYLAND_DISPLAY", None)
    command = [sys.executable, *program, *map(str, arguments)]
    return subprocess.Popen(command, text=True, env=environment, **kwargs)


def saved_run(tmp_path, env_id, algorithm):
    """A run folder with this model."""
    run = RunDir.create(tmp_path, env_id)
    run.write_settings({"policy": "MlpPolicy"}, {"algo": "td3x", "env": env_id})
    algorithm.save(run.last_model)
    return run


def wait_until(condition, process=None, seconds=120):
    """Until it holds; without ``process``, if one is given, it never would."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def stop_after(monkeypatch, steps, number=signal.SIGINT):
    """Let a signal come at this step of the runs of this process: a Ctrl-C, unless it is another."""
    on_step = TD3XCheckpointCallback._on_step

    def interrupted(callback):
        if callback.num_timesteps == steps:
            os.kill(os.getpid(), number)
        return on_step(callback)

    monkeypatch.setattr(TD3XCheckpointCallback, "_on_step", interrupted)
