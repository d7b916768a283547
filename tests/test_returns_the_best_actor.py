"""``best_actor_window`` keeps the actor with the best evidence from training, and what is learned stays the same."""

import copy
import io
import random
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from torch import nn

from sb3_td3x import TD3X, ModelFileError
from sb3_td3x.saving import model_zip
from sb3_td3x.td3x.returned import BestActor
from tests.reference.best_window import best_window
from tests.resuming import OpenLineEnv, assert_same_run, run_twice, seeded
from tests.tools import LineEnv, largest_difference, model, weights
from tests.zips import members, packed, signed

GOLDEN = Path(__file__).parent / "golden"
OBSERVATIONS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def states(actor):
    return {name: value.clone() for name, value in actor.state_dict().items()}


class Episodes(BaseCallback):
    """Every training episode that the actor began: its return, and a copy of the actor before the update after it."""

    def __init__(self, learning_starts):
        super().__init__()
        self.learning_starts, self.ended = learning_starts, []

    def _on_step(self):
        acts = self.num_timesteps - self.training_env.num_envs >= self.learning_starts
        if self.n_calls == 1:
            self.begun = [acts] * self.training_env.num_envs
        for index, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                if self.begun[index]:
                    self.ended.append((info["episode"]["r"], states(self.model.actor)))
                self.begun[index] = self.num_timesteps >= self.learning_starts
        return True


def trained(env=None, steps=120, watch=None, **kwargs):
    arguments = {"best_actor_window": 3, "learning_starts": 30, "learning_rate": 1e-2, **kwargs}
    return model(env or Monitor(LineEnv()), **arguments).learn(steps, watch)


class Ones(gym.RewardWrapper):
    def reward(self, reward):
        return 1.0


def test_a_window_that_load_switches_off_adds_no_parts_of_episodes_later(tmp_path):
    model(Ones(LineEnv(length=10)), best_actor_window=1, learning_starts=0).learn(18).save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", env=Ones(LineEnv(length=10)), best_actor_window=None)
    assert loaded.best_actor_return == 10
    loaded.learn(5, reset_num_timesteps=False)
    loaded.best_actor_window = 1
    loaded._best.score = -np.inf
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.best_actor_return == 10


def test_a_window_that_is_switched_off_and_on_again_adds_no_parts_of_episodes():
    algorithm = model(Ones(LineEnv(length=10)), best_actor_window=1, learning_starts=0).learn(18)
    assert algorithm.best_actor_return == 10
    algorithm.best_actor_window = None
    algorithm.learn(5, reset_num_timesteps=False)
    algorithm.best_actor_window = 1
    algorithm._best.score = -np.inf
    algorithm.learn(20, reset_num_timesteps=False)
    assert algorithm.best_actor_return == 10


class Remembers(FlattenExtractor):
    """As a user's does who looks at attention weights: torch refuses to copy what it keeps."""

    def forward(self, observations):
        self.last = observations * self.scale
        return self.last

    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(th.ones(1))


def test_networks_that_keep_a_tensor_of_their_last_pass_are_copied(tmp_path):
    algorithm = model(policy_kwargs={"net_arch": [8], "features_extractor_class": Remembers}, best_actor_window=1).learn(30)
    algorithm.actor(algorithm.policy.obs_to_tensor(OBSERVATIONS)[0])
    assert not algorithm.actor.features_extractor.last.is_leaf
    algorithm.learn(40, reset_num_timesteps=False)
    assert algorithm.best_actor.features_extractor is not algorithm.actor.features_extractor
    algorithm.actor(algorithm.policy.obs_to_tensor(OBSERVATIONS)[0])
    algorithm.export_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize(("window", "n_envs"), [(1, 1), (2, 1), (3, 3), (4, 3), (1, 3), (100, 1)])
def test_it_is_the_slow_twins_choice(window, n_envs):
    watch = Episodes(learning_starts=30)
    env = DummyVecEnv([lambda length=length: Monitor(LineEnv(length=length)) for length in (20, 7, 20)[:n_envs]])
    algorithm = trained(env, 200, watch, best_actor_window=window, gradient_steps=-1)
    score, actor = best_window(watch.ended, window)
    assert algorithm.best_actor_return == pytest.approx(score, abs=1e-5)  # Monitor rounds
    if actor is None:
        assert window == 100
        assert algorithm.best_actor is None
    else:
        assert largest_difference(states(algorithm.best_actor), actor) == 0
        assert largest_difference(states(algorithm.actor), actor) > 0


