"""Subclasses written for SB3's TD3 work: each SB3 hook that TD3X overrides may be overridden again with ``super()``."""

import copy
import inspect

import numpy as np
import pytest
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X, save_run
from sb3_td3x.common.resumable import Resumable
from tests.tools import SMALL, BatchNorm, LineEnv, largest_difference, model, reloaded, weights

HOOKS = sorted(
    name
    for name, method in inspect.getmembers(TD3X)
    if any(name in vars(cls) for cls in (TD3X, Resumable))
    and hasattr(OffPolicyAlgorithm, name)
    and callable(method)
    and not name.startswith("__")
)


@pytest.fixture(params=[TD3, TD3X])
def base(request):
    """What works in a subclass of SB3's TD3 works in one of TD3X."""
    return request.param


def overriding(called):
    """A subclass of the user's whose hooks note their calls and leave the rest to ``super()``."""

    def hook(name):
        def call(self, *args, **kwargs):  # or the class
            called.append(name)
            return getattr(super(subclass, self), name)(*args, **kwargs)

        found = inspect.getattr_static(TD3X, name)
        if isinstance(found, staticmethod):
            return staticmethod(lambda *args, **kwargs: called.append(name) or getattr(TD3X, name)(*args, **kwargs))
        return classmethod(call) if isinstance(found, classmethod) else call

    subclass = type("Own", (TD3X,), {name: hook(name) for name in HOOKS})
    return subclass


def use_everything(cls, folder):
    """A short run in which every hook is called once at least."""
    made = model(cls=cls).learn(60)
    made.save(folder / "model")
    made.save_replay_buffer(folder / "buffer")
    loaded = cls.load(folder / "model", env=LineEnv())
    loaded.load_replay_buffer(folder / "buffer")
    loaded.set_env(LineEnv())
    loaded.set_random_seed(3)
    return loaded.learn(40, reset_num_timesteps=False)


def test_the_hooks_are_those_that_sb3_calls():
    assert {"_setup_model", "_setup_learn", "learn", "train", "collect_rollouts", "_sample_action", "_store_transition"} <= {
        *HOOKS
    }
    assert {"_excluded_save_params", "_get_torch_save_params", "dump_logs", "load", "save", "set_parameters"} <= {*HOOKS}


def test_a_subclass_may_override_each_and_call_super(tmp_path):
    called, plain = [], weights(use_everything(TD3X, tmp_path))
    assert largest_difference(weights(use_everything(overriding(called), tmp_path)), plain) == 0
    assert {*called} == {*HOOKS}


LOOP = ["collect_rollouts", "_store_transition", "_sample_action"]


@pytest.mark.parametrize("names", [*LOOP, LOOP[:2], LOOP, ["_create_aliases", "train"]], ids=str)
def test_a_subclass_may_have_sb3s_own_code_in_place_of_it(names, tmp_path):
    cls = type("Own", (TD3X,), {name: getattr(TD3, name) for name in ([names] if isinstance(names, str) else names)})
    learner = model(cls=cls, gradient_steps=1, n_quantiles=1).learn(40)
    assert (learner._n_updates, learner._episode_num) == (30, 2)
    save_run(learner, tmp_path)  # every step is stored
    learner.set_env(LineEnv())


class Around(ReplayBuffer):
    """A replay buffer with a memory of its own."""

    def __init__(self, *args, **kwargs):
        self.inner = ReplayBuffer(*args, **kwargs)
        BaseBuffer.__init__(self, *args, **{name: kwargs[name] for name in ("device", "n_envs")})

    def add(self, *args):
        self.inner.add(*args)
        self.pos, self.full = self.inner.pos, self.inner.full

    def sample(self, *args, **kwargs):
        return self.inner.sample(*args, **kwargs)


def test_a_replay_buffer_may_have_a_memory_of_its_own(base):
    env = VecNormalize(DummyVecEnv([LineEnv]))
    learner = model(env, cls=base, replay_buffer_class=Around).learn(30).learn(30)
    assert learner.replay_buffer.inner.size() == 60
    assert learner._n_updates > 0


