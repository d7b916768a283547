"""Spaces, buffers, wrappers, optimizers and callbacks of SB3: each trains, and does with TD3X what it is for."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common import callbacks as sb3_callbacks
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from sb3_td3x import TD3X
from tests.tools import Calls, LineEnv, Samples, largest_difference, model, weights

IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
DICTIONARY = spaces.Dict({"position": spaces.Box(-10, 10, (2,)), "speed": spaces.Box(-10, 10, (3,))})


def trains(algorithm, steps=40):
    """Train, and check that every network has moved and stayed finite."""
    before = weights(algorithm)
    algorithm.learn(steps)
    after = weights(algorithm)
    assert algorithm.num_timesteps >= steps
    assert algorithm._n_updates > 0
    for network in ("actor.", "critic.", "actor_target.", "critic_target."):
        moved = [name for name in before if name.startswith(network) and not th.equal(before[name], after[name])]
        assert moved, f"{network} did not move"
    assert all(value.isfinite().all() for value in after.values())
    return algorithm


@pytest.mark.parametrize(
    ("policy", "space", "extractor", "buffer"),
    [
        ("MlpPolicy", spaces.Box(-10, 10, (4,)), FlattenExtractor, ReplayBuffer),
        ("MlpPolicy", spaces.Box(-10, 10, (2, 3), np.float64), FlattenExtractor, ReplayBuffer),
        ("CnnPolicy", IMAGE, NatureCNN, ReplayBuffer),
        ("MultiInputPolicy", DICTIONARY, CombinedExtractor, DictReplayBuffer),
        ("MultiInputPolicy", spaces.Dict({"image": IMAGE, "v": spaces.Box(-1, 1, (2,))}), CombinedExtractor, DictReplayBuffer),
    ],
)
@pytest.mark.parametrize("n_quantiles", [1, 5])
def test_observations(policy, space, extractor, buffer, n_quantiles):
    small = {"net_arch": [8], **({"features_extractor_kwargs": {"features_dim": 8}} if policy == "CnnPolicy" else {})}
    algorithm = trains(model(LineEnv(space), policy, policy_kwargs=small, buffer_size=60, n_quantiles=n_quantiles), 30)
    assert type(algorithm.actor.features_extractor) is extractor
    assert type(algorithm.replay_buffer) is buffer


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounds", [([0.0, 0.0], [0.1, 0.1]), ([-1.0, -2.0], [3.0, 2.5]), ([[-1.0] * 3] * 2, [[1.0] * 3] * 2)])
def test_actions_stay_in_any_box(bounds, dtype):
    space = spaces.Box(*(np.asarray(bound, dtype) for bound in bounds), dtype=dtype)
    seen = []

    class Watched(LineEnv):
        def step(self, action):
            seen.append(action)
            assert self.action_space.contains(action.astype(self.action_space.dtype))
            return super().step(action)

    algorithm = trains(model(Watched(action_space=space), action_noise=0.5))
    assert seen[0].shape == space.shape
    assert algorithm.replay_buffer.actions.dtype == np.float32
    assert np.abs(algorithm.replay_buffer.actions).max() <= 1
    assert algorithm.predict(np.ones(3, np.float32))[0].shape == space.shape


@pytest.mark.parametrize(("low", "high"), [([-1.0, 1.0], [1.0, 1.0]), ([-1.0, -3e38], [1.0, 3e38]), (-1.0, 1.0)])
def test_bounds_that_cannot_be_scaled_are_refused(low, high):
    space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    with pytest.raises(ValueError, match="each a finite range above 0"):
        model(LineEnv(action_space=space))


def test_a_frozen_actor_stays_while_the_critics_learn():
    algorithm = model()
    algorithm.actor.requires_grad_(False)
    before = weights(algorithm)
    algorithm.learn(40)
    moved = {name.split(".")[0] for name, value in weights(algorithm).items() if not th.equal(value, before[name])}
    assert moved == {"critic", "critic_target"}


def test_training_until_a_callback_stops_it():
    algorithm = model(accelerate="plain").learn(float("inf"), callback=sb3_callbacks.StopTrainingOnMaxEpisodes(2))
    assert algorithm.num_timesteps == 40


@pytest.mark.parametrize("vec_env", [DummyVecEnv, SubprocVecEnv, lambda makers: VecFrameStack(DummyVecEnv(makers), 2)])
def test_several_environments_and_as_many_updates_as_steps(vec_env):
    env = vec_env([LineEnv, LineEnv])
    algorithm = trains(model(env, gradient_steps=-1))
    # Warm-up of 10 steps is 5 rounds of two; each later round of two steps makes two updates
    assert (algorithm.num_timesteps, algorithm._n_updates) == (40, 30)
    env.close()


def test_vec_normalize_stores_raw_and_trains_on_normalized():
    env = VecNormalize(DummyVecEnv([LineEnv]), norm_reward=False)
    algorithm = model(env)
    buffer, batches = algorithm.replay_buffer, []
    sample = buffer.sample
    buffer.sample = lambda *args, **kwargs: batches.append(sample(*args, **kwargs)) or batches[-1]
    trains(algorithm)
    raw = buffer.observations[: buffer.size(), 0]
    assert np.abs(raw).max() < 2
    assert len(batches) == algorithm._n_updates
    assert max(batch.observations.abs().max().item() for batch in batches) > np.abs(raw).max()


@pytest.mark.parametrize("n_envs", [1, 2])
def test_hindsight_replay(n_envs):
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=True)] * n_envs)
    algorithm = model(
        env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs={"n_sampled_goal": 2},
        learning_starts=20,
    )  # fmt: skip
    trains(algorithm, 60)
    assert isinstance(algorithm.replay_buffer, HerReplayBuffer)


@pytest.mark.parametrize("train_freq", [4, (4, "step"), (1, "episode")])
def test_train_frequencies_with_as_many_updates_as_steps(train_freq):
    algorithm = trains(model(train_freq=train_freq, gradient_steps=-1), 60)
    # Training starts at the first multiple of 4, or the first episode's end (20 steps), past 10 steps
    assert algorithm._n_updates == (52 if train_freq != (1, "episode") else 60)


class Extractor(BaseFeaturesExtractor):
    """With batch norm, layer norm, dropout, a parameter that is never used and one that is frozen."""

    def __init__(self, space, width=5):
        super().__init__(space, width)
        size = space.shape[0]
        norms = th.nn.BatchNorm1d(width), th.nn.LayerNorm(width)
        self.net = th.nn.Sequential(th.nn.Linear(size, width), *norms, th.nn.Dropout(0.1), th.nn.ReLU())
        self.unused = th.nn.Parameter(th.ones(1))
        self.frozen = th.nn.Parameter(th.ones(1), requires_grad=False)

    def forward(self, observations):
        return self.net(observations) * self.frozen


@pytest.mark.parametrize("shared", [False, True])
def test_custom_extractor_with_batch_norm_and_dropout(shared):
    kwargs = {"net_arch": [8], "features_extractor_class": Extractor, "share_features_extractor": shared}
    algorithm = trains(model(policy_kwargs=kwargs, n_quantiles=5 if shared else 1))
    extractor = algorithm.actor.features_extractor
    assert (algorithm.critic.features_extractor is extractor) is shared
    assert extractor.frozen.item() == extractor.unused.item() == 1
    statistics = extractor.net[1].running_mean.clone()
    assert statistics.abs().max() > 0
    observation = np.ones((3, 3), np.float32)
    np.testing.assert_array_equal(algorithm.predict(observation)[0], algorithm.predict(observation)[0])  # no dropout
    assert th.equal(extractor.net[1].running_mean, statistics)  # acting does not move them


@pytest.mark.parametrize(("net_arch", "n_critics"), [([], 1), ([4], 3), ({"pi": [6], "qf": [8, 4]}, 3)])
def test_network_shapes(net_arch, n_critics):
    algorithm = trains(model(policy_kwargs={"net_arch": net_arch, "n_critics": n_critics}))
    assert len(algorithm.critic.q_networks) == n_critics


def test_default_networks_are_the_papers():
    algorithm = model(policy_kwargs=None)
    assert [layer.out_features for layer in algorithm.actor.mu if isinstance(layer, th.nn.Linear)] == [400, 300, 1]
    for critic in algorithm.critic.q_networks:
        assert [layer.out_features for layer in critic if isinstance(layer, th.nn.Linear)] == [400, 300, 1]


def test_sb3s_callbacks(tmp_path):
    evaluation = sb3_callbacks.EvalCallback(
        Monitor(LineEnv()), eval_freq=20, n_eval_episodes=2, verbose=0,
        best_model_save_path=str(tmp_path), log_path=str(tmp_path),
        callback_on_new_best=sb3_callbacks.StopTrainingOnRewardThreshold(1e9),
    )  # fmt: skip
    calls = []
    several = sb3_callbacks.CallbackList(
        [
            evaluation,
            sb3_callbacks.CheckpointCallback(20, str(tmp_path), save_replay_buffer=True),
            sb3_callbacks.EveryNTimesteps(10, sb3_callbacks.LogEveryNTimesteps(10)),
            sb3_callbacks.StopTrainingOnMaxEpisodes(3),
        ]
    )
    algorithm = model().learn(100, callback=[several, sb3_callbacks.ConvertCallback(lambda _, __: calls.append(1) or True)])
    assert algorithm.num_timesteps == 60  # three episodes of 20
    assert len(calls) == 60
    assert (tmp_path / "best_model.zip").exists()
    with np.load(tmp_path / "evaluations.npz") as archive:
        assert archive["timesteps"].tolist() == [20, 40, 60]
    assert (tmp_path / "rl_model_replay_buffer_40_steps.pkl").exists()
    assert TD3X.load(tmp_path / "rl_model_40_steps").num_timesteps == 40


def test_progress_bar_and_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(sb3_callbacks, "tqdm", bar := Mock(wraps=sb3_callbacks.tqdm))
    model(tensorboard_log=str(tmp_path)).learn(90, progress_bar=True, log_interval=1)
    bar.assert_called_once_with(total=90)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "TD3X_1")).Reload()
    scalars = {"rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "train/actor_loss", "train/critic_loss"}
    assert scalars | {"train/learning_rate"} <= set(events.Tags()["scalars"])


def test_networks_follow_a_replaced_policy():
    algorithm, other = model().learn(20), model(seed=1)
    algorithm.policy = other.policy
    assert algorithm.actor is other.policy.actor
    assert algorithm.critic_target is other.policy.critic_target
    trains(algorithm)


@pytest.mark.skipif(not th.cuda.is_available(), reason="no GPU: CUDA_VISIBLE_DEVICES=0 pytest -k cuda")
def test_cuda_makes_the_cpus_updates():
    results = []
    for device in ("cpu", "cuda"):
        algorithm = TD3X("MlpPolicy", LineEnv(), seed=0, device=device, buffer_size=1000, learning_starts=10).learn(60)
        results.append({name: value.cpu() for name, value in weights(algorithm).items()})
    assert largest_difference(*results) < 1e-3


@pytest.mark.parametrize(
    ("space", "message"),
    [(spaces.Discrete(3), "only supports"), (spaces.Box(-np.inf, np.inf, (1,)), "finite lower and upper bound")],
)
def test_a_discrete_or_unbounded_action_space_is_refused(space, message):
    with pytest.raises(AssertionError, match=message):
        model(LineEnv(action_space=space))


@pytest.mark.parametrize("space", [spaces.Discrete(4), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(4)], ids=repr)
def test_observations_that_are_no_box(space):
    trains(model(Samples(space)))


def test_a_logger_that_a_callback_sets_lasts():
    sets = Calls(_init_callback=lambda callback: callback.model.set_logger(Logger(None, [])))
    algorithm = TD3X("MlpPolicy", LineEnv(), policy_kwargs={"net_arch": [8]}).learn(20, sets)
    logger = algorithm.logger
    assert algorithm.learn(20, reset_num_timesteps=False).logger is logger
