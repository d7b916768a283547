"""The replay buffer on the device gives what SB3's gives, without the host."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.replay import DeviceReplayBuffer
from tests.tools import LineEnv, model

SPACES = spaces.Box(-10, 10, (3,)), spaces.Box(-1, 1, (1,))


def filled(transitions, size=32, n_envs=2, cls=DeviceReplayBuffer):
    """Observation, reward and the rest tell which transition of which environment they belong to."""
    buffer = cls(size * n_envs, *SPACES, device="cpu", n_envs=n_envs)
    for step in range(transitions):
        number = np.arange(n_envs) + 100.0 * step
        observation = np.repeat(number[:, None], 3, axis=1).astype(np.float32)
        done = np.array([step % 3 == 0] * n_envs)
        infos = [{"TimeLimit.truncated": step % 6 == 0}] * n_envs
        buffer.add(observation, observation + 0.5, (number % 2)[:, None], number, done, infos)
    return buffer


@pytest.mark.parametrize("transitions", [20, 50])
def test_every_stored_transition_is_sampled_whole_and_no_other(transitions):
    device, host = filled(transitions), filled(transitions, cls=ReplayBuffer)
    assert (device.pos, device.full, device.size()) == (host.pos, host.full, host.size())

    def rows(samples):
        parts = [part.numpy().reshape(len(samples.rewards), -1) for part in samples if part is not None]
        return {tuple(row) for row in np.concatenate(parts, axis=1)}

    assert rows(device.sample(5000)) == rows(host.sample(5000))


def test_normalisation_is_that_of_vecnormalize():
    env = VecNormalize(DummyVecEnv([LineEnv] * 2))
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, 2, 3]), np.array([4.0, 5, 6])
    env.ret_rms.var = np.array(7.0)
    buffer = filled(1)
    plain, normalized = buffer.sample(64), buffer.sample(64, env)
    expected = {tuple(np.float32(env.normalize_obs(row))) for row in plain.observations.numpy()}
    assert {tuple(row) for row in normalized.observations.numpy()} == expected
    np.testing.assert_allclose(
        np.unique(normalized.rewards.numpy()), env.normalize_reward(np.unique(plain.rewards.numpy())), rtol=1e-6
    )


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


def test_storing_observations_once_is_refused():
    with pytest.raises(ValueError, match="optimize_memory_usage"):
        DeviceReplayBuffer(10, *SPACES, optimize_memory_usage=True, handle_timeout_termination=False)


def test_dict_observations_are_refused():
    with pytest.raises(ValueError, match="not for Dict"):
        DeviceReplayBuffer(10, spaces.Dict({"a": SPACES[0]}), SPACES[1])


def test_its_memory_follows_its_device():
    buffer = filled(3)
    buffer.device = th.device("meta")
    assert buffer.observations.device.type == buffer.rewards.device.type == "meta"
