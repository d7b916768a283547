"""The log holds what TD3 is debugged with, the numbers are right, and writing it changes nothing in a run."""

import csv
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import LogEveryNTimesteps
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.logger import configure
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_td3x.td3x import diagnostics
from sb3_td3x.td3x.compiled import has_compiler
from sb3_td3x.td3x.diagnostics import measure
from sb3_td3x.td3x.exploration import noise_std
from sb3_td3x.td3x.gradient_step import UpdateSettings
from tests.tools import SMALL, BatchNorm, LineEnv, largest_difference, model, random_batch, reloaded, weights

ROOT = Path(__file__).parent.parent
MEASURED = {"train/q_mean", "train/target_mean", "train/twin_gap", "train/action_saturation"}
LOGGED = {*MEASURED, "train/replay_size", "rollout/action_noise_std", "time/updates_per_second"}
DICT = spaces.Dict({"image": spaces.Box(0, 255, (1, 36, 36), np.uint8), "vector": spaces.Box(-10, 10, (2,))})


def logged(folder, *formats, steps=130, env=None, policy="MlpPolicy", **kwargs):
    """A short run that writes its log at every second episode, and the model after it."""
    algorithm = model(env, policy, **kwargs)
    algorithm.set_logger(configure(str(folder), list(formats or ["csv"])))
    return algorithm.learn(steps, log_interval=2)


def rows(folder):
    return list(csv.DictReader((folder / "progress.csv").read_text().splitlines()))


