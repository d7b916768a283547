"""Warm-up with random actions, then the actor with Gaussian noise, within the bounds, without asking for it."""

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import EventCallback
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from tests.tools import Calls, LineEnv, at, model, reloaded

LOPSIDED = spaces.Box(np.array([-2.0, 0.0], dtype=np.float32), np.array([1.0, 10.0], dtype=np.float32))


def stored_actions(algorithm):
    size = algorithm.replay_buffer.size()
    return algorithm.replay_buffer.actions[:size].reshape(size, -1)


def greedy_actions(algorithm):
    size = algorithm.replay_buffer.size()
    unscaled, _ = algorithm.predict(algorithm.replay_buffer.observations[:size, 0])
    return algorithm.policy.scale_action(unscaled).reshape(size, -1)


def test_noise_of_a_tenth_of_the_scaled_range_is_the_default():
    algorithm = model(LineEnv(action_space=LOPSIDED), learning_starts=0, gradient_steps=0).learn(900)
    noise = stored_actions(algorithm) - greedy_actions(algorithm)
    assert noise.std(axis=0) == pytest.approx([0.1, 0.1], rel=0.15)
    assert np.abs(stored_actions(algorithm)).max() <= 1
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.2  # each joint has its own


def test_none_and_zero_switch_it_off():
    for off in (None, 0):
        algorithm = model(action_noise=off, learning_starts=0, gradient_steps=0).learn(30)
        assert algorithm.action_noise is None
        np.testing.assert_allclose(stored_actions(algorithm), greedy_actions(algorithm), atol=1e-6)


