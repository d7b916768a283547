"""Rounded or fast matrix products stay inside updates, as do numbers that count as 0, and are as accurate as asked."""

import contextlib

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from sb3_td3x import TD3X
from sb3_td3x.td3x import precision
from tests.commands import td3x
from tests.paths import assert_equal, pair, ready
from tests.tools import LineEnv, largest_difference, random_batch, train_each, train_on, weights

has_bf16_units = precision.has_bf16_units  # before a fixture replaces it
has_settings = pytest.mark.skipif(not hasattr(th.backends.mkldnn, "matmul"), reason="torch 2.8 has no setting for products")


class TestPrecision:
    def test_bf16_rounds_hidden_products_in_updates_only(self):
        wide = {"policy_kwargs": {"net_arch": [64, 64]}}
        exact, rounded = ready("plain", **wide), ready("plain", precision="bf16", **wide)
        observation = random_batch(0).observations.numpy()
        np.testing.assert_array_equal(exact.predict(observation)[0], rounded.predict(observation)[0])
        train_each((exact, rounded), range(2))
        difference = largest_difference(weights(exact), weights(rounded))
        assert 1e-7 < difference < 5e-3  # Adam's first steps are lr (1e-3) long, whatever the gradient's size
        for name, value in weights(rounded).items():
            assert value.dtype == th.float32, name
        assert "forward" not in vars(rounded.actor.mu[2])

    def test_what_ends_an_update_at_its_start_rounds_no_later_product(self):
        class Refuses(th.nn.Linear):
            def __setattr__(self, name, value):
                if name == "forward":
                    raise KeyboardInterrupt
                super().__setattr__(name, value)

        layers = [th.nn.Linear(2, 2), Refuses(2, 2)]
        with pytest.raises(KeyboardInterrupt), precision.bf16_products(layers):
            pass
        assert "forward" not in vars(layers[0])

    def test_the_last_layers_stay_in_float32_however_wide(self):
        action_space = spaces.Box(-1, 1, (64,))
        wide = TD3X("MlpPolicy", LineEnv(action_space=action_space), policy_kwargs={"net_arch": [64]}, n_quantiles=64)
        rounded = []
        for network in (wide.actor, wide.critic):
            with precision.bf16_products(precision.hidden_layers(network)):
                rounded += [module for module in network.modules() if "forward" in vars(module)]
        assert rounded == [wide.critic.q_networks[0][0], wide.critic.q_networks[1][0]]

    def test_short_layers_stay_in_float32(self):
        exact, rounded = ready("plain"), ready("plain", precision="bf16")
        train_each((exact, rounded), range(2))
        assert largest_difference(weights(exact), weights(rounded)) == 0

    @pytest.mark.skipif(not th.set_flush_denormal(False), reason="this processor keeps denormal numbers")
    def test_moments_of_dead_units_become_zero_and_the_users_numbers_do_not(self):
        algorithm, smallest = ready("plain"), th.tensor(1e-39)
        train_on(algorithm, range(2))
        bias = algorithm.critic.q_networks[0][0].bias
        with th.no_grad():
            bias[0] = -1e6
        moments = [algorithm.critic.optimizer.state[bias][name] for name in ("exp_avg", "exp_avg_sq")]
        for moment in moments:
            moment[0] = smallest
        train_on(algorithm, [2])
        assert [moment[0].item() for moment in moments] == [0, 0]
        assert (smallest / 2).item() > 0
        th.set_flush_denormal(True)
        try:
            train_on(algorithm, [3])
            assert (smallest / 2).item() == 0
        finally:
            th.set_flush_denormal(False)

    def test_other_threads_go_on_with_the_users_numbers(self):
        program = """if True:
            import torch as th
            from sb3_td3x import TD3X
            th.set_num_threads(2)
            TD3X("MlpPolicy", "Pendulum-v1", learning_starts=20, policy_kwargs={"net_arch": [64, 64]}).learn(24)
            assert th.full((10**5,), 1e-39).mul(1.0).all()
        """
        td3x(program=("-c", program))

    @has_settings
    def test_torchs_settings_are_put_back_also_after_an_error(self):
        with contextlib.suppress(KeyError), precision.matrix_kernels("onednn"):
            assert th.backends.mkldnn.matmul.fp32_precision == "bf16"
            raise KeyError
        assert th.backends.mkldnn.matmul.fp32_precision == "none"
        assert th.get_float32_matmul_precision() == "highest"

    @has_settings
    def test_a_user_who_chose_a_precision_keeps_it(self):
        for setting in (th.backends, th.backends.mkldnn, th.backends.mkldnn.matmul):
            setting.fp32_precision = "ieee"
            try:
                with precision.matrix_kernels("onednn"):
                    assert th.backends.mkldnn.matmul.fp32_precision == "ieee"
                    train_on(ready("compiled"), [0])
            finally:
                setting.fp32_precision = "none"

    def test_updates_with_onednns_kernels_are_float32_or_declined(self):
        plain, compiled = pair(policy_kwargs={"net_arch": [64, 64]})  # oneDNN takes no smaller products
        compiled._get_updater().kernels = "onednn" if precision.is_accurate("onednn") else "default"
        train_each((plain, compiled), range(2))
        assert_equal(plain, compiled)

    @pytest.mark.parametrize(
        ("name", "is_accurate", "kernels"),
        [
            ("AuthenticAMD AMD EPYC family 26 model 2 stepping 1, AVX512", True, "onednn"),
            ("AuthenticAMD AMD EPYC family 26 model 2 stepping 1, AVX512", False, "default"),
            ("AuthenticAMD AMD EPYC family 25 model 17 stepping 1, AVX512", True, "default"),
            ("GenuineIntel Intel(R) Xeon(R) family 6 model 143 stepping 8, AVX512", True, "default"),
        ],
    )
    def test_onednns_kernels_are_for_zen_5_where_they_are_accurate(self, name, is_accurate, kernels, monkeypatch):
        monkeypatch.setattr(precision, "processor", lambda: name)
        monkeypatch.setattr(precision, "is_accurate", lambda kernels: is_accurate)
        assert precision.choose_matrix_kernels() == kernels

    @has_settings
    def test_checking_the_accuracy_leaves_kernels_and_generators_alone(self):
        before = th.backends.mkldnn.matmul.fp32_precision, th.get_rng_state()
        assert precision.is_accurate.__wrapped__("onednn") in (True, False)
        assert before[0] == th.backends.mkldnn.matmul.fp32_precision
        assert th.equal(before[1], th.get_rng_state())

    @pytest.mark.parametrize(("avx512", "amx", "expected"), [(False, False, False), (True, False, True), (False, True, True)])
    def test_the_processor_says_whether_it_multiplies_bfloat16(self, avx512, amx, expected, monkeypatch):
        with monkeypatch.context() as patch:
            patch.delattr(th.cpu, "get_capabilities", raising=False)  # torch 2.8 does not have it
            patch.setattr(th.cpu, "_is_avx512_bf16_supported", lambda: avx512)
            patch.setattr(th.cpu, "_is_amx_tile_supported", lambda: amx)
            assert has_bf16_units() is expected

    def test_bf16_is_refused_where_it_cannot_win(self, monkeypatch, tmp_path):
        ready("plain", precision="bf16").save(tmp_path / "model")
        monkeypatch.setattr(precision, "has_bf16_units", lambda: False)
        with pytest.raises(ValueError, match="precision='bf16' cannot be used for updates: this processor has no units"):
            ready("plain", precision="bf16")
        loaded = TD3X.load(tmp_path / "model", env=LineEnv())
        loaded.predict(np.zeros(3, np.float32))
        before = weights(loaded)
        with pytest.raises(ValueError, match="this processor has no units"):
            loaded.learn(30)
        assert largest_difference(before, weights(loaded)) == 0
        with pytest.raises(ValueError, match="has not been measured"):
            precision.require_supported("bf16", th.device("cuda"))


def test_programs_run_with_their_kernels(monkeypatch):
    asked, kernels = [], precision.matrix_kernels
    monkeypatch.setattr(precision, "matrix_kernels", lambda choice: asked.append(choice) or kernels(choice))
    algorithm = ready("compiled")
    algorithm._get_updater().kernels = "onednn"
    train_on(algorithm, [0])
    asked.clear()  # of the recording
    train_on(algorithm, [1])
    assert "onednn" in asked


def test_a_rounded_product_is_not_accurate(monkeypatch):
    real = th.Tensor.__matmul__

    def rounded(left, right):
        is_exact = left.dtype == th.float64
        return real(left, right) if is_exact else real(left.bfloat16(), right.bfloat16()).float()

    monkeypatch.setattr(th.Tensor, "__matmul__", rounded)
    assert not precision.is_accurate.__wrapped__("onednn")
