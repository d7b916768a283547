import io
import multiprocessing
import os
import sys

import gymnasium as gym
import pytest
import torch as th
from gymnasium.envs.registration import EnvSpec

from sb3_td3x import cli
from sb3_td3x.td3x import compiled, precision
from tests.tools import model

# Inductor's C++ without optimization, here and in processes that tests start: a program is made in two thirds of the time. The
# tests that compare a fast path with SB3's and over fifty updates have the code that users have (`optimized`).
os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")
# What tests expect was computed on a CPU, which is "auto" then
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# What the command prints depends on them; GitHub sets the first
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "TERMINAL_WIDTH", "COLUMNS", "TTY_INTERACTIVE", "TD3X_DEBUG"):
    os.environ.pop(name, None)

multiprocessing.set_forkserver_preload(["sb3_td3x.runs.experiment"])  # processes of environments import torch once


# Files with long tests, or with fixtures that all their tests share. They come first: at the end xdist's workers take tests
# from each other, and those are short then and share little.
LONG = [
    "test_works_with_rl_zoo", "test_passes_sb3s_own_tests", "test_studies_survive_faults", "test_studies", "test_ray_vec_env",
    "test_survives_faults", "test_command_trains", "test_command_reads_runs", "test_docs_and_examples_run",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_runtest_setup(item):
    if item.get_closest_marker("soak") and os.environ.get("TD3X_SOAK") != "1":
        pytest.skip("long: make soak")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; small networks gain nothing from a second thread."""
    th.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def one_program_per_graph():
    """
    Equal recordings are compiled once per process, because that takes seconds. Recording itself is done anew everywhere.

    A program reads nothing but its inputs, so models can share it.
    """
    import torch._inductor
    import torch._inductor.config

    programs = {}
    compile_graph = torch._inductor.compile

    def compile_once(graph, inputs, options):
        assert not any(node.op == "get_attr" for node in graph.graph.nodes), "a tensor is in the program that is no input"
        layouts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        key = graph.code, layouts, th.get_num_threads(), torch._inductor.config.aot_inductor.debug_compile
        if key not in programs:
            programs[key] = compile_graph(graph, inputs, options=options)
        return programs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", compile_once)
        yield


@pytest.fixture(autouse=True)
def bf16_units(monkeypatch):
    """``precision="bf16"`` is accepted on every processor; what it computes does not depend on units for it."""
    monkeypatch.setattr(precision, "has_bf16_units", lambda: True)


@pytest.fixture
def optimized():
    """Programs are compiled as for users."""
    import torch._inductor.config

    with torch._inductor.config.patch({"aot_inductor.debug_compile": False}):
        yield


@pytest.fixture(params=["plain", "compiled"])
def path(request):
    """The way updates are made. Compiled programs are for batches of ``batch_size``: 8, where a test uses this."""
    if request.param == "compiled" and not compiled.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    return request.param


@pytest.fixture
def called_and_heard(monkeypatch, capfd):
    """Calls ``td3x`` in this process: its exit code and what it wrote, as ``out`` and ``err``."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["td3x", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capfd.readouterr()

    return call


@pytest.fixture
def called(called_and_heard):
    """Calls ``td3x`` in this process: its exit code and what it wrote to stderr."""

    def call(*arguments):
        code, printed = called_and_heard(*arguments)
        return code, printed.err

    return call


@pytest.fixture
def heard(called_and_heard):
    """Calls ``td3x`` in this process, which must end well: what it wrote to stdout."""

    def call(*arguments):
        code, printed = called_and_heard(*arguments)
        assert code == 0, printed.err
        return printed.out

    return call


@pytest.fixture
def refused(called):
    """Calls ``td3x`` in this process, which must refuse: what it wrote to stderr."""

    def call(*arguments):
        code, printed = called(*arguments)
        assert code == 2, printed
        return printed

    return call


@pytest.fixture
def registered(monkeypatch):
    """Registers an environment for one test."""

    def register(name, env, **kwargs):
        monkeypatch.setitem(gym.registry, name, EnvSpec(name, env, **{"max_episode_steps": 100, **kwargs}))

    return register


@pytest.fixture(scope="session")
def trained():
    """A small model that has learned; not to be changed."""
    return model().learn(40)


@pytest.fixture(scope="session")
def walker_run(tmp_path_factory):
    """The folder of a short run of the command on the walker, from start to video, and what it printed; not to be changed."""
    from tests.commands import QUICK, td3x

    out = tmp_path_factory.mktemp("logs")
    printed = td3x("train", "--env", "Walker2DBulletEnv-v0", "--steps", 300, "--out", out, *QUICK)
    return out / "td3x" / "Walker2DBulletEnv-v0_1", printed


@pytest.fixture(scope="session")
def zipped(trained):
    """Its zip, as bytes."""
    file = io.BytesIO()
    trained.save(file)
    return file.getvalue()


@pytest.fixture
def recorded(monkeypatch):
    """Programs run operation by operation: what is recorded is what counts here."""
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs, options: program)
    monkeypatch.setattr(compiled, "has_compiler", lambda: True)
