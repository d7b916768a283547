"""What goes wrong in SB3 2.9's TD3 after loading, with other environments or with a NaN, goes right here."""

import itertools
import pickle
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
    sync_envs_normalization,
)

from sb3_td3x import TD3X, ModelFileError, NonFiniteError
from sb3_td3x.runs import experiment, play
from tests.commands import prepared
from tests.paths import noise, optimizer_states, ready, train
from tests.tools import (
    LineEnv,
    Spoilt,
    equal,
    feed,
    largest_difference,
    line_envs,
    model,
    random_batch,
    reloaded,
    weights,
    without_observation,
)

PICTURE = spaces.Box(0, 255, (36, 36, 3), np.uint8)


class TestNStepAfterLoad:
    @pytest.fixture(params=[TD3, TD3X])
    def path(self, request, tmp_path):
        model(cls=request.param, n_steps=3, gamma=0.9).learn(40).save(tmp_path / "n_step")
        return tmp_path / "n_step"

    def test_no_warning_about_a_buffer_the_user_never_chose(self, path):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = TD3X.load(path, env=LineEnv())
        assert loaded.replay_buffer.n_steps == 3
        assert loaded.replay_buffer.gamma == 0.9

    def test_other_values_at_load_reach_the_buffer(self, path):
        loaded = TD3X.load(path, env=LineEnv(), n_steps=2, gamma=0.5)
        assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (2, 0.5)
        assert type(TD3X.load(path, env=LineEnv(), n_steps=1).replay_buffer) is ReplayBuffer

    def test_a_buffer_class_given_to_load_is_used(self, path):
        chosen = {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 5, "gamma": 0.7}}
        loaded = TD3X.load(path, env=LineEnv(), n_steps=1, **chosen)
        assert (loaded.replay_buffer.n_steps, loaded.replay_buffer.gamma) == (5, 0.7)
        loaded = TD3X.load(path, env=LineEnv(), n_steps=1, replay_buffer_class=ReplayBuffer)
        assert type(loaded.replay_buffer) is ReplayBuffer
        assert TD3X.load(path, env=LineEnv(), replay_buffer_class=NStepReplayBuffer).replay_buffer.n_steps == 3

    def test_a_discount_edited_between_updates_reaches_the_buffer(self):
        algorithm = model(n_steps=3).learn(40)
        algorithm.gamma = 0.5
        algorithm.train(gradient_steps=1, batch_size=8)
        assert algorithm.replay_buffer.gamma == 0.5

    @pytest.mark.parametrize(("own", "buffers"), [(1, 4), (4, 4), (1, 1)])
    def test_a_buffer_the_user_chose_is_kept(self, own, buffers):
        chosen = {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": buffers, "gamma": 0.8}}
        loaded = reloaded(model(n_steps=own, **chosen).learn(40), env=LineEnv())
        assert loaded.replay_buffer.n_steps == buffers
        assert type(loaded.replay_buffer) is NStepReplayBuffer


class TestLayersAroundVecNormalize:
    """SB3 stores what ``VecNormalize`` saw (its issues #693 and #819)."""

    @pytest.mark.parametrize("around", [lambda env: VecFrameStack(env, 3), VecTransposeImage])
    def test_those_that_change_what_the_actor_sees_are_refused(self, around):
        space = PICTURE if around is VecTransposeImage else None
        inside = DummyVecEnv([lambda: LineEnv(space)])
        algorithm = model(around(VecNormalize(inside, norm_obs=False)), "CnnPolicy" if space else "MlpPolicy")
        with pytest.raises(
            ValueError, match=r"a wrapper around VecNormalize changes observations.* put VecNormalize outermost"
        ):
            algorithm.learn(10)
        assert algorithm.num_timesteps == 0

    def test_inside_of_it_they_are_stored_as_seen(self):
        env = VecNormalize(VecTransposeImage(DummyVecEnv([lambda: LineEnv(PICTURE)])), norm_obs=False)
        algorithm = model(env, "CnnPolicy").learn(12)
        assert algorithm.replay_buffer.observations.shape[2:] == (3, 36, 36)
        assert np.array_equal(algorithm.replay_buffer.next_observations[11, 0], algorithm._last_original_obs[0])

    @pytest.mark.parametrize(("policy", "normalize"), [("CnnPolicy", "{norm_obs: false}"), ("MlpPolicy", "true")])
    def test_the_command_takes_images_that_are_normalized(self, policy, normalize, tmp_path, registered):
        registered("Seen-v0", partial(LineEnv, PICTURE))
        overrides = (f"policy={policy}", f"normalize={normalize}", "learning_starts=10", "buffer_size=100")
        run = prepared(tmp_path, "Seen-v0", overrides, steps=30, eval_freq=20, eval_episodes=1)
        assert experiment.train(run)
        assert run.model.replay_buffer.obs_shape == (3, 36, 36)
        assert np.isfinite(play.evaluate(run.folder, 1, seed=5)).all()


class TestOtherNumberOfEnvironments:
    @pytest.mark.parametrize(
        ("noise", "saved", "loaded"),
        [(0.1, 2, 3), (0.1, 2, 1), (0.1, 1, 2), (OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)), 2, 3)],
    )
    def test_action_noise_fits_after_load(self, noise, saved, loaded):
        again = reloaded(model(line_envs(saved), action_noise=noise).learn(40), env=line_envs(loaded)).learn(40)
        assert np.shape(again.action_noise()) == ((loaded, 1) if loaded > 1 else (1,))

    def test_a_buffer_that_does_not_fit_is_refused_and_the_old_one_kept(self, tmp_path):
        model().learn(40).save_replay_buffer(tmp_path / "buffer")
        for other, said in (
            (model(line_envs(3)), "n_envs=1, but the model has n_envs=3"),
            (model(n_steps=3), "n_steps=1, but the model has n_steps=3"),
            (model(LineEnv(spaces.Box(-10, 10, (5,)))), "observation_space=Box"),
            (model(LineEnv(action_space=spaces.Box(-2, 2, (1,)))), "action_space=Box"),
        ):
            before = other.replay_buffer
            with pytest.raises(ValueError, match=said):
                other.load_replay_buffer(tmp_path / "buffer")
            assert other.replay_buffer is before
        (tmp_path / "dict.pkl").write_bytes(pickle.dumps({}))
        with pytest.raises(ModelFileError, match="no replay buffer"):
            model().load_replay_buffer(tmp_path / "dict.pkl")


