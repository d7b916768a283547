"""Updates take the path that is asked for; with ``"auto"`` they are compiled after the first ones, wherever these are made."""

import copy
import re
import signal
import subprocess
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn

from sb3_td3x.checkpoint import resume_run, save_run
from sb3_td3x.td3x import compiled, gradient_step
from sb3_td3x.td3x.compiled import SWITCH_AFTER, CannotAccelerate, Updater, update_path
from tests.paths import ready, train
from tests.resuming import OpenLineEnv, seeded
from tests.tools import filled, largest_difference, model, random_batch, reloaded, train_on, weights, without_output

SWITCH = 25


@pytest.fixture
def switch(monkeypatch, recorded):
    """``"auto"`` switches after a few updates; a program is its recording, and ``made`` lists after how many updates."""
    made = []
    monkeypatch.setattr(compiled, "SWITCH_AFTER", SWITCH)
    make = Updater._make
    monkeypatch.setattr(Updater, "_make", lambda updater, *args: made.append(updater.updates_made) or make(updater, *args))
    return made


class TestAuto:
    def test_says_nothing_while_it_is_plain_and_one_line_at_the_switch(self, switch, capsys):
        algorithm = model(verbose=1)
        algorithm.learn(30)
        assert "accelerate" not in capsys.readouterr().out
        algorithm.learn(30, reset_num_timesteps=False)
        assert capsys.readouterr().out.count("accelerate: ") == 1
        assert switch == [SWITCH]

    @pytest.mark.parametrize("steps", [2, 40])
    def test_any_loop_of_learn_calls_gets_there_once(self, switch, steps):
        algorithm = model()
        for _ in range(80 // steps):
            algorithm.learn(steps, reset_num_timesteps=steps == 40)
        assert algorithm._updates_since_load == algorithm._n_updates > SWITCH
        assert switch == [SWITCH]

    def test_switches_inside_one_train_call(self, switch):
        algorithm = model().learn(20)
        algorithm.train(40, 8)
        assert switch == [SWITCH]

    def test_a_copy_continues_counting_and_a_loaded_model_begins_anew(self, switch):
        algorithm = model().learn(30)
        assert algorithm._updates_since_load == copy.deepcopy(algorithm)._updates_since_load == 20
        assert reloaded(algorithm)._updates_since_load == 0

    @pytest.mark.filterwarnings("error:not restored exactly")
    @pytest.mark.parametrize("saved_at", [SWITCH + 9, SWITCH + 10, SWITCH + 11])  # 10 steps are random
    def test_a_resumed_run_switches_where_the_uninterrupted_one_does(self, switch, tmp_path, saved_at):
        whole = model(seeded(OpenLineEnv)).learn(60)
        assert switch == [SWITCH]
        save_run(model(seeded(OpenLineEnv)).learn(saved_at), tmp_path)
        switch.clear()
        resumed = resume_run(tmp_path, seeded(OpenLineEnv)).learn(60, resume=True)
        assert switch == [max(SWITCH, saved_at - 10)]
        assert largest_difference(weights(whole), weights(resumed)) == 0

    @pytest.mark.parametrize("accelerate", ["auto", "compiled"])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_that_ends_the_compiler_too_only_makes_it_begin_again(
        self, switch, monkeypatch, tmp_path, accelerate, number
    ):
        """A terminal's Ctrl-C reaches the compiler as well; the run itself makes its step and stops."""
        monkeypatch.setattr(
            compiled, "stop_signals", lambda: [signal.SIGTERM, signal.SIGHUP]
        )  # also where nohup began the tests
        (unfinished := tmp_path / "program.so").touch()
        ended = [subprocess.CalledProcessError(-number, ["g++", "program.cpp", "-o", str(unfinished)])]

        def compile_(program, inputs, options):
            if ended:
                raise RuntimeError("C++ compile error") from ended.pop()
            return program

        monkeypatch.setattr("torch._inductor.compile", compile_)
        algorithm = model(accelerate=accelerate).learn(10)
        algorithm.train(SWITCH + 1, 8)
        assert algorithm._updater.declined is None
        assert algorithm._updater.programs_made == 2
        assert len(switch) == 2
        assert not unfinished.exists()  # Inductor would load it

    @pytest.mark.parametrize("kind", [ImportError, OSError])
    def test_a_library_whose_linker_was_killed_is_linked_anew(self, switch, monkeypatch, tmp_path, kind):
        (cut := tmp_path / "program.main.so").touch()

        def compile_(program, inputs, options):
            if cut.exists():
                raise RuntimeError(f"{kind.__name__}: {cut}: file too short") from kind(f"{cut}: file too short")
            return program

        monkeypatch.setattr("torch._inductor.compile", compile_)
        algorithm = model(accelerate="compiled").learn(10)
        algorithm.train(SWITCH + 1, 8)
        assert algorithm._updater.programs_made == 2

    def test_a_compiler_that_fails_after_a_signal_has_failed(self, switch, monkeypatch):
        errors = [OSError("no space left"), subprocess.CalledProcessError(-signal.SIGINT, ["g++"])]
        monkeypatch.setattr("torch._inductor.compile", lambda *_, **__: (_ for _ in ()).throw(errors.pop()))
        algorithm = model().learn(10)
        algorithm.train(SWITCH + 1, 8)
        assert "no space left" in algorithm._updater.declined

    def test_ctrl_c_while_compiling_leaves_the_model_alone(self, switch, monkeypatch):
        algorithm = model().learn(10 + SWITCH)
        before = weights(algorithm)
        with monkeypatch.context() as patch:
            patch.setattr("torch._inductor.compile", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                algorithm.train(1, 8)
        assert largest_difference(before, weights(algorithm)) == 0
        algorithm.train(2, 8)
        assert switch == [SWITCH, SWITCH]

    def test_stays_plain_where_something_keeps_changing(self, switch, monkeypatch):
        monkeypatch.setattr(compiled, "SWITCH_AFTER", 0)
        monkeypatch.setattr(compiled, "MOST_PROGRAMS", 4)
        algorithm = model(policy_kwargs={"activation_fn": nn.LeakyReLU}).learn(15)
        slopes = [layer for layer in algorithm.policy.modules() if isinstance(layer, nn.LeakyReLU)]
        for number in range(4):
            for layer in slopes:
                layer.negative_slope = 0.1 * number
            algorithm.train(2, 8)
        assert algorithm._updater.programs_made == 4
        assert "keeps changing" in algorithm._updater.declined

    def test_stays_plain_without_a_compiler_and_says_so_once(self, monkeypatch, capsys):
        monkeypatch.setattr(compiled, "has_compiler", lambda: False)
        monkeypatch.setattr(compiled, "SWITCH_AFTER", 5)
        model(verbose=1, learning_starts=2).learn(20)
        assert capsys.readouterr().out.count("accelerate: plain (there is no C++ compiler") == 1

    def test_stays_plain_where_compiled_updates_have_not_been_run(self, monkeypatch):
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)
        networks = model().policy
        assert update_path("auto", networks, SWITCH_AFTER) == "compiled"
        monkeypatch.setattr(compiled.sys, "platform", "darwin")
        assert update_path("auto", networks, SWITCH_AFTER) == "plain"
        assert update_path("compiled", networks) == "compiled"


class TestCompiled:
    def test_is_refused_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(compiled, "has_compiler", lambda: False)
        with pytest.raises(CannotAccelerate, match="no C\\+\\+ compiler"):
            model(accelerate="compiled")

    @pytest.mark.parametrize(
        ("error", "line"),
        [("no space left", "no space left"), ("C++ compile error\n\nx.cpp: error: old", "x.cpp: error: old")],
    )
    def test_is_refused_where_the_compiler_fails(self, error, line, monkeypatch):
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)
        monkeypatch.setattr("torch._inductor.compile", lambda *_, **__: (_ for _ in ()).throw(OSError(error)))
        with pytest.raises(
            CannotAccelerate, match=f"cannot be used: compiling the update failed \\(OSError: {re.escape(line)}"
        ):
            train_on(ready("compiled"), [0])

    def test_leaves_out_options_of_a_later_torch(self, monkeypatch):
        asked, usual = [], dict(compiled._OPTIONS)
        monkeypatch.setattr(compiled, "has_compiler", lambda: True)
        monkeypatch.setitem(compiled._OPTIONS, "aot_inductor.of_a_later_torch", True)
        monkeypatch.setattr("torch._inductor.compile", lambda program, inputs, options: asked.append(options) or program)
        train_on(ready("compiled"), [0])
        assert asked == [{name: usual[name] for name in usual if name in torch._inductor.list_options()}] * len(asked)
        assert asked[0]["cpp_wrapper"] is True
        assert compiled._WITHOUT_REUSE.keys() <= set(torch._inductor.list_options())  # without them some numbers were wrong

    def test_is_refused_on_cuda_where_auto_is_plain(self):
        on_cuda = SimpleNamespace(device=torch.device("cuda"))
        assert update_path("auto", on_cuda, SWITCH_AFTER) == "plain"
        with pytest.raises(CannotAccelerate, match="compiled updates are for the CPU, the networks are on 'cuda'"):
            update_path("compiled", on_cuda)


