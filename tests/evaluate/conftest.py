import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # The tensors are small and other tests use the same cores, so more threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
