"""``average_actor_window`` keeps the mean of the actors that learning goes through, and what is learned stays the same."""

import copy
import io
import random

import numpy as np
import pytest
import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from sb3_td3x import TD3X, ModelFileError
from sb3_td3x.serialization import modelfile
from tests.resuming import OpenLineEnv, assert_same_run, run_twice, seeded
from tests.tools import LineEnv, largest_difference, model, weights
from tests.zips import members, packed, signed

OBSERVATIONS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def states(actor):
    return {name: value.double().clone() for name, value in actor.state_dict().items()}


def trained(env=None, steps=80, watch=None, **kwargs):
    arguments = {"average_actor_window": 10, "learning_starts": 20, "learning_rate": 1e-2, **kwargs}
    return model(env or Monitor(LineEnv()), **arguments).learn(steps, watch)


class Path(BaseCallback):
    """The actor after every series of updates that moved it, and how many updates that were."""

    def __init__(self):
        super().__init__()
        self.actors, self.updates = [], 0

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        count = self.model._n_updates // self.model.policy_delay
        if count > self.updates:
            self.actors.append((states(self.model.actor), count - self.updates))
        self.updates = count


def slow_mean(actors, window):
    """Each actor counts as often as it had updates; the weights of old ones shrink by 1 - count / window."""
    mean, seen = None, 0
    for actor, count in actors:
        seen += count
        share = min(count / min(seen, window), 1.0)
        mean = actor if mean is None else {name: (1 - share) * mean[name] + share * actor[name] for name in actor}
    return mean


@pytest.mark.parametrize("window", [1, 10, 1000])
@pytest.mark.parametrize("schedule", [{}, {"gradient_steps": 6}, {"train_freq": 20, "gradient_steps": -1, "policy_delay": 3}])
def test_it_is_the_slow_twins_mean(window, schedule):
    watch = Path()
    algorithm = trained(watch=watch, average_actor_window=window, **schedule)
    watch._on_rollout_start()
    expected = slow_mean(watch.actors, window)
    assert largest_difference(states(algorithm.average_actor), expected) < 1e-6
    assert algorithm._averaged.updates == sum(count for _, count in watch.actors)
    if window == 1000:
        assert largest_difference(states(algorithm.average_actor), states(algorithm.actor)) > 1e-4


