import atexit
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Before torch is imported. Tests run side by side, one process a core, and no result may depend on how many cores
# there are.
os.environ["OMP_NUM_THREADS"] = "1"
if not os.access(os.path.expanduser("~"), os.W_OK):  # torch, Triton, matplotlib and this package keep caches there
    os.environ["HOME"] = tempfile.mkdtemp()  # inherited by all processes of this run
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest
import torch
from _pytest.doctest import DoctestModule
from emulate import compiler
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


@pytest.fixture(scope="session")
def emulation(shared_folder):
    """What stands in for driver.load; None if no compiler here can make it."""
    try:
        return compiler(shared_folder("emulated"))
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


ON_DEVICE = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=[
                pytest.mark.triton,
                pytest.mark.skipif(ON_DEVICE, reason="compiled, not interpreted, on this machine"),
            ],
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """Where Triton's kernels run: interpreted on the CPU, or on a device where there is one."""
    return request.param


@pytest.fixture
def unwritten_is_nan():
    """Fill what torch allocates, so that a value that a kernel does not write fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for docstring examples in src only.

    There, modules that cannot be imported are skipped (Triton's, without Triton). A test file that cannot be imported
    would be skipped as well, because its second import finds in sys.modules what the first has left.
    """
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


def missing():
    """Say what this machine lacks, by the mark of the tests that need it."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not torch.cuda.is_available():
        yield "gpu", "needs a CUDA device"
    if shutil.which(compiler) is None or not headers.exists():
        yield "inductor", "torch.compile needs a C++ compiler and Python's headers"
    if " " in torch.__file__:
        yield "inductor", "torch.compile cannot link torch's libraries from a path with a space"
    if find_spec("triton") is None:
        yield "triton", "needs Triton"
    elif not torch.cuda.is_available() and version("triton") >= "3.7":
        yield "triton", "Triton 3.7's interpreter fails on these kernels, and there is no GPU to compile them for"


def pytest_collection_modifyitems(items):
    for mark, reason in missing():
        for item in items:
            if item.get_closest_marker(mark):  # not item.keywords: a folder may be called so
                item.add_marker(pytest.mark.skip(reason=reason))
