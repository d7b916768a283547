"""
The compiled path makes the plain path's updates up to rounding, whatever the policy, and says when it cannot.

Compiling takes seconds per program, so the cases share their shapes wherever they can.
"""

import copy
import random
from types import MethodType

import cloudpickle
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import DictReplayBufferSamples
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X, NonFiniteError, TD3XPolicy
from sb3_td3x.td3x import compiled, gradient_step
from tests.paths import assert_equal, noise, pair, programs, ready, train
from tests.tools import SMALL, LineEnv, feed, largest_difference, random_batch, train_each, train_on, weights, without_output

pytestmark = pytest.mark.skipif(not compiled.has_compiler(), reason="no C++ compiler on this machine")


class NormalizedExtractor(BaseFeaturesExtractor):
    """A user's own network with batch norm, whose statistics are part of what an update changes."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 5)
        # No bias before batch norm: it has no effect, so Adam would only amplify its gradient's rounding
        self.layers = th.nn.Sequential(th.nn.Linear(3, 5, bias=False), th.nn.BatchNorm1d(5), th.nn.Tanh())

    def forward(self, observations):
        return self.layers(observations)


def test_equal_after_one_update_and_bounded_after_fifty(optimized):
    plain, compiled = pair()
    for update in range(2):
        for algorithm in (plain, compiled):
            train(algorithm, [random_batch(update)], first=update)
        assert_equal(plain, compiled)
    train_each((plain, compiled), range(2, 50))
    # Rounding grows with the updates; the bound is the documented one
    assert_equal(plain, compiled, rtol=1e-3, atol=1e-5)
    assert plain.logger.name_to_value["train/critic_loss"] == pytest.approx(
        compiled.logger.name_to_value["train/critic_loss"], rel=1e-4
    )


def test_a_learning_rate_of_zero_moves_nothing():
    """It is where a linear schedule ends, and a unit that never fires has moments of zero."""
    plain, compiled = pair(learning_rate=lambda progress: 1e-3 * progress)
    for algorithm in (plain, compiled):
        with th.no_grad():
            for network in (algorithm.actor.mu, algorithm.critic.qf0):
                network[0].bias[0] = -100
        train_on(algorithm, range(2))
        before = without_targets(algorithm)
        algorithm._current_progress_remaining = 0.0
        train_on(algorithm, range(2, 4))
        assert largest_difference(before, without_targets(algorithm)) == 0
    assert_equal(plain, compiled)


def without_targets(algorithm):
    return {name: value for name, value in weights(algorithm).items() if "target" not in name}


def test_one_program_per_kind_of_update_whatever_moves(tmp_path):
    compiled = ready("compiled", learning_rate=lambda progress: 1e-3 * progress)
    for update in range(200):
        compiled._current_progress_remaining = 1 - update / 400
        compiled.gamma, compiled.tau = 0.9 + update / 4000, 0.005 + update / 40000
        compiled.target_policy_noise, compiled.target_noise_clip = 0.1 + update / 1000, 0.4 + update / 1000
        train(compiled, [random_batch(update)], first=update)
    assert compiled._n_updates == 200
    assert programs(compiled) == 2
    compiled.set_parameters(compiled.get_parameters())
    train_on(compiled, range(4))
    assert programs(compiled) == 2

    compiled.save(tmp_path / "model", exclude=["_draw_noise"])
    loaded = without_output(TD3X.load(tmp_path / "model", env=LineEnv(), trust=True))
    train_on(loaded, range(4))
    assert programs(loaded) == 2


@pytest.mark.parametrize(
    ("name", "values", "programs_made", "settings"),
    [
        ("max_grad_norm", (0.05, 0.01, None, 1, 0.002), [2, 2, 2, 2, 2], {}),
        ("qf_learning_rate", (None, 5e-3, LinearSchedule(7e-3, 0.0, 1.0), None), [2, 2, 2, 2], {}),
        ("top_quantiles_to_drop_per_net", (2, 1, 2, 1.0), [2, 4, 4, 4], {"n_quantiles": 5}),
    ],
)
def test_an_edited_setting_takes_effect_with_the_next_update(name, values, programs_made, settings):
    plain, compiled = pair(policy_delay=1, **settings)
    made = []
    for seed, value in enumerate(values):
        for algorithm in (plain, compiled):
            setattr(algorithm, name, value)
            train_on(algorithm, [seed])
        made.append(programs(compiled))
        assert_equal(plain, compiled, atol=1e-6)
    assert made == programs_made


def test_a_setting_that_a_changed_loss_reads_takes_effect_with_the_next_update(monkeypatch):
    usual = gradient_step.actor_losses

    def scaled(policy, batch, noise, settings):
        loss, reported = usual(policy, batch, noise, settings)
        return loss, reported._replace(actor=settings.top_quantiles_to_drop_per_net * reported.actor)

    monkeypatch.setattr(gradient_step, "actor_losses", scaled)
    for algorithm in pair(policy_delay=1, n_quantiles=5, learning_rate=0.0):
        reported = []
        for algorithm.top_quantiles_to_drop_per_net in (1, 3):
            train_on(algorithm, [0])
            reported.append(algorithm.logger.name_to_value["train/actor_loss"])
        assert reported[1] == pytest.approx(3 * reported[0], rel=1e-5)


@pytest.mark.parametrize("first", ["plain", "compiled"])
def test_a_model_saved_on_one_path_trains_on_on_the_other(tmp_path, first):
    second = {"plain": "compiled", "compiled": "plain"}[first]
    stays, moves = ready(first), ready(first)
    train_each((stays, moves), range(4))
    moves.save(tmp_path / "model", exclude=["_draw_noise"])
    moves = without_output(TD3X.load(tmp_path / "model", env=LineEnv(), accelerate=second))
    train_each((stays, moves), range(4, 8))
    assert_equal(stays, moves, rtol=1e-4)


@pytest.mark.usefixtures("recorded")
def test_freezing_a_layer_during_training_takes_effect():
    plain, compiled = pair(policy_delay=1)
    for algorithm in (plain, compiled):
        train_on(algorithm, range(2))
        algorithm.actor.mu[0].weight.requires_grad_(False)
        frozen = algorithm.actor.mu[0].weight.clone()
        train_on(algorithm, range(2, 4))
        assert th.equal(algorithm.actor.mu[0].weight, frozen)
    assert_equal(plain, compiled, rtol=1e-4)


def restore(algorithm, batches):
    saved = algorithm.get_parameters()
    saved = copy.deepcopy(saved)
    train(algorithm, batches)
    algorithm.set_parameters(saved)


def load_optimizer(algorithm, batches):
    state = copy.deepcopy(algorithm.critic.optimizer.state_dict())
    train(algorithm, batches)
    algorithm.critic.optimizer.load_state_dict(state)


def new_optimizer(algorithm, batches):
    algorithm.critic.optimizer = th.optim.Adam(algorithm.critic.parameters(), lr=1e-3)


def other_activation(algorithm, batches):
    algorithm.actor.mu[1] = th.nn.Tanh()


def other_order(algorithm, batches):
    groups = [{"params": [*network.parameters()]} for network in (algorithm.critic.qf1, algorithm.critic.qf0)]
    algorithm.critic.optimizer = th.optim.Adam(groups, lr=1e-3)


def other_forward(algorithm, batches):
    network = algorithm.actor.features_extractor
    network.forward = MethodType(lambda network, observations: th.zeros_like(observations), network)


def other_critic(algorithm, batches):
    algorithm.critic.q_networks.reverse()  # SB3's list: the actor climbs the first


def layer_twice(algorithm, batches):
    for network in (algorithm.actor, algorithm.actor_target):
        network.mu.append(network.mu[-1])


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "change", [restore, load_optimizer, new_optimizer, other_activation, other_order, other_forward, other_critic, layer_twice]
)
def test_what_is_exchanged_between_two_series_takes_effect(change):
    plain, compiled = pair(policy_delay=1)
    for algorithm in (plain, compiled):
        train_on(algorithm, range(3))
        change(algorithm, [random_batch(seed) for seed in range(3, 6)])
        train_on(algorithm, range(6, 9))
    assert_equal(plain, compiled, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("recorded")
def test_programs_know_autocast_and_hooks_of_all_modules():
    algorithm = ready("compiled", policy_delay=1)
    train_on(algorithm, range(2))
    with th.autocast("cpu", th.bfloat16):
        train_on(algorithm, range(2))
    assert programs(algorithm) == 4
    train_on(algorithm, range(2))
    assert programs(algorithm) == 4
    hook = th.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(compiled.CannotAccelerate, match="hook"):
            train_on(algorithm, range(2))
    finally:
        hook.remove()


def test_a_model_with_programs_can_be_copied_and_pickled():
    compiled = ready("compiled")
    train_on(compiled, range(2))
    compiled.set_logger(None)
    del compiled.replay_buffer.sample, compiled._draw_noise
    for twin in (copy.deepcopy(compiled), cloudpickle.loads(cloudpickle.dumps(compiled))):
        assert largest_difference(weights(twin), weights(compiled)) == 0
        assert twin._updater is None


class PartlyTrained(TD3XPolicy):
    """The critics' optimizer leaves their extractor alone."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        parameters = [parameter for network in self.critic.q_networks for parameter in network.parameters()]
        self.critic.optimizer = th.optim.Adam(parameters, lr=lr_schedule(1))