class TestRandomGeneratorsAtLoad:
    def states(self):
        return random.getstate(), np.random.get_state()[1].tolist(), th.get_rng_state().tolist()

    def test_load_leaves_the_global_generators_alone(self, tmp_path):
        model(seed=7).learn(40).save(tmp_path / "model")
        random.seed(1), np.random.seed(1), th.manual_seed(1)
        before = self.states()
        TD3X.load(tmp_path / "model", env=(env := DummyVecEnv([LineEnv])))
        assert self.states() == before
        assert env._seeds == [None]

    def test_a_seed_given_to_load_is_used(self, tmp_path):
        model(seed=7).learn(40).save(tmp_path / "model")
        results = []
        for _ in range(2):
            loaded = TD3X.load(tmp_path / "model", env=LineEnv(), seed=3).learn(60)
            results.append(weights(loaded))
        assert largest_difference(*results) == 0

    def test_target_noise_after_sb3s_zip_follows_its_seed(self):
        draws = []
        for seed in (1, 1, 2):
            draws.append(th.randn(5, generator=reloaded(model(cls=TD3, seed=seed).learn(20)).noise_generator))
        assert th.equal(draws[0], draws[1])
        assert not th.equal(draws[0], draws[2])


class TestResumingWithoutTheReplayBuffer:
    @pytest.mark.parametrize("saved_at", [25, 60])
    def test_no_update_until_learning_starts_transitions_are_stored(self, saved_at):
        loaded = reloaded(model(learning_starts=30).learn(saved_at), env=LineEnv())
        updates, before = loaded._n_updates, weights(loaded)
        loaded.learn(29, reset_num_timesteps=False)
        assert loaded._n_updates == updates
        assert largest_difference(weights(loaded), before) == 0
        loaded.learn(20, reset_num_timesteps=False)
        assert loaded._n_updates == updates + 20

    def test_learning_starts_that_is_set_to_later_steps_asks_for_no_more_than_those(self):
        """``model.learning_starts = model.num_timesteps + 5_000`` is what SB3's users write for this."""
        loaded = reloaded(model(learning_starts=30).learn(60), env=LineEnv())
        loaded.learning_starts, updates = loaded.num_timesteps + 15, loaded._n_updates
        assert loaded.learn(30, reset_num_timesteps=False)._n_updates == updates + 15
        assert loaded.learn(30, reset_num_timesteps=False)._n_updates == updates + 45
        again = reloaded(loaded, env=LineEnv())
        assert again.learn(30, reset_num_timesteps=False)._n_updates == updates + 45 + 16

    def test_updates_that_are_asked_for_before_are_made(self):
        collecting = model(learning_starts=100)
        for updates in (5, 10):
            collecting.learn(20, reset_num_timesteps=False).train(5, 8)
            assert collecting._n_updates == updates

    def test_the_policy_acts_meanwhile(self):
        loaded = reloaded(model(learning_starts=30).learn(60), env=LineEnv(), action_noise=None)
        with pytest.warns(UserWarning, match="^no updates yet: the replay buffer lacks learning_starts transitions"):
            loaded.learn(5, reset_num_timesteps=False)
        buffer = loaded.replay_buffer
        expected, _ = loaded.predict(buffer.observations[:5, 0])
        np.testing.assert_allclose(buffer.actions[:5, 0], expected, atol=1e-6)

    def test_with_its_buffer_training_continues_at_once(self, tmp_path):
        saved = model(learning_starts=30).learn(60)
        saved.save(tmp_path / "model"), saved.save_replay_buffer(tmp_path / "buffer")
        loaded = TD3X.load(tmp_path / "model", env=LineEnv())
        loaded.load_replay_buffer(tmp_path / "buffer")
        loaded.learn(5, reset_num_timesteps=False)
        assert loaded._n_updates == saved._n_updates + 5

    def test_a_buffer_smaller_than_learning_starts_only_has_to_be_full(self):
        loaded = reloaded(model(learning_starts=30, buffer_size=20).learn(60), env=LineEnv())
        updates = loaded._n_updates
        loaded.learn(25, reset_num_timesteps=False)
        assert loaded._n_updates == updates + 6


