"""Loading an untrusted file runs no code of whoever made it, and no pickle crashes the interpreter."""

import builtins
import contextlib
import copyreg
import functools
import io
import os
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.td3.policies import TD3Policy

from sb3_td3x import TD3X, ModelFileError, TD3XPolicy, load_vecnormalize
from tests.tools import LineEnv, model, without_constructor
from tests.zips import members, packed, with_attributes, with_pickle

GOLDEN = Path(__file__).parent / "golden"


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
    reconstruct = pickle.dumps(np.zeros(2), 4)
    yield "os.system", inner
    yield "exec", pickle.dumps(Calls(builtins.exec, code))
    yield "eval", pickle.dumps(Calls(builtins.eval, code))
    yield "partial", pickle.dumps(Calls(functools.partial(os.system, touch)))
    yield "a function of numpy that runs text", named("numpy.f2py.crackfortran", "myeval", code)
    yield "numpy's test runner", named("numpy.testing._private.utils", "runstring", code, {})
    yield "torch's own unrestricted reader", pickle.dumps(Calls(th.storage._load_from_bytes, inner))
    yield "torch.load", pickle.dumps(Calls(th.load, io.BytesIO(inner)))
    yield "dots in a name", named("stable_baselines3.common.save_util", "os.system", touch)
    yield "dots behind a known class", named("stable_baselines3.common.buffers", "ReplayBuffer.__init__.__globals__", touch)
    yield "a method of a known class", named("stable_baselines3.td3.policies", "TD3Policy.load", str(canary))
    yield "getattr", pickle.dumps(Calls(getattr, TD3Policy, "load"))
    yield "getattr of a module", b"cbuiltins\ngetattr\n(cos\n__dict__\nVsystem\ntR."
    yield "copyreg", pickle.dumps(Calls(copyreg.add_extension, "os", "system", 77))
    yield "reconstructor", named("copyreg", "_reconstructor", "x", "y", None)
    yield "an extension", pickle.PROTO + b"\2" + pickle.EXT1 + b"\x4d" + pickle.STOP
    yield "the first protocol", b"(S'" + touch.encode() + b"'\nios\nsystem\n."
    yield "object", b"(cos\nsystem\nS'" + touch.encode() + b"'\no."
    yield "numpy.load", named("numpy", "load", str(canary))
    yield "array constructed from a class", reconstruct.replace(b"ndarray", b"memmap\0"[:7])
    yield "open", pickle.dumps(Calls(open, str(canary), "w"))
    yield "a layer", pickle.dumps(th.nn.ReLU())
    yield "a known class called", pickle.dumps(Calls(ReplayBuffer, 10, spaces.Box(0, 1), spaces.Box(0, 1)))
    yield (
        "attributes of a class",
        (
            pickle.dumps(ReplayBuffer, 4)[:-1] + b"N}\x8c\x03addNs\x86b."  # sets ReplayBuffer.add for the whole process
        ),
    )
    yield "a method covered", pickle.dumps(without_constructor(NormalActionNoise, __call__=None, reset=1))
    yield "persistent", b"Vx\nQ."
    yield "a set", pickle.dumps({1, 2})


ATTACKS = [name for name, _ in attacks("x")]


@pytest.fixture(params=ATTACKS)
def attack(request, tmp_path):
    """A pickle, and the file that must not be there afterwards."""
    canary = tmp_path / "canary"
    adder = ReplayBuffer.add
    yield dict(attacks(canary))[request.param]
    assert not canary.exists()
    assert ReplayBuffer.add is adder
    assert "x" not in copyreg._extension_registry


def test_the_attacks_would_work_on_sb3s_road(tmp_path):
    written = io.BytesIO()  # here: pickle alone does not read with numpy 1 what numpy 2 wrote
    model(cls=TD3).save(written)
    attack = dict(attacks(tmp_path / "canary"))["exec"]
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever SB3 says to what it unpickled
        TD3X.load(io.BytesIO(with_attributes(written.getvalue(), gamma=attack)), trust=True)
    assert (tmp_path / "canary").exists()


class TestNoCodeRuns:
    @pytest.mark.parametrize("whose", ["sb3", "td3x"])
    def test_from_an_attribute(self, attack, whose, zipped):
        content = zipped if whose == "td3x" else (GOLDEN / "sb3_td3_2.9.2.zip").read_bytes()
        with pytest.raises(ModelFileError):
            TD3X.load(io.BytesIO(with_attributes(content, action_noise=attack)))

    def test_from_an_attribute_that_load_is_told_to_change(self, attack, zipped):
        with contextlib.suppress(ModelFileError):  # what the file holds there may be passed over
            TD3X.load(io.BytesIO(with_attributes(zipped, action_noise=attack)), action_noise=0.1)

    def test_from_tensors(self, attack, zipped):
        content = packed({**members(zipped), "policy.pth": with_pickle(members(zipped)["policy.pth"], attack)})
        for read in (TD3X.load, model().set_parameters):
            with pytest.raises(ModelFileError):
                read(io.BytesIO(content))

    def test_from_a_policy(self, attack, trained, tmp_path):
        trained.policy.save(tmp_path / "policy.pth")
        (tmp_path / "policy.pth").write_bytes(with_pickle((tmp_path / "policy.pth").read_bytes(), attack))
        with pytest.raises(ModelFileError):
            TD3XPolicy.load(tmp_path / "policy.pth")

    def test_from_a_replay_buffer(self, attack, tmp_path):
        (tmp_path / "buffer.pkl").write_bytes(attack)
        with pytest.raises(ModelFileError):
            model().load_replay_buffer(tmp_path / "buffer.pkl")

    def test_from_normalization_statistics(self, attack, tmp_path):
        (tmp_path / "vecnormalize.pkl").write_bytes(attack)
        with pytest.raises(ModelFileError):
            load_vecnormalize(tmp_path / "vecnormalize.pkl", DummyVecEnv([LineEnv]))

    def test_from_an_object_inside_a_buffer(self, attack, trained, tmp_path):
        content = pickle.dumps(trained.replay_buffer, 4)
        (tmp_path / "buffer.pkl").write_bytes(content[:-1] + b"\x8c\x01x" + attack[:-1] + b"\x86.")
        with pytest.raises(ModelFileError):
            model().load_replay_buffer(tmp_path / "buffer.pkl")

    def test_of_a_module_that_an_environments_name_asks_for(self, zipped, tmp_path, monkeypatch):
        (tmp_path / "evil_module.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        for content in (zipped, (GOLDEN / "sb3_td3_2.9.2.zip").read_bytes()):
            with pytest.raises(ModelFileError, match="sets env"):
                TD3X.load(io.BytesIO(with_attributes(content, env="evil_module:Env-v0")))
        assert "evil_module" not in sys.modules


@pytest.mark.parametrize("length", [2**33, 2**62])
@pytest.mark.parametrize("code", [pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.FRAME])
def test_a_length_without_its_bytes_allocates_nothing(tmp_path, code, length):
    (tmp_path / "buffer.pkl").write_bytes(pickle.PROTO + b"\5" + code + struct.pack("<Q", length) + b"x.")
    with pytest.raises(ModelFileError, match="cut off"):
        model().load_replay_buffer(tmp_path / "buffer.pkl")