def test_warm_up_is_uniform_over_the_whole_range():
    algorithm = model(LineEnv(action_space=LOPSIDED), action_noise=None, learning_starts=900, gradient_steps=0).learn(900)
    actions = stored_actions(algorithm)
    assert actions.std(axis=0) == pytest.approx([1 / 3**0.5] * 2, rel=0.1)
    assert np.abs(actions).max() <= 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_number_may_be_set_while_learning(count):
    def decay(callback):
        callback.model.action_noise = 0.0 if callback.num_timesteps > 30 else 0.5

    algorithm = model(DummyVecEnv([LineEnv] * count), action_noise=None, learning_starts=0, gradient_steps=0)
    buffer = algorithm.learn(60, Calls(decay)).replay_buffer
    greedy = [algorithm.predict(observation)[0] for observation in buffer.observations[: buffer.pos]]
    noise = np.abs(buffer.actions[: buffer.pos] - greedy)[..., 0]
    assert noise[0].max() < 1e-6
    assert noise[1 : 30 // count].std(axis=0).min() > 0.1
    assert len(np.unique(noise[2])) == count  # each environment has its own
    assert noise[30 // count + 1 :].max() < 1e-6


@pytest.mark.parametrize("kind", [np.int32, bool])
def test_whole_numbers_as_actions_are_refused(kind):
    with pytest.raises(ValueError, match=r"actions must be real numbers.*TransformAction"):
        model(LineEnv(action_space=spaces.Box(0, 1 if kind is bool else 10, (2,), dtype=kind)))


def test_warm_up_follows_the_first_of_many_short_runs():
    algorithm = model(learning_starts="auto", gradient_steps=0)
    for steps in (6000, 100):
        algorithm.learn(steps, lambda *_: False, reset_num_timesteps=False)
        assert algorithm.learning_starts == 120


def test_a_number_may_be_set_on_a_model_or_at_load():
    algorithm = model()
    algorithm.action_noise = 0.05
    algorithm.learn(20)
    assert isinstance(algorithm.action_noise, NormalActionNoise)
    np.testing.assert_array_equal(algorithm.action_noise._sigma, [0.05])
    np.testing.assert_array_equal(reloaded(algorithm, action_noise=0.2).action_noise._sigma, [0.2])


class Counting(OrnsteinUhlenbeckActionNoise):
    """Correlated noise that keeps what it has given, and must not be copied, as if it held a model with its buffer."""

    def __init__(self):
        super().__init__(np.zeros(1), 0.3 * np.ones(1))
        self.given = []

    def __call__(self):
        self.given.append(float(super().__call__()[0]))
        return np.array(self.given[-1:], np.float32)

    def __deepcopy__(self, memo):
        raise AssertionError("the noise was copied")


class TestNoiseOfTheUsersOwn:
    def test_correlated_noise_continues_inside_an_episode_however_often_learn_is_called(self):
        """SB3 restarts it with every ``learn``: a standard deviation of 0.55 becomes 0.07 in calls of 10 steps."""
        values = {}
        for steps in (600, 10, 1):
            algorithm = model(LineEnv(length=10**9), action_noise=Counting(), learning_starts=0, gradient_steps=0)
            for _ in range(600 // steps):
                algorithm.learn(steps, reset_num_timesteps=False)
            values[steps] = algorithm.action_noise.given
        assert values[600] == values[10] == values[1]
        assert len(values[1]) == 600

    def test_one_that_a_callback_sets_continues_too(self):
        def learned(*parts):
            algorithm = model(LineEnv(length=10**9), action_noise=0.1, learning_starts=0, gradient_steps=0)
            noise = Counting()
            change = EventCallback()
            change._on_step = lambda: change.n_calls != 10 or setattr(algorithm, "action_noise", noise) is None
            for steps in parts:
                algorithm.learn(steps, change, reset_num_timesteps=False)
            return noise.given

        assert learned(30) == learned(15, 15)

    def test_one_that_is_made_for_several_environments_is_used_for_one_too(self):
        class Half(VectorizedActionNoise):
            def __call__(self):
                return super().__call__() / 2

        noise = Half(NormalActionNoise(np.zeros(1), np.ones(1)), 1)
        assert model(action_noise=noise).learn(30).action_noise is noise

    def test_one_that_is_drawn_in_another_way_is_not_judged_by_the_numbers_of_its_class(self):
        class First(NormalActionNoise):
            def __call__(self):
                return super().__call__()[:1]

        class Bare(NormalActionNoise):
            def __init__(self):
                ActionNoise.__init__(self)

            def __call__(self):
                return np.zeros(1)

        for noise in (First(np.zeros(2), np.ones(2)), Bare()):
            assert model(action_noise=noise).learn(30).action_noise is noise

    def test_a_callback_finds_it_where_learn_begins(self):
        def anneal(callback):
            found.append(callback.model.action_noise)
            callback.model.action_noise = None

        algorithm, found = model(action_noise=(noise := NormalActionNoise(np.zeros(1), np.ones(1)))), []
        algorithm.learn(5).learn(5, Calls(_init_callback=anneal), reset_num_timesteps=False)
        assert found == [noise]
        assert algorithm.action_noise is None
        assert "reset" not in vars(noise)

    def test_correlated_noise_starts_again_with_an_episode_and_with_a_run(self):
        algorithm = model(LineEnv(length=20), action_noise=Counting(), learning_starts=0, gradient_steps=0).learn(30)
        assert max(abs(algorithm.action_noise.given[step]) for step in (0, 20)) < 0.15  # one step from 0
        algorithm.action_noise.noise_prev = np.array([9.0])
        algorithm.learn(1)
        assert abs(algorithm.action_noise.given[-1]) < 0.15

    def test_it_starts_again_where_a_callback_has_reset_the_environment(self):
        def use(learner):
            learner.action_noise.noise_prev = np.array([9.0])
            learner.env.reset()

        algorithm = model(LineEnv(length=10**9), action_noise=Counting(), learning_starts=0, gradient_steps=0)
        assert abs(algorithm.learn(40, at(30, use)).action_noise.given[30]) < 0.15

    def test_several_environments_keep_theirs_too(self):
        count = 2
        noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1))
        env = DummyVecEnv([lambda: LineEnv(length=10**9)] * count)
        algorithm = model(env, action_noise=noise, learning_starts=0, gradient_steps=0).learn(10 * count)
        before = [float(noise.noise_prev[0]) for noise in algorithm.action_noise.noises]
        assert all(before)
        algorithm.learn(0, reset_num_timesteps=False)
        assert [float(noise.noise_prev[0]) for noise in algorithm.action_noise.noises] == before

    def test_it_is_neither_called_nor_copied_before_it_acts(self):
        algorithm = model(action_noise=Counting())
        assert algorithm.action_noise.given == []
        algorithm.learn(30)
        assert len(algorithm.action_noise.given) == 30


class TestAutomaticLearningStarts:
    @pytest.mark.parametrize(("total", "starts"), [(1_000, 100), (10_000, 200), (5e6, 10_000)])
    def test_is_two_percent_of_the_run_within_limits(self, total, starts):
        algorithm = model(learning_starts="auto")
        assert algorithm.learning_starts == 100
        algorithm._setup_learn(int(total))
        assert algorithm.learning_starts == starts

    def test_is_kept_when_a_run_continues_and_resolved_again_for_a_new_one(self):
        algorithm = model(learning_starts="auto")
        algorithm._setup_learn(20_000)
        assert algorithm.learning_starts == 400
        algorithm.num_timesteps = 20_000
        algorithm._setup_learn(1_000, reset_num_timesteps=False)
        assert algorithm.learning_starts == 400
        loaded = reloaded(algorithm, env=LineEnv())
        assert loaded.learning_starts == 400
        loaded._setup_learn(50_000)
        assert loaded.learning_starts == 1_000

    @pytest.mark.parametrize("bad", [-1, 0.5, None])
    def test_an_invalid_value_is_refused(self, bad):
        with pytest.raises(ValueError, match="learning_starts"):
            model(learning_starts=bad)
        with pytest.raises(ValueError, match="learning_starts"):
            model().learning_starts = bad

    def test_a_number_set_later_wins(self, tmp_path):
        algorithm = model(learning_starts="auto")
        algorithm.learning_starts = 7
        algorithm._setup_learn(500_000)
        assert algorithm.learning_starts == 7
        algorithm.save(tmp_path / "model")
        loaded = TD3X.load(tmp_path / "model", env=LineEnv(), learning_starts=9)
        loaded._setup_learn(500_000)
        assert loaded.learning_starts == 9
        again = TD3X.load(tmp_path / "model", env=LineEnv(), learning_starts="auto")
        assert again.learning_starts == 100
        again._setup_learn(500_000)
        assert again.learning_starts == 10_000
