import pytest
import torch
import torch.nn.functional as F

from batchnorm.models.bn_inception import pixel_blocks as module
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


def example(device, shape=(3, 3, 9, 12), size=7, outputs=32):
    # Triton's interpreter cannot multiply matrices in bfloat16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, kernel = torch.randn(shape, device=device).to(dtype), torch.randn(outputs, shape[1], size, size, device=device)
    dy = torch.randn(shape[0], outputs, (shape[2] + 1) // 2, (shape[3] + 1) // 2, device=device).to(dtype)
    return x, kernel, dy.contiguous(memory_format=torch.channels_last)


def exact(x, kernel, dy):
    """The output and the kernel's gradient, in float64."""
    kernel = kernel.double().requires_grad_()
    y = F.conv2d(x.double(), kernel, None, 2, kernel.shape[-1] // 2)
    return y.detach(), torch.autograd.grad(y, kernel, dy.double())[0]


def assert_near(found, expected, tolerance):
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().mean().item())


# The paper's stem, several groups of pixels for each program, and kernels of one and of four blocks.
SIZES = [{}, {"shape": (2, 3, 20, 33)}, {"size": 1}, {"size": 3, "shape": (2, 2, 9, 9), "outputs": 16}]


@pytest.mark.parametrize("given", SIZES)
def test_the_kernels_convolve(device, given, monkeypatch):
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(module, name, getattr(module, name)._replace(pixels=32))
    x, kernel, dy = example(device, **given)
    rounded = kernel.to(x.dtype)
    expected, dkernel = exact(x, rounded, dy)
    size = kernel.shape[-1]
    blocks = pixel_blocks(x, (size // 2 + size // 2 % 2) // 2, (size + 1) // 2).movedim(1, -1)
    y = torch.empty_like(dy.movedim(1, -1))
    module.multiply(blocks, rounded, y)
    assert_near(y.movedim(-1, 1), expected, 2**-7)
    assert_near(module.kernel_gradient(blocks, dy.movedim(1, -1), kernel.shape), dkernel, 1e-4)


class Batched(torch.autograd.Function):
    """Call the differentiable gradient as the convolution does if it gets a batch of gradients."""

    @staticmethod
    def forward(ctx, y, blocks, kernel):
        ctx.save_for_backward(blocks, kernel)
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        assert torch._C._functorch.is_legacy_batchedtensor(dy)
        return None, None, module._differentiable_gradient(ctx.saved_tensors[0], dy, ctx.saved_tensors[1])


@pytest.mark.parametrize("size", [3, 5, 7])
def test_the_differentiable_gradient(size):
    x, kernel, dy = (t.double() for t in example("cpu", size=size))
    blocks = pixel_blocks(x, (size // 2 + size // 2 % 2) // 2, (size + 1) // 2)
    expected = exact(x, kernel, dy)[1]
    assert_near(module._differentiable_gradient(blocks, dy, kernel), expected, 1e-12)
    y = F.conv2d(blocks, torch.zeros(32, 16, *[(size + 1) // 2] * 2).double()).requires_grad_()
    batched = Batched.apply(y, blocks, kernel.requires_grad_())
    (found,) = torch.autograd.grad(batched, kernel, torch.stack([dy, 2 * dy]), is_grads_batched=True)
    assert_near(found, torch.stack([expected, 2 * expected]), 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "twice", "batched", "strided"])
def test_gradients(kind):
    x, kernel, dy = example("cuda")
    _, expected = exact(x, kernel.bfloat16(), dy)
    kernel.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = module.convolve_by_blocks(x, kernel)
    assert type(y.grad_fn).__name__ == "_ConvolutionBackward"
    assert y.is_contiguous(memory_format=torch.channels_last)
    dy = dy.contiguous() if kind == "strided" else dy
    if kind == "batched":
        found = torch.autograd.grad(y, kernel, torch.stack([dy, 2 * dy]), is_grads_batched=True)[0]
        assert_near(found[1], 2 * found[0].double(), 0.01)
        found = found[0]
    else:
        (found,) = torch.autograd.grad(y, kernel, dy.requires_grad_(kind == "twice"), create_graph=kind == "twice")
    assert found.dtype == torch.float32
    assert found.requires_grad == (kind == "twice")
    # cuDNN rounds the gradient to bfloat16.
    assert_near(found.detach(), expected, 1e-4 if kind in ("plain", "strided") else 0.01)


@pytest.mark.gpu
def test_torch_convolves_what_the_kernels_do_not_support():
    x, kernel, _ = example("cuda", outputs=20)
    y = module.convolve_by_blocks(x, kernel.to(x.dtype).requires_grad_())
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    x, kernel, _ = example("cuda")
    y = module.convolve_by_blocks(x.float(), kernel.requires_grad_())
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    y = module.convolve_by_blocks(x.requires_grad_(), kernel.detach().to(x.dtype))
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
