import io
import os

import pytest
import torch as th

from sb3_td3x import accelerate
from tests.tools import model

# Inductor's C++ without optimisation, here and in processes that tests start: a program is made in two thirds of the time. The
# tests that compare a fast path with SB3's and over fifty updates have the code that users have (`optimised`).
os.environ.setdefault("AOT_INDUCTOR_DEBUG_COMPILE", "1")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; small networks gain nothing from a second thread."""
    th.set_num_threads(1)


@pytest.fixture
def optimised():
    """Programs are compiled as for users."""
    import torch._inductor.config

    with torch._inductor.config.patch({"aot_inductor.debug_compile": False}):
        yield


@pytest.fixture(params=["plain", "compiled"])
def path(request):
    """The way updates are made. Compiled programs are for batches of ``batch_size``: 8, where a test uses this."""
    if request.param == "compiled" and not accelerate._has_compiler():
        pytest.skip("no C++ compiler on this machine")
    return request.param


@pytest.fixture(scope="session")
def trained():
    """A small model that has learned; not to be changed."""
    return model().learn(40)


@pytest.fixture(scope="session")
def zipped(trained):
    """Its zip, as bytes."""
    file = io.BytesIO()
    trained.save(file)
    return file.getvalue()
