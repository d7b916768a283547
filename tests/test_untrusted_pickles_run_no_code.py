"""Loading an untrusted file runs none of its code, and no pickle crashes the interpreter."""

import builtins
import contextlib
import copyreg
import io
import multiprocessing
import os
import pickle
import runpy
import struct
import sys
import tracemalloc
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.type_aliases import TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy, load_vecnormalize
from sb3_td3x.common.buffers import PrioritizedReplayBuffer
from sb3_td3x.runs.environments import require_registered
from sb3_td3x.saving import safe_pickle
from sb3_td3x.saving.safe_pickle import NotAllowed, load_tensors, loads
from tests.tools import LineEnv, model, without_constructor
from tests.zips import members, packed, with_attributes, with_pickle, with_tensors

SB3S = (Path(__file__).parent / "golden" / "sb3_td3_2.9.2.zip").read_bytes()


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def named(module, name, *arguments):
    """Protocol 4: a call of a name, dots and all, looked up in a module."""
    texts = b"".join(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name))
    tail = pickle.dumps(arguments, 0)[:-1]
    return pickle.PROTO + b"\4" + texts + pickle.STACK_GLOBAL + tail + pickle.REDUCE + pickle.STOP


def attacks(canary):
    """Pickles that create the file ``canary`` when python's own reader reads them, or that would harm otherwise."""
    touch = f"touch {canary}"
    code = f"open({str(canary)!r}, 'w').close()"
    inner = pickle.dumps(Calls(os.system, touch))
    reconstruct = pickle.dumps(np.zeros(2), 3)
    yield "os.system", inner
    yield "exec", pickle.dumps(Calls(builtins.exec, code))
    yield "numpy's test runner", named("numpy.testing._private.utils", "runstring", code, {})
    yield "torch's own unrestricted reader", pickle.dumps(Calls(th.storage._load_from_bytes, inner))
    yield "dots in a name", named("stable_baselines3.common.save_util", "os.system", touch)
    yield "dots behind a known class", named("stable_baselines3.common.buffers", "ReplayBuffer.__init__.__globals__", touch)
    yield "a method of a known class", named("stable_baselines3.td3.policies", "TD3Policy.load", str(canary))
    yield "getattr", pickle.dumps(Calls(getattr, TD3Policy, "load"))
    yield "copyreg", pickle.dumps(Calls(copyreg.add_extension, "os", "system", 77))
    yield "reconstructor", pickle.dumps(Calls(copyreg._reconstructor, NormalActionNoise, np.ndarray, None))
    yield "an extension", pickle.PROTO + b"\2" + pickle.EXT1 + b"\x4d" + pickle.STOP
    yield "the first protocol", b"(S'" + touch.encode() + b"'\nios\nsystem\n."
    yield "object", b"(cos\nsystem\nS'" + touch.encode() + b"'\no."
    yield "array constructed from a class", reconstruct.replace(b"ndarray", b"memmap")
    yield "a layer", pickle.dumps(th.nn.ReLU())
    yield "a known class called", pickle.dumps(Calls(ReplayBuffer, 10, spaces.Box(0, 1), spaces.Box(0, 1)))
    yield "a known class called with a number", pickle.dumps(Calls(th.nn.ELU, 3))
    yield "keywords", b"\x80\x04cstable_baselines3.common.noise\nNormalActionNoise\n)}" + pickle.NEWOBJ_EX + b"."
    # Sets ReplayBuffer.add for the whole process
    yield "attributes of a class", pickle.dumps(ReplayBuffer, 4)[:-1] + b"N}\x8c\x03addNs\x86b."
    yield "a method covered", pickle.dumps(without_constructor(NormalActionNoise, __call__=None, reset=1))
    yield "persistent", b"Vx\nQ."
    yield "a set", pickle.dumps({1, 2})


