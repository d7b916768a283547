"""``layer_norm``: a ``LayerNorm`` behind each hidden layer of the critics, of either kind, on every path and in files."""

import pytest
import torch as th
from torch import nn

from sb3_td3x import TD3X
from tests.tools import SMALL, LineEnv, feed, largest_difference, model, random_batch, weights, without_output

KINDS = [1, 5]


def normed(**kwargs):
    return model(policy_kwargs={**SMALL, "layer_norm": True}, **kwargs)


@pytest.mark.parametrize("n_quantiles", KINDS)
def test_stands_behind_each_hidden_layer_of_critics_and_their_targets_only(n_quantiles):
    algorithm = normed(n_quantiles=n_quantiles)
    for critic in (algorithm.critic, algorithm.critic_target):
        for network in critic.q_networks:
            kinds = [type(layer) for layer in network]
            assert kinds == [nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
            assert [layer.normalized_shape for layer in network if isinstance(layer, nn.LayerNorm)] == [(16,), (12,)]
    assert not any(isinstance(layer, nn.LayerNorm) for layer in algorithm.actor.modules())


@pytest.mark.parametrize("n_quantiles", KINDS)
def test_the_values_are_those_of_the_layers_by_hand(n_quantiles):
    critic = normed(n_quantiles=n_quantiles).critic
    inputs = th.randn(4, 3), th.rand(4, 1)
    for value, network in zip(critic(*inputs), critic.q_networks, strict=True):
        first, second, last = (layer for layer in network if isinstance(layer, nn.Linear))
        hidden = th.cat(inputs, dim=1)
        for layer in (first, second):
            hidden = layer(hidden)
            hidden = (hidden - hidden.mean(1, keepdim=True)) / (hidden.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
            hidden = hidden.relu()
        th.testing.assert_close(value, last(hidden))


@pytest.mark.parametrize("n_quantiles", KINDS)
def test_its_parameters_learn_and_reach_the_targets(n_quantiles):
    algorithm = without_output(normed(n_quantiles=n_quantiles, tau=0.5, policy_delay=1))
    before = weights(algorithm)
    feed(algorithm, [random_batch(seed, 8) for seed in range(2)], [th.zeros(8, 1)] * 2)
    algorithm.train(2, batch_size=8)
    for name in ("critic.qf0.1.weight", "critic.qf1.4.bias", "critic_target.qf1.4.bias"):
        assert (weights(algorithm)[name] - before[name]).abs().max() > 1e-6


def test_compiled_updates_equal_plain_ones():
    outcomes = []
    for path in ("plain", "compiled"):
        algorithm = without_output(normed(n_quantiles=5, accelerate=path, policy_delay=1))  # one program
        feed(algorithm, [random_batch(seed, 8) for seed in range(4)], [th.zeros(8, 1)] * 4)
        algorithm.train(4, batch_size=8)
        outcomes.append(weights(algorithm))
    assert largest_difference(*outcomes) < 1e-5


@pytest.mark.parametrize("name", ["layer_norm", "normalize_observations"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, not 'no'"):
        model(policy_kwargs={**SMALL, name: "no"})


@pytest.mark.parametrize("n_quantiles", KINDS)
def test_comes_back_from_a_file(n_quantiles, tmp_path):
    algorithm = normed(n_quantiles=n_quantiles).learn(30)
    algorithm.save(tmp_path / "model")
    assert largest_difference(weights(TD3X.load(tmp_path / "model", env=LineEnv())), weights(algorithm)) == 0
