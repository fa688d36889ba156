"""Test an Inception module whose kernels write slices of its output, in Triton's interpreter or on a GPU."""

import contextlib
import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.models.bn_inception import joined_branches
from batchnorm.models.bn_inception.blocks import InceptionModule, InceptionRow, Unit
from batchnorm.models.bn_inception.weight_gradients import WeightGradients
from batchnorm.ops.cuda.layout import geometry_of

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]
ROWS = {
    "average": InceptionRow("3a", 1, 16, 8, 16, 8, 24, "avg", 8),
    "pass": InceptionRow("3c", 2, 0, 8, 16, 8, 24, "max", 0),
    "maximum": InceptionRow("5b", 1, 16, 8, 16, 8, 24, "max", 8),
}
INPUTS, SIZE = 16, 5


def unit(inputs, outputs, kernel, stride, out, row):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return Unit(OrderedDict(conv=conv, bn=bn.BatchNorm2d(outputs, 1e-3, activation="relu")))


def made(row, device):
    module = InceptionModule(INPUTS, ROWS[row], SIZE, unit)
    for p in module.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, 1.0, 0.2)
    return module.to(device).to(memory_format=torch.channels_last)


def images(device, n=4):
    x = torch.randn(n, INPUTS, SIZE, SIZE, device=device)
    return x.contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def _precise():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def launches(monkeypatch):
    """Allow interpreted kernels on CPU tensors, and list how many layers each call normalizes together."""
    counted = []
    run = joined_branches.grouped.forward
    monkeypatch.setattr(joined_branches, "takes", lambda x: geometry_of(x).nhwc)
    monkeypatch.setattr(joined_branches.grouped, "forward", lambda xs, *rest: counted.append(len(xs)) or run(xs, *rest))
    return counted


