import pytest
import torch

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


@pytest.fixture
def unwritten_is_nan():
    """Fill what torch allocates, so that a value that a kernel does not write fails."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
