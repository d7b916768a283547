"""An exported graph does what ``predict`` does, from raw observations on, and needs neither torch nor SB3."""

import copy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pybullet_envs_gymnasium  # noqa: F401  # registers the walker
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)
from torch import nn

from sb3_td3x import TD3X, __version__
from sb3_td3x.td3x import onnx
from tests.commands import saved_run
from tests.tools import SMALL, LineEnv, Samples, WithoutSpec, model

TWO = spaces.Box(-1, 1, (2,))
PICTURE = spaces.Box(0, 255, (36, 36, 3), np.uint8)
ODD_BOUNDS = spaces.Box(np.array([[-3.0, 0.0], [5.0, -2.0]]), np.array([[-1.0, 10.0], [5.5, 9.0]]), dtype=np.float64)


class Steps(LineEnv):
    """Registered, so that its model knows the environment's name."""


@pytest.fixture(autouse=True)
def known_environment(registered):
    registered("Steps-v0", Steps)


def exported(algorithm, path, **kwargs):
    algorithm.export_onnx(path, **kwargs)
    return onnxruntime.InferenceSession(path)


def batches(space, sizes=(1, 3, 17)):
    space = copy.deepcopy(space)
    space.seed(1)
    for size in sizes:
        drawn = [space.sample() for _ in range(size)]
        yield (
            {key: np.stack([observation[key] for observation in drawn]) for key in space}
            if isinstance(space, spaces.Dict)
            else np.stack(drawn)
        )


def require_equal_actions(session, algorithm, space, seen=lambda batch: batch):
    """For batches of several sizes; ``seen`` is what SB3's wrappers make of a raw batch."""
    low, high = algorithm.action_space.low, algorithm.action_space.high
    different = set()
    for batch in batches(space):
        (actions,) = session.run(None, batch if isinstance(batch, dict) else {"observation": batch})
        expected, _ = algorithm.predict(seen(batch), deterministic=True)
        assert actions.dtype == expected.dtype
        assert actions.shape == expected.shape
        np.testing.assert_allclose((actions - low) / (high - low), (expected - low) / (high - low), rtol=0, atol=5e-6)
        assert (low <= actions).all()
        assert (actions <= high).all()
        different.update(actions.reshape(len(actions), -1)[:, 0].round(4).tolist())
    assert len(different) > 3  # the observations matter


def normalized(env, seed=0, **kwargs):
    """A ``VecNormalize`` with statistics that matter: large means, small and large deviations."""
    wrapper = VecNormalize(env, norm_reward=False, **kwargs)
    random = np.random.default_rng(seed)
    for moments in wrapper.obs_rms.values() if isinstance(wrapper.obs_rms, dict) else [wrapper.obs_rms]:
        shape = moments.mean.shape
        moments.mean, moments.var = random.normal(size=shape) * 3, random.uniform(0.01, 20, size=shape)
    return wrapper


