"""``overlap=True``: updates run while environments in other processes step; all else happens as before."""

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnvWrapper, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.common.transitions import stored_transitions
from tests.tools import LineEnv, largest_difference, model, weights


@pytest.fixture
def processes():
    made = []

    def make(n_envs=2):
        made.append(SubprocVecEnv([LineEnv] * n_envs, start_method="fork"))
        return made[-1]

    yield make
    for env in made:
        env.close()


class Recorder(VecEnvWrapper):
    """Notes when actions are sent and results are fetched."""

    def __init__(self, venv, events):
        super().__init__(venv)
        self.events = events

    def reset(self):
        return self.venv.reset()

    def step_async(self, actions):
        self.events.append("send actions")
        self.venv.step_async(actions)

    def step_wait(self):
        self.events.append("wait")
        return self.venv.step_wait()


def record_updates(algorithm, events):
    train = algorithm._train
    algorithm._train = lambda *args: (events.append(("update", stored_transitions(algorithm.replay_buffer))), train(*args))


def test_updates_run_between_sending_actions_and_waiting_with_the_same_transitions_as_without(processes):
    order = {}
    for overlap in (False, True):
        events = []
        algorithm = model(Recorder(processes(), events), overlap=overlap, gradient_steps=-1)
        record_updates(algorithm, events)
        algorithm.learn(40)
        order[overlap] = events
        assert algorithm._n_updates == 40 - 10  # none in the first ten steps, and the last is not forgotten
    seen = {overlap: [event for event in events if event[0] == "update"] for overlap, events in order.items()}
    assert seen[True] == seen[False]
    first = order[True].index(seen[True][0])
    assert order[True][first - 1 : first + 2] == ["send actions", seen[True][0], "wait"]
    first = order[False].index(seen[False][0])
    assert order[False][first - 1 : first + 2] == ["wait", seen[False][0], "send actions"]


def test_a_seed_gives_one_run(processes):
    runs = [model(processes(), overlap=True).learn(60) for _ in range(2)]
    assert largest_difference(weights(runs[0]), weights(runs[1])) == 0


class AtRolloutStart(BaseCallback):
    """Looks at the model when an update is pending."""

    def __init__(self, look):
        super().__init__()
        self.look, self.seen = look, []

    def _on_rollout_start(self):
        self.seen.append((self.look(self.model), self.model._n_updates))

    def _on_step(self):
        return True


def test_saving_exporting_and_predicting_find_the_pending_update_made(processes, tmp_path):
    def saved(algorithm):
        algorithm.save(tmp_path / "model")
        return TD3X.load(tmp_path / "model")._n_updates

    def predicted(algorithm):
        algorithm.predict(np.zeros((1, 3), np.float32))

    def exported(algorithm):
        with pytest.raises(ValueError, match="the model takes"):  # it is not the file that matters here
            algorithm.export_onnx(tmp_path / "actor.onnx", env=LineEnv(spaces.Box(-1, 1, (7,))))

    for look in (saved, predicted, exported):
        callback = AtRolloutStart(look)
        model(processes(1), overlap=True).learn(30, callback)
        assert [updates for _, updates in callback.seen] == [0] * 11 + list(range(1, 20))
        assert all(look is not saved or value == updates for value, updates in callback.seen)


def test_it_works_with_normalisation_and_evaluation(processes):
    env = VecNormalize(processes())
    algorithm = model(env, overlap=True)
    evaluation = EvalCallback(VecNormalize(DummyVecEnv([LineEnv]), training=False), eval_freq=20, verbose=0, warn=False)
    algorithm.learn(100, evaluation)
    assert np.isfinite(evaluation.last_mean_reward)
    assert algorithm.get_env() is env
    before = weights(algorithm)
    algorithm.train(1, 8)  # outside of `learn` there is nothing to overlap with
    assert largest_difference(before, weights(algorithm)) > 0


def test_switching_it_off_for_a_later_learn_is_heeded(processes):
    events = []
    algorithm = model(Recorder(processes(), events), overlap=True).learn(20)
    algorithm.overlap = False
    events.clear()
    record_updates(algorithm, events)
    algorithm.learn(20, reset_num_timesteps=False)
    assert events[1] == "wait"
    assert events[2][0] == "update"


def test_environments_in_this_process_are_refused():
    with pytest.raises(ValueError, match="SubprocVecEnv"):
        model(overlap=True).learn(20)


def test_training_after_episodes_is_refused(processes):
    with pytest.raises(ValueError, match="train_freq in steps"):
        model(processes(1), overlap=True, train_freq=(1, "episode")).learn(20)


def test_an_update_that_fails_leaves_the_environments_in_step(processes):
    env = processes()
    algorithm = model(env, overlap=True)
    algorithm._train = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        algorithm.learn(40)
    assert env.get_attr("length") == [20, 20]
    del algorithm._train
    algorithm.learn(20, reset_num_timesteps=False)


class Fault(Exception):
    pass


def ended_by_an_error(env, **kwargs):
    """A model whose ``learn`` has ended with one more update due."""

    def fail(algorithm):
        if algorithm._n_updates == 5:
            raise Fault

    algorithm = model(env, overlap=True, **kwargs)
    with pytest.raises(Fault):
        algorithm.learn(40, AtRolloutStart(fail))
    assert algorithm._n_updates == 5
    return algorithm


def test_an_update_that_is_due_when_an_error_ends_learn_is_not_lost_and_not_part_of_the_next_run(processes, tmp_path):
    env = processes(1)
    algorithm = ended_by_an_error(env)
    algorithm.set_env(env)
    assert algorithm._n_updates == 6
    algorithm.save_replay_buffer(tmp_path / "buffer.pkl")
    algorithm = ended_by_an_error(env)
    algorithm.load_replay_buffer(tmp_path / "buffer.pkl")
    assert algorithm._n_updates == 6
    algorithm, seen = ended_by_an_error(env), AtRolloutStart(lambda _: None)
    algorithm.overlap = False
    algorithm.learn(5, seen)
    assert [updates for _, updates in seen.seen] == [6] * 5


def test_the_end_of_learn_and_updates_by_hand_find_nothing_pending(processes):
    seen = []

    class Look(BaseCallback):
        def _on_step(self):
            return True

        def _on_training_end(self):
            seen.append(self.model._n_updates)
            self.model.train(5, 8)
            seen.append(self.model._n_updates)

    model(processes(1), overlap=True).learn(30, Look())
    assert seen == [20, 25]


def test_hindsight_replay_is_refused():
    env = SubprocVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=True)], start_method="fork")
    with pytest.raises(ValueError, match="HerReplayBuffer"):
        TD3X("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, overlap=True, device="cpu").learn(10)
    env.close()