ATTACKS = [name for name, _ in attacks("x")]


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The file that an attack creates; nothing must have happened afterwards."""
    adder = ReplayBuffer.add
    monkeypatch.setitem(copyreg._extension_cache, 77, os.system)
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()
    assert ReplayBuffer.add is adder
    assert ("os", "system") not in copyreg._extension_registry


def test_the_attacks_would_work_with_sb3s_own_loading(tmp_path):
    written = io.BytesIO()  # here: pickle alone does not read with numpy 1 what numpy 2 wrote
    model(cls=TD3).save(written)
    attack = dict(attacks(tmp_path / "canary"))["exec"]
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever SB3 says to what it unpickled
        TD3X.load(io.BytesIO(with_attributes(written.getvalue(), gamma=attack)), trust=True)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "exec",
        "numpy's test runner",
        "torch's own unrestricted reader",
        "dots in a name",
        "the first protocol",
        "object",
    ],
)
def test_the_attacks_work_with_pythons_own_reader(name, tmp_path):
    with contextlib.suppress(Exception):
        pickle.loads(dict(attacks(tmp_path / "canary"))[name])
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_no_pickle_runs_code(name, canary):
    attack = dict(attacks(canary))[name]
    with pytest.raises((NotAllowed, ModelFileError)):
        loads(attack)
    with pytest.raises((NotAllowed, ModelFileError)):
        load_tensors(with_pickle(a_tensor(), attack))


def in_tensors(zipped, attack):
    return packed({**members(zipped), "policy.pth": with_pickle(members(zipped)["policy.pth"], attack)})


def in_a_policy(zipped, attack):
    return with_pickle(members(zipped)["policy.pth"], attack)


def in_a_buffer(zipped, attack):
    return pickle.dumps(model().replay_buffer, 4)[:-1] + b"\x8c\x01x" + attack[:-1] + b"\x86."


# How each file is loaded, and how an attack gets into it
DOORS = {
    "a model": (TD3X.load, lambda zipped, attack: with_attributes(zipped, action_noise=attack)),
    "a model of SB3": (TD3X.load, lambda zipped, attack: with_attributes(SB3S, action_noise=attack)),
    "a model's tensors": (TD3X.load, in_tensors),
    "parameters": (lambda path: model().set_parameters(path), in_tensors),
    "a policy": (TD3XPolicy.load, in_a_policy),
    "a replay buffer": (lambda path: model().load_replay_buffer(path), lambda zipped, attack: attack),
    "an object inside a replay buffer": (lambda path: model().load_replay_buffer(path), in_a_buffer),
    "statistics": (lambda path: load_vecnormalize(path, DummyVecEnv([LineEnv])), lambda zipped, attack: attack),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_file_runs_code(door, zipped, canary, tmp_path):
    read, with_attack = DOORS[door]
    for name in ("exec", "attributes of a class"):
        (tmp_path / "file.zip").write_bytes(with_attack(zipped, dict(attacks(canary))[name]))
        with pytest.raises(ModelFileError):
            read(tmp_path / "file.zip")


def test_an_attribute_that_load_is_told_to_replace_runs_no_code(zipped, canary):
    content = with_attributes(zipped, action_noise=dict(attacks(canary))["exec"])
    with contextlib.suppress(ModelFileError):  # what the file holds there may be passed over
        TD3X.load(io.BytesIO(content), action_noise=0.1)


def test_the_module_that_a_file_asks_for_is_not_imported(zipped, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for content in (zipped, SB3S):
        with pytest.raises(ModelFileError, match="sets env"):
            TD3X.load(io.BytesIO(with_attributes(content, env="evil_module:Env-v0")))
        with pytest.raises(ModelFileError, match="evil_module"):  # and that a pickle names
            TD3X.load(io.BytesIO(with_attributes(content, action_noise=b"\x80\x02cevil_module\nAttack\n.")))
    assert "evil_module" not in sys.modules


class Made(Calls):
    """Pickled as a call whose result is then given a state, as often as there are states."""

    def __init__(self, function, *arguments, state):
        super().__init__(function, *arguments)
        self.call = (*self.call, state)


_ARRAY, _BUFFER, _SCALAR = (np.zeros(2).__reduce_ex__(4)[0], np.zeros(2).__reduce_ex__(5)[0], np.float64(1).__reduce__()[0])
_EMPTY = (np.ndarray, (0,), b"b")
_MT = np.random.MT19937(0).state
F8, OBJECT = np.dtype("f8"), np.dtype("O")


def an_array(shape, dtype, data):
    return Made(_ARRAY, *_EMPTY, state=(1, shape, dtype, False, data))


def a_dtype(name, *state):
    return Made(np.dtype, name, False, True, state=state or (3, "<", None, None, None, -1, -1, 0))


def a_generator(kind, state):
    return Made(np.random._pickle.__bit_generator_ctor, kind, state=state)


CRASHES = {
    "an array of more numbers than bytes": an_array((10**6,), F8, b"12345678"),
    "an array of another length": an_array((2,), F8, b"123"),
    "an array of endless sides": an_array((2**62, 2**62, 0), F8, b""),
    "an array of a negative side": an_array((-1,), F8, b""),
    "an array of many sides": an_array((1,) * 1000, F8, b"12345678"),
    "an array of more sides than numpy has room for": an_array((1, 1, 1, 0) + (1,) * 96, F8, b""),
    "an array of numbers as sides": an_array((1.0,), F8, b"12345678"),
    "addresses as objects": an_array((1,), OBJECT, b"12345678"),
    "addresses as objects in a buffer": Calls(_BUFFER, b"12345678", OBJECT, (1,), "C"),
    "an address as an object": Calls(_SCALAR, OBJECT, b"12345678"),
    "objects that are missing": an_array((2,), OBJECT, [{}]),
    "objects that are no dicts": an_array((1,), OBJECT, [[]]),
    "objects inside objects": an_array((1,), OBJECT, [{"inner": an_array((1,), OBJECT, [{}])}]),
    "a view of text": Calls(_BUFFER, "12345678", F8, (1,), "C"),
    "a buffer of more numbers than bytes": Calls(_BUFFER, b"12345678", F8, (2**40,), "C"),
    "a buffer in no order": Calls(_BUFFER, b"12345678", F8, (1,), "no order"),
    "a scalar of another size": Calls(_SCALAR, F8, b"1234"),
    "a record type": a_dtype("V8", 3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 27),
    "a type with fields": a_dtype("f8", 3, "<", None, ("a",), {"a": (OBJECT, 0)}, -1, -1, 0),
    "a type of another size": a_dtype("f8", 3, "<", None, None, None, 2**31 - 1, 1, 0),
    "a type of text": a_dtype("U1000000000"),
    "objects in another byte order": a_dtype("O8", 3, ">", None, None, None, -1, -1, 63),
    "a type by a list": a_dtype([("a", "O")]),
    "a type of no order": a_dtype("f8", 3, "x", None, None, None, -1, -1, 0),
    "a generator behind its end": a_generator("MT19937", {**_MT, "state": {**_MT["state"], "pos": 2 * 10**9}}),
    "a generator before its beginning": a_generator("MT19937", {**_MT, "state": {**_MT["state"], "pos": -5}}),
    "a generator with a short memory": a_generator("MT19937", {**_MT, "state": {"key": np.zeros(3), "pos": 5}}),
    "another generator's state": a_generator("PCG64", {**_MT, "bit_generator": "SFC64"}),
    "a generator of another kind": Calls(np.random._pickle.__bit_generator_ctor, "os"),
    "a generator from a number": Calls(np.random._pickle.__generator_ctor, 7),
    "a box without bounds": without_constructor(spaces.Box, low=0, _shape=(1,), dtype=F8, _np_random=None),
    "noise without its numbers": without_constructor(NormalActionNoise, _mu=np.zeros(1)),
    "a queue of a negative length": Calls(deque, (), -1),
    "a queue of a huge length": Calls(deque, (), 2**70),
    "a member that there is not": Calls(TrainFrequencyUnit, "never"),
    "a device that there is not": Calls(th.device, "cuda", 2**80),
}


def test_moments_that_a_file_names_twice_are_two(zipped, tmp_path):
    model().learn(20).save(tmp_path / "model.zip")

    def share(state):
        for values in state["state"].values():
            values["exp_avg_sq"], values["step"] = values["exp_avg"], state["state"][0]["step"]

    trained = (tmp_path / "model.zip").read_bytes()
    (tmp_path / "file.zip").write_bytes(with_tensors(trained, "actor.optimizer.pth", share))
    states = TD3X.load(tmp_path / "file.zip").actor.optimizer.state.values()
    tensors = [value for state in states for value in state.values()]
    assert len({value.data_ptr() for value in tensors}) == len(tensors)


def test_what_a_model_saves_is_not_for_a_file_to_say(zipped, tmp_path):
    names = ["policy_class", "observation_space"]
    (tmp_path / "file.zip").write_bytes(with_attributes(zipped, only_in_checkpoints=names, only_in_process=names))
    TD3X.load(tmp_path / "file.zip").save(tmp_path / "again.zip")
    TD3X.load(tmp_path / "again.zip")


HOSTILE_BUFFERS = {
    "whole numbers": (ReplayBuffer, lambda buffer: {"rewards": buffer.rewards.astype(np.int8)}),
    "a broken position": (ReplayBuffer, lambda buffer: {"pos": 2.5}),
    "no ends": (NStepReplayBuffer, lambda buffer: {"dones": None}),
    "no priorities": (PrioritizedReplayBuffer, lambda buffer: {"priorities": None}),
    "fewer priorities": (PrioritizedReplayBuffer, lambda buffer: {"priorities": buffer.priorities[:3]}),
    "priorities without value": (PrioritizedReplayBuffer, lambda buffer: {"priorities": buffer.priorities * np.nan}),
    "no start": (HerReplayBuffer, lambda buffer: {"ep_start": None}),
    "a start far before": (HerReplayBuffer, lambda buffer: {"_current_ep_start": np.full(1, -(10**15))}),
}


@pytest.mark.parametrize("what", HOSTILE_BUFFERS)
def test_a_replay_buffer_whose_parts_are_not_its_own_numbers_is_refused(what, tmp_path):
    cls, change = HOSTILE_BUFFERS[what]
    goals = {"env": BitFlippingEnv(continuous=True), "policy": "MultiInputPolicy"} if cls is HerReplayBuffer else {}
    goals |= {"prioritization": "lap"} if cls is PrioritizedReplayBuffer else {}
    learner = model(replay_buffer_class=cls, **goals)
    for name, value in change(learner.replay_buffer).items():
        vars(learner.replay_buffer)[name] = value
        if value is None:
            del vars(learner.replay_buffer)[name]
    with (tmp_path / "buffer.pkl").open("wb") as file:
        pickle.dump(learner.replay_buffer, file)
    with pytest.raises(ModelFileError):
        model(replay_buffer_class=cls, **goals).load_replay_buffer(tmp_path / "buffer.pkl")


_TWICE = pickle.dumps(np.zeros(2), 4)[:-1] + pickle.dumps((1, (8,), np.dtype("i1"), False, b"12345678"), 4)[2:-1] + b"b."
CRASHES = {
    **{name: pickle.dumps(value, 4) for name, value in CRASHES.items()},
    "an array made twice": _TWICE,
    "queues in queues": b"\x80\x04ccollections\ndeque\nq\x00)R" + 150_000 * b"h\x00)R" + 150_000 * b"a" + b".",
    "a key of a million tuples": b"\x80\x04}N" + pickle.TUPLE1 * 10**6 + b"Ns.",
    "a key of pairs of pairs": b"\x80\x04}N" + 40 * (pickle.DUP + pickle.TUPLE2) + b"Ns.",
    "a member named by a million tuples": pickle.dumps(TrainFrequencyUnit, 4)[:-1] + b"N" + pickle.TUPLE1 * 10**6 + b"R.",
}


@pytest.mark.parametrize("what", CRASHES)
def test_no_pickle_crashes_the_interpreter(what):
    with pytest.raises((NotAllowed, ModelFileError)):
        loads(CRASHES[what])


def test_operations_of_a_later_protocol_are_not_executed(monkeypatch):
    executed = []
    monkeypatch.setitem(pickle._Unpickler.dispatch, 0xFE, executed.append)
    later = runpy.run_path(safe_pickle.__file__)
    with pytest.raises(ModelFileError, match="damaged pickle"):
        later["loads"](b"\x80\x05N\xfe.")
    assert not executed


def test_the_class_of_arrays_which_makes_objects_of_bytes_is_only_a_name():
    assert loads(pickle.dumps(np.ndarray)) is object
    with pytest.raises((NotAllowed, ModelFileError)):
        loads(pickle.dumps(Calls(np.ndarray, (1,), np.dtype("f8"))))


def test_environments_processes_import_no_module_that_the_main_process_did_not_find(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the main process")
    with pytest.raises(ValueError, match="evil_module cannot be imported"):
        require_registered("evil_module:Env-v0")


def a_tensor(storage=th.FloatStorage, key="0", count=2, offset=0, size=(2,), stride=(1,), hooks=(), **more):
    """A file of ``torch.save`` with one tensor of two numbers, or not quite."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return more.get("id", ("storage", storage, key, "cpu", count)) if isinstance(value, Storage) else None

    file = io.BytesIO()
    arguments = (Storage(), offset, size, stride, False, OrderedDict(hooks))
    Pickler(file, 2).dump(Calls(th._utils._rebuild_tensor_v2, *arguments))
    return packed({"archive/data.pkl": file.getvalue(), "archive/data/0": bytes(8), "archive/byteorder": b"little"})