class TestNumbers:
    SETTINGS = UpdateSettings(gamma=0.9, tau=0.01, target_policy_noise=0.2, target_noise_clip=0.3)

    @pytest.mark.parametrize("n_critics", [1, 2, 3])
    def test_are_those_of_a_slow_calculation(self, n_critics):
        algorithm = model(policy_kwargs={**SMALL, "n_critics": n_critics})
        batch, noise = random_batch(0, batch=6), th.randn(6, 1)
        with th.no_grad():
            algorithm.actor.mu[-2].bias.fill_(3)  # tanh(3) is 0.995: most actions are saturated
        policy, gap, values, targets, saturated = algorithm.policy, [], [], [], []
        for i in range(6):  # one transition after the other
            observation, action, after = (
                part[i : i + 1] for part in (batch.observations, batch.actions, batch.next_observations)
            )
            with th.no_grad():
                q = [float(value) for value in policy.critic(observation, action)]
                next_action = float(policy.actor_target(after)) + float(np.clip(0.2 * float(noise[i]), -0.3, 0.3))
                next_action = th.tensor([[np.clip(next_action, -1, 1)]], dtype=th.float32)
                next_q = min(float(value) for value in policy.critic_target(after, next_action))
                saturated.append(abs(float(policy.actor(observation))) > 0.99)
            values += q
            gap.append(max(q) - min(q))
            targets.append(float(batch.rewards[i]) + (1 - float(batch.dones[i])) * 0.9 * next_q)
        expected = {
            "q_mean": np.mean(values), "target_mean": np.mean(targets), "action_saturation": np.mean(saturated),
            **({"twin_gap": np.mean(gap)} if n_critics > 1 else {}),
        }  # fmt: skip
        assert expected["action_saturation"] > 0
        assert measure(policy, batch, noise, self.SETTINGS) == pytest.approx(expected, rel=1e-5)

    def test_a_quantile_critics_value_is_the_mean_of_its_quantiles(self):
        algorithm = model(n_quantiles=5)
        batch, noise = random_batch(1, batch=6), th.randn(6, 1)
        found = measure(algorithm.policy, batch, noise, self.SETTINGS._replace(top_quantiles_to_drop_per_net=2))
        with th.no_grad():
            first, second = (quantiles.mean(dim=1) for quantiles in algorithm.critic(batch.observations, batch.actions))
            kept = algorithm.policy.actor_target(batch.next_observations) + (0.2 * noise).clamp(-0.3, 0.3)
            pool = th.cat(algorithm.critic_target(batch.next_observations, kept.clamp(-1, 1)), dim=1).sort(dim=1).values
        target = batch.rewards + (1 - batch.dones) * 0.9 * pool[:, :6]  # 10 quantiles without the largest 4
        assert found["q_mean"] == pytest.approx(float((first + second).mean() / 2), rel=1e-5)
        assert found["twin_gap"] == pytest.approx(float((first - second).abs().mean()), rel=1e-5)
        assert found["target_mean"] == pytest.approx(float(target.mean()), rel=1e-5)

    def test_noise_of_each_kind(self):
        assert noise_std(None) == 0
        normal = NormalActionNoise(np.zeros(2), np.array([0.1, 0.3]))
        assert [noise_std(normal), noise_std(VectorizedActionNoise(normal, 3))] == pytest.approx([0.2, 0.2])
        for noise, std in zip((several := VectorizedActionNoise(normal, 2)).noises, (0.1, 0.5), strict=True):
            noise._sigma = np.full(2, std)
        assert noise_std(several) == pytest.approx(0.3)
        correlated = OrnsteinUhlenbeckActionNoise(np.zeros(1), np.full(1, 0.2), theta=0.5, dt=0.2)
        np.random.seed(0)
        assert noise_std(correlated) == pytest.approx(np.std([correlated() for _ in range(40_000)]), rel=0.03)
        by_joint = OrnsteinUhlenbeckActionNoise(np.zeros(2), np.full(2, 0.2), theta=np.full(2, 0.5), dt=0.2)
        assert noise_std(by_joint) == noise_std(correlated)
        own = {"__call__": lambda self: 0}  # what it draws need not be of its class's deviation
        assert noise_std(type("Own", (NormalActionNoise.__base__,), own)()) is None
        assert noise_std(type("Own", (NormalActionNoise,), own)(np.zeros(2), np.ones(2))) is None

    def test_there_are_none_before_the_first_update(self, tmp_path):
        loaded = reloaded(model().learn(30), env=LineEnv())
        loaded.set_logger(configure(str(tmp_path), ["csv"]))
        loaded.learn(30, LogEveryNTimesteps(1))  # a new run with a trained actor
        assert [bool(row["train/q_mean"]) for row in rows(tmp_path)] == [False] * 11 + [True] * 19  # 10 steps are random

    def test_sizes_and_noise_in_the_log(self, tmp_path):
        logged(tmp_path, action_noise=0.25, learning_starts=50, env=DummyVecEnv([LineEnv] * 2), buffer_size=100)
        kept = rows(tmp_path)
        assert [int(row["train/replay_size"]) for row in kept] == [40, 80, 100]  # two environments, 100 in all
        assert {float(row["rollout/action_noise_std"]) for row in kept} == {0.25}
        # Nothing has been updated by the first: no values yet
        assert [bool(row["train/q_mean"]) for row in kept] == [False, True, True]
        assert [float(row["time/updates_per_second"]) > 0 for row in kept] == [False, True, True]

    def test_are_measured_once_where_several_lines_are_written_in_one_step(self, tmp_path):
        logged(tmp_path, env=DummyVecEnv([LineEnv] * 4))  # whose episodes end together
        kept = rows(tmp_path)
        assert [int(row["train/replay_size"]) for row in kept] == [80, 80]
        assert [bool(row["train/q_mean"]) for row in kept] == [True, False]

    def test_draw_no_numbers_of_a_networks_own_noise(self, tmp_path):
        class Noisy(FlattenExtractor):
            def forward(self, observations):
                return super().forward(observations) + 0.1 * th.randn(3)

        settings = {"policy_kwargs": {**SMALL, "features_extractor_class": Noisy}}
        often, never = (weights(model(**settings).learn(60, log_interval=interval)) for interval in (1, None))
        assert largest_difference(often, never) == 0

    def test_are_in_every_line_of_a_training_without_an_environment(self, tmp_path):
        learner = model().learn(60)
        learner.set_logger(configure(str(tmp_path), ["csv"]))
        for _ in range(2):
            learner.train(5, 8)
            learner.dump_logs()
        assert [bool(row["train/q_mean"]) for row in rows(tmp_path)] == [True, True]


class TestKeys:
    def test_are_in_csv_and_tensorboard(self, tmp_path):
        logged(tmp_path, "csv", "tensorboard")
        assert set(rows(tmp_path)[0]) >= LOGGED
        assert set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]) >= LOGGED

    @pytest.mark.parametrize(
        ("kwargs", "missing"),
        [
            ({"policy_kwargs": {**SMALL, "n_critics": 1}}, {"train/twin_gap"}),
            ({"policy_kwargs": {**SMALL, "n_critics": 3}, "n_quantiles": 4}, set()),
            ({"policy": "MultiInputPolicy", "env": LineEnv(DICT)}, set()),
            ({"env": VecNormalize(DummyVecEnv([LineEnv]))}, set()),
            ({"n_steps": 3}, set()),
            (
                {
                    "policy": "MultiInputPolicy",
                    "env": BitFlippingEnv(n_bits=4, continuous=True),
                    "replay_buffer_class": HerReplayBuffer,
                },
                set(),
            ),
        ],
        ids=["one critic", "three quantile critics", "Dict", "normalized", "n-step", "hindsight"],
    )
    def test_are_there_for_every_kind_of_model(self, kwargs, missing, tmp_path):
        logged(tmp_path, steps=60, **kwargs)
        last = rows(tmp_path)[-1]
        assert MEASURED - set(last) == missing
        assert all(np.isfinite(float(last[key])) for key in MEASURED - missing)

    def test_are_all_explained(self, tmp_path):
        logged(tmp_path, qf_learning_rate=1e-3)
        page = (ROOT / "docs" / "logging.md").read_text()
        assert set(re.findall(r"`(\w+/\w+)`", page)) >= {*rows(tmp_path)[0], "eval/success_rate"}  # which SB3 adds


