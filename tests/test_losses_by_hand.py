"""Each equation of TD3 against numbers worked out by hand."""

import pytest
import torch as th

from sb3_td3x.td3x import losses


def column(*values):
    return th.tensor(values, dtype=th.float64).reshape(-1, 1)


def test_noise_is_scaled_then_clipped_and_the_action_is_clamped_after_it():
    actions = column(0.0, 0.9, -0.9, 0.3)
    noise = column(1.0, 10.0, -10.0, -1.0)
    # noise x 0.2 = 0.2, 2.0, -2.0, -0.2; clipped to 0.5: 0.2, 0.5, -0.5, -0.2; added: 0.2, 1.4, -1.4, 0.1; clamped
    th.testing.assert_close(losses.target_policy_smoothing(actions, noise, 0.2, 0.5), column(0.2, 1.0, -1.0, 0.1))


def test_target_takes_the_smaller_twin_per_transition():
    # 1 + 0.5 min(4, 6) = 3; 2 + 0.5 min(8, 2) = 3
    target = losses.clipped_double_q_target([column(4.0, 8.0), column(6.0, 2.0)], column(1.0, 2.0), column(0.0, 0.0), 0.5)
    th.testing.assert_close(target, column(3.0, 3.0))


def test_target_does_not_look_past_a_termination():
    target = losses.clipped_double_q_target([column(4.0, 4.0), column(6.0, 6.0)], column(1.0, 1.0), column(1.0, 0.0), 0.5)
    th.testing.assert_close(target, column(1.0, 3.0))


def test_target_discounts_each_transition_by_its_own_factor():
    # n-step batches carry gamma to the power of the steps summed: 1 + 0.5 x 4 = 3; 1 + 0.25 x 4 = 2
    target = losses.clipped_double_q_target([column(4.0, 4.0)], column(1.0, 1.0), column(0.0, 0.0), column(0.5, 0.25))
    th.testing.assert_close(target, column(3.0, 2.0))


def test_critic_loss_is_the_sum_over_critics_of_mean_squared_errors():
    # ((1-2)^2 + (3-5)^2) / 2 + ((2-2)^2 + (1-5)^2) / 2 = 2.5 + 8
    loss = losses.scalar_critic_loss([column(1.0, 3.0), column(2.0, 1.0)], column(2.0, 5.0))
    assert loss.item() == pytest.approx(10.5)


def row(*values):
    return th.tensor([values], dtype=th.float64)


def test_quantile_target_leaves_out_the_largest_of_the_pool():
    # Two critics, one to drop for each: of 1 9 3 | 7 8 2 go 9 and 8, which may be one critic's; then 1 + 0.5 z
    target = losses.quantile_target([row(1.0, 9.0, 3.0), row(7.0, 8.0, 2.0)], row(1.0), row(0.0), 0.5, 1)
    th.testing.assert_close(target.sort().values, row(1.5, 2.0, 2.5, 4.5))
    target = losses.quantile_target([row(8.0, 9.0, 3.0), row(7.0, 1.0, 2.0)], row(1.0), row(0.0), 0.5, 1)
    th.testing.assert_close(target.sort().values, row(1.5, 2.0, 2.5, 4.5))


def test_quantile_target_may_keep_all_does_not_look_past_a_termination_and_discounts_each_transition():
    quantiles = th.cat([row(2.0, 4.0)] * 3)
    target = losses.quantile_target([quantiles], column(1.0, 1.0, 1.0), column(0.0, 1.0, 0.0), column(0.5, 0.5, 0.25), 0)
    th.testing.assert_close(target.sort().values, th.cat([row(2.0, 3.0), row(1.0, 1.0), row(1.5, 2.0)]))


def test_quantile_loss_weighs_errors_by_the_share_each_quantile_stands_for():
    # Shares 1/4 and 3/4. Quantile 0 against 0.5 and 3: 1/4 x 0.125 and 1/4 x 2.5; quantile 2: 1/4 x 1 and 3/4 x 0.5
    loss = losses.quantile_critic_loss([row(0.0, 2.0)], row(0.5, 3.0))
    assert loss.item() == pytest.approx((0.125 / 4 + 2.5 / 4 + 1.0 / 4 + 3 * 0.5 / 4) / 4)
    # a mean over critics: one that is right everywhere halves it
    right = losses.quantile_critic_loss([row(0.0, 2.0), row(1.0, 1.0)], row(1.0))
    assert right.item() == pytest.approx(losses.quantile_critic_loss([row(0.0, 2.0)], row(1.0)).item() / 2)


def test_actor_loss_falls_when_the_value_rises():
    assert losses.actor_loss(column(1.0, 3.0)).item() == pytest.approx(-2.0)


@pytest.mark.parametrize(("tau", "expected"), [(0.0, 2.0), (0.25, 3.0), (1.0, 6.0)])
def test_polyak_moves_the_target_by_tau(tau, expected):
    # (1 - 0.25) 2 + 0.25 x 6 = 3: the bracket the texts misplace
    target = column(2.0)
    losses.polyak_update([target], [column(6.0)], tau)
    assert target.item() == pytest.approx(expected)
