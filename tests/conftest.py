import pytest
import torch as th


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; small networks gain nothing from a second thread."""
    th.set_num_threads(1)
