"""Memory is taken when it is filled, and a layer's mode is switched only where it matters."""

import gc
import weakref

import psutil
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from tests.tools import SMALL, LineEnv, filled, model, reloaded


def resident_megabytes():
    return psutil.Process().memory_info().rss / 1e6


def test_a_replay_buffer_takes_its_memory_as_it_fills_also_after_loading():
    env = LineEnv(spaces.Box(-10, 10, (1000,)))
    before = resident_megabytes()
    large = model(env, buffer_size=250_000, policy_kwargs={"net_arch": [2]})  # 2 GB when full
    loaded = reloaded(large, env=env)
    loaded.predict(env.reset(seed=0)[0])
    assert loaded.replay_buffer.observations.nbytes == 1_000_000_000
    assert resident_megabytes() - before < 100


def test_a_replay_buffer_that_was_only_trained_on_goes_with_its_model():
    algorithm = model()
    algorithm.replay_buffer = filled(ReplayBuffer, transitions=16, n_envs=1)
    algorithm.train(gradient_steps=2, batch_size=8)
    buffer = weakref.ref(algorithm.replay_buffer)
    gc.disable()
    try:
        del algorithm
        assert buffer() is None
    finally:
        gc.enable()


def walks(algorithm, monkeypatch):
    """Number of times that a whole network is walked over to set its mode, in 20 steps with updates."""
    algorithm.learn(40)
    count = [0]
    train = th.nn.Module.train
    monkeypatch.setattr(
        th.nn.Module, "train", lambda self, mode=True: (count.__setitem__(0, count[0] + 1), train(self, mode))[1]
    )
    algorithm.learn(20, reset_num_timesteps=False)
    return count[0]


def has_modes_in_learn(algorithm):
    seen = []
    algorithm.learn(20, lambda *_: seen.append(algorithm.policy.has_modes) or True)
    return seen[-1]


def test_modes_are_switched_only_where_a_layer_has_them(monkeypatch):
    assert walks(model(), monkeypatch) == 0


def test_unknown_layers_are_in_training_mode_during_updates(monkeypatch):
    modes = []

    class Own(th.nn.Tanh):
        def forward(self, values):
            modes.append(self.training)
            return super().forward(values)

    algorithm = model(policy_kwargs={**SMALL, "activation_fn": Own})
    algorithm.learn(30)
    modes.clear()
    algorithm.train(1, 8)
    assert True in modes
    modes.clear()
    algorithm.predict(LineEnv().reset(seed=0)[0])
    assert set(modes) == {False}
    assert walks(algorithm, monkeypatch) > 0


def test_a_layer_that_is_exchanged_later_is_noticed_by_the_next_learn():
    algorithm = model()
    assert not has_modes_in_learn(algorithm)
    algorithm.actor.mu[1] = th.nn.Dropout(0.1)
    assert has_modes_in_learn(algorithm)


def test_a_layer_that_is_exchanged_after_learn_acts_in_evaluation_mode():
    algorithm = model().learn(20)
    algorithm.actor.mu.insert(2, th.nn.Dropout(0.5))
    algorithm.actor.train()
    observation = LineEnv().reset(seed=0)[0]
    assert len({float(algorithm.predict(observation, deterministic=True)[0][0]) for _ in range(8)}) == 1


def test_a_forward_of_the_users_is_noticed_by_the_next_learn():
    algorithm = model()
    layer = algorithm.actor.mu[1]
    layer.forward = lambda values: th.nn.functional.dropout(values, 0.1, layer.training)
    assert has_modes_in_learn(algorithm)