class TrainedByBoth(TD3XPolicy):
    """One extractor, moved by the actor's loss and by the critics'."""

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.critic.share_features_extractor = False


class OwnPolicy(TD3Policy):
    """A policy class that is not derived from ``TD3XPolicy``."""


EVERY_UPDATE = {"policy_delay": 1}
OWN_EXTRACTOR = {**SMALL, "features_extractor_class": NormalizedExtractor}
SHARED = {**OWN_EXTRACTOR, "share_features_extractor": True}
POLICIES = {
    "SGD": {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.SGD}},
    "a policy of SB3's": {"policy": OwnPolicy},
    "three critics": {"policy_kwargs": {**SMALL, "n_critics": 3}},
    "a custom extractor with batch norm": {"policy_kwargs": OWN_EXTRACTOR},
    "a shared extractor": {"policy_kwargs": SHARED},
    "an optimizer of a part": {"policy": PartlyTrained, "policy_kwargs": OWN_EXTRACTOR, "max_grad_norm": 0.1},
    "an extractor that both losses train": {"policy": TrainedByBoth, "policy_kwargs": SHARED},
}


@pytest.mark.parametrize("kwargs", POLICIES.values(), ids=POLICIES)
def test_equal_for_policies_of_every_kind(kwargs):
    plain, compiled = pair(**kwargs, **EVERY_UPDATE)
    train_each((plain, compiled), range(2))
    assert_equal(plain, compiled, rtol=1e-4, atol=1e-6)
    assert programs(compiled) == 2