class Elsewhere(Around):
    """One whose ``size`` stays 0, as SB3's loop never asks for it."""

    def add(self, *args):
        self.inner.add(*args)


def test_a_replay_buffer_need_not_tell_how_much_it_holds(base):
    learner = model(cls=base, replay_buffer_class=Elsewhere, learning_starts=10).learn(30)
    assert learner._n_updates == 20
    assert learner.learn(30, reset_num_timesteps=False)._n_updates == 50


def test_a_subclass_may_save_fewer_parts(base):
    cls = type("Lean", (base,), {"_get_torch_save_params": lambda self: (["policy"], [])})
    saved = model(cls=cls).learn(20)
    assert largest_difference(weights(reloaded(saved, cls=cls)), weights(saved)) == 0


def test_what_a_subclass_leaves_out_may_depend_on_its_settings(base):
    class Own(base):
        parts = 0

        def _excluded_save_params(self):
            return [*super()._excluded_save_params(), *[f"part{number}" for number in range(self.__dict__["parts"])]]

    (saved := model(cls=Own)).parts, saved.part0 = 1, lambda: None
    assert not hasattr(reloaded(saved, cls=Own), "part0")


def test_a_subclass_may_set_parameters_where_it_is_set_up_also_while_it_is_loaded(base, tmp_path):
    class Own(base):
        def _setup_model(self):
            super()._setup_model()
            self.set_parameters(load_path_or_dict=str(tmp_path / "before.zip"))
            self.first, self.teacher = weights(self), copy.deepcopy(self)

        def _excluded_save_params(self):
            return [*super()._excluded_save_params(), "first", "teacher"]

    model(cls=base, seed=7).save(tmp_path / "before.zip")
    saved = model(cls=Own).learn(20)
    loaded = reloaded(saved, cls=Own)
    assert all(np.array_equal(value, saved.first[name]) for name, value in loaded.first.items())
    loaded.teacher.set_parameters(model(cls=base, seed=8).get_parameters())
    assert largest_difference(weights(loaded), weights(saved)) == 0


def test_a_subclass_that_changes_old_parameters_is_given_them_at_load(base):
    class Own(base):
        def set_parameters(self, params, *args, **kwargs):
            seen.append(sorted(params))
            params["policy"] = {name: value + 1 for name, value in params["policy"].items()}
            super().set_parameters(params, *args, **kwargs)

    seen, saved = [], model(cls=Own)
    assert largest_difference(weights(reloaded(saved, cls=Own)), weights(saved)) == 1
    assert seen == [["actor.optimizer", "critic.optimizer", "policy"]]


@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's, of which one cannot tell what to do
def test_a_train_for_scalar_critics_is_told_of_the_quantiles():
    learner = model(cls=type("Own", (TD3X,), {"train": TD3.train}), n_quantiles=5, top_quantiles_to_drop_per_net=1)
    with pytest.warns(UserWarning, match="Own.train .*wrong for 5 quantiles: if it has them, set n_quantiles=1"):
        learner.learn(100, log_interval=1)


def test_a_subclass_finds_the_lists_of_running_statistics_that_sb3s_td3_has(base):
    class Own(base):
        def train(self, gradient_steps, batch_size=100):
            super().train(gradient_steps, batch_size)
            for network in ("actor", "critic"):
                online, target = (getattr(self, f"{network}_batch_norm_stats{end}") for end in ("", "_target"))
                assert [tensor.shape for tensor in online] == [tensor.shape for tensor in target] == [(3,), (3,)]
                polyak_update(online, target, 1.0)

    trained = model(cls=Own, policy_kwargs={**SMALL, "features_extractor_class": BatchNorm}).learn(40)
    assert trained._n_updates == 30
    assert trained.critic_batch_norm_stats[0].abs().sum() > 0


def test_a_subclass_may_name_parts_of_its_policy_where_sb3s_td3_does(base):
    class Own(base):
        def _create_aliases(self):
            super()._create_aliases()
            self.head = self.actor.mu[-1]

    made = model(cls=Own)
    assert made.head is made.policy.actor.mu[-1]
    made.policy = model().policy
    made._create_aliases()
    assert made.head is made.policy.actor.mu[-1]
