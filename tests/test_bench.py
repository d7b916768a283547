"""``td3x bench`` measures the same work for everyone and says what it measured."""

import dataclasses
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import contenders
import pytest
import torch as th
from stable_baselines3 import TD3
from typer.testing import CliRunner

from sb3_td3x import cli
from sb3_td3x.runs import bench
from sb3_td3x.td3x import compiled, precision

SMALL = bench.Case(batch_size=4, net_arch=(8, 6), observations=3, actions=2, buffer_size=50)
OPTIONS = ["--batch", "4", "--net", "8,6"]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "has_compiler", lambda: False)


def test_a_path_that_cannot_be_used_is_named_with_the_reason():
    lines = []
    assert list(bench.contenders(SMALL, "cpu", lines.append)) == [bench.BASELINE, "TD3X plain"]
    assert "TD3X compiled is not measured: " in lines[0]
    assert "there is no C++ compiler" in lines[0]


def test_all_paths_have_the_settings_of_sb3(monkeypatch):
    monkeypatch.setattr(compiled, "has_compiler", lambda: True)
    sb3, *paths = [bench.model(algorithm, SMALL, **settings) for algorithm, settings in bench.ALGORITHMS.values()]
    assert [learner.accelerate for learner in paths] == ["plain", "compiled"]
    equal = ("batch_size", "learning_rate", "gamma", "tau", "policy_delay", "target_policy_noise", "target_noise_clip")
    for learner in paths:
        assert [getattr(learner, name) for name in equal] == [getattr(sb3, name) for name in equal]
        assert [weights.shape for weights in learner.policy.parameters()] == [
            weights.shape for weights in sb3.policy.parameters()
        ]


def test_contenders_take_turns_until_the_time_is_over_and_are_told_as_they_are_measured():
    turns, lines = [], []
    counting = {name: lambda name=name: turns.append(name) for name in ("a", "b compiled")}
    taken = bench.take_turns(counting, "cpu", 1, 60.0, lines.append)
    assert turns[-4:] == ["a", "b compiled", "a", "b compiled"]
    assert {len(values) for values in taken.values()} == {11}
    assert [line.split(":")[0] for line in lines] == ["a", "b compiled", "b compiled"]
    assert "compiling" in lines[1]
    assert "compiled in" in lines[2]

    taken = bench.take_turns(counting, "cpu", 1, 0.0, lines.append)
    assert {len(values) for values in taken.values()} == {1}


def test_a_contender_whose_compiler_fails_is_left_out_with_the_reason():
    lines = []
    updates = {"a": lambda: None, "b compiled": Mock(side_effect=compiled.CannotAccelerate("the compiler is too old"))}
    assert list(bench.take_turns(updates, "cpu", 1, 0.0, lines.append)) == ["a"]
    assert lines[-1] == "b compiled is not measured: the compiler is too old"


def test_ratios_are_those_of_the_same_turn():
    taken = {bench.BASELINE: [10.0, 30.0], "x": [5.0, 30.0]}
    assert [(row["ms"], row["times_sb3"]) for row in bench.rows(taken)] == [(20.0, 1.0), (17.5, 1.5)]


@pytest.mark.parametrize(("option", "limits"), [([], (40, 120.0)), (["--quick"], (10, 20.0))])
def test_quick_takes_twenty_seconds_and_the_default_two_minutes(option, limits, monkeypatch, heard):
    def take_turns(updates, device, per_turn, seconds, announce):
        assert (per_turn, seconds) == limits
        return {bench.BASELINE: [1.0]}

    monkeypatch.setattr(bench, "take_turns", take_turns)
    heard("bench", *OPTIONS, *option)


def test_quantile_critics_are_measured_with_scalar_ones():
    updates = bench.contenders(dataclasses.replace(SMALL, n_quantiles=3), "cpu", print)
    assert list(updates) == [bench.BASELINE, "TD3X plain", "TD3X plain, 3 quantiles"]
    for update in updates.values():
        update()


def test_the_eager_contender_learns():
    contender = contenders._EagerTD3(SMALL, "cpu", bench.model(TD3, SMALL).replay_buffer)
    before = [parameter.clone() for network in (contender.actor, contender.critics) for parameter in network.parameters()]
    targets = [parameter.clone() for parameter in contender.critic_targets.parameters()]
    for _ in range(2):
        contender.update()
    after = [parameter for network in (contender.actor, contender.critics) for parameter in network.parameters()]
    assert not any(th.equal(left, right) for left, right in zip(before, after, strict=True))
    assert not all(th.equal(*pair) for pair in zip(targets, contender.critic_targets.parameters(), strict=True))


