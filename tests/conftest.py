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

# Set this before torch is imported. Tests run in parallel, one process per core, and no result may depend on the number
# of cores.
os.environ["OMP_NUM_THREADS"] = "1"
if not os.access(os.path.expanduser("~"), os.W_OK):  # torch, Triton, matplotlib and this package keep caches there
    os.environ["HOME"] = tempfile.mkdtemp()  # inherited by all processes of this run
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

import pytest
import torch
from _pytest.doctest import DoctestModule
from emulate import compiler
from hypothesis import HealthCheck, settings
from packaging.version import Version

torch.set_num_threads(1)  # in case a plugin has already imported torch
if not torch.cuda.is_available():
    # Set this before triton is imported, to run its kernels on CPU tensors, one program after the other.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "batchnorm",
    deadline=None,  # machines are noisy, so an example may take any time
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("batchnorm")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """Return a function that makes a folder shared by all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name):
        (base / name).mkdir(exist_ok=True)
        return base / name

    return folder


@pytest.fixture(scope="session")
def emulation(shared_folder):
    """Return an emulation of driver.load, or None if this machine has no compiler for it."""
    try:
        return compiler(shared_folder("emulated"))
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request):
    """Return the device for Triton's kernels: a GPU if there is one, or the CPU, where they are interpreted."""
    return request.param


@pytest.fixture
def unwritten_is_nan():
    """Fill uninitialized tensors with NaN, so that tests fail if a kernel leaves a value unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _seed_and_threads():
    torch.manual_seed(0)
    # The tensors are small and other tests use the same cores, so more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for docstring examples in src only.

    Some modules in src need Triton, so pytest is configured to ignore import errors when it looks for examples. If it
    also looked in test files, a failed import would leave a partly imported module in sys.modules, and pytest would
    run only the tests above the error.
    """
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


def missing():
    """Yield the marks of tests that cannot run on this machine, each with the reason."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    gpu = torch.cuda.is_available()
    yield ("interpreted", "has a GPU, which runs these kernels") if gpu else ("gpu", "needs a CUDA device")
    if shutil.which(compiler) is None or not headers.exists():
        yield "inductor", "torch.compile needs a C++ compiler and Python's headers"
    if " " in torch.__file__:
        yield "inductor", "torch.compile cannot link torch's libraries from a path with a space"
    reason = None
    if find_spec("triton") is None:
        reason = "needs Triton"
    elif not gpu and Version(version("triton")) >= Version("3.7"):
        reason = "Triton 3.7's interpreter fails on these kernels, and there is no GPU to compile them for"
    elif not gpu and Version(version("numpy")) >= Version("2.4"):
        reason = "Triton's interpreter needs numpy < 2.4, and there is no GPU to compile these kernels for"
    if reason is not None:
        yield from (("triton", reason), ("interpreted", reason))


def pytest_collection_modifyitems(items):
    for mark, reason in missing():
        for item in items:
            if item.get_closest_marker(mark):  # item.keywords would also match names of folders
                item.add_marker(pytest.mark.skip(reason=reason))