def test_of_the_first_updates_it_is_the_plain_mean():
    watch = Path()
    algorithm = trained(watch=watch, average_actor_window=1000)
    watch._on_rollout_start()
    for name, value in states(algorithm.average_actor).items():
        th.testing.assert_close(value, sum(actor[name] for actor, _ in watch.actors) / len(watch.actors), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kwargs", [{"accelerate": "plain"}, {"accelerate": "compiled"}, {"n_quantiles": 3}])
def test_learning_is_the_same_bit_for_bit(kwargs):
    runs = []
    for extra in ({"average_actor_window": None}, {"predict_with": "average"}):
        random.seed(0)
        algorithm = trained(batch_size=8, **kwargs, **extra)
        runs.append((algorithm, th.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()))
    (without, *before), (algorithm, *after) = runs
    assert largest_difference(weights(without), weights(algorithm)) == 0
    assert th.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert np.array_equal(algorithm.replay_buffer.actions, without.replay_buffer.actions)
    assert without.average_actor is None


def test_predict_follows_the_switch_and_evaluations_with_it(tmp_path):
    evaluation = EvalCallback(Monitor(LineEnv()), eval_freq=70, n_eval_episodes=1, best_model_save_path=tmp_path, verbose=0)
    algorithm = trained(watch=evaluation)
    live, average = (one.predict(OBSERVATIONS)[0] for one in (algorithm.policy, algorithm.average_actor))
    assert not np.array_equal(live, average)
    assert np.array_equal(algorithm.predict(OBSERVATIONS)[0], live)
    algorithm.predict_with = "average"
    assert np.array_equal(algorithm.predict(OBSERVATIONS)[0], average)
    env = Monitor(LineEnv())
    env.unwrapped.reset(seed=3)
    scores = [evaluate_policy(algorithm, env, 2)[0]]
    env.unwrapped.reset(seed=3)
    assert scores == [evaluate_policy(algorithm.average_actor, env, 2)[0]]
    loaded = TD3X.load(tmp_path / "best_model")
    assert loaded.average_actor is not None


def test_before_the_first_update_predict_uses_the_live_one():
    algorithm = trained(steps=10, predict_with="average")
    assert algorithm.average_actor is None
    assert np.array_equal(algorithm.predict(OBSERVATIONS)[0], algorithm.policy.predict(OBSERVATIONS)[0])


def test_running_statistics_are_those_of_the_live_actor():
    algorithm = trained(policy_kwargs={"net_arch": [8], "normalize_observations": True})
    live, average = (dict(actor.named_buffers()) for actor in (algorithm.actor, algorithm.average_actor))
    assert live
    assert all(th.equal(average[name], value) for name, value in live.items())


def test_it_is_saved_beside_a_best_one_and_sb3_reads_the_file_as_before(tmp_path):
    algorithm = trained(predict_with="average", best_actor_window=1)
    algorithm.save(tmp_path / "model")
    loaded = TD3X.load(tmp_path / "model", env=Monitor(LineEnv()))
    assert np.array_equal(loaded.predict(OBSERVATIONS)[0], algorithm.average_actor.predict(OBSERVATIONS)[0])
    assert not any(parameter.requires_grad for parameter in loaded.average_actor.parameters())
    assert largest_difference(states(loaded.best_actor), states(algorithm.best_actor)) == 0
    assert loaded.learn(20, reset_num_timesteps=False)._averaged.updates >= algorithm._averaged.updates
    theirs = TD3.load(tmp_path / "model")
    assert np.array_equal(theirs.predict(OBSERVATIONS)[0], algorithm.policy.predict(OBSERVATIONS)[0])
    assert largest_difference(states(copy.deepcopy(algorithm).average_actor), states(algorithm.average_actor)) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"make_env": seeded},
        {"make_env": seeded, "gradient_steps": -1, "train_freq": (1, "episode")},
        {"make_env": lambda: VecNormalize(seeded())},
    ],
)
def test_a_resumed_run_returns_the_same_actor(tmp_path, settings):
    assert_same_average(*run_twice(tmp_path, average_actor_window=5, learning_rate=1e-2, **settings))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_resumed_inside_episodes_returns_the_same_actor(tmp_path, overlap):
    vec = SubprocVecEnv if overlap else DummyVecEnv
    runs = run_twice(tmp_path, lambda: seeded(OpenLineEnv, 2, vec), 13, average_actor_window=5, overlap=overlap)
    assert_same_average(*runs)
    for one in runs:
        one.env.close()


def assert_same_average(whole, resumed):
    assert_same_run(whole, resumed)
    assert whole._averaged.updates == resumed._averaged.updates > 0
    assert largest_difference(states(whole.average_actor), states(resumed.average_actor)) == 0


def test_a_new_run_begins_anew_and_one_that_goes_on_does_not():
    algorithm = trained()
    before = algorithm._averaged.updates
    algorithm.learn(10, reset_num_timesteps=False)
    assert algorithm._averaged.updates == before + 5
    algorithm.learn(10)
    assert algorithm.average_actor is None


def test_the_switch_needs_something_to_switch_to(tmp_path):
    with pytest.raises(ValueError, match="average_actor_window"):
        model(predict_with="average")
    model().save(tmp_path / "model")
    with pytest.raises(ValueError, match="average_actor_window"):
        TD3X.load(tmp_path / "model", predict_with="average")
    with pytest.raises(ValueError, match="average_actor_window must be at least 1"):
        model(average_actor_window=0)
    algorithm = trained(predict_with="average")
    algorithm.average_actor_window = None  # no more averaging
    before = states(algorithm.average_actor)
    algorithm.learn(10, reset_num_timesteps=False).save(tmp_path / "model")
    assert largest_difference(states(TD3X.load(tmp_path / "model").average_actor), before) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "is not a zip file"),
        ({"more": 1}, r"average_actor\.pt is not what TD3X writes"),
        ({"actor": {"mu.0.weight": th.zeros(2, 2)}}, "actor has not the model's tensors"),
        ({"updates": -1}, "updates must be at least 0"),
    ],
)
def test_a_damaged_or_foreign_one_is_refused(changes, message, tmp_path):
    algorithm = trained()
    algorithm.save(tmp_path / "model")
    file = io.BytesIO()
    th.save({**algorithm._averaged.state(), **(changes or {})}, file)
    content = b"no tensors" if changes is None else file.getvalue()
    parts = {**members((tmp_path / "model.zip").read_bytes()), modelfile.AVERAGE_ACTOR: content}
    (tmp_path / "bad.zip").write_bytes(packed(signed(parts)))
    with pytest.raises(ModelFileError, match=message):
        TD3X.load(tmp_path / "bad")
