"""Prioritized replay draws transitions by their last error, as LAP's paper says."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import replay
from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from sb3_td3x.common.transitions import sample
from sb3_td3x.td3x import compiled, gradient_step
from tests.paths import assert_equal, pair
from tests.reference.prioritized_by_the_paper import largest_errors, priority
from tests.tools import LineEnv, filled, model, reloaded, train_on, without_output

DICTS = spaces.Dict({"position": spaces.Box(-10, 10, (2,))})
ONE_ARRAY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}


class TestBuffer:
    @pytest.mark.parametrize("transitions", [20, 50])
    def test_every_stored_transition_is_sampled_whole_and_no_other(self, transitions):
        own, host = filled(PrioritizedReplayBuffer, transitions), filled(ReplayBuffer, transitions)
        assert (own.pos, own.full, own.size()) == (host.pos, host.full, host.size())

        def rows(samples):
            parts = [part.numpy().reshape(len(samples.rewards), -1) for part in samples if part is not None]
            return {tuple(row) for row in np.concatenate(parts, axis=1)}

        assert rows(own.sample(5000)) == rows(host.sample(5000))

    @pytest.mark.parametrize("clip", [10.0, 0.3])
    def test_normalization_is_that_of_vecnormalize(self, clip):
        env = VecNormalize(DummyVecEnv([LineEnv] * 2), clip_obs=clip, clip_reward=clip)
        env.obs_rms.mean, env.obs_rms.var = np.array([1.0, 2, 3]), np.array([4.0, 5, 6])
        env.ret_rms.var = np.array(7.0)
        buffer = filled(PrioritizedReplayBuffer, 1)
        plain, normalized = buffer.sample(64), buffer.sample(64, env)
        for part in ("observations", "next_observations"):
            expected = {tuple(np.float32(env.normalize_obs(row))) for row in getattr(plain, part).numpy()}
            assert {tuple(row) for row in getattr(normalized, part).numpy()} == expected
        np.testing.assert_allclose(
            np.unique(normalized.rewards.numpy()), env.normalize_reward(np.unique(plain.rewards.numpy())), rtol=1e-6
        )

    # Where one is far above the others, few candidates are kept
    @pytest.mark.parametrize(("transitions", "largest"), [(20, 300.0), (50, 1e9)])
    def test_draws_in_proportion_to_the_priorities(self, transitions, largest):
        buffer = filled(PrioritizedReplayBuffer, transitions)
        errors = th.cat([th.linspace(0, 300, 39), th.tensor([largest])])
        buffer._sampled = np.arange(40) % buffer.size(), np.arange(40) % 2
        buffer.update_priorities(errors)
        np.random.seed(0)
        draws = 40_000
        steps, envs = buffer._draw(draws)
        counts = np.zeros((buffer.size(), 2))
        np.add.at(counts, (steps, envs), 1)
        chances = buffer.priorities[: buffer.size()] / buffer.priorities[: buffer.size()].sum()
        deviations = (counts - draws * chances) / np.sqrt(draws * chances * (1 - chances))
        assert np.abs(deviations).max() < 4.5
        assert chances.max() / chances.min() > 5

    def test_an_error_changes_the_priority_of_its_transition_alone(self):
        buffer = filled(PrioritizedReplayBuffer, 10)
        np.random.seed(1)
        batch = buffer.sample(2)
        buffer.update_priorities(th.tensor([32.0, 0.5]))
        step, env = np.divmod(batch.observations[:, 0].numpy(), 100)
        assert buffer.priorities[int(step[0]), int(env[0])] == pytest.approx(4.0)  # 32 to the power of 0.4
        assert (buffer.priorities != 1).sum() == 1

    def test_new_transitions_have_the_largest_priority_there_is_not_that_of_the_last_batch(self):
        buffer = filled(PrioritizedReplayBuffer, 10)
        for step, error in enumerate((32.0, 2.0)):
            buffer._sampled = np.array([step]), np.array([0])
            buffer.update_priorities(th.tensor([error]))
        add_one(buffer)
        assert buffer.priorities[10] == pytest.approx([4.0, 4.0])  # 32 to the power of 0.4

    def test_a_largest_priority_that_is_gone_is_forgotten(self):
        buffer = filled(PrioritizedReplayBuffer, 10)
        buffer.sample(1)
        buffer.update_priorities(th.tensor([32.0]))
        for _ in range(300):
            buffer._sampled = np.divmod(np.arange(20), 2)
            buffer.update_priorities(th.full((20,), 2.0))
        add_one(buffer)
        assert buffer.priorities[10] == pytest.approx(2**0.4)

    def test_priorities_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match="priorities"):
            replay.set_marks(filled(PrioritizedReplayBuffer, 10), {"priorities": np.ones((10, 3)), "_largest": np.ones(2)})


def add_one(buffer):
    observation = np.zeros((2, 3), np.float32)
    buffer.add(observation, observation, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])


class TestAlgorithm:
    @pytest.mark.parametrize("n_quantiles", [1, 5])
    def test_priorities_follow_the_errors_of_the_last_update(self, n_quantiles):
        algorithm = without_output(model(prioritization="lap", n_quantiles=n_quantiles, target_policy_noise=0.0))
        algorithm.learn(40)
        algorithm.replay_buffer.rewards *= 10
        before, state = copy.deepcopy(algorithm.policy), np.random.get_state()
        batch = sample(algorithm.replay_buffer, 8, None, "update 1")
        place = algorithm.replay_buffer._sampled
        np.random.set_state(state)
        algorithm.train(1, 8)
        target = gradient_step.critic_target(before, batch, th.zeros_like(batch.actions), algorithm._settings_of_update())
        with th.no_grad():
            values = before.critic(batch.observations, batch.actions)
        expected = [priority(error) for error in largest_errors([value.numpy() for value in values], target.numpy())]
        assert max(expected) > 1  # all smaller errors have this one
        np.testing.assert_allclose(algorithm.replay_buffer.priorities[place], expected, rtol=1e-5)

    @pytest.mark.skipif(not compiled.has_compiler(), reason="no C++ compiler on this machine")
    def test_compiled_updates_tell_the_same_errors(self):
        told = {"plain": [], "compiled": []}
        models = pair(prioritization="lap", n_quantiles=5, policy_delay=1)
        for algorithm in models:
            algorithm.replay_buffer.update_priorities = told[algorithm.accelerate].append
            train_on(algorithm, range(4))
        assert_equal(*models)
        assert len(told["compiled"]) == 4
        for plain, fast in zip(*told.values(), strict=True):
            th.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)

    def test_lap_chooses_its_buffer_and_none_leaves_it_to_sb3(self, tmp_path):
        assert type(model(prioritization="lap").replay_buffer) is PrioritizedReplayBuffer
        assert type(model().replay_buffer) is ReplayBuffer
        model(prioritization="lap").learn(30).save(tmp_path / "model")
        assert TD3X.load(tmp_path / "model").replay_buffer_class is PrioritizedReplayBuffer
        assert TD3X.load(tmp_path / "model", prioritization=None).replay_buffer_class is ReplayBuffer

    @pytest.mark.parametrize(
        ("said", "settings"),
        [
            ("for n_steps=1, not 3", {"n_steps": 3}),
            ("not for Dict", {"env": LineEnv(DICTS), "policy": "MultiInputPolicy"}),
            ("leave optimize_memory_usage off", ONE_ARRAY),
            # SB3 would first ask for this to be off
            ("leave optimize_memory_usage off", {**ONE_ARRAY, "replay_buffer_kwargs": {"handle_timeout_termination": True}}),
        ],
    )
    def test_what_has_no_priorities_is_refused(self, said, settings):
        with pytest.raises(ValueError, match=said):
            model(prioritization="lap", **settings)

    def test_lap_needs_a_buffer_with_priorities(self, tmp_path):
        needed = "needs a PrioritizedReplayBuffer"
        for cls in (ReplayBuffer, NStepReplayBuffer, HerReplayBuffer):
            with pytest.raises(ValueError, match=needed):
                model(prioritization="lap", replay_buffer_class=cls)
        without = model().learn(20)
        without.save_replay_buffer(tmp_path / "buffer")
        with pytest.raises(ValueError, match=needed):
            model(prioritization="lap").load_replay_buffer(tmp_path / "buffer")
        without.prioritization = "lap"
        with pytest.raises(ValueError, match=needed):
            without.learn(5, reset_num_timesteps=False)
        replaced = model(prioritization="lap").learn(20)
        replaced.replay_buffer = without.replay_buffer
        with pytest.raises(ValueError, match=needed):
            replaced.train(1)

    def test_a_buffer_with_priorities_needs_lap(self, tmp_path):
        said = 'PrioritizedReplayBuffer needs prioritization="lap", not None'
        with pytest.raises(ValueError, match=said):
            model(replay_buffer_class=PrioritizedReplayBuffer)
        lap = model(prioritization="lap").learn(20)
        lap.save_replay_buffer(tmp_path / "buffer")
        other = model()
        before = other.replay_buffer
        with pytest.raises(ValueError, match=said):
            other.load_replay_buffer(tmp_path / "buffer")
        assert other.replay_buffer is before
        lap.prioritization = None
        with pytest.raises(ValueError, match=said):
            lap.learn(5, reset_num_timesteps=False)

    @pytest.mark.parametrize("cls", [TD3, TD3X])
    def test_lap_asked_for_at_load_brings_its_buffer(self, cls):
        loaded = reloaded(model(cls=cls).learn(20), env=LineEnv(), prioritization="lap").learn(20)
        assert type(loaded.replay_buffer) is PrioritizedReplayBuffer
