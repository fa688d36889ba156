import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Before anything imports triton: the kernels run on CPU tensors then, one program after the other.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "batchnorm",
    deadline=None,  # machines are noisy: no timed assertions
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("batchnorm")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not item.keywords: a folder may be called so
            item.add_marker(skip)
