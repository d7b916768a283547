"""The prioritized replay buffer gives what SB3's gives."""

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from tests.tools import SPACES, LineEnv, filled


@pytest.mark.parametrize("transitions", [20, 50])
def test_every_stored_transition_is_sampled_whole_and_no_other(transitions):
    own, host = filled(PrioritizedReplayBuffer, transitions), filled(ReplayBuffer, transitions)
    assert (own.pos, own.full, own.size()) == (host.pos, host.full, host.size())

    def rows(samples):
        parts = [part.numpy().reshape(len(samples.rewards), -1) for part in samples if part is not None]
        return {tuple(row) for row in np.concatenate(parts, axis=1)}

    assert rows(own.sample(5000)) == rows(host.sample(5000))


@pytest.mark.parametrize("clip", [10.0, 0.3])
def test_normalization_is_that_of_vecnormalize(clip):
    env = VecNormalize(DummyVecEnv([LineEnv] * 2), clip_obs=clip, clip_reward=clip)
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, 2, 3]), np.array([4.0, 5, 6])
    env.ret_rms.var = np.array(7.0)
    buffer = filled(PrioritizedReplayBuffer, 1)
    plain, normalized = buffer.sample(64), buffer.sample(64, env)
    expected = {tuple(np.float32(env.normalize_obs(row))) for row in plain.observations.numpy()}
    assert {tuple(row) for row in normalized.observations.numpy()} == expected
    np.testing.assert_allclose(
        np.unique(normalized.rewards.numpy()), env.normalize_reward(np.unique(plain.rewards.numpy())), rtol=1e-6
    )


def test_storing_observations_once_is_refused():
    for handles in (True, False):  # SB3 would first ask for it to be off
        with pytest.raises(ValueError, match="leave optimize_memory_usage off"):
            PrioritizedReplayBuffer(10, *SPACES, optimize_memory_usage=True, handle_timeout_termination=handles)


def test_dict_observations_are_refused():
    with pytest.raises(ValueError, match="not for Dict"):
        PrioritizedReplayBuffer(10, spaces.Dict({"a": SPACES[0]}), SPACES[1])
