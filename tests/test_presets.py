"""Presets hold what they say, build for every environment they name, and read no code."""

import inspect
import re
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pybullet_envs_gymnasium  # noqa: F401
import pytest
import yaml
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from sb3_td3x import TD3X, presets
from sb3_td3x.runs import experiment, play
from sb3_td3x.runs.environments import EVALUATION, open_env
from tests.commands import saved_run
from tests.tools import model

FAMILIES = ("gymnasium.envs.classic_control", "gymnasium.envs.box2d", "gymnasium.envs.mujoco", "pybullet_envs_gymnasium")
DISCRETE = ("Acrobot", "CartPole", "LunarLander", "MountainCar")
SOURCE = re.compile(r"rl-zoo3 [\d.]+|TD3 authors'")


def continuous_tasks():
    """The newest version of every task of these families whose actions are continuous."""
    newest = {}
    for spec in gym.registry.values():
        if str(spec.entry_point).startswith(FAMILIES) and spec.name not in DISCRETE:
            newest[spec.name] = max(newest.get(spec.name, 0), spec.version)
    return [f"{name}-v{version}" for name, version in newest.items()]


def test_there_are_three():
    assert presets.names() == ["default", "sb3", "t3d"]


def test_the_settings_are_the_keywords_of_td3x():
    others = {"self", "policy", "env", "seed", "device", "verbose", "tensorboard_log", "_init_setup_model"}
    assert set(presets.MODEL_KEYS) == set(inspect.signature(TD3X.__init__).parameters) - others


class TestFile:
    def test_has_entries_like_a_preset_and_takes_what_it_leaves_out_from_the_default_one(self, tmp_path):
        (tmp_path / "mine.yml").write_text("Pendulum-v1: {learning_rate: 1e-3, n_timesteps: 1e4}\ndefault: {gamma: 0.9}\n")
        name = str(tmp_path / "mine.yml")
        assert presets.load(name, "Pendulum-v1") == {"learning_rate": 1e-3, "n_timesteps": 10_000}
        assert presets.load(name, "Other-v0") == {"gamma": 0.9, "n_timesteps": 500_000}

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("Other-v0: {gamma: 0.9}", "mine.yml has no entry for Pendulum-v1 and none named default"),
            ("batch_size: 128", "must map environments"),
            ("default: {batchsize: 128}", "there is no setting 'batchsize': did you mean batch_size"),
            ("default: {env_kwargs: {g: 9}}", "no setting 'env_kwargs': it is the option --env-kwargs of td3x train"),
            ("default: {gamma: 0.9", "mine.yml cannot be read"),
            ("default: {gamma: !!bool x}", "mine.yml cannot be read"),
            ("!!python/object/apply:os.getcwd []", "mine.yml cannot be read"),
            (None, "mine.yml cannot be read"),
        ],
    )
    def test_with_an_error_is_named(self, content, complaint, tmp_path):
        if content is not None:
            (tmp_path / "mine.yml").write_text(content)
        with pytest.raises(ValueError, match=complaint):
            presets.load(str(tmp_path / "mine.yml"), "Pendulum-v1")


@pytest.mark.parametrize(("name", "n_quantiles"), [("sb3", 1), ("t3d", 1), ("default", 25)])
def test_every_entry_builds_a_model_with_its_settings_and_the_presets_critics(name, n_quantiles):
    for env_id in presets.table(name):
        entry = presets.load(name, env_id)
        assert set(entry) <= {*presets.RUN_KEYS, *presets.MODEL_KEYS}
        assert entry["n_timesteps"] >= 10_000
        presets.check(entry)
        arguments = {"n_quantiles": "auto", **presets.model_arguments(entry)}
        algorithm = model(**{**arguments, "buffer_size": 100, "policy_kwargs": {"net_arch": [4]}})
        assert algorithm.n_quantiles == n_quantiles, env_id
        for key in ("gamma", "batch_size", "tau", "learning_rate", "gradient_steps"):
            if isinstance(entry.get(key), (int, float)):
                assert getattr(algorithm, key) == entry[key], env_id


def test_every_continuous_task_of_the_common_families_has_an_entry_that_names_its_source():
    tasks = continuous_tasks()
    assert sum("Bullet" in env_id for env_id in tasks) == 13
    assert {"Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v3", "CarRacing-v3", "Humanoid-v5"} <= set(tasks)
    paragraphs = re.split(r"\n\n(?=#)", (files("sb3_td3x.presets") / "default.yml").read_text())
    for env_id in tasks:
        (paragraph,) = (part for part in paragraphs if re.search(rf"^{env_id}:", part, re.MULTILINE))
        comment = "".join(line for line in paragraph.splitlines() if line.startswith("#"))
        assert SOURCE.search(comment), paragraph
        policy = "CnnPolicy" if env_id.startswith("CarRacing") else None  # chosen by the observations
        assert presets.load("default", env_id).get("policy") == policy