def test_returns_are_those_before_normalisation():
    watch = Episodes(learning_starts=30)
    env = VecNormalize(DummyVecEnv([lambda: Monitor(LineEnv())]), clip_reward=0.1)
    algorithm = trained(env, 200, watch, best_actor_window=2)
    score, actor = best_window(watch.ended, 2)
    assert algorithm.best_actor_return == pytest.approx(score, abs=1e-5)
    assert largest_difference(states(algorithm.best_actor), actor) == 0


def test_environments_that_write_into_the_same_array_at_every_step_are_understood():
    class Reusing(DummyVecEnv):
        def step_wait(self):
            observations, rewards, dones, infos = super().step_wait()
            self.dones = getattr(self, "dones", dones)
            self.dones[:] = dones
            return observations, rewards, self.dones, infos

    found, expected = (trained(cls([lambda: Monitor(LineEnv())])).best_actor_return for cls in (Reusing, DummyVecEnv))
    assert found == expected


def test_of_equal_windows_the_later_is_kept_and_a_worse_one_is_not():
    best, policy = BestActor(1), model().policy

    def episode(value, steps):
        with th.no_grad():
            policy.actor.mu[0].bias.fill_(steps)
        for part, start, done in ((value - 1.0, True, False), (1.0, False, True)):
            best.step(policy.actor, 1, np.array([part]), np.array([start]), np.array([done]), True, steps)

    for value, steps, expected in ((5.0, 1, 1), (4.0, 2, 1), (5.0, 3, 3), (6.0, 4, 4), (-9.0, 5, 4)):
        episode(value, steps)
        assert best.actor.mu[0].bias[0].item() == best.steps == expected


