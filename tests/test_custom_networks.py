"""Custom networks learn the same on every path, or their updates are made on the plain one, with the reason."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch as th
import torch.utils.checkpoint
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import HumanOutputFormat, Logger
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

from sb3_td3x import NonFiniteError, TD3XPolicy
from sb3_td3x.td3x import compiled, gradient_step, precision
from sb3_td3x.td3x.compiled import CannotAccelerate
from sb3_td3x.td3x.critics import SCALAR
from tests.paths import assert_equal, pair, programs, ready, train
from tests.tools import (
    SMALL,
    LineEnv,
    equal,
    largest_difference,
    model,
    random_batch,
    train_each,
    train_on,
    weights,
    without_output,
)


class Extractor(BaseFeaturesExtractor):
    """Of as many features as observations."""

    def __init__(self, observation_space):
        super().__init__(observation_space, 3)
        self.layer = th.nn.Linear(3, 3)
        self.prepare()

    def prepare(self):
        """Adds or exchanges parts."""

    def forward(self, observations):
        return self.layer(observations)


class Multiplying(Extractor):
    """The gradient of its weight comes in another memory order than the weight."""

    def prepare(self):
        self.scale = 1.0

    def forward(self, observations):
        return self.scale * th.einsum("bi,oi->bo", observations, self.layer.weight)


class Scripted(Extractor):
    def prepare(self):
        self.layer = th.jit.script(th.nn.Sequential(th.nn.Linear(3, 3), th.nn.Tanh()))


class Lazy(Extractor):
    positions = None

    def forward(self, observations):
        if self.positions is None:
            self.positions = th.arange(3, dtype=th.float32)
        return self.layer(observations + self.positions)


class Counting(Extractor):
    calls = 0

    def forward(self, observations):
        self.calls += 1
        return self.layer(observations) / self.calls


class Collecting(Extractor):
    def prepare(self):
        self.calls = {"of forward": [0]}

    def forward(self, observations):
        self.calls["of forward"][0] += 1
        return self.layer(observations) / self.calls["of forward"][0]


class Drawing(Extractor):
    def forward(self, observations):
        return self.layer(observations) * np.random.uniform(0.8, 1.2)


class Generating(Extractor):
    def prepare(self):
        self.random = np.random.default_rng(0)

    def forward(self, observations):
        return self.layer(observations) * self.random.uniform(0.8, 1.2)


class GeneratingAlike(Generating):
    random = np.random.default_rng(0)  # of all its objects
    prepare = Extractor.prepare


class Constrained(Extractor):
    def forward(self, observations):
        self.layer.weight.data = th.renorm(self.layer.weight.data, p=2, dim=0, maxnorm=0.1)
        return self.layer(observations)


class Activating(Extractor):
    def prepare(self):
        self.function = None

    def forward(self, observations):
        return self.layer(observations) if self.function is None else self.function(self.layer(observations))


class Dropping(Extractor):
    def forward(self, observations):
        return th.nn.functional.dropout(self.layer(observations))


class Branching(Extractor):
    def forward(self, observations):
        return self.layer(observations * 2 if observations.mean() > 0 else observations)


class Registering(Extractor):
    def forward(self, observations):
        if "late" not in self._buffers:
            self.register_buffer("late", th.ones(3))
        return self.layer(observations * self.late)


class Centered(Extractor):
    """Sets its buffer anew instead of writing into it."""

    def prepare(self):
        self.register_buffer("mean", th.zeros(3))

    def forward(self, observations):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * observations.mean(0).detach()
        return self.layer(observations - self.mean)


class Recurrent(Extractor):
    """Has no kernel that a compiled program can call backwards (torch 2.13)."""

    def prepare(self):
        self.cell = th.nn.LSTM(1, 3, batch_first=True)

    def forward(self, observations):
        return self.cell(observations.unsqueeze(-1))[0][:, -1]


class BatchNormed(Extractor):
    def prepare(self):
        self.layer = th.nn.Sequential(th.nn.BatchNorm1d(3), self.layer)


class Attending(Extractor):
    def prepare(self):
        self.attention = th.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, observations):
        tokens = observations.unsqueeze(-1).expand(-1, -1, 4)
        return self.layer(self.attention(tokens).mean(-1))


class Normed(Extractor):
    """With a hook of torch's that sets an attribute before every call."""

    def prepare(self):
        self.layer = th.nn.utils.spectral_norm(self.layer)


def _own(module):
    """The attributes that are not torch's: numbers, generators."""
    return {name: value for name, value in vars(module).items() if isinstance(value, (int, list, np.random.Generator))}