def test_mujocos_older_tasks_follow_the_newest():
    older = [spec for spec in gym.registry.values() if str(spec.entry_point).startswith(FAMILIES[2]) and spec.version == 4]
    assert older
    for spec in older:
        assert spec.id in presets.table("default")
        assert presets.load("default", spec.id) == presets.load("default", f"{spec.name}-v5")


def test_an_entry_is_found_under_module_and_name_too():
    bullet = presets.load("default", "Walker2DBulletEnv-v0")
    assert bullet["gamma"] == 0.98
    assert presets.load("default", "pybullet_envs_gymnasium:Walker2DBulletEnv-v0") == bullet


def test_t3d_is_the_texts_recipe_for_every_environment():
    algorithm = model(**presets.model_arguments(presets.load("t3d", "Anything-v0")))
    assert (algorithm.train_freq.frequency, algorithm.train_freq.unit.value, algorithm.gradient_steps) == (1, "episode", -1)
    assert (algorithm.batch_size, algorithm.learning_rate, algorithm.gamma, algorithm.tau) == (100, 1e-3, 0.99, 0.005)
    assert (algorithm.target_policy_noise, algorithm.target_noise_clip, algorithm.policy_delay) == (0.2, 0.5, 2)
    assert (algorithm.learning_starts, algorithm.action_noise._sigma.tolist()) == (10_000, [0.1])
    assert presets.load("t3d", "Anything-v0")["n_timesteps"] == 500_000


def test_sb3_is_rl_zoos_tuned_td3_value_by_value():
    rl_zoo = find_spec("rl_zoo3")
    if rl_zoo is None or version("rl_zoo3") != "2.9.2":
        pytest.skip("rl-zoo3 2.9.2 is not installed")
    theirs = yaml.safe_load(Path(rl_zoo.origin).with_name("hyperparams").joinpath("td3.yml").read_text())
    del theirs["MinitaurBulletEnv-v0"]
    for entry in theirs.values():
        entry.update(n_quantiles=1, learning_starts=entry.get("learning_starts", 100))
        if "policy_kwargs" in entry:
            assert entry["policy_kwargs"] == "dict(net_arch=[400, 300])"
            entry["policy_kwargs"] = {"net_arch": [400, 300]}
    newer = {f"{name[:-1]}5": entry for name, entry in theirs.items() if name.endswith("-v4")}
    assert presets.table("sb3") == {**theirs, **newer}


def test_linear_schedules_go_from_the_value_to_zero():
    rate = presets.model_arguments(presets.load("sb3", "BipedalWalkerHardcore-v3"))["learning_rate"]
    assert [rate(progress) for progress in (1.0, 0.5, 0.0)] == pytest.approx([7e-4, 3.5e-4, 0.0])


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("batch_size=128", "batch_size", 128),
        ("learning_rate=lin_3e-4", "learning_rate", "lin_3e-4"),
        ("train_freq=[1, episode]", "train_freq", [1, "episode"]),
        ("policy_kwargs=null", "policy_kwargs", None),
        ("normalize=true", "normalize", True),
        ("buffer_size=1e5", "buffer_size", 100_000),
        ("action_noise=None", "action_noise", None),
        ("policy_kwargs={note: '1e5'}", "policy_kwargs", {"note": "1e5"}),
        ("action_noise=[0.5, 0.1, 6e4]", "action_noise", [0.5, 0.1, 60_000]),
        ("policy_kwargs={optimizer_kwargs: {eps: 1e-5}}", "policy_kwargs", {"optimizer_kwargs": {"eps": 1e-5}}),
    ],
)
def test_set_changes_one_value(assignment, key, value):
    before = presets.load("default", "Walker2DBulletEnv-v0")
    after = presets.override(before, [assignment])
    assert after == {**before, key: value}


@pytest.mark.parametrize(
    ("assignments", "sigma"),
    [
        (["action_noise=0.3"], 0.3),
        (["noise_std=0.3"], 0.3),
        (["noise_type=normal", "noise_std=0.2"], 0.2),
        (["noise_type=null"], None),
        ([], 0.1),
    ],
)
def test_noise_in_rl_zoos_keys_reaches_the_model(assignments, sigma):
    entry = presets.override(presets.load("default", "Walker2DBulletEnv-v0"), assignments)
    noise = model(**presets.model_arguments(entry)).action_noise
    assert (noise is None) if sigma is None else (noise._sigma.tolist() == [sigma])