@pytest.mark.parametrize("own_rate", [False, True])
def test_a_schedule_ends_at_its_end_where_the_last_rollout_goes_past_it(own_rate):
    seen = []

    def schedule(progress):
        seen.append(progress)
        return 1e-3 * progress

    rates = {"qf_learning_rate": schedule} if own_rate else {"learning_rate": schedule}
    algorithm = model(train_freq=40, gradient_steps=1, **rates).learn(100)
    assert algorithm.num_timesteps == 120
    assert min(seen) == 0
    assert algorithm.critic.optimizer.param_groups[0]["lr"] == 0


def test_a_schedule_with_a_state_is_called_as_often_as_by_sb3():
    def rate(cls):
        calls = itertools.count(1)
        learner = model(cls=cls, learning_rate=lambda remaining: 1e-3 / next(calls), gradient_steps=2).learn(40)
        return learner.actor.optimizer.param_groups[0]["lr"]

    assert rate(TD3X) == rate(TD3)


def test_a_schedule_that_gives_the_critics_alone_an_invalid_rate_is_refused():
    rates = itertools.repeat(1e-3)
    learner = model(learning_rate=lambda remaining: next(rates))
    rates = itertools.cycle([1e-3, 1e-3, -1.0])  # for the log, the actor and the critics
    with pytest.raises(ValueError, match="learning_rate"):
        learner.learn(20)


@pytest.mark.parametrize(
    "noise",
    [
        NormalActionNoise(np.zeros(1), np.ones(1)),
        OrnsteinUhlenbeckActionNoise(np.zeros(2), np.ones(2)),
        OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(3)),
        NormalActionNoise(np.zeros((3, 1)), np.ones((3, 1))),
        VectorizedActionNoise(NormalActionNoise(np.zeros(1), np.ones(1)), 2),
    ],
)
def test_noise_of_the_wrong_size_is_refused(noise):
    with pytest.raises(ValueError, match=r"action has shape \(3,\)"):
        model(LineEnv(action_space=spaces.Box(-1, 1, (3,))), action_noise=noise)