class TestTheGraphActsAsPredict:
    def test_with_normalized_stacked_observations_and_odd_action_bounds(self, tmp_path):
        frames = VecFrameStack(DummyVecEnv([lambda: LineEnv(spaces.Box(-10, 10, (2, 3), np.float64), ODD_BOUNDS)]), 2)
        env = normalized(VecMonitor(frames), clip_obs=1.5, epsilon=1e-3)  # the stack has a memory and stays outside
        session = exported(algorithm := model(env), tmp_path / "flat.onnx")
        (taken,), (given,) = session.get_inputs(), session.get_outputs()
        assert (taken.name, taken.shape[1:], taken.type) == ("observation", [2, 6], "tensor(double)")
        assert (given.name, given.shape[1:], given.type) == ("action", [2, 2], "tensor(double)")
        require_equal_actions(session, algorithm, frames.observation_space, env.normalize_obs)

    def test_with_statistics_in_the_policy(self, tmp_path):
        algorithm = model(policy_kwargs={**SMALL, "normalize_observations": True}).learn(40)
        assert algorithm.policy.normalizer.moments[0].mean.abs().min() > 0.01
        require_equal_actions(exported(algorithm, tmp_path / "own.onnx"), algorithm, algorithm.observation_space)

    def test_with_dict_observations_of_which_some_are_normalized(self, tmp_path):
        counts = {"kind": spaces.Discrete(4), "kinds": spaces.MultiDiscrete([2, 3]), "switches": spaces.MultiBinary(3)}
        boxes = {"speed": spaces.Box(-9, 9, (3,)), "action": spaces.Box(-1, 1, (2, 2)), "view": PICTURE}
        space = spaces.Dict({**counts, **boxes})
        env = normalized(VecTransposeImage(DummyVecEnv([lambda: Samples(space, TWO)])), norm_obs_keys=["speed"])
        algorithm = model(env, "MultiInputPolicy")
        session = exported(algorithm, tmp_path / "dict.onnx")
        assert {tensor.name: tensor.shape[1:] for tensor in session.get_inputs()} == {
            "action": [2, 2], "kind": [], "kinds": [2], "speed": [3], "switches": [3], "view": [36, 36, 3],
        }  # fmt: skip
        assert session.get_outputs()[0].name == "chosen_action"  # a key has the usual name
        transposed = env.venv.transpose_observations
        require_equal_actions(session, algorithm, space, lambda batch: env.normalize_obs(transposed(dict(batch))))

    def test_with_a_dict_whose_only_key_is_observation(self, tmp_path):
        space = spaces.Dict({"observation": spaces.Box(-9, 9, (3,))})
        algorithm = model(Samples(space, TWO), "MultiInputPolicy")
        require_equal_actions(exported(algorithm, tmp_path / "one.onnx"), algorithm, space)

    @pytest.mark.parametrize("env", [None, LineEnv(PICTURE)])
    def test_with_images_as_the_environment_gives_them(self, env, tmp_path):
        algorithm = model(LineEnv(PICTURE), "CnnPolicy")
        session = exported(algorithm, tmp_path / "image.onnx", env=env)
        assert session.get_inputs()[0].shape[1:] == [36, 36, 3]
        assert session.get_inputs()[0].type == "tensor(uint8)"
        require_equal_actions(session, algorithm, PICTURE)

    def test_without_dropout_and_without_changing_the_model(self, tmp_path):
        layers = {"net_arch": [8], "features_extractor_class": WithDropout}
        algorithm = model(policy_kwargs=layers).learn(60)
        algorithm.policy.set_training_mode(True)
        session = exported(algorithm, tmp_path / "actor.onnx")
        assert algorithm.actor.training  # exporting changes nothing
        require_equal_actions(session, algorithm, algorithm.observation_space)

    def test_with_another_default_device(self, tmp_path):
        env = normalized(DummyVecEnv([LineEnv]))
        algorithm = model(env)
        with th.device("meta"):  # as ``set_default_device("cuda")`` does
            session = exported(algorithm, tmp_path / "model.onnx", env=env)
        assert session.get_inputs()

    def test_with_statistics_that_are_given_and_says_what_it_is(self, tmp_path):
        algorithm = model(env := normalized(DummyVecEnv([lambda: gym.make("Steps-v0")]), seed=1))
        algorithm.save(tmp_path / "model.zip")
        alone = TD3X.load(tmp_path / "model.zip")
        folder = tmp_path / "here"  # is made
        session = exported(alone, folder / "given.onnx", env=env)
        require_equal_actions(session, alone, env.observation_space, env.normalize_obs)
        assert session.get_modelmeta().custom_metadata_map == {
            "algorithm": "TD3X", "environment": "Steps-v0", "timesteps": "0", "sb3_td3x": __version__,
        }  # fmt: skip
        assert str(Path(onnx.__file__).parent).encode() not in (folder / "given.onnx").read_bytes()
        assert [path.name for path in folder.iterdir()] == ["given.onnx"]  # the weights are inside


def test_environments_that_give_no_spec_or_are_closed_have_no_name(tmp_path):
    algorithms = [model(WithoutSpec([Steps])), model(SubprocVecEnv([Steps]))]
    algorithms[1].env.close()
    for algorithm in algorithms:
        session = exported(algorithm, tmp_path / "model.onnx")
        assert session.get_modelmeta().custom_metadata_map["environment"] == ""


class WithDropout(FlattenExtractor):
    def __init__(self, space):
        super().__init__(space)
        self.dropout = nn.Dropout(0.5)

    def forward(self, observations):
        return self.dropout(super().forward(observations))


class KeepsItsLastPass(FlattenExtractor):
    def forward(self, observations):
        self.last = th.nn.functional.linear(super().forward(observations), th.ones(3, 3, requires_grad=True))
        return self.last


def test_a_policy_with_a_layer_that_keeps_its_last_pass(tmp_path):
    algorithm = model(policy_kwargs={"features_extractor_class": KeepsItsLastPass}, accelerate="plain").learn(20)
    algorithm.policy.critic(*[th.ones(1, size) for size in (3, 1)])
    exported(algorithm, tmp_path / "model.onnx")


class DependsOnData(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations) * (2.0 if float(observations.sum()) > 0 else 1.0)


