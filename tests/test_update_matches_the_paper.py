"""TD3X's updates are the paper's: equal to a float64 reference that shares no code with the package."""

from functools import partial

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.torch_layers import FlattenExtractor

from tests.paths import ready
from tests.reference.prioritized_by_the_paper import PaperLAPTD3
from tests.reference.quantiles_by_the_paper import PaperQuantileTD3
from tests.reference.td3_by_the_paper import PaperTD3
from tests.tools import feed, model, random_batch, train_on, weights, without_output

UPDATES = 20
SETTINGS = {"gamma": 0.97, "tau": 0.02, "policy_delay": 2, "target_policy_noise": 0.3, "target_noise_clip": 0.4}
QUANTILES = {"n_quantiles": 5, "top_quantiles_to_drop_per_net": 2}
OWN_RATE = {"qf_learning_rate": 3e-3}
CLIPPED = {"max_grad_norm": 0.03}
LAP = {"prioritization": "lap"}
SCALAR = {None: PaperTD3, "lap": PaperLAPTD3}
FLOAT64, FLOAT32 = (th.float64, 1e-10), (th.float32, 1e-5)


class Float64Extractor(FlattenExtractor):
    """SB3 casts observations to float32 first; they are exact in it here."""

    def forward(self, observations):
        return super().forward(observations).double()


def layers(network):
    linear = [module for module in network if isinstance(module, th.nn.Linear)]
    return [
        (module.weight.detach().double().numpy().copy(), module.bias.detach().double().numpy().copy()) for module in linear
    ]


def reference_of(algorithm):
    policy = algorithm.policy
    scalar = algorithm.n_quantiles == 1
    quantile = partial(PaperQuantileTD3, drop=algorithm.top_quantiles_to_drop_per_net)
    reference = SCALAR[algorithm.prioritization] if scalar else quantile
    return reference(
        layers(policy.actor.mu),
        [layers(network) for network in policy.critic.q_networks],
        learning_rates=(algorithm.learning_rate, algorithm.qf_learning_rate or algorithm.learning_rate),
        gamma=algorithm.gamma,
        tau=algorithm.tau,
        noise_std=algorithm.target_policy_noise,
        noise_clip=algorithm.target_noise_clip,
        policy_delay=algorithm.policy_delay,
        max_grad_norm=algorithm.max_grad_norm or np.inf,
    )


def assert_equal_networks(policy, reference, tolerance):
    pairs = [(policy.actor.mu, reference.actor), (policy.actor_target.mu, reference.actor_target)]
    pairs += zip(policy.critic.q_networks, reference.critics, strict=True)
    pairs += zip(policy.critic_target.q_networks, reference.critic_targets, strict=True)
    for network, expected in pairs:
        for (weight, bias), (expected_weight, expected_bias) in zip(layers(network), expected, strict=True):
            np.testing.assert_allclose(weight, expected_weight, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(bias, expected_bias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "n_critics", "accelerate", "extras"),
    [(*FLOAT64, n_critics, "plain", {}) for n_critics in (1, 2, 3)]
    + [(*FLOAT32, 2, "plain", {})]
    + [(*FLOAT64, n_critics, "plain", QUANTILES) for n_critics in (1, 3)]
    + [(*FLOAT64, 2, "plain", {**QUANTILES, "top_quantiles_to_drop_per_net": 0})]
    + [(*FLOAT64, 2, "plain", OWN_RATE), (*FLOAT64, 2, "plain", CLIPPED), (*FLOAT32, 3, "plain", QUANTILES | CLIPPED)]
    + [(*FLOAT64, n_critics, "plain", LAP) for n_critics in (1, 2)]
    # Quantiles have Huber loss already: what LAP changes is what is drawn
    + [(*FLOAT64, 2, "plain", QUANTILES | LAP)]
    # a program takes long to compile
    + [(*FLOAT32, 2, "compiled", {}), (*FLOAT64, 2, "compiled", {})]
    + [(*FLOAT64, 2, "compiled", QUANTILES | OWN_RATE | CLIPPED)],
)
def test_parameters_targets_and_losses_equal_the_reference(dtype, tolerance, n_critics, accelerate, extras):
    extractor = {"features_extractor_class": Float64Extractor} if dtype == th.float64 else {}
    policy_kwargs = {"net_arch": [16, 12], "n_critics": n_critics, **extractor}
    algorithm = ready(accelerate, policy_kwargs=policy_kwargs, **SETTINGS, **extras)
    algorithm.policy.to(dtype)
    algorithm.replay_buffer.update_priorities = lambda errors: None  # of batches that it did not draw
    reference = reference_of(algorithm)

    for update in range(1, UPDATES + 1):
        batch = random_batch(update, dtype=dtype)
        noise = th.randn(8, 1, generator=th.Generator().manual_seed(update)).to(dtype)
        feed(algorithm, [batch], [noise])
        algorithm.train(gradient_steps=1, batch_size=8)
        losses = reference.update(
            *(
                part.double().numpy()
                for part in (batch.observations, batch.actions, batch.next_observations, batch.rewards, batch.dones)
            ),
            noise.double().numpy(),
        )
        logged = algorithm.logger.name_to_value
        assert logged["train/critic_loss"] == pytest.approx(losses[0], rel=tolerance)
        if update % SETTINGS["policy_delay"] == 0:
            assert logged["train/actor_loss"] == pytest.approx(losses[1], rel=tolerance, abs=tolerance)
        assert_equal_networks(algorithm.policy, reference, tolerance)
    if "max_grad_norm" in extras:
        assert min(reference.norms) < extras["max_grad_norm"] < max(reference.norms)
    assert accelerate == "plain" or algorithm._get_updater().programs_made == 2


def test_a_frozen_layer_is_not_part_of_the_norm_that_is_bounded():
    kwargs = {"net_arch": [16, 12], "optimizer_class": th.optim.SGD}
    algorithm = without_output(model(learning_rate=1.0, max_grad_norm=0.01, policy_kwargs=kwargs))
    for layer in algorithm.critic.q_networks[0]:
        layer.requires_grad_(False)
    before = weights(algorithm)
    train_on(algorithm, [0])
    moved = {name: value - before[name] for name, value in weights(algorithm).items() if name.startswith("critic.")}
    assert not any(difference.any() for name, difference in moved.items() if name.startswith("critic.qf0"))
    assert th.cat([difference.flatten() for difference in moved.values()]).norm() == pytest.approx(0.01, rel=1e-3)
