import pytest
import torch
import torch.nn.functional as F

from batchnorm.models.bn_inception import pixel_blocks as module
from batchnorm.models.bn_inception.pixel_blocks import pixel_blocks, write_blocks
from batchnorm.ops.cuda import driver

UNAVAILABLE = driver.unavailable
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


@pytest.fixture(
    params=[pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def usable(request, emulation, monkeypatch):
    """Return the device for pixel_blocks.cu: a GPU if there is one, or the CPU, where the kernel is emulated."""
    if request.param == "cpu":
        if emulation is None:
            pytest.skip("no g++ that compiles the emulated kernel")
        monkeypatch.setattr(driver, "load", emulation)
        monkeypatch.setattr(driver, "unavailable", lambda: None)
        monkeypatch.setattr(module.dispatch, "has_kernels", lambda x: True)
        monkeypatch.setattr(module, "_available", lambda device: 232_448)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module._kernel.cache_clear()
    yield request.param
    module._kernel.cache_clear()


def example(device, shape=(3, 3, 9, 12), size=7, outputs=64, dtype=torch.bfloat16):
    x, kernel = torch.randn(shape, device=device).to(dtype), torch.randn(outputs, shape[1], size, size, device=device)
    dy = torch.randn(shape[0], outputs, (shape[2] + 1) // 2, (shape[3] + 1) // 2, device=device).to(dtype)
    return x, kernel, dy.contiguous(memory_format=torch.channels_last)


def exact(x, kernel, dy):
    """Return the output and the kernel's gradient, in float64."""
    kernel = kernel.double().requires_grad_()
    y = F.conv2d(x.double(), kernel, None, 2, kernel.shape[-1] // 2)
    return y.detach(), torch.autograd.grad(y, kernel, dy.double())[0]


def assert_near(found, expected, tolerance):
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().mean().item())


SHAPES = [
    (3, 3, 9, 12),  # each image is a part of one tile
    (1, 3, 1, 1),  # one pixel
    (2, 3, 70, 2),  # one column of output pixels
    (1, 3, 4, 530),  # rows longer than a tile
    (5, 3, 48, 51),  # more tiles than programs, if the kernel is emulated
]


@pytest.mark.parametrize(("shape", "dtype"), [*((s, torch.bfloat16) for s in SHAPES), (SHAPES[0], torch.float16)])
def test_the_kernels_convolve(usable, shape, dtype):
    x, kernel, dy = example(usable, shape, dtype=dtype)
    rounded = kernel.to(dtype).float()
    expected, dkernel = exact(x, rounded, dy)
    blocks = pixel_blocks(x, 2, 4).movedim(1, -1)
    y = torch.full_like(dy, torch.nan)
    module.run_convolve(blocks, rounded, y.movedim(1, -1))
    assert_near(y, expected, 2**-7)
    assert_near(module.run_kernel_gradient(blocks, dy.movedim(1, -1)), dkernel, 1e-4)


def convolved(device, **given):
    """Return the output of convolve_by_blocks, the kernel, the output's gradient and the kernel's expected gradient."""
    x, kernel, dy = example(device, **given)
    kernel = kernel.to(x.dtype).requires_grad_()
    y = module.convolve_by_blocks(x, kernel)
    assert type(y.grad_fn).__name__ == "_ConvolutionBackward"
    expected, dkernel = exact(x, kernel.detach(), dy)
    assert_near(y.detach(), expected, 2**-7)
    return y, kernel, dy, dkernel


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_gradients(usable, layout):
    y, kernel, dy, expected = convolved(usable)
    assert y.is_contiguous(memory_format=torch.channels_last)
    (found,) = torch.autograd.grad(y, kernel, dy.contiguous(memory_format=layout))
    assert_near(found, expected, 2**-7)


def test_the_gradient_can_be_differentiated(usable):
    y, kernel, dy, expected = convolved(usable)
    dy.requires_grad_()
    (found,) = torch.autograd.grad(y, kernel, dy, create_graph=True)
    assert_near(found.detach(), expected, 0.01)
    # The kernel's gradient is linear in dy. Its product with the kernel, differentiated with respect to dy, is y.
    (again,) = torch.autograd.grad(found, dy, kernel.detach())
    assert_near(again, y.detach().double(), 0.01)


def test_batches_of_gradients(usable):
    y, kernel, dy, expected = convolved(usable)
    many = torch.stack([dy, 2 * dy])
    for found in (
        torch.autograd.grad(y, kernel, many, is_grads_batched=True, retain_graph=True)[0],
        torch.func.vmap(lambda one: torch.autograd.grad(y, kernel, one, retain_graph=True)[0])(many),
    ):
        assert_near(found, torch.stack([expected, 2 * expected]), 0.01)


def test_hooks_may_change_the_layout_of_saved_tensors(usable):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
        y, kernel, dy, expected = convolved(usable)
    assert_near(torch.autograd.grad(y, kernel, dy)[0], expected, 2**-7)


def test_the_output_can_be_changed_in_place(usable):
    y, kernel, dy, _ = convolved(usable)
    kept = y.detach().clone()
    (found,) = torch.autograd.grad(y.mul_(2), kernel, dy)
    torch.testing.assert_close(y.detach(), 2 * kept)
    assert found.isfinite().all()


@pytest.mark.gpu
def test_autocast_casts_the_kernel():
    x, kernel, dy = example("cuda")
    _, expected = exact(x, kernel.bfloat16(), dy)
    with torch.autocast("cuda", torch.bfloat16):
        y = module.convolve_by_blocks(x.float(), kernel.requires_grad_())
    (found,) = torch.autograd.grad(y, kernel, dy)
    assert found.dtype == torch.float32
    assert_near(found, expected, 1e-4)


def test_gradients_that_are_not_aligned(usable):
    y, kernel, dy, expected = convolved(usable)
    memory = torch.empty(dy.numel() + 1, dtype=dy.dtype, device=dy.device)
    unaligned = memory[1:].view(dy.movedim(1, -1).shape).movedim(-1, 1).copy_(dy)
    assert_near(torch.autograd.grad(y, kernel, unaligned)[0], expected, 2**-7)


def test_compiled_code_has_no_graph_break(usable, monkeypatch):
    monkeypatch.setattr(driver, "unavailable", UNAVAILABLE)
    x, kernel = torch.randn(2, 3, 32, 32), torch.randn(64, 3, 7, 7)
    compiled = torch.compile(module.convolve_by_blocks, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, kernel), F.conv2d(x, kernel, stride=2, padding=3), rtol=1e-4, atol=1e-4)


UNSUPPORTED = {
    "32 outputs": {"outputs": 32},
    "4 inputs": {"shape": (3, 4, 9, 12)},
    "a smaller kernel": {"size": 5},
    "float32": {},
    "an image with a gradient": {},
    "an old GPU": {},
    "little shared memory": {},
    "no compiler": {},
    "BATCHNORM_FAST=0": {},
}


@pytest.mark.parametrize("why", UNSUPPORTED)
def test_torch_convolves_what_the_kernels_do_not_support(usable, why, monkeypatch):
    x, kernel, dy = example(usable, **UNSUPPORTED[why])
    kernel = kernel.to(x.dtype)
    if why == "float32":
        x, kernel = x.float(), kernel.float()
    elif why == "an image with a gradient":
        x.requires_grad_()
    elif why == "an old GPU":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    elif why == "little shared memory":
        monkeypatch.setattr(module, "_available", lambda device: 32_768)
    elif why == "no compiler":
        monkeypatch.setattr(driver, "unavailable", lambda: "libnvrtc.so cannot be loaded")
    elif why == "BATCHNORM_FAST=0":
        monkeypatch.undo()
        monkeypatch.setattr(module.dispatch, "FAST", False)
    y = module.convolve_by_blocks(x, kernel.requires_grad_())
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"
    assert_near(y.detach(), exact(x.detach(), kernel.detach(), dy)[0], 2**-7)


def test_other_numbers_of_channels_are_rejected():
    with pytest.raises(RuntimeError, match="the convolution's weight has 3 input channels, but the image has 4"):
        module.convolve_by_blocks(torch.zeros(1, 4, 8, 8), torch.zeros(16, 3, 7, 7))


class Batched(torch.autograd.Function):
    """Call _differentiable_gradient in the backward pass, as _Convolution does with is_grads_batched=True."""

    @staticmethod
    def forward(ctx, y, blocks, kernel):
        ctx.save_for_backward(blocks, kernel)
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None, None, module._differentiable_gradient(ctx.saved_tensors[0], dy, ctx.saved_tensors[1])


@pytest.mark.parametrize("size", [3, 5, 7])
def test_the_differentiable_gradient(size):
    x, kernel, dy = (t.double() for t in example("cpu", size=size))
    window = module.Window.of(size)
    blocks = pixel_blocks(x, window.before, window.taps)
    expected = exact(x, kernel, dy)[1]
    assert_near(module._differentiable_gradient(blocks, dy, kernel), expected, 1e-12)
    batched = Batched.apply(torch.zeros_like(dy), blocks, kernel.requires_grad_())
    (found,) = torch.autograd.grad(batched, kernel, torch.stack([dy, 2 * dy]), is_grads_batched=True)
    assert_near(found, torch.stack([expected, 2 * expected]), 1e-12)
