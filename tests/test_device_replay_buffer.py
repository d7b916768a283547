"""A run with the replay buffer on the device repeats itself and can be saved. What it samples: ``test_replay_buffers``."""

import torch as th

from sb3_td3x import TD3X
from sb3_td3x.common.transitions import DeviceReplayBuffer
from tests.tools import LineEnv, model


def test_a_seed_gives_one_run_and_the_buffer_can_be_saved(tmp_path):
    runs = [model(replay_buffer_class=DeviceReplayBuffer).learn(60) for _ in range(2)]
    for left, right in zip(runs[0].policy.parameters(), runs[1].policy.parameters(), strict=True):
        assert th.equal(left, right)
    runs[0].save(tmp_path / "model")
    runs[0].save_replay_buffer(tmp_path / "buffer")
    loaded = TD3X.load(tmp_path / "model", env=LineEnv())
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert th.equal(loaded.replay_buffer.observations, runs[0].replay_buffer.observations)
    loaded.learn(20, reset_num_timesteps=False)