def test_ornstein_uhlenbeck_noise_has_the_shape_of_an_action():
    noise = presets.model_arguments(presets.load("sb3", "MountainCarContinuous-v0"), (2,))["action_noise"]
    assert type(noise).__name__ == "OrnsteinUhlenbeckActionNoise"
    assert noise().shape == (2,)
    assert noise._sigma.tolist() == [0.5, 0.5]
    assert noise._dt == 0.01  # SB3's default


def test_the_mountain_cars_noise_is_correlated_over_a_few_steps():
    noise = presets.model_arguments(presets.load("default", "MountainCarContinuous-v0"))["action_noise"]
    np.random.seed(0)
    values = np.array([noise()[0] for _ in range(20_000)])
    assert np.corrcoef(values[:-7], values[7:])[0, 1] == pytest.approx(0.85**7, abs=0.05)  # (1 - theta dt) per step


def test_the_critics_own_rate_is_read_as_the_actors():
    entry = presets.override(presets.load("t3d", "Pendulum-v1"), ["qf_learning_rate=lin_2e-3"])
    algorithm = model(**presets.model_arguments(entry))
    assert (algorithm.learning_rate, algorithm.qf_learning_rate(0.5)) == (1e-3, 1e-3)
    for bad in ("exp_1e-3", "lin_fast", "fast", "hold_1e-3", "hold1.0_1e-3", "hold0.6_fast"):
        with pytest.raises(ValueError, match="qf_learning_rate must be a number, lin_<number> or hold<share"):
            presets.model_arguments({"qf_learning_rate": bad})


def test_a_held_rate_falls_to_0_after_its_share_of_the_run():
    rate = presets.model_arguments({"learning_rate": "hold0.6_7e-4"})["learning_rate"]
    assert [rate(left) for left in (1.0, 0.4, 0.2, 0.0, -0.1)] == pytest.approx([7e-4, 7e-4, 3.5e-4, 0.0, 0.0])


