"""``max_grad_norm`` bounds each network's gradient as torch does. Its numbers: also ``test_update_matches_the_paper``."""

import pytest
import torch as th

from tests.tools import SMALL, model, train_each, train_on, weights, without_output

SGD = {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.SGD}}


def ready(**kwargs):
    return without_output(model(batch_size=8, policy_delay=1, **kwargs))


def moved(algorithm, before, network):
    """How far a network's parameters are from where they were."""
    now = weights(algorithm)
    return sum((now[name] - before[name]).square().sum().item() for name in now if name.startswith(f"{network}.")) ** 0.5


def test_each_network_moves_no_further_than_the_bound_with_plain_gradient_descent():
    free, bounded = (ready(learning_rate=1.0, max_grad_norm=bound, **SGD) for bound in (None, 0.01))
    before = weights(free)
    train_each((free, bounded), [0])
    assert moved(free, before, "critic") > 0.1
    assert moved(bounded, before, "critic") == pytest.approx(0.01, rel=1e-3)
    assert moved(free, before, "actor") > 0.01
    assert moved(bounded, before, "actor") == pytest.approx(0.01, rel=1e-3)


def test_a_frozen_layer_is_not_part_of_the_norm():
    algorithm = ready(learning_rate=1.0, max_grad_norm=0.01, **SGD)
    for layer in algorithm.critic.q_networks[0]:
        layer.requires_grad_(False)
    before = weights(algorithm)
    train_on(algorithm, [0])
    assert moved(algorithm, before, "critic.qf0") == 0
    assert moved(algorithm, before, "critic.qf1") == pytest.approx(0.01, rel=1e-3)
