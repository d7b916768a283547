"""The four kinds of networks keep their roles: twins differ, targets follow and are never trained, the actor waits."""

import numpy as np
import pytest
import torch as th

from tests.tools import largest_difference, model, random_batch, train_on, weights, without_output


def test_twins_start_different_and_targets_start_equal():
    policy = model().policy
    first, second = policy.critic.q_networks
    assert not th.equal(first[0].weight, second[0].weight)
    for target, source in ((policy.actor_target, policy.actor), (policy.critic_target, policy.critic)):
        assert largest_difference(target.state_dict(), source.state_dict()) == 0


def test_targets_receive_no_gradient_and_no_optimizer_step(path):
    algorithm = without_output(model(tau=0.0, accelerate=path, batch_size=8))
    before = weights(algorithm)
    train_on(algorithm, range(4))
    for name, parameter in algorithm.policy.named_parameters():
        if "target" in name:
            assert parameter.grad is None
            assert th.equal(parameter, before[name])
    assert largest_difference(before, weights(algorithm)) > 0  # the others did move


def test_actor_step_leaves_no_gradient_in_the_critics():
    algorithm, alone = without_output(model(policy_delay=1)), without_output(model(policy_delay=2))
    for learner in (algorithm, alone):
        learner.critic.optimizer.param_groups[0]["foreach"] = False  # Adam's fused step keeps no gradients
        train_on(learner, range(1))
    after_actor_step = [parameter.grad for parameter in algorithm.critic.parameters()]
    after_critic_step = [parameter.grad for parameter in alone.critic.parameters()]
    assert all(th.equal(left, right) for left, right in zip(after_actor_step, after_critic_step, strict=True))


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_actor_and_targets_move_only_at_every_delayth_update_also_across_calls(delay, path):
    algorithm = without_output(model(policy_delay=delay, accelerate=path, batch_size=8))
    for update in range(1, 8):
        before = weights(algorithm)
        train_on(algorithm, range(1))
        moved = {name for name, value in weights(algorithm).items() if not th.equal(value, before[name])}
        due = update % delay == 0
        assert {name.split(".")[0] for name in moved} == (
            {"actor", "actor_target", "critic", "critic_target"} if due else {"critic"}
        )


def test_target_noise_is_drawn_per_transition_and_per_action_dimension():
    algorithm = model()
    noise = algorithm._draw_noise(random_batch(0, batch=64, action_dim=5)).numpy()
    assert noise.shape == (64, 5)
    assert len(np.unique(noise)) == noise.size
    assert abs(noise.std() - 1) < 0.1


def test_buffers_and_nothing_else_are_copied_whatever_they_are_called():
    class Extractor(th.nn.Module):
        def __init__(self, space):
            super().__init__()
            self.features_dim = 4
            self.running_gait = th.nn.Linear(space.shape[0], 4)
            self.register_buffer("calls", th.zeros(()), persistent=False)

        def forward(self, observations):
            self.calls = self.calls + self.training
            return self.running_gait(observations)

    algorithm = without_output(model(tau=0.0, policy_kwargs={"net_arch": [8], "features_extractor_class": Extractor}))
    source, target = algorithm.critic.features_extractor, algorithm.critic_target.features_extractor
    before = target.running_gait.weight.clone()
    train_on(algorithm, range(2))
    assert th.equal(target.running_gait.weight, before)
    assert not th.equal(source.running_gait.weight, before)
    assert source.calls == target.calls > 0