def results(module, x, dy):
    """Return the output, all gradients and all buffers after a forward and a backward pass."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    gradients = torch.autograd.grad(y, [x, *module.parameters()], dy)
    return [y.detach(), *gradients, *module.buffers()]


@pytest.mark.parametrize("row", ROWS)
def test_outputs_gradients_and_averages(launches, device, row):
    module, x = made(row, device), images(device)
    # The oracle is on the CPU because torch 2.11's gradient of a padded avg_pool2d is wrong on CUDA in channels last.
    oracle = copy.deepcopy(module).double().cpu()
    module.rearrange, oracle.rearrange = True, False
    with torch.no_grad():
        dy = torch.randn_like(copy.deepcopy(oracle)(x.cpu().double()))
    got, expected = results(module, x, dy.to(x)), results(oracle, x.cpu().double(), dy)
    assert launches == [{"average": 4, "pass": 2, "maximum": 4}[row], 2]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_ten_training_steps(launches, device):
    module, x = made("average", device), images(device, 8)
    oracle = copy.deepcopy(module).double().cpu()
    module.rearrange, oracle.rearrange = True, False
    losses = []
    for net, inputs in ((module, x), (oracle, x.cpu().double())):
        target = torch.linspace(0, 1, len(x))[:, None].to(inputs)
        optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9)
        losses.append([])
        for _ in range(10):
            loss = (net(inputs).mean((2, 3)) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert len(launches) == 20
    assert losses[1][-1] < losses[1][0]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    for a, b in zip(module.state_dict().values(), oracle.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("row", ROWS)
def test_evaluation(launches, device, row, monkeypatch):
    module, x = made(row, device), images(device)
    for buffer in module.buffers():
        if buffer.dim():
            nn.init.uniform_(buffer, 0.5, 1.5)
    module.eval()
    drawn = copy.deepcopy(module)
    module.rearrange, drawn.rearrange = True, False
    with torch.no_grad():
        expected = drawn(x)
        monkeypatch.setattr(torch, "cat", lambda parts: torch.concat(parts) if parts[0].shape[2] == 1 else None)
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    assert launches == []


def test_nothing_is_concatenated(launches, device, monkeypatch):
    module, x = made("average", device), images(device)
    module.rearrange = True
    kernels = module.joined_kernels()
    for kernel, neighbor in zip(kernels, joined_branches.as_neighbors(kernels, torch.float32), strict=True):
        kernel.data = neighbor
    monkeypatch.setattr(torch, "cat", None)
    module(x).sum().backward()
    assert len(launches) == 2


def test_second_derivatives(launches, device):
    module, x = made("average", device), images(device, 2).requires_grad_()
    found = []
    for rearrange in (True, False):
        module.rearrange = rearrange
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [x, *module.parameters()]))
    assert len(launches) == 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_a_gradient_in_another_layout(launches, device):
    module, x = made("pass", device), images(device)
    module.rearrange = True
    y = module(x)
    dy = torch.randn(y.shape, device=device)
    found = [
        torch.autograd.grad(y, module.three[0].conv.weight, d, retain_graph=True)[0]
        for d in (dy, dy.contiguous(memory_format=torch.channels_last))
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("change", ["hook", "frozen", "ghost", "eps", "evaluation", "recompute"])
def test_what_is_unusual_runs_layer_by_layer(launches, device, change):
    module, x = made("average", device), images(device)
    norm = module.three.conv.bn
    if change == "hook":
        norm.register_forward_hook(lambda *_: None)
    elif change == "frozen":
        bn.freeze_(module.three)
    elif change == "ghost":
        norm.statistics = bn.Ghost(2)
    elif change == "eps":
        norm.eps = 1e-5
    elif change == "evaluation":
        module.eval()
    drawn = copy.deepcopy(module)
    module.rearrange, drawn.rearrange = True, False
    if change == "recompute":
        with bn.recompute():
            y = module(x)
    else:
        y = module(x)
    torch.testing.assert_close(y, drawn(x), rtol=1e-4, atol=1e-4)
    assert launches == []


def test_a_batch_that_is_run_again_moves_no_averages(launches, device):
    module, x = made("average", device), images(device).requires_grad_()
    module.rearrange = True
    torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).sum().backward()
    assert len(launches) == 4
    assert {int(m.num_batches_tracked) for m in module.modules() if isinstance(m, bn.BatchNorm2d)} == {1}


def test_hooks_of_branches_are_called(device):
    module, x, heard = made("average", device), images(device), []
    module.rearrange = True
    module.three.register_forward_hook(lambda *_: heard.append("three"))
    module(x)
    assert heard == ["three"]


@pytest.mark.parametrize("row", ROWS)
def test_global_hooks_and_those_of_the_pool_see_the_module_as_drawn(device, row):
    module, x = made(row, device), images(device)
    drawn = copy.deepcopy(module)
    module.rearrange, drawn.rearrange = True, False

    def seen(net, register):
        shapes = []
        handle = register(net)(lambda _, inputs, y: shapes.append((inputs[0].shape, y.shape)))
        net(x)
        handle.remove()
        return shapes

    for register in (
        lambda _: nn.modules.module.register_module_forward_hook,
        lambda net: net.pool[0].register_forward_hook,
    ):
        assert seen(module, register) == seen(drawn, register)


def test_kernels_that_are_neighbors_are_joined_in_place():
    kernels = [torch.randn(n, 6, 1, 1) for n in (3, 5)]
    copies = joined_branches.as_neighbors(kernels, torch.float32)
    for given in (kernels, [k.contiguous(memory_format=torch.channels_last) for k in copies], copies):
        leaves = [k.requires_grad_() for k in given]
        whole = joined_branches.join_kernels(leaves)
        assert torch.equal(whole, torch.cat(kernels))
        got = torch.autograd.grad(whole.square().sum(), leaves)
        torch.testing.assert_close(got, tuple(2 * k.detach() for k in kernels))
    assert joined_branches.are_neighbors(copies)
    assert not joined_branches.are_neighbors(kernels)
    assert not joined_branches.are_neighbors(copies[::-1])
    with torch.no_grad():
        copies[1].zero_()  # in place, as an optimizer updates weights
    assert not joined_branches.join_kernels(copies)[3:].any()


@pytest.mark.gpu
def test_gradients_of_kernels_computed_aside():
    module, x = made("average", "cuda"), images("cuda", 64)
    gradients = WeightGradients()
    dy, found = None, []
    for aside in (True, False):
        with gradients if aside else contextlib.nullcontext():
            y = module(x)
        dy = torch.randn_like(y) if dy is None else dy
        if aside:
            ((places, grads),) = gradients.backward(y, dy, list(module.parameters()))
            assert gradients.pending
            assert places == list(range(len(grads)))
            gradients.wait()
        else:
            grads = list(torch.autograd.grad(y, list(module.parameters()), dy))
        found.append(grads)
    assert not gradients.pending
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("row", ROWS)
def test_a_module_that_was_changed_runs_as_drawn(launches, device, row):
    class Doubled(Unit):
        def forward(self, x):
            return 2 * super().forward(x)

    def with_bias(module):
        module.three[0].conv.bias = nn.Parameter(torch.randn(8, device=device))

    def with_another_unit(module):
        module.three[1] = Doubled(OrderedDict(module.three[1].named_children()))

    def with_another_forward(module):
        module.three[0].conv.forward = lambda x, run=module.three[0].conv.forward: run(2 * x)

    def with_a_plain_convolution(module):
        module.three[0] = module.three[0].conv

    def with_a_wider_kernel(module):
        conv = module.three[0].conv
        wider = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=False, device=device)
        module.three[0].conv = wider.to(memory_format=torch.channels_last)

    def with_other_windows(module):
        module.pool[0].kernel_size, module.pool[0].padding = 5, 2

    def with_a_pool_that_is_not_linear(module):
        module.pool[0] = nn.MaxPool2d(3, module.pool[0].stride, 1)

    def without_averages(module):
        for layer in module.modules():
            if isinstance(layer, bn.BatchNorm2d):
                layer.track_running_stats = False

    changes = (
        with_bias,
        with_another_unit,
        lambda module: module.three.append(nn.Hardtanh(0, 0.1)),
        with_another_forward,
        with_a_plain_convolution,
        with_a_wider_kernel,
        with_other_windows,
        with_a_pool_that_is_not_linear,
        without_averages,
    )
    for change in changes:
        module, x = made(row, device), images(device)
        change(module)
        drawn = copy.deepcopy(module)
        module.rearrange, drawn.rearrange = True, False
        for ours, expected in zip(*([net(x), *net.buffers()] for net in (module, drawn)), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        module.rearrange = drawn.rearrange = None
        with torch.no_grad():
            torch.testing.assert_close(module.eval()(x), drawn.eval()(x), rtol=1e-4, atol=1e-4)
    assert not launches


def test_kernels_of_one_channel_and_other_strides(launches, device):
    rows = {
        "1 channel": InceptionRow("x", 1, 16, 1, 1, 8, 24, "avg", 1),
        "stride 3": InceptionRow("x", 3, 0, 8, 16, 8, 24, "max", 0),
    }
    for name, row in rows.items():
        module = InceptionModule(INPUTS, row, SIZE, unit).to(device).to(memory_format=torch.channels_last)
        drawn, x = copy.deepcopy(module), images(device)
        module.rearrange, drawn.rearrange = True, False
        dy = torch.randn_like(copy.deepcopy(drawn)(x))
        for ours, expected in zip(results(module, x, dy), results(drawn, x, dy), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3, msg=lambda said, name=name: name + said)


def test_kernels_that_change_before_the_backward_pass_are_noticed(launches, device):
    module, x = made("average", device), images(device)
    module.rearrange = True
    kernels = module.joined_kernels()
    for kernel, neighbor in zip(kernels, joined_branches.as_neighbors(kernels, torch.float32), strict=True):
        kernel.data = neighbor
    y = module(x.requires_grad_())
    with torch.no_grad():
        kernels[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_outputs_of_convolutions_in_another_layout(launches, monkeypatch, device):
    module, x = made("average", device), images(device)
    drawn = copy.deepcopy(module)
    module.rearrange, drawn.rearrange = True, False
    expected = drawn(x)
    run = torch.nn.functional.conv2d
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *args: run(*args).contiguous())
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    assert launches
