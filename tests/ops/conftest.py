import shutil

import pytest
import torch
from emulate import compiler

from batchnorm.ops.cuda import nvrtc, resident

ON_DEVICE = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(ON_DEVICE, reason="compiled, not interpreted, on this machine")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request):
    """Where Triton's kernels run: interpreted on the CPU, or on a device where there is one."""
    return request.param


@pytest.fixture(scope="session")
def emulation(tmp_path_factory):
    return compiler(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def resident_device(request, emulation, monkeypatch):
    """Where resident.cu runs: emulated on the CPU, or on a device where there is one."""
    forget = resident._kernel.cache_clear
    if request.param == "cpu":
        if shutil.which("g++") is None:
            pytest.skip("no g++ to compile the emulated kernel with")
        forget()
        monkeypatch.setattr(nvrtc, "load", emulation)
    yield request.param
    forget()


@pytest.fixture
def unwritten_is_nan():
    """Fill what torch allocates, so that a value that a kernel does not write fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