def test_an_episode_that_began_at_random_is_no_evidence():
    assert trained(steps=40, best_actor_window=1, learning_starts=30).best_actor is None
    assert trained(steps=60, best_actor_window=1, learning_starts=30).best_actor is not None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"accelerate": "plain"},
        {"accelerate": "compiled"},
        {"policy_kwargs": {"net_arch": [8], "share_features_extractor": True}, "n_quantiles": 3},
    ],
)
def test_learning_is_the_same_bit_for_bit(kwargs):
    runs = []
    for extra in ({"best_actor_window": None}, {"predict_with": "best"}):
        random.seed(0)
        algorithm = trained(batch_size=8, **kwargs, **extra)
        runs.append((algorithm, th.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
    for algorithm, *generators in runs[1:]:
        assert largest_difference(weights(runs[0][0]), weights(algorithm)) == 0
        assert th.equal(generators[0], runs[0][1])
        assert generators[1:] == list(runs[0][2:])
        assert np.array_equal(algorithm.replay_buffer.actions, runs[0][0].replay_buffer.actions)


def test_predict_follows_the_switch_and_evaluations_with_it():
    algorithm = trained()
    live, best = (one.predict(OBSERVATIONS, deterministic=True)[0] for one in (algorithm.policy, algorithm.best_actor))
    assert not np.array_equal(live, best)
    assert np.array_equal(algorithm.predict(OBSERVATIONS, deterministic=True)[0], live)
    env = Monitor(LineEnv())
    scores = {"live": None, "best": None}
    for choice in scores:
        algorithm.predict_with = choice
        env.unwrapped.reset(seed=3)
        scores[choice] = evaluate_policy(algorithm, env, 2)[0]
    assert np.array_equal(algorithm.predict(OBSERVATIONS, deterministic=True)[0], best)
    env.unwrapped.reset(seed=3)
    assert evaluate_policy(algorithm.best_actor, env, 2)[0] == scores["best"] != scores["live"]
    with pytest.raises(ValueError, match="predict_with must be one of live, best"):
        algorithm.predict_with = "worst"
    assert algorithm.predict_with == "best"


@pytest.mark.parametrize("steps", [20, 120])
def test_without_a_window_a_model_predicts_with_what_it_has_found(steps, tmp_path):
    with pytest.raises(ValueError, match="best_actor_window"):
        model().predict_with = "best"
    algorithm = trained(steps=steps, predict_with="best")
    assert (algorithm.best_actor is None) == (steps == 20)
    algorithm.best_actor_window = None  # no more evidence
    algorithm.save(tmp_path / "model")
    expected = algorithm.predict(OBSERVATIONS)[0]
    assert np.array_equal(TD3X.load(tmp_path / "model").predict(OBSERVATIONS)[0], expected)


def test_an_eval_callback_measures_it_and_its_best_model_acts_with_it(tmp_path):
    evaluation = EvalCallback(Monitor(LineEnv()), eval_freq=120, n_eval_episodes=2, best_model_save_path=tmp_path, verbose=0)
    trained(watch=evaluation, predict_with="best", steps=150)
    loaded = TD3X.load(tmp_path / "best_model")
    assert loaded.predict_with == "best"
    assert np.array_equal(loaded.predict(OBSERVATIONS)[0], loaded.best_actor.predict(OBSERVATIONS)[0])


def test_without_a_best_actor_yet_predict_uses_the_live_one():
    algorithm = trained(steps=20, predict_with="best")
    assert algorithm.best_actor is None
    assert np.array_equal(algorithm.predict(OBSERVATIONS)[0], algorithm.policy.predict(OBSERVATIONS)[0])


def test_it_is_saved_and_sb3_reads_the_file_as_before(tmp_path):
    algorithm = trained(predict_with="best")
    algorithm.save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model")
    assert loaded.best_actor_return == algorithm.best_actor_return
    assert np.array_equal(loaded.predict(OBSERVATIONS)[0], algorithm.predict(OBSERVATIONS)[0])
    assert not any(parameter.requires_grad for parameter in loaded.best_actor.parameters())
    theirs = TD3.load(tmp_path / "model")
    assert np.array_equal(theirs.predict(OBSERVATIONS)[0], algorithm.policy.predict(OBSERVATIONS)[0])
    other = model(seed=5)
    other.set_parameters(tmp_path / "model.zip")
    assert largest_difference(weights(other), weights(algorithm)) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"make_env": seeded},
        {"make_env": seeded, "gradient_steps": -1, "train_freq": (1, "episode")},
        {"make_env": lambda: VecNormalize(seeded())},
    ],
)
def test_a_resumed_run_returns_the_same_actor(tmp_path, settings):
    assert_same_best(*run_twice(tmp_path, best_actor_window=2, learning_rate=1e-2, **settings))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_resumed_inside_episodes_returns_the_same_actor(tmp_path, overlap):
    vec = SubprocVecEnv if overlap else DummyVecEnv
    runs = run_twice(tmp_path, lambda: seeded(OpenLineEnv, 2, vec), 13, best_actor_window=3, overlap=overlap)
    assert_same_best(*runs)
    for one in runs:
        one.env.close()


def assert_same_best(whole, resumed):
    assert_same_run(whole, resumed)
    assert (whole.best_actor_return, whole._best.steps) == (resumed.best_actor_return, resumed._best.steps)
    assert largest_difference(states(whole.best_actor), states(resumed.best_actor)) == 0
    assert (whole._best.total, whole._best.episodes) == (resumed._best.total, resumed._best.episodes)
    assert np.array_equal(whole._best.returns, resumed._best.returns)


def test_what_an_episode_gave_before_it_was_cut_is_forgotten(tmp_path):
    from sb3_td3x import resume_run, save_run

    algorithm = model(DummyVecEnv([LineEnv]), best_actor_window=1, learning_starts=0).learn(30)
    save_run(algorithm, tmp_path)
    resumed = resume_run(tmp_path, DummyVecEnv([LineEnv]))
    assert resumed._best.returns[0] < 0
    with pytest.warns(UserWarning, match="under way"):
        resumed.learn(31, resume=True)
    assert resumed._best.returns[0] == resumed.replay_buffer.rewards[30, 0]


def test_a_new_run_has_new_evidence_and_one_that_goes_on_has_not():
    algorithm = trained()
    before = algorithm.best_actor_return
    algorithm.learn(1, reset_num_timesteps=False)
    assert algorithm.best_actor_return == before
    algorithm.learn(1)
    assert (algorithm.best_actor, algorithm.best_actor_return) == (None, -np.inf)


