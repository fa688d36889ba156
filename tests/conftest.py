import atexit
import os
import shutil
import tempfile

# Before torch is imported. Tests run side by side, one process a core, and no result may depend on how many cores
# there are.
os.environ["OMP_NUM_THREADS"] = "1"
if not os.access(os.path.expanduser("~"), os.W_OK):  # torch, Triton, matplotlib and this package keep caches there
    os.environ["HOME"] = tempfile.mkdtemp()  # inherited by all processes of this run
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # if a plugin imported torch before
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


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Make a folder that all processes of this test run share."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name):
        (base / name).mkdir(exist_ok=True)
        return base / name

    return folder


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