def test_the_floor_makes_every_product_of_the_update(monkeypatch):
    flops = []
    for name in ("mm", "addmm"):  # the second has a bias before the two
        monkeypatch.setattr(th, name, lambda *parts, out: flops.append(parts[-2].numel() * parts[-1].shape[1]))
    floor = contenders._matrix_products(SMALL, "cpu")
    actor, critic = (4 * n for n in (3 * 8 + 8 * 6 + 6 * 2, 5 * 8 + 8 * 6 + 6 * 1))
    first_actor, first_critic = 4 * 3 * 8, 4 * 5 * 8
    critics_step = actor + 4 * critic + 2 * (2 * critic - first_critic)
    only_actions = 4 * 8 * (5 - 2)  # nobody needs the observations' gradient
    actors_step = actor + critic + critic - only_actions + 2 * actor - first_actor
    floor()
    assert sum(flops) == critics_step
    flops.clear()
    floor()
    assert sum(flops) == critics_step + actors_step


@pytest.mark.skipif(not hasattr(th.backends.mkldnn, "matmul"), reason="torch 2.8 has no setting for products")
@pytest.mark.parametrize("kernels", ["default", "onednn"])
def test_the_floor_takes_the_kernels_of_compiled_updates(kernels, monkeypatch):
    used = []
    real = th.mm

    def mm(left, right, out):
        used.append(th.backends.mkldnn.matmul.fp32_precision)
        return real(left, right, out=out)

    monkeypatch.setattr(precision, "choose_matrix_kernels", lambda: kernels)
    monkeypatch.setattr(th, "mm", mm)
    contenders._matrix_products(SMALL, "cpu")()
    assert set(used) == {"bf16" if kernels == "onednn" else "none"}
    assert th.backends.mkldnn.matmul.fp32_precision == "none"


def test_the_command_prints_a_table(called_and_heard):
    code, printed = called_and_heard("bench", "--device", "auto", "--quick", *OPTIONS)
    said = " ".join((printed.out + printed.err).split())
    assert code == 0
    assert all(text in said for text in ("TD3X compiled is not measured", "SB3 TD3: ", "times SB3"))
    assert re.search(r"SB3 TD3( \d+\.\d\d){3} 1\.00", said)


def test_the_script_measures_every_contender_and_writes_the_figures(tmp_path, capsys):
    out = tmp_path / "new" / "speed.json"
    contenders.main([*OPTIONS, "--observations", "3", "--actions", "2", "--buffer", "50", "--seconds", "0", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert figures["case"] == {**vars(SMALL), "net_arch": [8, 6]}
    names = {bench.BASELINE, "TD3X plain", "sb3-contrib TQC", contenders.EAGER, contenders.FLOOR}
    assert names <= {row["name"] for row in figures["rows"]}
    assert all(row["ms"] > 0 for row in figures["rows"])
    assert [row["share_of_floor"] for row in figures["rows"] if row["name"] == contenders.FLOOR] == [1]
    assert "of floor" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--net", "wide"], ["--net", "8,0"], ["--device", "tpu"]])
def test_invalid_values_are_refused_before_anything_is_measured(option):
    result = CliRunner().invoke(cli.app, ["bench", *option])
    assert isinstance(result.exception, ValueError)
    assert result.output == ""


@pytest.mark.parametrize("option", ["--batch", "--quantiles"])
def test_a_size_of_zero_is_refused_too(option, refused):
    assert f"Invalid value for '{option}'" in refused("bench", option, 0)


def test_milliseconds_of_an_update_of_this_batch(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert bench._milliseconds(lambda: clock.__setitem__(0, clock[0] + 0.002), 5, "cpu") == pytest.approx(2)
    assert {update.args for update in bench.contenders(SMALL, "cpu", print).values()} == {(1, SMALL.batch_size)}


def test_bench_has_the_threads_that_it_prints(monkeypatch, heard):
    monkeypatch.setattr(bench, "take_turns", lambda *_: {bench.BASELINE: [1.0]})
    monkeypatch.setattr(th, "set_num_threads", asked := Mock())
    assert "threads 3" in heard("bench", *OPTIONS, "--threads", 3)
    asked.assert_called_once_with(3)