class TwoStreams(BaseFeaturesExtractor):
    """A user's own network: a common layer, two that follow it, and one for both of them, stacked."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 8)
        self.common, self.last = th.nn.Linear(3, 8), th.nn.Linear(4, 4)
        self.streams = th.nn.ModuleList([th.nn.Linear(8, 4), th.nn.Linear(8, 4)])

    def forward(self, observations):
        hidden = th.nn.functional.elu(self.common(observations))
        first, second = self.last(th.stack([th.tanh(stream(hidden)) for stream in self.streams]))
        return th.cat([first, second], dim=1)


def test_equal_for_dict_and_image_observations():
    space = spaces.Dict({"image": spaces.Box(0, 255, (1, 36, 36), np.uint8), "vector": spaces.Box(-10, 10, (3,))})
    plain, compiled = (
        ready(path, env=LineEnv(space), policy="MultiInputPolicy", **EVERY_UPDATE) for path in ("plain", "compiled")
    )

    def observation(seed):
        flat = random_batch(seed).observations
        image = th.as_tensor(np.random.default_rng(seed).integers(0, 255, (8, 1, 36, 36)), dtype=th.uint8)
        return {"image": image, "vector": flat}

    batch = random_batch(0)
    batch = DictReplayBufferSamples(observation(0), batch.actions, observation(1), batch.dones, batch.rewards)
    for algorithm in (plain, compiled):
        feed(algorithm, [batch], [noise(0)])
        algorithm.train(1, 8)
    assert_equal(plain, compiled, atol=1e-5)
    assert programs(compiled) == 2


def test_equal_for_batches_of_one():
    """The hidden layer is as wide as observation and action together, whose memory the compiler reused too early."""
    plain, compiled = pair(policy_kwargs={"net_arch": [4], "activation_fn": th.nn.ELU}, **EVERY_UPDATE)
    for algorithm in (plain, compiled):
        train(algorithm, [random_batch(0, batch=1)])
    assert_equal(plain, compiled)


def test_equal_for_streams_of_a_users_network_that_are_stacked():
    """Of the stack, too, the compiler reused the memory while a part was still in use."""
    policy_kwargs = {**SMALL, "features_extractor_class": TwoStreams, "optimizer_class": th.optim.SGD}
    plain, compiled = pair(policy_kwargs=policy_kwargs, learning_rate=1.0, **EVERY_UPDATE)
    for algorithm in (plain, compiled):
        train(algorithm, [random_batch(0)])
    assert_equal(plain, compiled)


def test_equal_for_n_step_returns():
    plain, compiled = pair(n_steps=3, **EVERY_UPDATE)
    batch = random_batch(0)._replace(discounts=th.full((8, 1), 0.9**3))
    for algorithm in (plain, compiled):
        train(algorithm, [batch])
    assert_equal(plain, compiled)


@pytest.mark.usefixtures("recorded")
def test_numbers_are_not_rounded_to_the_actions_type():
    env = LineEnv(action_space=spaces.Box(-1, 1, (1,), np.float16))
    both = pair(env=env, gamma=0.5001)  # 0.5 in float16
    for algorithm in both:
        batch = random_batch(0)
        feed(algorithm, [batch._replace(actions=batch.actions.half())], [noise(0).half()])
        algorithm.train(1, 8)
    assert_equal(*both)


def test_updates_before_the_bad_one_in_a_series_are_kept():
    series, alone = ready("compiled"), ready("compiled")
    batches = [random_batch(seed) for seed in range(4)]
    batches[2].rewards[0] = np.nan
    train(alone, batches[:2])
    feed(series, batches, [noise(seed) for seed in range(4)])
    with pytest.raises(NonFiniteError, match="update 3"):
        series.train(4, 8)
    assert series._n_updates == 2
    assert largest_difference(weights(series), weights(alone)) == 0


def test_making_programs_draws_no_random_number():
    compiled = ready("compiled")
    before = th.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    train_on(compiled, range(2))
    assert programs(compiled) == 2
    assert th.equal(before[0], th.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
