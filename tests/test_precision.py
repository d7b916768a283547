"""Rounded or fast matrix products stay inside updates, and are as accurate as asked."""

import contextlib
import errno
import json
import os

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_td3x import TD3X
from sb3_td3x.td3x import precision
from tests.paths import assert_equal, pair, ready, train
from tests.tools import LineEnv, largest_difference, random_batch, weights


class TestPrecision:
    def test_bf16_rounds_hidden_products_in_updates_only(self):
        wide = {"policy_kwargs": {"net_arch": [64, 64]}}
        exact, rounded = ready("plain", **wide), ready("plain", precision="bf16", **wide)
        observation = random_batch(0).observations.numpy()
        np.testing.assert_array_equal(exact.predict(observation)[0], rounded.predict(observation)[0])
        for algorithm in (exact, rounded):
            train(algorithm, [random_batch(seed) for seed in range(2)])
        difference = largest_difference(weights(exact), weights(rounded))
        assert 1e-7 < difference < 5e-3  # Adam's first steps are lr (1e-3) long, whatever the gradient's size
        for name, value in weights(rounded).items():
            assert value.dtype == th.float32, name
        assert "forward" not in vars(rounded.actor.mu[2])

    def test_the_last_layers_stay_in_float32_however_wide(self):
        action_space = spaces.Box(-1, 1, (64,))
        wide = TD3X("MlpPolicy", LineEnv(action_space=action_space), policy_kwargs={"net_arch": [64]}, n_quantiles=64)
        rounded = []
        for network in (wide.actor, wide.critic):
            with precision.hidden_products(network, "bf16"):
                rounded += [module for module in network.modules() if "forward" in vars(module)]
        assert rounded == [wide.critic.q_networks[0][0], wide.critic.q_networks[1][0]]

    def test_short_layers_stay_in_float32(self):
        exact, rounded = ready("plain"), ready("plain", precision="bf16")
        for algorithm in (exact, rounded):
            train(algorithm, [random_batch(seed) for seed in range(2)])
        assert largest_difference(weights(exact), weights(rounded)) == 0

    def test_torchs_settings_are_put_back_also_after_an_error(self):
        with contextlib.suppress(KeyError), precision.matrix_kernels("onednn"):
            assert th.backends.mkldnn.matmul.fp32_precision == "bf16"
            raise KeyError
        assert th.backends.mkldnn.matmul.fp32_precision == "none"
        assert th.get_float32_matmul_precision() == "highest"

    def test_a_user_who_chose_a_precision_keeps_it(self):
        for setting in (th.backends, th.backends.mkldnn, th.backends.mkldnn.matmul):
            setting.fp32_precision = "ieee"
            try:
                with precision.matrix_kernels("onednn"):
                    assert th.backends.mkldnn.matmul.fp32_precision == "ieee"
                    train(ready("compiled"), [random_batch(0)])
            finally:
                setting.fp32_precision = "none"

    def test_updates_with_onednns_kernels_are_float32_or_declined(self):
        plain, compiled = pair()
        compiled._update_maker().kernels = precision.fastest_matrix_kernels()
        for algorithm in (plain, compiled):
            train(algorithm, [random_batch(seed) for seed in range(2)])
        assert_equal(plain, compiled)

    def test_the_fastest_kernels_are_measured_once_per_processor(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        measured = []
        monkeypatch.setattr(precision, "_probe", lambda: measured.append(1) or "onednn")
        for _ in range(2):
            precision._fastest_matrix_kernels.cache_clear()
            assert precision.fastest_matrix_kernels() == "onednn"
        assert measured == [1]
        (kept,) = (tmp_path / "sb3_td3x").iterdir()
        for damaged in (json.dumps({"this": "is damaged"})[:-3], "[]", json.dumps({"kernels": "none such"})):
            kept.write_text(damaged)
            precision._fastest_matrix_kernels.cache_clear()
            assert precision.fastest_matrix_kernels() == "onednn"
            assert json.loads(kept.read_text())["kernels"] == "onednn"
        precision._fastest_matrix_kernels.cache_clear()

    @pytest.mark.parametrize("has_hard_links", [True, False])
    def test_runs_that_measure_them_at_once_take_the_same(self, tmp_path, monkeypatch, has_hard_links):
        def refused(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        def probe():
            """Another process is sooner, and measures otherwise."""
            monkeypatch.setattr(precision, "_probe", lambda: "default")
            precision._fastest_matrix_kernels.__wrapped__("this machine")
            return "onednn"

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(precision, "_probe", probe)
        if not has_hard_links:
            monkeypatch.setattr(os, "link", refused)
        kept = [
            precision._fastest_matrix_kernels.__wrapped__(machine) for machine in ("this machine", "another", "this machine")
        ]
        assert kept == ["default"] * 3
        assert len(list((tmp_path / "sb3_td3x").iterdir())) == 2

    def test_without_a_home_folder_they_are_measured_each_time(self, monkeypatch):
        def home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(precision.Path, "home", home)
        monkeypatch.setattr(precision, "_probe", lambda: "onednn")
        assert precision._fastest_matrix_kernels("another processor") == "onednn"

    def test_measuring_leaves_threads_kernels_and_generators_alone(self):
        before = th.get_num_threads(), th.backends.mkldnn.matmul.fp32_precision, th.get_rng_state()
        assert precision._probe() in precision.KERNELS
        assert before[:2] == (th.get_num_threads(), th.backends.mkldnn.matmul.fp32_precision)
        assert th.equal(before[2], th.get_rng_state())
