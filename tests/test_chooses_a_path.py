"""Which path the updates of a run take: what is asked for or an error, what pays under ``"auto"``, said once."""

import math
from types import SimpleNamespace

import pytest
import torch

from sb3_td3x import TD3X
from sb3_td3x.td3x import compiled
from sb3_td3x.td3x.compiled import WORTH_COMPILING, CannotAccelerate, FastUpdate, choose
from tests.paths import ready, train
from tests.tools import model, random_batch, without_output


class TestChoosing:
    def test_short_runs_do_not_pay_for_compiling(self):
        policy = model().policy
        assert choose("auto", policy, WORTH_COMPILING - 1)[0] == "plain"
        assert choose("auto", policy, WORTH_COMPILING)[0] == "compiled"

    def test_a_run_without_updates_does_not_compile_however_long_it_is(self):
        def stop(local, _):
            return local["self"].num_timesteps < 5

        assert model(gradient_steps=0).learn(math.inf, stop).update_path == "plain"

    def test_it_is_chosen_once_per_run_and_said_once(self, capsys):
        algorithm = model(verbose=1)
        algorithm.learn(30)
        algorithm.learn(30, reset_num_timesteps=False)
        assert algorithm.update_path == "plain"
        assert capsys.readouterr().out.count("accelerate: plain (20 updates ahead do not pay") == 1

    def test_a_run_that_goes_on_stays_on_its_path(self, tmp_path):
        algorithm = model().learn(30)
        algorithm.save(tmp_path / "model")
        assert TD3X.load(tmp_path / "model").update_path == "plain"
        assert choose("auto", algorithm.policy, 0, chosen_before="compiled") == ("compiled", "as before")

    def test_a_longer_run_after_a_short_one_is_compiled(self):
        assert choose("auto", model().policy, WORTH_COMPILING, chosen_before="plain")[0] == "compiled"

    def test_no_compiler_is_a_reason(self, monkeypatch):
        monkeypatch.setattr(compiled, "_has_compiler", lambda: False)
        assert "no C++ compiler" in choose("auto", model().policy, 1e9)[1]
        with pytest.raises(CannotAccelerate, match="no C\\+\\+ compiler"):
            model(accelerate="compiled")

    def test_a_compiler_that_fails_is_a_reason(self, monkeypatch, capsys):
        monkeypatch.setattr(compiled, "_compile", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(CannotAccelerate, match="making the program failed \\(OSError: no space left"):
            train(ready("compiled"), [random_batch(0)])

    def test_what_is_asked_for_later_is_heeded_or_refused(self, tmp_path):
        algorithm = without_output(model())
        algorithm.update_path = "compiled"
        assert isinstance(algorithm._get_updater(), FastUpdate)
        algorithm.accelerate = "plain"
        assert not isinstance(algorithm._get_updater(), FastUpdate)
        algorithm.accelerate, algorithm.update_path = "auto", "plain"
        assert not isinstance(algorithm._get_updater(), FastUpdate)

    def test_on_cuda_updates_are_plain_and_compiled_is_refused(self):
        on_cuda = SimpleNamespace(device=torch.device("cuda"))
        assert choose("auto", on_cuda, 1e9)[0] == "plain"
        with pytest.raises(CannotAccelerate, match="compiled updates are for the CPU, the networks are on 'cuda'"):
            choose("compiled", on_cuda)

    @pytest.mark.parametrize("name", ["accelerate", "precision"])
    def test_unknown_words_are_refused(self, name):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            model(**{name: "fastest"})