class TestARunWithALogEqualsOneWithout:
    @pytest.mark.parametrize(
        "kwargs",
        [
            {},
            {"train_freq": (1, "episode"), "gradient_steps": -1},
            {"policy_kwargs": {**SMALL, "features_extractor_class": BatchNorm}},
            {"accelerate": "compiled"},
        ],
        ids=["plain", "episodes", "batch norm", "compiled"],
    )
    def test_bit_for_bit(self, kwargs, tmp_path):
        if kwargs.get("accelerate") == "compiled" and not has_compiler():
            pytest.skip("there is no C++ compiler")
        with_log = logged(tmp_path, "csv", **kwargs)
        drawn_with = random.random(), np.random.random(), th.rand(1)
        without = model(**kwargs).learn(130, log_interval=0)
        drawn_without = random.random(), np.random.random(), th.rand(1)
        assert rows(tmp_path)[-1]["train/q_mean"]
        assert largest_difference(weights(with_log), weights(without)) == 0
        assert with_log.replay_buffer.observations.tolist() == without.replay_buffer.observations.tolist()
        assert drawn_with == drawn_without
        assert th.equal(with_log.noise_generator.get_state(), without.noise_generator.get_state())

    def test_a_buffer_of_the_users_own_is_not_sampled_for_the_log(self, tmp_path):
        """Its sampling may have a state of any kind: an order, a generator, an exponent that anneals."""

        class InOrder(ReplayBuffer):
            calls = 0

            def sample(self, batch_size, env=None):
                self.calls += 1
                return self._get_samples(np.arange(self.calls, self.calls + batch_size) % self.size(), env)

        with_log = logged(tmp_path, replay_buffer_class=InOrder)
        without = model(replay_buffer_class=InOrder).learn(130, log_interval=None)
        assert rows(tmp_path)[-1]["train/q_mean"]
        assert with_log.replay_buffer.calls == without.replay_buffer.calls == with_log._n_updates
        assert largest_difference(weights(with_log), weights(without)) == 0


WITH_WANDB = """
import time
import wandb
from wandb.integration.sb3 import WandbCallback
from tests.tools import model

# As sync_tensorboard=True does, without its wait of ten seconds for a second log directory
wandb.tensorboard.patch(root_logdir="tensorboard/TD3X_1")
run = wandb.init(project="td3x", mode="offline")
model(tensorboard_log="tensorboard").learn(130, WandbCallback(model_save_path="models"), log_interval=1)
assert run.config["algo"] == "TD3X" and run.config["batch_size"] == 8
deadline = time.monotonic() + 120
while not run.summary.get("train/twin_gap"):  # wandb reads TensorBoard's files every few seconds
    assert time.monotonic() < deadline, dict(run.summary)
    time.sleep(0.2)
run.finish()
"""


@pytest.mark.soak  # wandb takes ten seconds to read TensorBoard's files
def test_weights_and_biases_callback_gets_the_log_without_a_network(tmp_path):
    # In a process of its own, because wandb changes TensorBoard's classes for good. Another test's wandb service must not be
    # inherited: it would look for TensorBoard's files in its own working directory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", WITH_WANDB], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "models" / "model.zip").exists()


def test_updates_per_second_are_those_since_the_last_line(tmp_path, monkeypatch):
    algorithm = model()
    monkeypatch.setattr(diagnostics, "time", SimpleNamespace(perf_counter=lambda: algorithm.num_timesteps))
    algorithm.set_logger(configure(str(tmp_path), ["csv"]))
    algorithm.learn(130, log_interval=2)
    assert {float(row["time/updates_per_second"]) for row in rows(tmp_path)[1:]} == {1}