class TestNotANumber:
    @pytest.mark.parametrize(
        ("where", "spoil"), [("reward", lambda o, _, *rest: (o, np.inf, *rest)), ("observation", without_observation)]
    )
    @pytest.mark.parametrize("normalize", [False, True])
    def test_from_the_environment_is_named_and_kept_out_of_buffer_and_weights(self, where, spoil, normalize):
        env = DummyVecEnv([lambda: Spoilt(31, spoil)])
        algorithm = model(env := VecNormalize(env) if normalize else env)
        with pytest.raises(NonFiniteError, match=rf"{where} is not finite at environment step 31") as raised:
            algorithm.learn(100, lambda *_: not normalize or sync_envs_normalization(env, env) is None)  # as EvalCallback does
        assert isinstance(raised.value, ValueError)
        assert algorithm.replay_buffer.size() == 30
        assert all(value.isfinite().all() for value in weights(algorithm).values())
        if normalize:  # of the reset and 30 steps, and RunningMeanStd's 1e-4
            assert (env.obs_rms.count, env.ret_rms.count) == pytest.approx((31.0001, 30.0001), abs=1e-3)
            assert np.isfinite([*env.obs_rms.mean, *env.obs_rms.var, env.ret_rms.mean, env.ret_rms.var]).all()
        algorithm.learn(100, reset_num_timesteps=False)

    def test_is_kept_out_of_the_statistics_of_two_layers(self):
        inner = VecNormalize(DummyVecEnv([lambda: Spoilt(31, lambda o, _, *rest: (o, np.nan, *rest))]), norm_obs=False)
        with pytest.raises(NonFiniteError, match="reward is not finite"):
            model(VecNormalize(inner, norm_reward=False)).learn(100)
        assert inner.ret_rms.count == pytest.approx(30.0001, abs=1e-3)
        assert np.isfinite(inner.ret_rms.var)

    def test_at_the_reset_is_named_and_the_next_learn_resets_again(self):
        class BrokenAtFirst(LineEnv):
            resets = 0

            def reset(self, **kwargs):
                self.resets += 1
                observation, info = super().reset(**kwargs)
                return np.full_like(observation, np.nan) if self.resets == 1 else observation, info

        algorithm = model(BrokenAtFirst())
        with pytest.raises(NonFiniteError, match="observation is not finite at the reset"):
            algorithm.learn(20)
        assert algorithm.learn(20, reset_num_timesteps=False).num_timesteps == 20

    def test_in_a_terminal_observation_is_named(self):
        algorithm = model(Spoilt(31, without_observation, length=31))
        with pytest.raises(NonFiniteError, match="terminal observation"):
            algorithm.learn(100)

    @pytest.mark.parametrize(
        ("network", "settings"),
        [
            ("actor", {}),
            ("critic", {}),
            ("critic", {"n_quantiles": 5, "policy_delay": 1}),
            ("critic", {"max_grad_norm": 0.05, "policy_delay": 1}),  # an infinite gradient is not scaled to zeros
        ],
    )
    def test_in_an_update_is_named_and_changes_nothing(self, network, settings, path):
        algorithm = ready(path, **settings)
        batches = [random_batch(seed) for seed in range(6)]
        train(algorithm, batches[:2])
        healthy, moments = weights(algorithm), optimizer_states(algorithm)
        if network == "critic":
            batches[2].rewards[3] = np.inf
        else:  # finite in the critics' step, which uses the actor's target only
            algorithm.actor.mu[0].weight.data[0, 0] = healthy["actor.mu.0.weight"][0, 0] = np.inf
            algorithm._n_updates = 3
        first_bad = algorithm._n_updates + 1
        feed(algorithm, batches[2:], [noise(seed) for seed in range(2, 6)])
        with pytest.raises(NonFiniteError, match=f"{network} loss or its gradient is not finite at update {first_bad}"):
            algorithm.train(4, 8)
        assert algorithm._n_updates == first_bad - 1
        assert equal((weights(algorithm), optimizer_states(algorithm)), (healthy, moments))
