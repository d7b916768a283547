"""Every setting of the update changes it, invalid values are refused, and ``1e6`` is a whole number."""

import functools
import math

import pytest
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.utils import LinearSchedule

from sb3_td3x.td3x.gradient_step import UpdateSettings
from tests.tools import Calls, at, largest_difference, model, train_on, weights, without_output

TURNED = {
    "gamma": 0.5,
    "tau": 0.5,
    "target_policy_noise": 0.9,
    "target_noise_clip": 0.05,
    "policy_delay": 1,
    "learning_rate": 1e-2,
    "qf_learning_rate": 1e-2,
    "max_grad_norm": 1e-8,  # of Adam's steps only the length of its epsilon is left
    "top_quantiles_to_drop_per_net": 1,
    "prioritization": "lap",
}
# What else it takes for a setting to matter. Those that are part of a program are tried on one program, that of both networks
BESIDE = {
    "max_grad_norm": {"policy_delay": 1},
    "top_quantiles_to_drop_per_net": {"policy_delay": 1, "n_quantiles": 5},
    "prioritization": {"policy_delay": 1},
}


@functools.cache
def trained(**kwargs):
    """The weights after six updates, made once for all tests that compare with them."""
    algorithm = without_output(model(batch_size=8, **kwargs))
    run(algorithm)
    return weights(algorithm)


def run(algorithm):
    algorithm.replay_buffer.update_priorities = lambda errors: None  # the buffer has not drawn these batches
    train_on(algorithm, range(6))


def test_all_settings_of_the_update_are_tried():
    assert set(UpdateSettings._fields) <= set(TURNED)


@pytest.mark.parametrize("name", TURNED)
def test_turning_it_in_the_constructor_changes_the_update(name, path):
    same = {"accelerate": path, **BESIDE.get(name, {})}
    assert largest_difference(trained(**same), trained(**same, **{name: TURNED[name]})) > 1e-6


@pytest.mark.parametrize("name", sorted(set(TURNED) - {"learning_rate", "prioritization"}))
def test_turning_the_attribute_of_a_built_model_changes_the_update_likewise(name, path):
    same = {"accelerate": path, **BESIDE.get(name, {})}
    algorithm = without_output(model(batch_size=8, **same))
    run(algorithm)
    for kept in ("actor", "critic"):
        getattr(algorithm, kept).optimizer.state.clear()
    algorithm.set_parameters(model(**same).get_parameters())
    algorithm._n_updates = 0
    setattr(algorithm, name, TURNED[name])
    run(algorithm)
    assert largest_difference(weights(algorithm), trained(**same, **{name: TURNED[name]})) == 0


@pytest.mark.parametrize("setting", [{}, {"qf_learning_rate": LinearSchedule(8e-3, 0.0, 1.0)}])
def test_each_rate_follows_its_schedule_and_without_their_own_the_critics_have_the_actors(setting, path):
    algorithm = without_output(model(accelerate=path, learning_rate=lambda progress: progress * 1e-3, **setting))
    algorithm._current_progress_remaining = 0.25
    run(algorithm)
    rates = [network.optimizer.param_groups[0]["lr"] for network in (algorithm.actor, algorithm.critic)]
    assert rates == pytest.approx([2.5e-4, 2e-3 if setting else 2.5e-4])
    logged = [algorithm.logger.name_to_value.get(f"train/{name}") for name in ("learning_rate", "qf_learning_rate")]
    assert logged == [rates[0], rates[1] if setting else None]