def test_updates_before_learn_make_the_programs_that_learn_uses(switch):
    """So that nothing waits for a compiler once it has begun, although the networks are in another mode then."""
    algorithm = without_output(model(accelerate="compiled", learning_starts=0))
    algorithm.replay_buffer = filled(ReplayBuffer, 20, n_envs=1)
    algorithm.train(2, 8)
    algorithm.learn(10)
    algorithm.train(2, 8)
    assert (switch, algorithm._updater.programs_made) == ([0], 2)


def test_what_is_set_later_takes_effect(switch):
    algorithm = without_output(model(accelerate="plain"))
    train_on(algorithm, [0])
    assert switch == []
    algorithm.accelerate = "compiled"
    train(algorithm, [random_batch(1)])
    assert switch == [1]


def test_another_thread_may_use_the_model_while_its_update_is_recorded(switch, monkeypatch, tmp_path):
    algorithm, outcomes = ready("compiled"), []
    observation = random_batch(0).observations.numpy()
    expected = algorithm.predict(observation)[0]
    critic_losses = gradient_step.critic_losses

    def use():
        saved = algorithm.policy.state_dict()
        torch.save(saved, tmp_path / "policy.pth")
        outcomes.append((algorithm.predict(observation)[0] == expected).all() and largest_difference(saved, before) == 0)

    def used_meanwhile(*args):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return critic_losses(*args)

    before = weights(algorithm)
    monkeypatch.setattr(gradient_step, "critic_losses", used_meanwhile)
    train_on(algorithm, [0])
    assert switch == [0]
    assert outcomes[0]
