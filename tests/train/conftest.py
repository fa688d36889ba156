import pytest
import torch
from training import striped_folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Generated images: 30 to train on, 12 to validate on, of three classes."""
    return striped_folder(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(autouse=True)
def _one_thread():
    # Small tensors on shared cores: threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
