"""Truncated quantile critics do what their paper says, and one quantile is a scalar critic."""

from pathlib import Path

import numpy as np
import pytest
import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy
from tests.tools import OBSERVATIONS, SMALL, LineEnv, largest_difference, model, train_each, train_on, weights, without_output

QUANTILES = {"n_quantiles": 5, "top_quantiles_to_drop_per_net": 2}
GOLDEN = Path(__file__).parent / "golden"


class Own(TD3Policy):
    """SB3's networks by SB3's code."""


def ready(**kwargs):
    return without_output(model(batch_size=8, **{**QUANTILES, **kwargs}))


def test_one_quantile_is_the_scalar_critic_bit_for_bit():
    expected, one = (model(policy=policy, top_quantiles_to_drop_per_net=7).learn(30) for policy in (Own, "MlpPolicy"))
    assert type(one.critic) is type(expected.critic) is ContinuousCritic
    assert largest_difference(weights(expected), weights(one)) == 0


class TestCritic:
    def test_names_are_sb3s_and_only_the_last_layers_are_wider(self):
        scalar, quantile = weights(model()), weights(model(n_quantiles=25))
        assert list(scalar) == list(quantile)
        differ = {name for name in scalar if scalar[name].shape != quantile[name].shape}
        assert {name.split(".", 1)[1] for name in differ} == {"qf0.4.weight", "qf0.4.bias", "qf1.4.weight", "qf1.4.bias"}

    def test_q1_is_the_first_critics_mean(self):
        critic = model(**QUANTILES).critic
        inputs = th.ones(4, 3), th.zeros(4, 1)
        outputs = critic(*inputs)
        assert [tuple(output.shape) for output in outputs] == [(4, 5), (4, 5)]
        th.testing.assert_close(critic.q1_forward(*inputs), outputs[0].mean(1, keepdim=True))


@pytest.mark.parametrize("drop", [5, -1, 1.5, None])
def test_a_count_to_drop_that_leaves_nothing_or_is_none_is_refused_also_when_edited(drop, tmp_path):
    with pytest.raises(ValueError, match="top_quantiles_to_drop_per_net"):
        model(n_quantiles=5, top_quantiles_to_drop_per_net=drop)
    algorithm = ready()
    before = weights(algorithm)
    algorithm.save(tmp_path / "model")
    with pytest.raises(ValueError, match="top_quantiles_to_drop_per_net"):
        TD3X.load(tmp_path / "model", top_quantiles_to_drop_per_net=drop)
    with pytest.raises(ValueError, match="top_quantiles_to_drop_per_net"):  # noqa: PT012  # at one of both
        algorithm.top_quantiles_to_drop_per_net = drop
        train_on(algorithm, [0])
    assert largest_difference(weights(algorithm), before) == 0


class TestFiles:
    def test_a_saved_model_trains_on_as_if_it_had_not_been_saved(self, tmp_path):
        stays, moves = ready(top_quantiles_to_drop_per_net=1), ready(top_quantiles_to_drop_per_net=1)
        train_each((stays, moves), range(4))
        moves.save(tmp_path / "model", exclude=["_draw_noise"])
        moves = without_output(TD3X.load(tmp_path / "model", env=LineEnv()))
        assert (moves.n_quantiles, moves.top_quantiles_to_drop_per_net) == (5, 1)
        np.testing.assert_array_equal(moves.predict(OBSERVATIONS)[0], stays.predict(OBSERVATIONS)[0])
        train_each((stays, moves), range(4, 8))
        assert largest_difference(weights(stays), weights(moves)) == 0

    def test_another_number_of_quantiles_is_refused_at_load(self, tmp_path):
        with pytest.raises(ValueError, match="n_quantiles cannot be 25: the critics in the file have 1") as raised:
            TD3X.load(GOLDEN / "sb3_td3_2.9.2.zip", n_quantiles=25)
        assert not isinstance(raised.value, ModelFileError)  # a script that discards damaged files keeps this one
        model(**QUANTILES).save(tmp_path / "model")
        with pytest.raises(ValueError, match="n_quantiles cannot be 1: the critics in the file have 5"):
            TD3X.load(tmp_path / "model", n_quantiles=1)
        for same in (5, "auto"):
            assert TD3X.load(tmp_path / "model", n_quantiles=same).n_quantiles == 5

    def test_sb3s_td3_does_not_take_a_quantile_critic_for_a_scalar_one(self, tmp_path):
        model(**QUANTILES).save(tmp_path / "model")
        with pytest.raises(RuntimeError, match="size mismatch"):
            TD3.load(tmp_path / "model")


class TestPolicies:
    def test_a_policy_that_cannot_have_quantiles_is_refused(self):
        with pytest.raises(ValueError, match=r"Own cannot have quantile critics \(n_quantiles=5\)"):
            model(policy=Own, **QUANTILES)

    def test_by_default_there_are_25_and_scalar_critics_where_the_policy_has_no_others(self):
        for policy, expected in (("MlpPolicy", 25), (TD3Policy, 25), (Own, 1)):
            algorithm = TD3X(policy, LineEnv(), policy_kwargs=SMALL, buffer_size=10, device="cpu")
            assert algorithm.n_quantiles == getattr(algorithm.critic, "n_quantiles", 1) == expected

    def test_a_policy_that_makes_other_critics_is_refused(self):
        class Own(TD3XPolicy):
            def make_critic(self, features_extractor=None):
                return TD3Policy.make_critic(self, features_extractor)

        with pytest.raises(ValueError, match="make_critic of Own makes no critics with n_quantiles=5"):
            model(policy=Own, **QUANTILES)

    def test_the_number_is_given_to_the_algorithm_alone(self):
        with pytest.raises(ValueError, match="n_quantiles is an argument of TD3X itself"):
            model(policy_kwargs={**SMALL, "n_quantiles": 5})
