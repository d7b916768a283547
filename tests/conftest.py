import pytest
import torch as th

from sb3_td3x import accelerate


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; small networks gain nothing from a second thread."""
    th.set_num_threads(1)


@pytest.fixture(params=["plain", "compiled"])
def path(request):
    """The way updates are made. Compiled programs are for batches of ``batch_size``: 8, where a test uses this."""
    if request.param == "compiled" and not accelerate._has_compiler():
        pytest.skip("no C++ compiler on this machine")
    return request.param
