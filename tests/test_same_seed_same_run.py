"""The same seed gives the same run, array for array."""

from contextlib import closing

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.runs.environments import AFTERWARDS, EVALUATION, TRAINING, EpisodeSeeds, open_env
from tests.tools import LineEnv, model

CASES = {
    "plain": {},
    "two environments": {"env": 2, "gradient_steps": -1},
    "episodes": {"train_freq": (1, "episode"), "gradient_steps": -1},
    "n-step": {"n_steps": 3},
}


def run(case, seed=0):
    kwargs = dict(CASES[case])
    count = kwargs.pop("env", 1)
    env = DummyVecEnv([LineEnv for _ in range(count)])
    return model(env, seed=seed, learning_starts=20, **kwargs).learn(120)


def arrays(algorithm):
    """Everything a run leaves behind."""
    result = {f"weights/{name}": value.numpy() for name, value in algorithm.policy.state_dict().items()}
    for name in ("actor", "critic"):
        for index, state in getattr(algorithm, name).optimizer.state_dict()["state"].items():
            result |= {f"{name}/{index}/{key}": value.numpy() for key, value in state.items()}
    buffer = algorithm.replay_buffer
    result |= {f"replay/{key}": getattr(buffer, key) for key in ("observations", "actions", "rewards", "dones")}
    result["noise"] = algorithm.noise_generator.get_state().numpy()
    return result


@pytest.mark.parametrize("case", CASES)
def test_twice_in_one_process(case):
    first, second = arrays(run(case)), arrays(run(case))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_another_seed_gives_another_run():
    first, second = (arrays(run("plain", seed=seed)) for seed in (0, 1))
    assert not any(np.array_equal(first[name], second[name]) for name in ("replay/observations", "replay/actions", "noise"))


def test_torchs_own_seed_is_enough_for_the_target_noise_when_none_is_given():
    draws = []
    for _ in range(2):
        th.manual_seed(5)
        draws.append(th.randn(3, generator=model(seed=None).noise_generator))
    assert th.equal(*draws)


def test_target_noise_is_not_drawn_from_torchs_generator():
    learner, before = model().learn(20), th.get_rng_state()
    learner.train(2, 8)
    assert th.equal(th.get_rng_state(), before)


class TestEpisodeSeeds:
    def starts(self, *stream, episodes=3):
        env = EpisodeSeeds(LineEnv(), *stream)
        return [env.reset(seed=99)[0][0].item() for _ in range(episodes)]

    def test_every_episode_starts_differently_and_as_its_seed_says(self):
        assert self.starts(0, TRAINING, 0) == self.starts(0, TRAINING, 0)
        assert len(set(self.starts(0, TRAINING, 0))) == 3

    def test_runs_environments_and_evaluations_have_starts_of_their_own(self):
        streams = [(0, TRAINING, 0), (1, TRAINING, 0), (0, TRAINING, 1), (0, EVALUATION, 0), (0, AFTERWARDS, 0)]
        assert len({start for stream in streams for start in self.starts(*stream)}) == 3 * len(streams)

    def test_environments_without_numbers_of_their_own_are_refused(self):
        with pytest.raises(ValueError, match="differ between environments"):
            make_vec_env("Pendulum-v1", n_envs=2, wrapper_class=EpisodeSeeds)

    def test_what_happens_within_an_episode_does_not_move_the_next_start(self):
        env = EpisodeSeeds(LineEnv(), 0, TRAINING, 0)
        env.reset()
        env.unwrapped.np_random.random(1000)
        assert env.reset()[0][0].item() == self.starts(0, TRAINING, 0)[1]


def test_every_environment_of_a_run_begins_in_its_own_way():
    firsts = []
    for stream in (TRAINING, EVALUATION, AFTERWARDS):
        with closing(open_env("Pendulum-v1", 0, stream, {"n_envs": 2})) as env:
            firsts += env.reset().tolist()
    assert len({tuple(first) for first in firsts}) == 4
