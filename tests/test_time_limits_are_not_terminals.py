"""The target looks past a time limit, not past a termination; an n-step return never crosses an episode's end."""

import numpy as np
import pytest
import torch as th

from sb3_td3x.td3x import gradient_step, losses
from tests.tools import LineEnv, model

LENGTH = 4


def collected(terminates, **kwargs):
    env = LineEnv(length=LENGTH, terminates=terminates)
    return model(env, gradient_steps=0, learning_starts=0, **kwargs).learn(3 * LENGTH)


def batch_of(buffer, indices):
    return buffer._get_samples(np.array(indices))


@pytest.mark.parametrize(("terminates", "stored"), [(True, 1.0), (False, 0.0)])
def test_only_a_termination_stops_the_bootstrap(terminates, stored):
    batch = batch_of(collected(terminates).replay_buffer, [LENGTH - 2, LENGTH - 1])
    assert batch.dones.flatten().tolist() == [0.0, stored]
    target = losses.clipped_double_q_target([th.full((2, 1), 10.0)], batch.rewards, batch.dones, 0.5)
    # reward + 0.5 x 10, but the bare reward after a termination
    expected = batch.rewards.flatten() + th.tensor([5.0, 0.0 if terminates else 5.0])
    th.testing.assert_close(target.flatten(), expected)


def test_the_target_discounts_an_n_step_return_by_the_steps_that_it_sums():
    algorithm = collected(terminates=False, n_steps=3, gamma=0.5)
    batch, policy = batch_of(algorithm.replay_buffer, range(LENGTH)), algorithm.policy
    with th.no_grad():
        values = policy.critic_target(batch.next_observations, policy.actor_target(batch.next_observations))
    expected = batch.rewards + batch.discounts * th.cat(values, dim=1).amin(dim=1, keepdim=True)
    found = gradient_step.critic_target(policy, batch, th.zeros_like(batch.actions), algorithm._settings_of_update())
    th.testing.assert_close(found, expected)


def test_a_termination_stays_one_where_learn_begins_anew():
    algorithm = collected(terminates=True, n_steps=3).learn(LENGTH)
    assert batch_of(algorithm.replay_buffer, [3 * LENGTH - 1]).dones.item() == 1