@pytest.mark.parametrize("window", [2, None])
def test_networks_that_are_put_in_its_place_act(window):
    algorithm = trained(predict_with="best")
    algorithm.best_actor_window = window
    algorithm.set_parameters(model(seed=5).get_parameters())
    assert np.array_equal(algorithm.predict(OBSERVATIONS)[0], model(seed=5).predict(OBSERVATIONS)[0])
    assert algorithm.best_actor is None
    assert algorithm.predict_with == ("live" if window is None else "best")


def test_a_window_that_cannot_be_is_refused_where_it_is_set():
    algorithm = model(best_actor_window=2, predict_with="best")
    for window in (0, None):
        with pytest.raises(ValueError, match="best_actor_window"):
            algorithm.best_actor_window = window
    assert algorithm.best_actor_window == 2


def test_another_number_of_environments_goes_on(tmp_path):
    trained().save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", env=DummyVecEnv([LineEnv] * 2))
    assert loaded.learn(100, reset_num_timesteps=False).best_actor is not None


@pytest.mark.parametrize(
    ("policy", "space"),
    [
        ("CnnPolicy", spaces.Box(0, 255, (36, 36, 1), np.uint8)),
        ("MultiInputPolicy", spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "b": spaces.Box(-10, 10, (3,))})),
    ],
)
def test_for_every_policy(policy, space, tmp_path):
    kwargs = {"net_arch": [8], **({"features_extractor_kwargs": {"features_dim": 8}} if policy == "CnnPolicy" else {})}
    algorithm = trained(
        LineEnv(space, length=5),
        30,
        policy=policy,
        policy_kwargs=kwargs,
        buffer_size=60,
        learning_starts=10,
        predict_with="best",
    )
    algorithm.save(tmp_path / "model")
    observation = algorithm.env.reset()
    expected = algorithm.best_actor.predict(observation)[0]
    assert np.array_equal(TD3X.load(tmp_path / "model").predict(observation)[0], expected)


def test_it_can_be_copied():
    algorithm = trained()
    assert largest_difference(states(copy.deepcopy(algorithm).best_actor), states(algorithm.best_actor)) == 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"best_actor_window": 0},
        {"best_actor_window": 1.5},
        {"best_actor_window": "many"},
        {"predict_with": "worst", "best_actor_window": 1},
        {"predict_with": "best"},
    ],
)
def test_nonsense_is_refused(kwargs, tmp_path):
    with pytest.raises(ValueError, match=r"best_actor_window|predict_with"):
        model(**kwargs)
    model().save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"best_actor_window|predict_with"):
        TD3X.load(tmp_path / "model", **kwargs)


@pytest.mark.parametrize("name", ["sb3_td3_2.9.2", "td3x_format_1"])
def test_a_file_from_before_keeps_none_whatever_the_default_is(name, monkeypatch):
    monkeypatch.setitem(TD3X.__init__.__kwdefaults__, "best_actor_window", 10)
    monkeypatch.setitem(TD3X.__init__.__kwdefaults__, "predict_with", "best")
    loaded = TD3X.load(GOLDEN / f"{name}.zip")
    assert (loaded.best_actor_window, loaded.predict_with, loaded.best_actor) == (None, "live", None)


def broken(**changes):
    file = io.BytesIO()
    state = trained()._best.state()
    th.save({**state, **changes}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "is not a zip file"),
        ({"more": 1}, r"best_actor\.pt is not what TD3X writes"),
        ({"score": float("nan")}, "the score nan"),
        ({"actor": {"mu.0.weight": th.zeros(2, 2)}}, "actor has not the model's tensors"),
        ({"episodes": -1}, "episodes must be at least 0"),
        ({"returns": None}, "cannot be loaded"),
    ],
)
def test_a_damaged_or_foreign_one_is_refused(changes, message, tmp_path):
    trained().save(tmp_path / "model")
    content = b"no tensors" if changes is None else broken(**changes)
    parts = {**members((tmp_path / "model.zip").read_bytes()), model_zip.BEST_ACTOR: content}
    (tmp_path / "bad.zip").write_bytes(packed(signed(parts)))
    with pytest.raises(ModelFileError, match=message):
        TD3X.load(tmp_path / "bad")
