"""
Runs that survive being killed.

``save_run`` writes a checkpoint, ``resume_run`` continues from one, ``TD3XCheckpointCallback`` saves while training.
Below them: ``store`` (the folder, and when a checkpoint is whole), ``replay`` (transitions), ``env_state``,
``callback_state`` and ``log_state``.
"""

from sb3_td3x.checkpoint.callback import TD3XCheckpointCallback
from sb3_td3x.checkpoint.env_state import ResumableEnv
from sb3_td3x.checkpoint.run import resume_run, save_run
from sb3_td3x.checkpoint.store import Checkpoint, Store

__all__ = ["Checkpoint", "ResumableEnv", "Store", "TD3XCheckpointCallback", "resume_run", "save_run"]