WHOLE_WITH_MINIMUM = {
    "buffer_size": 1, "batch_size": 1, "gradient_steps": -1, "n_steps": 1, "policy_delay": 1, "n_quantiles": 1,
    "top_quantiles_to_drop_per_net": 0,
}  # fmt: skip
OF_THE_POLICY = {
    "n_critics": [0],
    **dict.fromkeys(["normalize_images", "normalize_observations", "share_features_extractor"], ("no",)),
    **dict.fromkeys(["activation_fn", "optimizer_class", "features_extractor_class"], ("relu",)),
}
REFUSED = {
    **{name: [least - 1, least + 0.5, math.nan, 10**400, "many"] for name, least in WHOLE_WITH_MINIMUM.items()},
    **dict.fromkeys(["tau", "gamma"], (-0.1, 1.1, math.nan, None)),
    **dict.fromkeys(["target_policy_noise", "target_noise_clip", "action_noise"], (-0.1, math.nan, math.inf)),
    **dict.fromkeys(["learning_rate", "qf_learning_rate"], (-0.1, math.nan, math.inf)),
    "max_grad_norm": [0, math.nan, math.inf, "small", True],
    "train_freq": [1.5, (1, "day"), (1, "step", 3), (0, "episode")],
    "prioritization": ["per", True],
    **dict.fromkeys(["accelerate", "precision"], ("fastest",)),
    **OF_THE_POLICY,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_out_of_range_or_of_another_kind_is_refused_by_name(name):
    for bad in REFUSED[name]:
        with pytest.raises(ValueError, match=f"^{name} must be "):
            model(**({"policy_kwargs": {name: bad}} if name in OF_THE_POLICY else {name: bad}))


@pytest.mark.parametrize("edge", [0, 1])
def test_shares_may_be_all_or_nothing(edge):
    algorithm = model(tau=edge, gamma=edge)
    assert (algorithm.tau, algorithm.gamma) == (edge, edge)


@pytest.mark.parametrize("train_freq", [1.0, (2.0, "step")])
def test_a_whole_number_may_be_written_as_a_float(train_freq):
    numbers = {"buffer_size": 1e3, "batch_size": 16.0, "gradient_steps": 1.0, "policy_delay": 2.0, "n_steps": 2.0}
    algorithm = model(**numbers, learning_starts=1e1, train_freq=train_freq).learn(4e1)
    assert algorithm.num_timesteps == 40
    assert algorithm._n_updates > 0


@pytest.mark.parametrize(("gradient_steps", "updates"), [(1, 30), (3, 90), (-1, 30)])
def test_there_are_as_many_updates_per_step_as_asked_for(gradient_steps, updates):
    assert model(gradient_steps=gradient_steps, learning_starts=10).learn(40)._n_updates == updates


@pytest.mark.parametrize("train_freq", [4, (4, "step"), [4, "step"]])
def test_a_train_freq_set_on_a_model_is_that_of_the_next_run(train_freq):
    algorithm = model(gradient_steps=1).learn(40)
    algorithm.train_freq = train_freq
    assert algorithm.learn(40)._n_updates == 30 + 8  # after steps 12, 16, ..., 40: the warm-up takes 10
    assert model(train_freq=train_freq).learn(40)._n_updates == 8


@pytest.mark.parametrize(("step", "updates"), [(6, 15), (20, 10 + 10)])  # the warm-up takes 10 steps
def test_a_train_freq_set_during_a_run_is_that_of_the_next_rollout(step, updates):
    """SB3 stops with an error about an int without a frequency."""
    halve = at(step, lambda learner: setattr(learner, "train_freq", 2))
    assert model(gradient_steps=1).learn(40, halve)._n_updates == updates


def test_a_train_freq_set_where_training_starts_is_that_of_the_run():
    sets = Calls(_on_training_start=lambda callback: setattr(callback.model, "train_freq", 4))
    assert model(gradient_steps=1).learn(40, sets)._n_updates == 8


@pytest.mark.parametrize(("name", "value", "updates"), [("gradient_steps", 2.0, 9 + 22), ("batch_size", 4.0, 20)])
def test_a_whole_number_set_during_a_run_may_be_a_float(name, value, updates):
    edit = at(20, lambda learner: setattr(learner, name, value))
    assert model(gradient_steps=1).learn(30, edit)._n_updates == updates


@pytest.mark.parametrize("name", ["learning_rate", "qf_learning_rate"])
@pytest.mark.parametrize("bad", [math.nan, -1e-3])
def test_a_schedule_that_gives_an_invalid_rate_stops_the_run_with_its_weights(name, bad):
    algorithm = model(**{name: lambda progress: 1e-3 if progress > 0.5 else bad})
    with pytest.raises(ValueError, match=f"^{name} must"):
        algorithm.learn(40)
    assert algorithm._n_updates == 9  # steps 11 to 19
    assert all(value.isfinite().all() for value in weights(algorithm).values())


INVALID = {
    "learning_rate": -1, "qf_learning_rate": -1, "max_grad_norm": 0, "gamma": 2, "batch_size": 0,
    "precision": "fp16", "accelerate": "fast", "prioritization": "per",
    "n_quantiles": 3, "n_steps": 3, "buffer_size": 10, "optimize_memory_usage": True,
}  # fmt: skip
ADVICE = {"n_quantiles": r"give it to TD3X\(\.\.\.\)$", "buffer_size": r"give it to TD3X\(\.\.\.\) or load$"}


def test_an_invalid_train_freq_is_refused_at_once():
    algorithm = model().learn(20)
    with pytest.raises(ValueError, match="train_freq must"):
        algorithm.train_freq = 0
    assert algorithm.train_freq.frequency == 1


@pytest.mark.parametrize("name", INVALID)
def test_an_edit_to_an_invalid_value_is_refused_at_the_next_learn_and_the_next_update(name):
    algorithm = model().learn(20)
    before = getattr(algorithm, name)
    setattr(algorithm, name, INVALID[name])
    weights_before = weights(algorithm)
    for refused in (lambda: algorithm.learn(20), lambda: algorithm.train(1, 8)):
        with pytest.raises(ValueError, match=f"{name}.*{ADVICE.get(name, '')}"):
            refused()
    assert largest_difference(weights(algorithm), weights_before) == 0
    setattr(algorithm, name, before)
    algorithm.learn(20)


def test_an_edit_to_an_invalid_value_inside_a_run_ends_it_at_the_next_update():
    """A run would otherwise continue until its saved model is refused."""
    algorithm, edit = model(), at(20, lambda learner: setattr(learner, "gamma", 2))
    with pytest.raises(ValueError, match="gamma must be a number between 0 and 1, not 2"):
        algorithm.learn(40, edit)
    assert algorithm.num_timesteps == 20
    assert algorithm._n_updates == 9


def test_n_steps_are_refused_where_the_replay_buffer_has_none():
    with pytest.raises(ValueError, match="ReplayBuffer gives 1-step returns, n_steps=3 is not for it"):
        model(n_steps=3, replay_buffer_class=ReplayBuffer)
    given = {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.9}}
    algorithm = model(gamma=0.5, **given).learn(20)
    assert algorithm.replay_buffer.n_steps == 3  # as SB3 takes it
    assert algorithm.replay_buffer.gamma == 0.5  # a return has one discount, the model's


def test_a_learning_rate_set_on_a_model_is_that_of_the_next_update():
    """SB3 makes its schedule once, so that it ignores a later one."""
    algorithm = model(learning_rate=1e-3).learn(20)
    for rate, used in ((2e-3, 2e-3), (LinearSchedule(4e-3, 0.0, 1.0), 4e-3 * 0.75)):
        algorithm.learning_rate = rate
        algorithm._current_progress_remaining = 0.75
        algorithm.train(1, 8)
        assert algorithm.actor.optimizer.param_groups[0]["lr"] == pytest.approx(used)


def test_the_callers_dictionaries_are_left_as_they_were():
    kwargs, policy_kwargs = {}, {"net_arch": [8]}
    model(n_steps=3, replay_buffer_kwargs=kwargs, policy_kwargs=policy_kwargs)
    assert kwargs == {}
    assert policy_kwargs == {"net_arch": [8]}
