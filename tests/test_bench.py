"""``td3x bench`` measures the same work for everyone and says what it measured."""

import dataclasses
import json

import pytest
import torch as th
from typer.testing import CliRunner

from sb3_td3x import cli
from sb3_td3x.runs import speed
from sb3_td3x.td3x import compiled

SMALL = speed.Case(batch_size=4, net_arch=(8, 6), observations=3, actions=2, buffer_size=50)


@pytest.fixture(autouse=True)
def only_what_starts_quickly(monkeypatch):
    monkeypatch.setattr(compiled, "_has_compiler", lambda: False)
    monkeypatch.setattr(speed, "find_spec", lambda name: None)  # SBX


def test_every_contender_has_its_turn_and_ratios_are_those_of_the_same_turn():
    taken = speed.compare(SMALL, repeats=2, updates=2)
    assert {speed.BASELINE, speed.EAGER, speed.FLOOR, "TD3X plain", "TD3X plain, bf16"} <= set(taken)
    assert all(len(values) == 2 and min(values) > 0 for values in taken.values())

    rows = speed.summary({speed.BASELINE: [10.0, 30.0], "x": [5.0, 15.0], speed.FLOOR: [2.0, 6.0]})
    assert [(row["times_sb3"], row["share_of_floor"]) for row in rows] == [(1.0, 0.2), (2.0, 0.4), (5.0, 1.0)]


def test_time_that_is_over_ends_the_turns_and_each_contender_is_told_as_it_is_measured():
    lines = []
    taken = speed.compare(SMALL, repeats=50, updates=1, seconds=0.0, announce=lines.append)
    assert {len(values) for values in taken.values()} == {1}
    assert [line.split(":")[0] for line in lines] == list(taken)


def test_quantile_critics_are_measured_beside_scalar_ones():
    found = speed.contenders(dataclasses.replace(SMALL, n_quantiles=3))
    assert {"TD3X plain", "TD3X plain, 3 quantiles", "TD3X plain, bf16, 3 quantiles"} <= set(found)
    for name in ("TD3X plain", "TD3X plain, 3 quantiles"):
        found[name]()


def test_the_eager_contender_learns():
    contender = speed._EagerTD3(SMALL, "cpu", speed._model(speed.TD3, SMALL, "cpu").replay_buffer)
    before = [parameter.clone() for network in (contender.actor, contender.critics) for parameter in network.parameters()]
    targets = [parameter.clone() for parameter in contender.critic_targets.parameters()]
    for _ in range(2):
        contender.update()
    after = [parameter for network in (contender.actor, contender.critics) for parameter in network.parameters()]
    assert not any(th.equal(left, right) for left, right in zip(before, after, strict=True))
    assert not all(th.equal(*pair) for pair in zip(targets, contender.critic_targets.parameters(), strict=True))


def test_the_floor_makes_every_product_of_the_update(monkeypatch):
    flops = []
    monkeypatch.setattr(th, "mm", lambda left, right, out: flops.append(left.shape[0] * left.shape[1] * right.shape[1]))
    monkeypatch.setattr(
        th, "addmm", lambda bias, left, right, out: flops.append(left.shape[0] * left.shape[1] * right.shape[1])
    )
    floor = speed._matrix_products(SMALL, "cpu")
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


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path):
    out = tmp_path / "new" / "speed.json"
    options = "bench --device auto --batch 4 --net 8,6 --observations 3 --actions 2 --buffer 50 --repeats 1 --out"
    result = CliRunner().invoke(cli.app, [*options.split(), str(out)])
    assert result.exit_code == 0, result.output
    assert "SB3 TD3: " in result.output
    assert "ms per update, ready after" in result.output
    figures = json.loads(out.read_text())
    assert figures["case"] == {**vars(SMALL), "net_arch": [8, 6]}
    assert {"processor", "torch", "threads", "rows"} <= set(figures)
    assert {row["name"] for row in figures["rows"]} >= {speed.BASELINE, speed.FLOOR}


@pytest.mark.parametrize("option", [["--net", "wide"], ["--net", "8,0"], ["--device", "tpu"]])
def test_an_invalid_option_is_refused_before_anything_is_measured(option):
    result = CliRunner().invoke(cli.app, ["bench", *option])
    assert isinstance(result.exception, ValueError)
    assert result.output == ""


@pytest.mark.parametrize("option", ["--batch", "--repeats"])
def test_a_size_of_zero_is_refused_too(option):
    result = CliRunner().invoke(cli.app, ["bench", option, "0"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