def with_extractor(extractor, **policy_kwargs):
    return {"policy_kwargs": {**SMALL, "features_extractor_class": extractor, **policy_kwargs}}


def assert_plain_takes_over(extractor, capsys):
    algorithm = model(verbose=1, **with_extractor(extractor))
    algorithm.learn(0)
    capsys.readouterr()
    algorithm._updates_since_load = compiled.SWITCH_AFTER
    algorithm.learn(40, reset_num_timesteps=False)
    assert algorithm._n_updates == 30
    printed = capsys.readouterr().out
    assert printed.count("accelerate: plain (") == 1
    return printed


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("extractor", "reason"),
    [
        (Lazy, "Lazy.positions is set in every call: register_buffer"),
        (Counting, "Counting.calls is set in every call"),
        (Collecting, "Collecting.calls is set in every call"),
        (Registering, "a layer changes what its buffer or parameter 'late' is"),
        (Drawing, "random numbers from numpy or python"),
        (Generating, "a layer holds a random generator"),
        (GeneratingAlike, "a layer holds a random generator"),
        (Constrained, "sets `.data` of a parameter or buffer"),
        (Dropping, "the policy draws random numbers"),
        (Branching, "the policy cannot be recorded as one program"),
    ],
)
def test_what_a_program_would_not_repeat_is_declined_and_leaves_the_policy_as_it_was(extractor, reason, capsys):
    algorithm = ready("compiled", **with_extractor(extractor))
    modules = list(algorithm.policy.modules())
    before = [dict(vars(module)) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    held, tensors = copy.deepcopy([_own(module) for module in modules]), weights(algorithm)
    with pytest.raises(CannotAccelerate, match=reason):
        train_on(algorithm, [0])
    assert [vars(module) for module in modules] == before
    assert [module._buffers for module in modules] == buffers
    assert equal([_own(module) for module in modules], held)
    assert largest_difference(weights(algorithm), tensors) == 0
    algorithm.accelerate = "plain"
    train_on(algorithm, range(2))
    assert reason in assert_plain_takes_over(extractor, capsys)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("extractor", [Centered, Normed, Attending])
def test_what_a_program_repeats_is_the_same_on_the_compiled_path(extractor):
    both = pair(**with_extractor(extractor))
    train_each(both, range(4))
    assert_equal(*both, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("recorded")
def test_random_numbers_are_found_in_a_thread_of_its_own_too():
    algorithm = ready("compiled", **with_extractor(Drawing))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CannotAccelerate, match="random numbers from numpy or python"):
        pool.submit(train_on, algorithm, [0]).result()


def test_random_numbers_that_another_thread_draws_are_not_taken_for_a_policys_own(recorded, monkeypatch):
    critic_losses = gradient_step.critic_losses
    monkeypatch.setattr(gradient_step, "critic_losses", lambda *args: np.random.random() and critic_losses(*args))
    algorithm = ready("compiled")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train_on, algorithm, [0]).result()
    assert programs(algorithm) == 2


