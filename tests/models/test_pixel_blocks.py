import pytest
import torch

from batchnorm.models.bn_inception.pixel_blocks import pixel_blocks, write_blocks

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]


@pytest.mark.parametrize("shape", [(2, 3, 8, 10), (1, 3, 7, 9), (2, 5, 4, 4)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_kernel_writes_what_torch_does(device, shape, layout):
    x = torch.randn(shape).contiguous(memory_format=layout)
    expected = pixel_blocks(x, 2, 4).to(torch.bfloat16)
    blocks = torch.empty(expected.movedim(1, -1).shape, dtype=torch.bfloat16, device=device)
    write_blocks(x.to(device), blocks, 2)
    # Triton's interpreter truncates instead of rounding when it casts to bfloat16.
    torch.testing.assert_close(blocks.movedim(-1, 1).cpu(), expected, rtol=2**-7, atol=0)
