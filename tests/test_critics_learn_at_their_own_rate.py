"""``qf_learning_rate`` is the critics' alone; without it there is one rate. Its numbers: ``test_update_matches_the_paper``."""

from stable_baselines3 import TD3
from stable_baselines3.common.utils import LinearSchedule

from sb3_td3x import TD3X
from tests.test_every_setting_has_an_effect import run
from tests.tools import LineEnv, model, without_output


def rates(algorithm):
    return tuple(getattr(algorithm, name).optimizer.param_groups[0]["lr"] for name in ("actor", "critic"))


def test_each_network_has_its_rate_and_both_are_logged(path):
    algorithm = without_output(model(batch_size=8, learning_rate=1e-3, qf_learning_rate=3e-3, accelerate=path))
    run(algorithm)
    assert rates(algorithm) == (1e-3, 3e-3)
    logged = algorithm.logger.name_to_value
    assert (logged["train/learning_rate"], logged["train/qf_learning_rate"]) == (1e-3, 3e-3)


def test_it_is_saved_and_can_be_changed_at_load(tmp_path):
    model(qf_learning_rate=LinearSchedule(4e-3, 0.0, 1.0)).learn(20).save(tmp_path / "model")
    assert TD3X.load(tmp_path / "model").qf_learning_rate(0.5) == 2e-3
    assert TD3X.load(tmp_path / "model", qf_learning_rate=None).qf_learning_rate is None
    assert TD3.load(tmp_path / "model").predict(LineEnv().reset(seed=0)[0])  # SB3 reads the file all the same