def test_layers_keep_their_modes_if_another_thread_predicts_while_programs_are_made(recorded, monkeypatch):
    both = pair(**with_extractor(BatchNormed))

    def compile_and_predict(program, inputs, options):
        both[1].policy.set_training_mode(False)
        return program

    monkeypatch.setattr("torch._inductor.compile", compile_and_predict)
    train_each(both, range(4))
    assert programs(both[1]) == 2
    assert_equal(*both, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("recorded")
def test_a_program_is_made_where_torch_searches_gradients_for_nan():
    algorithm = ready("compiled")
    with th.autograd.set_detect_anomaly(True, check_nan=False):
        train_on(algorithm, [0])
    assert programs(algorithm) == 2


@pytest.mark.parametrize("extractor", [Centered, BatchNormed])  # one sets its buffer anew, one changes it in place
def test_buffers_are_put_back_after_an_update_that_is_not_finite(extractor):
    algorithm = ready("plain", **with_extractor(extractor))
    train_on(algorithm, [0])
    before = weights(algorithm)
    held = [id(buffer) for buffer in algorithm.policy.buffers()]
    batch = random_batch(1)
    with pytest.raises(NonFiniteError):
        train(algorithm, [batch._replace(rewards=batch.rewards * th.inf)], first=1)
    assert largest_difference(weights(algorithm), before) == 0
    assert [id(buffer) for buffer in algorithm.policy.buffers()] == held


@pytest.mark.skipif(not compiled.has_compiler(), reason="no C++ compiler on this machine")
def test_layers_whose_program_fails_are_updated_on_the_plain_path(capsys):
    assert "compiling the update failed" in assert_plain_takes_over(Recurrent, capsys)


def test_scripted_layers_are_learned_on_the_path_that_takes_them(recorded):
    algorithm = model(**with_extractor(Scripted)).learn(20)
    algorithm._updates_since_load = compiled.SWITCH_AFTER
    before = [parameter.clone() for parameter in algorithm.critic.features_extractor.layer.parameters()]
    assert algorithm.learn(20, reset_num_timesteps=False)._n_updates == 30
    after = algorithm.critic.features_extractor.layer.parameters()
    assert not any(map(th.equal, before, after))


def test_a_replaced_forward_of_a_layer_stays_with_bf16():
    algorithm = model(LineEnv(), policy_kwargs={"net_arch": [64, 64]}, precision="bf16")
    layer, calls = algorithm.critic.q_networks[0][2], []
    own = layer.forward = lambda values: calls.append(1) or th.nn.Linear.forward(layer, values)
    with precision.bf16_products(precision.hidden_layers(algorithm.policy)):
        assert algorithm.critic.q_networks[1][2].forward is not None
        assert "forward" in vars(algorithm.critic.q_networks[1][2])
    assert layer.forward is own
    algorithm.learn(20)
    assert layer.forward is own
    assert len(calls) >= 10


@pytest.mark.parametrize("n_quantiles", [1, 5])
def test_whole_numbers_as_rewards_are_learned_alike_on_every_path(n_quantiles):
    batches = [batch._replace(rewards=(batch.rewards > 0).long()) for batch in map(random_batch, range(4))]
    both = pair(n_quantiles=n_quantiles, gamma=0.9)
    for algorithm in both:
        train(algorithm, batches)
    assert_equal(*both, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("recorded")
def test_a_batch_that_holds_one_tensor_twice_is_not_taken_for_what_all_hold():
    first, *others = map(random_batch, range(4))
    both = pair()
    for algorithm in both:
        train(algorithm, [first._replace(next_observations=first.observations), *others])
    assert_equal(*both, rtol=1e-4, atol=1e-6)


ADAMS = {
    "adam": {},
    "adam that maximizes": {"optimizer_kwargs": {"maximize": True}},
    "adam that decays weights": {"optimizer_kwargs": {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}},
    "adamw with amsgrad": {
        "optimizer_class": th.optim.AdamW, "optimizer_kwargs": {"weight_decay": 0.1, "amsgrad": True}
    },
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [th.optim.Adam, th.optim.AdamW])
def test_all_options_of_adam_are_known(optimizer):
    """One that a later torch adds belongs into ``_fused_step``."""
    (group,) = optimizer([th.nn.Parameter(th.zeros(1))]).param_groups
    ways = {"foreach", "fused", "capturable", "differentiable"}
    assert group.keys() - ways == {
        "params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"
    }  # fmt: skip


@pytest.mark.parametrize("path", ["plain", "compiled"])
@pytest.mark.parametrize("optimizer", ADAMS.values(), ids=ADAMS)
def test_gradients_in_any_memory_order_move_their_own_weights_as_torchs_optimizer_does(optimizer, path):
    fast, stepwise = (ready(way, **with_extractor(Multiplying, **optimizer)) for way in (path, "plain"))
    for algorithm in (fast, stepwise):
        for network in (algorithm.actor, algorithm.critic):
            group = network.optimizer.param_groups[0]
            network.optimizer.add_param_group({**group, "params": [group["params"].pop()], "weight_decay": 0.5})
            for group in network.optimizer.param_groups if algorithm is stepwise else ():
                group["foreach"] = False  # torch's own, operation by operation
        train_on(algorithm, range(4))
    for name, value in weights(stepwise).items():
        th.testing.assert_close(
            weights(fast)[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("extractor", "name", "values"),
    [
        (Multiplying, "scale", (0.5, np.float64(0.1), np.float32(0.9))),
        (Activating, "function", (th.tanh, th.nn.functional.elu)),
    ],
)
def test_an_edited_attribute_of_a_layer_takes_effect_on_every_path(extractor, name, values):
    models = pair(**with_extractor(extractor))
    for algorithm in models:
        for value in values:
            train_on(algorithm, range(2))
            for network in (algorithm.critic, algorithm.actor):
                setattr(network.features_extractor, name, value)
        train_on(algorithm, range(2, 4))
    assert_equal(*models, atol=1e-5)


def test_moments_of_another_shape_are_refused_as_by_torch():
    algorithm = model()
    train_on(algorithm, range(2))
    layer = algorithm.actor.mu[0]
    layer.weight.data, layer.bias.data = layer.weight[:4].detach().clone(), layer.bias[:4].detach().clone()
    layer_after = algorithm.actor.mu[2].requires_grad_(False)
    layer_after.weight.data = layer_after.weight[:, :4].clone()
    for target, source in zip(algorithm.actor_target.parameters(), algorithm.actor.parameters(), strict=True):
        target.data = source.detach().clone()
    with pytest.raises(RuntimeError, match="The size of tensor"):
        train_on(algorithm, range(2, 4))


@pytest.mark.parametrize("path", ["plain", "compiled"])
def test_weights_that_lie_otherwise_in_memory_than_their_moments_are_updated_alike(path):
    usual, turned = ready(path), ready(path)
    for algorithm in (usual, turned):
        train_on(algorithm, range(2))
        for layer in turned.policy.modules() if algorithm is turned else ():
            if isinstance(layer, th.nn.Linear):
                layer.weight.data = layer.weight.data.T.contiguous().T
        train_on(algorithm, range(2, 4))
    assert_equal(usual, turned)


class Moving(th.optim.SGD):
    """Puts the weights into new memory, as home-made optimizers do."""

    @th.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class Counted(th.optim.SGD):
    """Keeps a number in its state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


class Around:
    """Wraps an optimizer without torch's constructor, as Lookahead does."""

    def __init__(self, parameters, lr):
        self.inner = th.optim.SGD(parameters, lr)
        self.param_groups, self.state, self.zero_grad = self.inner.param_groups, self.inner.state, self.inner.zero_grad
        self.step, self.state_dict, self.load_state_dict = self.inner.step, self.inner.state_dict, self.inner.load_state_dict


class Embedding(Extractor):
    def prepare(self):
        self.layer = th.nn.Embedding(2, 3, sparse=True)

    def forward(self, observations):
        return self.layer((observations[:, 0] > 0).long())


@pytest.mark.parametrize(("optimizer", "extractor"), [(Counted, Extractor), (Around, Extractor), (th.optim.SGD, Embedding)])
def test_optimizers_and_gradients_of_other_kinds_learn_as_with_sb3(optimizer, extractor):
    learner = model(**with_extractor(extractor, optimizer_class=optimizer))
    before = {name: value.clone() for name, value in learner.policy.named_parameters()}
    learner.learn(40)
    moved = [name for name, value in learner.policy.named_parameters() if not th.equal(value, before[name])]
    assert {"actor.features_extractor.layer.weight", "critic.features_extractor.layer.weight"} <= set(moved)
    assert learner.critic.optimizer.state.get("steps", learner._n_updates) == learner._n_updates > 0


class Checkpointed(Extractor):
    reentrant = False

    def forward(self, observations):
        return th.utils.checkpoint.checkpoint(super().forward, observations.requires_grad_(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_twice_to_save_memory_are_trained_unless_reentrant(reentrant):
    algorithm = ready("plain", **with_extractor(type("Own", (Checkpointed,), {"reentrant": reentrant})))
    before = algorithm.critic.features_extractor.layer.weight.detach().clone()
    train_on(algorithm, range(2))
    assert th.equal(algorithm.critic.features_extractor.layer.weight, before) is reentrant


def test_parameters_of_an_optimizer_that_are_not_in_the_policy_are_named():
    algorithm = ready("compiled", **with_extractor(Extractor))
    algorithm.critic.features_extractor = algorithm.actor.features_extractor
    with pytest.raises(CannotAccelerate, match="the critic's optimizer has parameters that are not in the policy"):
        train_on(algorithm, range(1))


@pytest.mark.usefixtures("recorded")
def test_each_update_of_a_series_begins_with_the_weights_of_the_last():
    models = pair(policy_kwargs={"net_arch": [8], "optimizer_class": Moving, "optimizer_kwargs": {}})
    train_each(models, range(6))
    assert_equal(*models)


@pytest.mark.usefixtures("recorded")
def test_a_buffer_that_is_set_anew_goes_on_where_auto_begins_to_compile(monkeypatch):
    monkeypatch.setattr(compiled, "SWITCH_AFTER", 5)
    models = ready("plain", **with_extractor(Centered)), ready("auto", **with_extractor(Centered))
    train_each(models, range(20))
    assert programs(models[1]) == 2
    assert_equal(*models, rtol=1e-4, atol=1e-6)


def test_what_only_the_optimizer_lists_is_trained():
    algorithm = ready("plain", **with_extractor(Activating))
    late = th.nn.Linear(3, 3)
    algorithm.critic.features_extractor.function = lambda values: late(values)
    algorithm.critic.optimizer.add_param_group({"params": list(late.parameters())})
    before = late.weight.detach().clone()
    train_on(algorithm, range(2))
    assert not th.equal(late.weight, before)


def test_a_hook_on_a_gradient_is_called_whatever_the_path():
    algorithm, calls = ready("auto"), []
    algorithm._updates_since_load = compiled.SWITCH_AFTER
    (parameter := next(iter(algorithm.critic.parameters()))).register_hook(calls.append)
    train_on(algorithm, range(2))
    assert len(calls) == 2
    assert parameter.grad is None


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_a_layer_is_called_also_if_it_comes_after_compiling(register, capsys):
    algorithm, calls = ready("auto", verbose=1), []
    algorithm.set_logger(Logger(None, [HumanOutputFormat(sys.stdout)]))
    algorithm._updates_since_load = compiled.SWITCH_AFTER
    train_on(algorithm, range(2))
    assert algorithm._updater.programs_made == 2
    getattr(algorithm.critic.qf0, register)(lambda *_: calls.append(1))
    train_on(algorithm, range(2))
    assert len(calls) >= 2
    assert "accelerate: plain (a layer or a parameter's gradient has a hook" in capsys.readouterr().out


class TestAnOwnKindOfCritic:
    """A few functions, which may hold numbers, or draw some of their own."""

    @pytest.mark.usefixtures("recorded")
    def test_is_learned_on_the_plain_path(self, capsys, monkeypatch):
        drawn, random = [], np.random.default_rng(0)

        def target(values, *rest):
            drawn.append(random.choice(3, size=2, replace=False))  # as in REDQ
            return SCALAR.target([values[number] for number in drawn[-1]], *rest)

        monkeypatch.setattr(ContinuousCritic, "kind", SCALAR._replace(target=target), raising=False)
        learner = model(verbose=1, policy_kwargs={"net_arch": [8], "n_critics": 3}).learn(0)
        learner._updates_since_load = compiled.SWITCH_AFTER
        learner.learn(40, log_interval=None)
        assert len(drawn) == learner._n_updates == 30
        assert "accelerate: plain (the critics are of a kind of their own" in capsys.readouterr().out
        with pytest.raises(CannotAccelerate, match="kind of their own"):
            model(accelerate="compiled")

    def test_has_an_objective_that_sees_what_was_done(self, monkeypatch):
        """As behavior cloning does (TD3+BC)."""
        cloning = SCALAR._replace(actor_objective=lambda critic, batch, actions: -(actions - batch.actions).square())
        monkeypatch.setattr(ContinuousCritic, "kind", cloning, raising=False)
        learner = without_output(model(policy_delay=1, learning_rate=1e-2))
        batch = random_batch(0)

        def distance():
            return (learner.actor(batch.observations) - batch.actions).square().mean().item()

        before = distance()
        train_on(learner, [0] * 200)
        assert distance() < before / 4

    def test_may_hold_its_networks_as_one(self):
        class Own(TD3XPolicy):
            def make_critic(self, features_extractor=None):
                critic = super().make_critic(features_extractor)
                del critic.qf0, critic.qf1
                critic.q_networks = ensemble = critic.ensemble = th.nn.Linear(4, 3)
                critic.forward = lambda *parts: ensemble(th.cat(parts, dim=1)).split(1, dim=1)
                critic.q1_forward = lambda *parts: critic(*parts)[0]
                return critic

        learner = without_output(model(policy=Own))
        before = learner.critic.q_networks.weight.clone()
        train_on(learner, range(2))
        assert not th.equal(learner.critic.q_networks.weight, before)


@pytest.mark.usefixtures("recorded")
def test_batches_larger_than_asked_for_are_compiled():
    class Twice(ReplayBuffer):
        def sample(self, batch_size, env=None):
            return super().sample(2 * batch_size, env)

    assert programs(ready("compiled", replay_buffer_class=Twice).learn(20)) == 2


@pytest.mark.usefixtures("recorded")
def test_an_edited_forward_of_a_class_takes_effect_on_every_path(monkeypatch):
    both = pair(**with_extractor(Extractor))
    train_each(both, range(2))
    monkeypatch.setattr(Extractor, "forward", lambda self, observations: self.layer(observations).tanh())
    train_each(both, range(2, 4))
    assert_equal(*both, rtol=1e-4, atol=1e-6)


def test_a_replaced_step_and_a_hook_of_an_optimizer_are_called_at_every_update():
    algorithm, calls = ready("plain"), []
    step = algorithm.critic.optimizer.step
    algorithm.critic.optimizer.step = lambda *arguments: (calls.append("critic"), step(*arguments))
    algorithm.actor.optimizer.register_step_post_hook(lambda *_: calls.append("actor"))
    train_on(algorithm, range(4))
    assert calls == ["critic", "critic", "actor"] * 2
