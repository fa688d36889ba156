import numpy as np
import pytest
import torch
from training import stripes


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Generated images: 30 to train on, 12 to validate on, of three classes."""
    root, rng = tmp_path_factory.mktemp("stripes"), np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for label in range(3):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for k in range(count):
                stripes(rng, label).save(folder / f"{k}.png")
    return root


@pytest.fixture(autouse=True)
def _one_thread():
    # Small tensors on shared cores: threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