class TestBadInput:
    def test_a_missing_package_is_named_with_the_command_that_installs_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else name)
        with pytest.raises(ValueError, match="needs onnxscript: pip install onnxscript"):
            model().export_onnx(tmp_path / "model.onnx")

    def test_a_wrapper_around_the_normalization_is_refused(self, tmp_path):
        algorithm = model(VecFrameStack(VecNormalize(DummyVecEnv([LineEnv])), 2))
        with pytest.raises(ValueError, match="VecFrameStack is around VecNormalize"):
            algorithm.export_onnx(tmp_path / "model.onnx")

    def test_another_environment_is_refused(self, tmp_path):
        other = VecNormalize(DummyVecEnv([lambda: LineEnv(spaces.Box(-1, 1, (4,)))]))
        with pytest.raises(ValueError, match="Observation spaces do not match"):
            model().export_onnx(tmp_path / "model.onnx", env=other)

    def test_a_copy_without_what_its_normalization_is_around_is_told(self, tmp_path):
        algorithm = copy.deepcopy(model(normalized(DummyVecEnv([LineEnv]))))
        with pytest.raises(ValueError, match="its set_venv gives it one"):
            algorithm.export_onnx(tmp_path / "model.onnx")

    def test_a_network_that_cannot_be_exported_leaves_an_older_file(self, tmp_path):
        (path := tmp_path / "model.onnx").write_text("older")
        with pytest.raises(ValueError, match="cannot be exported to ONNX"):
            model(policy_kwargs={"features_extractor_class": DependsOnData}).export_onnx(path)
        assert path.read_text() == "older"

    @pytest.mark.parametrize("predicted", [0.5, np.nan])
    def test_a_graph_that_acts_otherwise_is_not_written(self, predicted, tmp_path, monkeypatch):
        monkeypatch.setattr(onnx, "_onnx", lambda graph, batch: passing_on())
        monkeypatch.setattr(onnx, "_predict", lambda *_: np.full((3, 1), predicted))
        with pytest.raises(ValueError, match="other actions than predict"):
            model().export_onnx(tmp_path / "model.onnx")
        assert not list(tmp_path.iterdir())


def passing_on():
    """A graph that gives the observation as action."""
    import onnx
    from onnx import helper

    kind = onnx.TensorProto.FLOAT
    taken, given = (helper.make_tensor_value_info(name, kind, ["batch", 3]) for name in ("observation", "action"))
    graph = helper.make_graph([helper.make_node("Identity", ["observation"], ["action"])], "graph", [taken], [given])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_the_command_exports_a_run_that_then_walks_without_torch(tmp_path, heard):
    run = saved_run(tmp_path, "Walker2DBulletEnv-v0", model(gym.make("Walker2DBulletEnv-v0")))
    assert heard("export", run.path, "--onnx", tmp_path / "walker.onnx").strip() == str(tmp_path / "walker.onnx")
    example = Path(__file__).parent.parent / "examples" / "walk_without_torch.py"
    code = (
        "import runpy, sys\n"
        "class Without:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'stable_baselines3', 'sb3_td3x'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        f"sys.argv = ['walk', '--model', {str(tmp_path / 'walker.onnx')!r}, '--steps', '30']\n"
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "torch is not loaded" in result.stdout
    assert len(example.read_text().splitlines()) < 40


def test_the_command_exports_a_run_with_its_normalization(tmp_path, heard):
    env = normalized(DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    run = saved_run(tmp_path, "Pendulum-v1", algorithm := model(env))
    env.save(run.normalization)
    heard("export", run.path)
    session = onnxruntime.InferenceSession(run.last_model.with_suffix(".onnx"))
    require_equal_actions(session, algorithm, env.observation_space, env.normalize_obs)


def test_a_graphs_actions_are_in_their_box_and_its_normalization_keeps_its_digits(tmp_path):
    box = spaces.Box(np.full(50, -0.1, np.float32), np.linspace(0.11, 3.7, 50, dtype=np.float32))
    env = VecNormalize(
        DummyVecEnv([lambda: LineEnv(spaces.Box(-1e6, 1e6, (3,), np.float64), box)]), norm_reward=False, clip_obs=1e9
    )
    env.obs_rms.mean, env.obs_rms.var = np.full(3, 1e5 + 0.003), np.full(3, 1e-6)
    algorithm = model(env)
    raw = env.obs_rms.mean + np.random.default_rng(0).normal(size=(5, 3)) * 1e-3
    session = exported(algorithm, tmp_path / "a.onnx")
    (actions,) = session.run(None, {"observation": raw})
    np.testing.assert_allclose(actions, algorithm.predict(env.normalize_obs(raw), deterministic=True)[0], atol=1e-5)
    with th.no_grad():
        algorithm.actor.mu[-2].bias.fill_(100)
    (actions,) = exported(algorithm, tmp_path / "b.onnx").run(None, {"observation": raw})
    assert (actions <= box.high).all()
