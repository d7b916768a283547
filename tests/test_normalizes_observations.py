"""``normalize_observations``: the statistics are those of the observations that were stored, and travel with the policy."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.td3x import normalizer
from sb3_td3x.td3x.normalizer import ObservationNormalizer, RunningMoments
from tests.paths import ready
from tests.tools import SMALL, LineEnv, feed, largest_difference, line_envs, model, random_batch, weights, without_output

NORMALIZED = {"policy_kwargs": {**SMALL, "normalize_observations": True}}
DICT = spaces.Dict({"vector": spaces.Box(-10, 10, (2,)), "image": spaces.Box(0, 255, (36, 36, 1), np.uint8)})


def stored(algorithm):
    buffer = algorithm.replay_buffer
    return buffer.observations[: buffer.size()].reshape(-1, *buffer.obs_shape)


class TestStatistics:
    def test_are_those_of_the_whole_history_not_of_the_last_batches(self):
        random, moments = np.random.default_rng(0), RunningMoments((2,))
        batches = [random.normal([3, -50], [2, 9], size=(n, 2)) for n in (1, 7, 1, 30)]
        sb3 = RunningMeanStd(shape=(2,))
        for batch in batches:
            moments.update(batch)
            sb3.update(batch)
        np.testing.assert_allclose(moments.mean, sb3.mean, rtol=1e-12)
        np.testing.assert_allclose(moments.var, sb3.var, rtol=1e-12)
        np.testing.assert_allclose(moments.mean, np.concatenate(batches).mean(0), rtol=1e-4)  # SB3 starts with a count of 1e-4

    def test_the_millionth_observation_still_counts(self):
        moments = RunningMoments((1,))
        moments.update(np.zeros((10**6, 1)))
        before = moments.mean.clone()
        moments.update(np.ones((1, 1)))
        assert moments.mean - before == pytest.approx(1e-6, rel=1e-4)

    @pytest.mark.parametrize("n_envs", [1, 3])
    def test_are_those_of_the_stored_observations(self, n_envs):
        env = DummyVecEnv([lambda: LineEnv()] * n_envs)
        algorithm = model(env, **NORMALIZED).learn(60)
        moments = algorithm.policy.normalizer.moments[0]
        np.testing.assert_allclose(moments.mean, stored(algorithm).mean(0), rtol=1e-3)
        np.testing.assert_allclose(moments.var, stored(algorithm).var(0), rtol=1e-2)

    def test_do_not_move_in_predict(self):
        algorithm = model(**NORMALIZED).learn(30)
        before = weights(algorithm)
        algorithm.predict(np.ones((5, 3)))
        assert largest_difference(weights(algorithm), before) == 0

    @pytest.mark.parametrize(
        ("space", "normalizes"),
        [(None, False), (spaces.Dict({"vector": spaces.Box(-10, 10, (2,))}), True)],
        ids=["flat", "Dict"],
    )
    def test_of_a_buffer_that_this_model_has_not_filled_are_counted_before_the_first_update(self, space, normalizes, tmp_path):
        def build():
            env = DummyVecEnv([lambda: LineEnv(space)] * 2)
            env = VecNormalize(env) if normalizes else env
            if normalizes:
                env.obs_rms = {"vector": shifted((2,))} if space else shifted((3,))
            return model(env, "MultiInputPolicy" if space else "MlpPolicy", buffer_size=100, **NORMALIZED)

        def shifted(shape):
            moments = RunningMeanStd(shape=shape)
            moments.mean, moments.var = np.full(shape, 9.0), np.full(shape, 4.0)
            return moments

        build().learn(80).save_replay_buffer(tmp_path / "buffer")
        algorithm = without_output(build())
        algorithm.load_replay_buffer(tmp_path / "buffer")
        algorithm.train(1, 8)
        buffer, moments = algorithm.replay_buffer, algorithm.policy.normalizer.moments[0]
        values = (buffer.observations["vector"] if space else buffer.observations)[: buffer.size()].reshape(80, -1)
        expected = (values - 9) / 2 if normalizes else values
        np.testing.assert_allclose(moments.mean, expected.mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(moments.var, expected.var(0), rtol=1e-3)
        before = weights(algorithm)
        algorithm.policy.normalizer.count_stored(algorithm.replay_buffer, algorithm.get_vec_normalize_env())  # once
        assert largest_difference(weights(algorithm), before) == 0

    def test_of_a_buffer_that_is_counted_in_parts_are_those_of_all(self, monkeypatch):
        monkeypatch.setattr(normalizer, "CHUNK", 15)
        algorithm = model(line_envs(2), **NORMALIZED).learn(60)  # fewer than the buffer holds
        algorithm.replay_buffer = model(line_envs(2), seed=1).learn(80).replay_buffer
        algorithm.policy.normalizer.count_stored(algorithm.replay_buffer, None)
        moments = algorithm.policy.normalizer.moments[0]
        assert moments.count == pytest.approx(80, abs=1e-3)
        np.testing.assert_allclose(moments.mean, stored(algorithm).mean(0), rtol=1e-4)

    def test_of_a_buffer_that_was_loaded_count_with_those_seen_since(self, tmp_path):
        model().learn(40).save_replay_buffer(tmp_path / "buffer")
        algorithm = model(**NORMALIZED, learning_starts=0)
        algorithm.load_replay_buffer(tmp_path / "buffer")
        algorithm.learn(20)
        np.testing.assert_allclose(algorithm.policy.normalizer.moments[0].mean, stored(algorithm).mean(0), rtol=1e-3)


class TestNetworks:
    def test_all_four_see_the_normalized_observation(self):
        """Equal to a policy without normalization that is given the normalized observation."""
        algorithm, plain = model(**NORMALIZED), model()
        normalizer = algorithm.policy.normalizer
        normalizer.update(np.array([[1.0, 2.0, -3.0], [5.0, 2.5, -1.0], [4.0, 2.0, 0.0]], np.float32))
        raw, action = th.tensor([[2.0, 2.2, -9.0]]), th.tensor([[0.3]])
        scaled = ((raw - normalizer.moments[0].mean) / (normalizer.moments[0].var + 1e-8).sqrt()).float()
        for name in ("actor", "actor_target"):
            th.testing.assert_close(getattr(algorithm, name)(raw), getattr(plain, name)(scaled))
        for name in ("critic", "critic_target"):
            th.testing.assert_close(getattr(algorithm, name)(raw, action), getattr(plain, name)(scaled, action))

    def test_far_values_are_clipped_like_vecnormalizes(self):
        moments = RunningMoments((1,))
        moments.update(np.array([[0.0], [1.0]]))
        assert moments(th.tensor([[1e6], [-1e6]])).flatten().tolist() == [10, -10]

    @pytest.mark.parametrize("shares", [False, True])
    def test_one_normalizer_serves_them_all_and_updates_leave_it_alone(self, shares):
        kwargs = {"policy_kwargs": {**SMALL, "normalize_observations": True, "share_features_extractor": shares}}
        algorithm = without_output(model(tau=0.5, **kwargs))
        algorithm.policy.normalizer.update(np.random.default_rng(0).normal(3, 2, size=(50, 3)))
        before = algorithm.policy.normalizer.moments[0].mean.clone()
        feed(algorithm, [random_batch(seed, 8) for seed in range(4)], [th.zeros(8, 1)] * 4)
        algorithm.train(4, batch_size=8)
        networks = (algorithm.actor, algorithm.actor_target, algorithm.critic, algorithm.critic_target)
        assert len({id(network.features_extractor.normalizer) for network in networks}) == 1
        th.testing.assert_close(algorithm.policy.normalizer.moments[0].mean, before, rtol=0, atol=0)

    def test_compiled_updates_see_statistics_that_have_moved(self):
        outcomes = []
        for path in ("plain", "compiled"):
            algorithm = ready(path, policy_delay=1, **NORMALIZED)  # one program
            for seed in range(3):
                algorithm.policy.normalizer.update(np.random.default_rng(seed).normal(3, 2 + seed, size=(50, 3)))
                feed(algorithm, [random_batch(seed, 8), random_batch(seed + 9, 8)], [th.zeros(8, 1)] * 2)
                before = algorithm.policy.normalizer.moments[0].mean.clone()
                algorithm.train(2, batch_size=8)
                assert th.equal(algorithm.policy.normalizer.moments[0].mean, before)
            outcomes.append(weights(algorithm))
        assert largest_difference(*outcomes) < 1e-5


class TestObservationSpaces:
    def test_vectors_of_a_dict_are_normalized_and_images_pass(self):
        normalizer = ObservationNormalizer(DICT)
        assert normalizer.keys == ["vector"]
        algorithm = model(
            LineEnv(DICT), "MultiInputPolicy", policy_kwargs={"net_arch": [8], "normalize_observations": True}, buffer_size=50
        ).learn(20)
        observation = {key: algorithm.replay_buffer.observations[key][:20, 0] for key in DICT.spaces}
        np.testing.assert_allclose(
            algorithm.policy.normalizer.moments[0].mean, observation["vector"].mean(0), rtol=1e-3, atol=1e-4
        )

    def test_goals_that_hindsight_replay_puts_in_place_of_the_desired_ones_are_not_clipped(self):
        """Such as the height of an object that is always to lie on the table, and that is lifted."""
        normalizer = ObservationNormalizer(spaces.Dict({"achieved_goal": DICT["vector"], "desired_goal": DICT["vector"]}))
        achieved = np.array([[0.3, 0.7], [0.1, 0.4]])
        normalizer.update({"achieved_goal": achieved, "desired_goal": np.array([[0.0, 0.5], [0.0, 0.1]])})
        np.testing.assert_allclose(normalizer.moments[1].mean, [0.1, 0.425], rtol=1e-3)
        assert normalizer({"achieved_goal": th.zeros(2, 2), "desired_goal": th.as_tensor(achieved)})["desired_goal"].max() < 2

    @pytest.mark.parametrize("images", [spaces.Box(0, 255, (36, 36, 1), np.uint8), spaces.Box(0, 1, (1, 36, 36))])
    def test_an_observation_without_vectors_is_refused(self, images):
        settings = {"normalize_observations": True, "normalize_images": images.dtype == np.uint8}
        with pytest.raises(ValueError, match="normalize_observations is for vectors, and there are none"):
            model(LineEnv(images), "CnnPolicy", buffer_size=10, policy_kwargs=settings)


def test_a_loaded_model_predicts_alike_without_its_environment(tmp_path):
    algorithm = model(**NORMALIZED).learn(40)
    algorithm.save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model")
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(observations)[0], algorithm.predict(observations)[0])
    assert loaded.policy.normalizer is loaded.critic_target.features_extractor.normalizer