@pytest.mark.parametrize("entry", [{"noise_type": "ou", "noise_std": 0.1}, {"noise_type": "normal"}, {"policy_kwargs": "abc"}])
def test_an_entry_that_cannot_be_is_refused(entry):
    with pytest.raises(ValueError, match=r"noise_type|policy_kwargs"):
        presets.model_arguments(entry)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("batchsize=128", "did you mean batch_size"),
        ("nonsense_key=1", "there is no setting 'nonsense_key'"),
        ("batch_size", "needs key=value"),
        ("eval_freq=100", "there is no setting 'eval_freq'"),
        ("n_timesteps=100", "it has an option .n_timesteps: --steps"),
        ("batch_size.x=3", "batch_size is a single value"),
        ("policy_kwargs.net_arch=[64,", "cannot be read as YAML"),
        ("policy_kwargs={n_critics: 1, n_critics: 3}", "the key 'n_critics' is there twice"),
        ("tau=2020-13-01", "'2020-13-01' cannot be read as YAML"),
        ("tau=!!timestamp x", "'!!timestamp x' cannot be read as YAML"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(assignment, message):
    with pytest.raises(ValueError, match=message):
        presets.override({}, [assignment])


@pytest.mark.parametrize(
    ("assignments", "complaint"),
    [
        (["max_grad_norm=-1"], "max_grad_norm must be a number above 0"),
        (["noise_std=-0.1"], "noise_std must be a number of at least 0"),
        (["noise_type=ornstein-uhlenbeck", "noise_std=-0.1"], "noise_std must be a number of at least 0"),
        (["noise_type=ornstein-uhlenbeck", "noise_std=0.2", "noise_dt=-1"], "noise_dt must be a number above 0"),
        (["learning_starts=many"], "learning_starts must be a whole number of at least 0 or .auto., not .many."),
        (["policy=MlpPolici"], "Policy MlpPolici unknown"),
        (["policy_kwargs.net_ach=[64]"], r"policy_kwargs has no 'net_ach': did you mean net_arch\?$"),
        (["top_quantiles_to_drop_per_net=25"], "must be below n_quantiles"),
        (["n_steps=3", "prioritization=lap"], "is for n_steps=1"),
        (["normalize=none"], "normalize must be true, false or a mapping"),
        (["normalize={norm_obs: maybe}"], "normalize.norm_obs must be True or False"),
        (["normalize.clip_obs=-1"], "normalize.clip_obs must be a number above 0"),
        (["normalize.norm_rewards=true"], "normalize has no 'norm_rewards': did you mean norm_reward"),
        (["train_freq=episode"], r'train_freq must be a number or a pair like \[1, "step"\]'),
        (["policy=[3]"], r"policy must be a name such as MlpPolicy, not \[3\]"),
        (["policy_kwargs.net_arch=64"], "net_arch must be a list of layer sizes"),
        (["policy_kwargs.net_arch=[64, 0]"], "a size in net_arch must be a whole number of at least 1, not 0"),
        (["env_wrapper=os.system"], "env_wrapper must be one of"),
    ],
)
def test_what_no_environment_could_be_trained_with_is_found_before_one_is_made(assignments, complaint, monkeypatch):
    monkeypatch.setattr(experiment, "open_env", None)
    with pytest.raises(ValueError, match=complaint):
        experiment.check(experiment.Experiment("Pendulum-v1", overrides=tuple(assignments)))


def test_what_the_environment_decides_is_left_to_it():
    taken = ["policy=MultiInputPolicy", "replay_buffer_class=HerReplayBuffer", "policy_kwargs.normalize_images=false"]
    noise = ["noise_type=ornstein-uhlenbeck", "noise_std=0.2"]
    nothing = ["policy_kwargs=null", "replay_buffer_kwargs=null", "normalize={gamma: 0.9, clip_obs: 5, norm_obs: false}"]
    experiment.check(experiment.Experiment("Pendulum-v1", overrides=(*taken, *noise)))
    experiment.check(experiment.Experiment("Pendulum-v1", overrides=tuple(nothing)))


def test_one_setting_inside_another_is_added_to_what_is_there():
    def changed(*assignments):
        return presets.override({}, assignments)

    assert changed("normalize=true", "normalize.norm_reward=false") == {"normalize": {"norm_reward": False}}
    assert changed("policy_kwargs={net_arch: [8], n_critics: 3}", "policy_kwargs.net_arch=[64, 64]") == {
        "policy_kwargs": {"net_arch": [64, 64], "n_critics": 3}
    }
    with pytest.raises(ValueError, match="policy_kwargs must be a mapping of names to values, not 5"):
        changed("policy_kwargs=5", "policy_kwargs.net_arch=[8]")


def test_classes_are_named_from_a_list():
    for key, (_, known) in presets.CLASSES.items():
        assert all(isinstance(presets.known_class(key, name), type) for name in known), key
    arguments = presets.model_arguments(
        {"replay_buffer_class": "HerReplayBuffer", "policy_kwargs": {"activation_fn": "ELU", "net_arch": [8]}}
    )
    assert arguments["replay_buffer_class"] is HerReplayBuffer
    assert arguments["policy_kwargs"] == {"activation_fn": nn.ELU, "net_arch": [8]}
    for kind in ("print", [1]):
        with pytest.raises(ValueError, match="activation_fn must be one of ReLU"):
            presets.model_arguments({"policy_kwargs": {"activation_fn": kind}})
    extractor = {"policy_kwargs": {"features_extractor_class": "NatureCNN"}}
    assert presets.model_arguments(extractor)["policy_kwargs"]["features_extractor_class"] is NatureCNN
    for entry in ({"replay_buffer_class": "os.system"}, {"policy_kwargs": {"features_extractor_class": "print"}}):
        with pytest.raises(ValueError, match="must be one of"):
            presets.model_arguments(entry)


def test_a_preset_is_never_changed_by_its_use():
    first = presets.load("sb3", "Walker2DBulletEnv-v0")
    first["policy_kwargs"]["net_arch"].append(1)
    presets.model_arguments(first)["gamma"] = 0
    assert presets.load("sb3", "Walker2DBulletEnv-v0")["policy_kwargs"] == {"net_arch": [400, 300]}


def test_nothing_that_is_evaluated_counts_for_the_statistics_or_is_normalized(tmp_path):
    env = VecNormalize(make_vec_env("Pendulum-v1"))
    run = saved_run(tmp_path, "Pendulum-v1", model(env))
    env.save(str(run.normalization))
    opened = open_env("Pendulum-v1", 0, EVALUATION, {"normalize": True}), play.open_evaluation_env(run, seed=0)
    for env in opened:
        assert (env.training, env.norm_reward) == (False, False)


def test_discounts_of_the_default_preset_are_rl_zoos_and_mujocos_values_the_constructors():
    ours, theirs = presets.table("default"), presets.table("sb3")
    for env_id in ours.keys() & theirs.keys() - {"LunarLanderContinuous-v3"}:  # it has values like those of its TQC
        assert ours[env_id].get("gamma", 0.99) == theirs[env_id].get("gamma", 0.99), env_id
    assert ours["Hopper-v5"] == {"n_timesteps": theirs["Hopper-v5"]["n_timesteps"], "policy": "MlpPolicy"}