def taking_place(state):
    state._metadata = {name: {"assign_to_params_buffers": True} for name in ("", *state._metadata)}


def taking_place_as_a_space(state):
    """A mapping that may have attributes."""
    taking_place(state)
    space = without_constructor(spaces.Dict, _shape=None, dtype=None, _np_random=None, spaces=dict(state))
    vars(space)["_metadata"] = state._metadata
    return space


@pytest.mark.parametrize("change", [taking_place, taking_place_as_a_space])
@pytest.mark.parametrize("load", [lambda path: TD3X.load(path, env=LineEnv()), model().set_parameters])
def test_a_files_tensors_do_not_take_the_place_of_parameters(load, change, zipped, tmp_path):
    (tmp_path / "file.zip").write_bytes(with_tensors(zipped, "policy.pth", change))
    if change is taking_place_as_a_space:
        with pytest.raises(ModelFileError, match="attribute '_metadata'"):
            load(tmp_path / "file.zip")
        return
    loaded = load(tmp_path / "file.zip") or load.__self__
    for network in (loaded.actor, loaded.critic):
        assert {*network.optimizer.param_groups[0]["params"]} == {*network.parameters()}


def test_a_member_that_is_larger_than_it_says_is_not_unpacked(zipped, tmp_path):
    parts = members(zipped) | {"system_info.txt": bytes(10**8)}
    file = packed(parts, zipfile.ZIP_DEFLATED)
    declared = (10**8).to_bytes(4, "little")
    assert file.count(declared) == 2
    (tmp_path / "file.zip").write_bytes(file.replace(declared, (10).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.raises(ModelFileError, match="Bad CRC-32"):
        TD3X.load(tmp_path / "file.zip")
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


TENSORS = {
    "that begins behind its memory": {"offset": 1},
    "that begins before its memory": {"offset": -1},
    "that is larger than its memory": {"size": (3,)},
    "that is repeated beyond its memory": {"size": (10**12,), "stride": (0,)},
    "that goes backwards": {"stride": (-1,)},
    "that jumps over its memory": {"stride": (2**40,)},
    "with sides that are no numbers": {"size": (1.0, 2.0), "stride": (1, 1)},
    "with endless sides": {"size": (2**70, 0), "stride": (1, 1)},
    "with fewer steps than sides": {"size": (2, 1)},
    "with more numbers than bytes": {"count": 2**40},
    "with a negative count": {"count": -2},
    "of another kind of number": {"storage": th.DoubleStorage},
    "of quantized numbers": {"storage": th.QInt8Storage},
    "of no kind": {"storage": th.UntypedStorage},
    "in another member": {"key": "../data.pkl"},
    "in no member": {"key": "1"},
    "by another reference": {"id": "archive/data/0"},
    "with a great many sides": {"size": (1,) * 100_000, "stride": (1,) * 100_000},
    "with hooks": {"hooks": {1: abs}},
}


@pytest.mark.parametrize("what", TENSORS)
def test_no_tensor_reads_what_is_not_its_memory(what):
    assert th.equal(load_tensors(a_tensor()), th.zeros(2))
    with pytest.raises((NotAllowed, ModelFileError)):
        load_tensors(a_tensor(**TENSORS[what]))


@pytest.mark.parametrize("code", [pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.FRAME])
def test_a_length_without_its_bytes_is_damage(tmp_path, code):
    for length in (2**33, 2**62):
        (tmp_path / "buffer.pkl").write_bytes(pickle.PROTO + b"\5" + code + struct.pack("<Q", length) + b"x.")
        with pytest.raises(ModelFileError, match=r"buffer\.pkl.*damaged pickle"):
            model().load_replay_buffer(tmp_path / "buffer.pkl")


def test_tensors_in_another_byte_order_are_refused():
    with pytest.raises(ModelFileError, match="big-endian"):
        load_tensors(packed({**members(a_tensor()), "archive/byteorder": b"big"}))
