"""``embedding_dim``: embeddings that learn to predict the next state's, beside what actor and critics of either kind see."""

import copy

import cloudpickle
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.td3.policies import TD3Policy
from torch import nn

from sb3_td3x import TD3X, NonFiniteError, TD3XPolicy
from sb3_td3x.td3x import losses
from sb3_td3x.td3x.sale import EmbeddedCritic, Encoder
from tests.paths import assert_equal, pair, train
from tests.reference.embeddings_by_the_paper import PaperEmbeddedTD3, normalized, normalized_backward
from tests.resuming import assert_same_run, run_twice, seeded
from tests.test_update_matches_the_paper import CLIPPED, FLOAT64, OWN_RATE, QUANTILES, RULE, Float64Extractor, layers
from tests.tools import SMALL, LineEnv, feed, largest_difference, model, random_batch, weights, without_output

DIM = 4
EMBEDDED = {"policy_kwargs": {**SMALL, "embedding_dim": DIM}}
BOTH_KINDS = pytest.mark.parametrize("n_quantiles", [1, 5])


def encoder_of(algorithm):
    return algorithm.critic.encoder


def all_layers(network):
    return layers(module for module in network.modules() if isinstance(module, nn.Linear))


class TestUpdate:
    def reference_of(self, algorithm):
        policy = algorithm.policy
        return PaperEmbeddedTD3(
            [*all_layers(policy.actor.features_extractor.linear), *layers(policy.actor.mu)],
            [all_layers(network) for network in policy.critic.q_networks],
            all_layers(policy.critic.encoder.state),
            all_layers(policy.critic.encoder.transition),
            drop=algorithm.top_quantiles_to_drop_per_net,
            learning_rates=(algorithm.learning_rate, algorithm.qf_learning_rate or algorithm.learning_rate),
            max_grad_norm=algorithm.max_grad_norm or np.inf,
            **{"gamma": algorithm.gamma, "tau": algorithm.tau, "policy_delay": algorithm.policy_delay},
            **{"noise_std": algorithm.target_policy_noise, "noise_clip": algorithm.target_noise_clip},
        )

    def assert_equal_networks(self, policy, reference, tolerance):
        def actor(one):
            return [*all_layers(one.features_extractor.linear), *layers(one.mu)]

        pairs = [
            (actor(policy.actor), reference.actor),
            (actor(policy.actor_target), reference.actor_target),
            (all_layers(policy.critic.encoder), reference.encoder),
            (all_layers(policy.critic.slow_encoder), reference.embedding),
            (all_layers(policy.critic_target.slow_encoder), reference.embedding_target),
        ]
        for critic, expected in ((policy.critic, reference.critics), (policy.critic_target, reference.critic_targets)):
            pairs += zip(map(all_layers, critic.q_networks), expected, strict=True)
        for network, expected in pairs:
            for layer, twin in zip(network, expected.layers(), strict=True):
                for part, expected_part in zip(layer, twin, strict=True):
                    np.testing.assert_allclose(part, expected_part, rtol=tolerance, atol=tolerance)
        for actor, embedding in ((policy.actor, reference.embedding), (policy.actor_target, reference.embedding_target)):
            own = all_layers(actor.features_extractor.slow_encoder)
            for (weight, _), (expected_weight, _) in zip(own, embedding.state, strict=True):
                np.testing.assert_allclose(weight, expected_weight, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize(
        ("accelerate", "extras"), [("plain", {}), ("plain", OWN_RATE | CLIPPED), ("compiled", OWN_RATE | CLIPPED)]
    )
    def test_parameters_followers_and_losses_equal_the_slow_twins(self, accelerate, extras):
        dtype, tolerance = FLOAT64
        policy_kwargs = {**EMBEDDED["policy_kwargs"], "features_extractor_class": Float64Extractor}
        extras = {**RULE, **QUANTILES, **extras}
        algorithm = without_output(model(policy_kwargs=policy_kwargs, accelerate=accelerate, **extras))
        algorithm.policy.to(dtype)
        reference = self.reference_of(algorithm)
        for update in range(1, 21):
            batch = random_batch(update, dtype=dtype)
            noise = th.randn(8, 1, generator=th.Generator().manual_seed(update)).to(dtype)
            feed(algorithm, [batch], [noise])
            algorithm.train(1, batch_size=8)
            inputs = (batch.observations, batch.actions, batch.next_observations, batch.rewards, batch.dones, noise)
            losses = reference.update(*(part.numpy() for part in inputs))
            logged = algorithm.logger.name_to_value
            assert logged["train/critic_loss"] == pytest.approx(losses[0], rel=tolerance)
            assert logged["train/encoder_loss"] == pytest.approx(losses[2], rel=tolerance)
            if update % RULE["policy_delay"] == 0:
                assert logged["train/actor_loss"] == pytest.approx(losses[1], rel=tolerance)
            self.assert_equal_networks(algorithm.policy, reference, tolerance)
        assert accelerate == "plain" or algorithm._get_updater().programs_made == 2

    def test_the_twins_own_gradient_of_the_normalisation_is_right(self):
        random = np.random.default_rng(0)
        values, slopes = random.normal(size=(2, 5)), random.normal(size=(2, 5))
        found = normalized_backward(values, slopes)
        for place in np.ndindex(values.shape):
            there, step = np.zeros_like(values), 1e-6
            there[place] = step
            difference = np.sum(slopes * (normalized(values + there) - normalized(values - there))) / (2 * step)
            assert difference == pytest.approx(found[place], abs=1e-8)

    @BOTH_KINDS
    def test_each_loss_moves_its_own_networks_only(self, n_quantiles):
        critic = model(n_quantiles=n_quantiles, **EMBEDDED).critic
        batch = random_batch(0)
        own = critic.encoder_loss(batch.observations, batch.actions, batch.next_observations)
        own.backward()
        moved = {name.split(".")[0] for name, one in critic.named_parameters() if one.grad is not None}
        assert moved == {"encoder"}
        critic.zero_grad()
        sum(value.sum() for value in critic(batch.observations, batch.actions)).backward()
        moved = {name.split(".")[0] for name, one in critic.named_parameters() if one.grad is not None}
        assert moved == {"qf0", "qf1"}

    def test_the_next_states_embedding_is_a_goal_that_gets_no_gradient(self):
        encoder, batch = Encoder(3, 1, DIM), random_batch(0)
        next_states = batch.next_observations.requires_grad_()
        encoder.loss(batch.observations, batch.actions, next_states).backward()
        assert next_states.grad is None

    @pytest.mark.parametrize("path", ["plain", "compiled"])
    @pytest.mark.parametrize("broken", ["critic", "actor"])
    def test_an_update_that_fails_moves_no_encoder(self, broken, path):
        """Of the critic only the encoder is broken; the actor fails after the critic and the encoder have moved."""
        algorithm = without_output(model(accelerate=path, policy_delay=1, **EMBEDDED))
        layer = algorithm.critic.encoder.transition[0] if broken == "critic" else algorithm.actor.mu[0]
        with th.no_grad():
            layer.weight[0, 0] = float("nan")
        before = weights(algorithm)
        feed(algorithm, [random_batch(0)], [th.zeros(8, 1)])
        with pytest.raises(NonFiniteError, match=f"{broken} loss or its gradient .* update 1"):
            algorithm.train(1, batch_size=8)
        after = weights(algorithm)
        assert all(th.equal(after[name], value) for name, value in before.items() if not value.isnan().any())

    def test_learns_to_predict_the_next_states_embedding(self):
        algorithm = model(n_quantiles=5, learning_rate=3e-3, **EMBEDDED).learn(300)
        batch = algorithm.replay_buffer.sample(200)
        states, actions, next_states = batch.observations, batch.actions, batch.next_observations
        encoder = encoder_of(algorithm)
        with th.no_grad():
            spread = encoder.state(next_states).var(dim=0, correction=0).mean()
            assert encoder.loss(states, actions, next_states) < 0.2 * spread


class TestNetworks:
    @BOTH_KINDS
    def test_followers_begin_as_what_they_follow(self, n_quantiles):
        policy = model(n_quantiles=n_quantiles, **EMBEDDED).policy
        wanted = policy.critic.encoder.state_dict()
        for critic, actor in ((policy.critic, policy.actor), (policy.critic_target, policy.actor_target)):
            assert isinstance(critic, EmbeddedCritic)
            assert largest(critic.slow_encoder.state_dict(), wanted) == 0
            assert largest(actor.features_extractor.slow_encoder.state_dict(), policy.critic.encoder.state.state_dict()) == 0
            assert not any(one.requires_grad for one in critic.slow_encoder.parameters())

    def test_embeddings_of_states_have_a_mean_absolute_value_of_one(self):
        embeddings = encoder_of(model(**EMBEDDED)).state(th.randn(6, 3) * 100)
        th.testing.assert_close(embeddings.abs().mean(1), th.ones(6))
        assert th.equal(losses.avg_l1_norm(th.zeros(2, 3)), th.zeros(2, 3))

    @BOTH_KINDS
    def test_actor_and_critics_see_observation_and_embedding(self, n_quantiles):
        policy = model(n_quantiles=n_quantiles, **EMBEDDED).policy
        observations, actions = th.randn(5, 3), th.rand(5, 1)

        def outputs():
            with th.no_grad():
                return policy.actor(observations), *policy.critic(observations, actions)

        before = outputs()
        for embedding in (policy.actor.features_extractor.slow_encoder, policy.critic.slow_encoder):
            for parameter in embedding.parameters():
                parameter.mul_(-1.5)
        assert all((new - old).abs().max() > 1e-6 for new, old in zip(outputs(), before, strict=True))
        th.testing.assert_close(policy.critic.q1_forward(observations, actions), outputs()[1].mean(1, keepdim=True))


def largest(left, right):
    return max((left[name] - right[name]).abs().max().item() for name in right)


class TestFrozen:
    def trained(self, freeze, thaw=False):
        algorithm = without_output(model(tau=0.5, policy_delay=1, **EMBEDDED))
        freeze(algorithm).requires_grad_(False)
        if thaw:
            freeze(algorithm).requires_grad_(True)
        before = weights(algorithm)
        train(algorithm, [random_batch(seed) for seed in range(3)])
        after = weights(algorithm)
        return {name for name, value in before.items() if not th.equal(value, after[name])}

    def test_an_actor_acts_as_it_did(self):
        assert not {name for name in self.trained(lambda algorithm: algorithm.actor) if name.startswith("actor.")}

    def test_an_encoder_stays_and_all_else_learns(self):
        moved = self.trained(encoder_of)
        assert not {name for name in moved if "encoder" in name}
        assert {"critic.qf0.0.linear.weight", "actor.mu.4.bias"} <= moved

    @pytest.mark.parametrize("network", ["actor", "critic"])
    def test_what_follows_is_trained_by_nobody_after_thawing(self, network):
        algorithm = without_output(model(tau=0, policy_delay=1, **EMBEDDED))
        getattr(algorithm, network).requires_grad_(False).requires_grad_(True)
        before = weights(algorithm)
        train(algorithm, [random_batch(seed) for seed in range(3)])
        followers = [name for name in before if "slow_encoder" in name]
        assert followers
        assert all(th.equal(weights(algorithm)[name], before[name]) for name in followers)


class TestGoesWith:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {"n_quantiles": 1},
            {"n_quantiles": 1, "prioritization": "lap"},
            {
                "n_quantiles": 5,
                "policy_kwargs": {**EMBEDDED["policy_kwargs"], "normalize_observations": True},
            },
        ],
    )
    def test_compiled_updates(self, kwargs):
        plain, compiled = pair(policy_delay=1, **{**EMBEDDED, **kwargs})
        batches = [random_batch(seed) for seed in range(4)]
        for algorithm in (plain, compiled):
            algorithm.replay_buffer.update_priorities = lambda errors: None  # of batches that it did not draw
            train(algorithm, batches)
        assert_equal(plain, compiled)
        for name in ("critic", "actor", "encoder"):
            left, right = (one.logger.name_to_value[f"train/{name}_loss"] for one in (plain, compiled))
            assert left == pytest.approx(right, rel=1e-5), name

    def test_products_in_bfloat16(self):
        losses = {}
        for products in ("fp32", "bf16"):
            algorithm = model(policy_kwargs={"net_arch": [64, 64], "embedding_dim": 64}, precision=products)
            train(without_output(algorithm), [random_batch(0)])
            losses[products] = algorithm.logger.name_to_value["train/encoder_loss"]
        assert 1e-6 < abs(losses["bf16"] / losses["fp32"] - 1) < 0.02

    def test_prioritized_replay(self):
        learned = model(n_quantiles=5, prioritization="lap", **EMBEDDED)
        before = weights(learned)["critic.encoder.transition.4.bias"]
        learned.learn(40)
        assert learned._n_updates == 30
        assert not th.equal(weights(learned)["critic.encoder.transition.4.bias"], before)

    def test_hindsight_replay(self):
        env = BitFlippingEnv(n_bits=3, continuous=True)
        learned = model(
            env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer, n_quantiles=5, learning_starts=20, **EMBEDDED
        ).learn(40)
        assert learned._n_updates > 0

    @pytest.mark.filterwarnings("error:not restored exactly")
    def test_a_run_that_is_killed_and_goes_on(self, tmp_path):
        whole, cut = run_twice(tmp_path, seeded, n_quantiles=5, **EMBEDDED)
        assert_same_run(whole, cut)

    @BOTH_KINDS
    def test_files(self, n_quantiles, tmp_path):
        learned = model(n_quantiles=n_quantiles, **EMBEDDED).learn(100)
        learned.save(tmp_path / "model")
        loaded = TD3X.load(tmp_path / "model", env=LineEnv())
        assert largest_difference(weights(loaded), weights(learned)) == 0
        assert loaded.policy_kwargs["embedding_dim"] == DIM
        observations = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
        assert np.array_equal(*(one.predict(observations)[0] for one in (learned, loaded)))
        loaded.learn(20, reset_num_timesteps=False)

    @BOTH_KINDS
    def test_a_file_of_the_policy_alone(self, n_quantiles, tmp_path):
        policy = model(n_quantiles=n_quantiles, **EMBEDDED).policy
        policy.save(tmp_path / "policy")
        assert largest(TD3XPolicy.load(tmp_path / "policy").state_dict(), policy.state_dict()) == 0

    def test_copies_and_pickles(self):
        learned = model(n_quantiles=5, **EMBEDDED).learn(40)
        for other in (copy.deepcopy(learned), cloudpickle.loads(cloudpickle.dumps(learned))):
            assert largest_difference(weights(other), weights(learned)) == 0

    def test_normalised_observations_in_files(self, tmp_path):
        policy_kwargs = {**EMBEDDED["policy_kwargs"], "normalize_observations": True}
        learned = model(n_quantiles=5, policy_kwargs=policy_kwargs).learn(40)
        learned.save(tmp_path / "model")
        loaded = TD3X.load(tmp_path / "model", env=LineEnv())
        assert largest_difference(weights(loaded), weights(learned)) == 0
        assert loaded.policy.normalizer is loaded.critic.features_extractor.normalizer
        assert loaded.policy.normalizer.moments[0].count > 40

    @pytest.mark.parametrize("n_critics", [1, 3])
    @pytest.mark.parametrize("net_arch", [[], {"pi": [8], "qf": []}])
    def test_networks_of_any_shape(self, net_arch, n_critics):
        policy_kwargs = {"net_arch": net_arch, "n_critics": n_critics, "embedding_dim": DIM}
        learned = model(n_quantiles=5, policy_kwargs=policy_kwargs, max_grad_norm=1.0).learn(30)
        assert [value.shape for value in learned.critic(th.randn(2, 3), th.rand(2, 1))] == [(2, 5)] * n_critics

    def test_onnx(self, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
        learned = model(n_quantiles=5, **EMBEDDED).learn(40)
        learned.export_onnx(tmp_path / "actor.onnx")
        observations = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
        (actions,) = onnxruntime.InferenceSession(tmp_path / "actor.onnx").run(None, {"observation": observations})
        np.testing.assert_allclose(actions, learned.predict(observations)[0], atol=1e-5)


class TestRefuses:
    @pytest.mark.parametrize(
        "several",
        [
            {"n_steps": 3},
            {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.99}},
        ],
    )
    def test_returns_of_several_steps(self, several):
        with pytest.raises(ValueError, match="embedding_dim is for returns of one step: leave out n_steps"):
            model(**several, **EMBEDDED)

    def test_a_features_extractor_that_learns(self):
        image = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        with pytest.raises(ValueError, match="without weights or statistics, not for NatureCNN: leave it out, or"):
            model(LineEnv(image), "CnnPolicy", **EMBEDDED)

    def test_a_shared_features_extractor(self):
        with pytest.raises(ValueError, match="leave out share_features_extractor"):
            model(policy_kwargs={**EMBEDDED["policy_kwargs"], "share_features_extractor": True})

    @pytest.mark.parametrize("make", ["make_actor", "make_critic"])
    def test_networks_of_ones_own_without_embeddings(self, make):
        own = type("Own", (TD3XPolicy,), {make: getattr(TD3Policy, make)})
        with pytest.raises(ValueError, match="Own makes networks of its own: with embedding_dim"):
            model(policy=own, **EMBEDDED)

    @pytest.mark.parametrize("value", [0, 1, 1.5, "many", True])
    def test_what_is_no_number_of_numbers(self, value):
        with pytest.raises(ValueError, match="embedding_dim must be"):
            model(policy_kwargs={**SMALL, "embedding_dim": value})


def test_another_policys_own_argument_of_that_name_is_its_own():
    class Own(TD3Policy):
        def __init__(self, *args, embedding_dim, **kwargs):
            super().__init__(*args, **kwargs)
            self.embedding_dim = embedding_dim

    assert model(policy=Own, policy_kwargs={**SMALL, "embedding_dim": [8, 8]}, n_steps=3).learn(30)._n_updates == 20
