"""Test normalization, ReLU and max pooling in one function, in Triton's interpreter or on a GPU."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.models import inception
from batchnorm.models.bn_inception import blocks, joined_branches, norm_pool, pooling
from batchnorm.models.bn_inception.blocks import Unit
from batchnorm.models.bn_inception.channels_last import alignment
from batchnorm.models.bn_inception.network import Network
from batchnorm.ops.call import Call
from batchnorm.ops.cuda import launch, schedule
from batchnorm.ops.cuda.cached_pass import processors
from batchnorm.ops.cuda.layout import geometry_of

# Triton's interpreter causes this warning with numpy >= 1.25.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("unwritten_is_nan"),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def _on_cpu_too(monkeypatch):
    """Allow interpreted kernels on CPU tensors."""
    monkeypatch.setattr(joined_branches, "takes", lambda x: geometry_of(x).nhwc)


def layer(channels, device):
    """Return a layer whose gamma is zero in one channel, and positive or negative in the others."""
    made = bn.BatchNorm2d(channels, 1e-3, activation="relu", device=device)
    with torch.no_grad():
        made.weight.copy_(torch.randn(channels))
        made.weight[0] = 0.0
        made.bias.copy_(0.3 + torch.randn(channels))
    return made


def images(shape, dtype, device, mean=3.0):
    x = (mean + torch.randn(shape)).to(device, dtype)
    return x.contiguous(memory_format=torch.channels_last)


def paper(x, gamma, beta, eps, sign):
    """Apply the paper's equations, ReLU and torch's max pooling, in float64 on the CPU.

    Before rounding, BN(x) is largest where x is largest or, if gamma is negative, smallest. So the pooling selects
    positions by the values of x * sign.
    """
    mu = x.mean((0, 2, 3), keepdim=True)
    var = (x - mu).square().mean((0, 2, 3), keepdim=True)
    z = (x - mu) / (var + eps).sqrt() * gamma[:, None, None] + beta[:, None, None]
    _, at = F.max_pool2d(x * sign[:, None, None], 3, 2, 1, return_indices=True)
    return z.flatten(2).gather(2, at.flatten(2)).view(at.shape).relu(), mu.flatten(), var.flatten()


def check(shape, dtype, device, mean=3.0):
    """Compare outputs, all gradients and running averages with the paper's equations."""
    bn_layer, x = layer(shape[1], device), images(shape, dtype, device, mean).requires_grad_()
    before = copy.deepcopy(bn_layer).cpu()
    assert norm_pool.can_pool(bn_layer, pooling.MaxPool2d(2), x)
    y = norm_pool.normalize_and_pool(bn_layer, x)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    dy = images(y.shape, dtype, device, 0.2)
    got = torch.autograd.grad(y, [x, bn_layer.weight, bn_layer.bias], dy)
    assert got[0].stride() == x.stride()
    exact = [t.detach().cpu().double().requires_grad_() for t in (x, before.weight, before.bias)]
    sign = torch.where(before.weight < 0, -1.0, 1.0).double()
    expected, mu, var = paper(*exact, before.eps, sign)
    wanted = torch.autograd.grad(expected, exact, dy.cpu().double())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)
    for a, b, t in zip(got, wanted, (tolerance, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=t, atol=t * float(b.abs().max()))
    m = x.numel() / shape[1]
    for name, value in (("running_mean", mu), ("running_var", var * m / (m - 1))):
        moved = 0.9 * getattr(before, name) + 0.1 * value
        torch.testing.assert_close(getattr(bn_layer, name).cpu(), moved.float(), rtol=1e-5, atol=1e-5)
    assert int(bn_layer.num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "mean"),
    [
        ((2, 24, 7, 9), torch.bfloat16, 3.0),  # odd sizes: the last windows have two rows and two columns
        ((3, 80, 4, 5), torch.bfloat16, 3.0),  # two slices of channels, of which the second is not full
        ((1, 5, 6, 4), torch.bfloat16, 3.0),  # an odd number of channels: half of the last byte is unused
        ((2, 16, 6, 6), torch.float16, 3.0),
        ((2, 12, 5, 6), torch.float32, 1e4),  # the mean is 10,000 times the standard deviation
        ((2, 6, 1, 3), torch.float32, 3.0),
    ],
)
def test_outputs_gradients_and_averages(shape, dtype, mean, device):
    check(shape, dtype, device, mean)


@pytest.mark.slow
def test_sums_of_many_programs(monkeypatch, device):
    monkeypatch.setattr(norm_pool, "PROGRAMS", 64)
    add_up, _ = norm_pool._sums_launch(torch.Size((35, 64, 8, 7)), 16, 64, 2, torch.device(device))
    assert add_up.constants[-1]  # the sums are added up in two steps
    check((35, 64, 8, 7), torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 64, 112, 112), (8, 192, 56, 56), (256, 64, 112, 112), (3, 62, 113, 57)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_of_the_network(shape, dtype):
    torch.manual_seed(1)
    check(shape, dtype, "cuda", 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_output_is_that_of_pooling_the_rounded_values(dtype, device):
    bn_layer, x = layer(16, device), images((3, 16, 7, 6), dtype, device)
    call = Call(x, bn_layer.weight, bn_layer.bias, bn_layer.eps, bn_layer.activation)
    way = schedule.stream(geometry_of(x), x.element_size(), False, processors(x.device))
    with torch.no_grad():
        between, _, _ = launch.forward(call, way=way)
        expected = F.max_pool2d(between, 3, 2, 1)
        assert torch.equal(norm_pool.normalize_and_pool(bn_layer, x), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from Triton's interpreter
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_channel_with_a_value_that_is_not_finite_is_not_a_number(value, device):
    bn_layer, x = layer(6, device), images((2, 6, 5, 5), torch.bfloat16, device)
    x[1, 2, 4, 0] = float(value)
    before = copy.deepcopy(bn_layer)
    x.requires_grad_()
    y = norm_pool.normalize_and_pool(bn_layer, x)
    assert y.isnan().any((0, 2, 3)).tolist() == [c == 2 for c in range(6)]
    assert y[:, 2].isnan().all()
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.isnan().any((0, 2, 3)).tolist() == [c == 2 for c in range(6)]
    torch.testing.assert_close(bn_layer.running_mean, before.running_mean)
    assert [int(b) for b in (bn_layer.num_batches_tracked, bn_layer.num_batches_skipped)] == [0, 1]


def test_second_derivatives(device):
    bn_layer, x = layer(6, device), images((2, 6, 5, 5), torch.float32, device).requires_grad_()
    with torch.no_grad():
        bn_layer.weight[0] = 0.5
    inputs, found = [x, bn_layer.weight, bn_layer.bias], []
    for run in (lambda x: norm_pool.normalize_and_pool(bn_layer, x), lambda x: F.max_pool2d(bn_layer(x), 3, 2, 1)):
        first = torch.autograd.grad(run(x).pow(3).sum(), inputs, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.detach().abs().max()))


def test_hooks_that_lose_the_layout_of_what_is_saved(device):
    bn_layer, x = layer(16, device), images((2, 16, 6, 7), torch.float32, device).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = norm_pool.normalize_and_pool(bn_layer, x)
    again = norm_pool.normalize_and_pool(bn_layer, x)
    dy = torch.randn_like(y)
    got, expected = (torch.autograd.grad(v, [x, bn_layer.weight], dy) for v in (y, again))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_gradient_that_is_a_slice_or_in_another_layout(device):
    bn_layer, x = layer(16, device), images((2, 16, 6, 7), torch.bfloat16, device).requires_grad_()
    y = norm_pool.normalize_and_pool(bn_layer, x)
    wide = images((2, 40, *y.shape[2:]), torch.bfloat16, device)
    for start in (8, 3):  # if a slice starts at channel 3, pairs of channels are not aligned
        dy = wide[:, start : start + 16]
        found = [
            torch.autograd.grad(y, [x, bn_layer.weight, bn_layer.bias], d, retain_graph=True)
            for d in (dy, dy.contiguous(), dy.contiguous(memory_format=torch.channels_last))
        ]
        for other in found[1:]:  # the kernels add up in another order if pairs are not aligned
            torch.testing.assert_close(found[0][0], other[0], rtol=1e-2, atol=1e-3)
            torch.testing.assert_close(found[0][1:], other[1:], rtol=1e-5, atol=1e-5)
    assert alignment(wide[:, 3:19]) == 1


def network(device, dtype=torch.float32):
    """Return a small network of a unit, a max pool and a linear layer, and images for it."""
    conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    unit = Unit(OrderedDict(conv=conv, bn=bn.BatchNorm2d(8, 1e-3, activation="relu")))
    net = Network(OrderedDict(stem=unit, pool1=pooling.MaxPool2d(2), flatten=nn.Flatten(), last=nn.Linear(72, 2)))
    unit.rearrange = True
    return net.to(device, dtype).to(memory_format=torch.channels_last), images((4, 3, 6, 5), dtype, device)


@pytest.fixture
def fused(monkeypatch):
    """Count the calls of the fused function."""
    counted, run = [], norm_pool.normalize_and_pool
    monkeypatch.setattr(blocks, "normalize_and_pool", lambda *args: counted.append(1) or run(*args))
    return counted


def results(net, x):
    y, trained = net(x), [p for p in net.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), trained), *net.buffers()]


def assert_same_as_drawn(net, x):
    drawn = copy.deepcopy(net)
    drawn.stem.rearrange = False
    for a, b in zip(results(net, x), results(drawn, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_unit_and_its_pool_are_fused(fused, device, momentum):
    net, x = network(device)
    net.stem.bn.momentum = momentum
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_same_as_drawn(net, x)
    assert fused
    assert list(net.state_dict())[:3] == ["stem.conv.weight", "stem.bn.weight", "stem.bn.bias"]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.stem.register_forward_hook(lambda *_: None),
        lambda net: net.stem.bn.register_forward_hook(lambda *_: None),
        lambda net: net.pool1.register_forward_pre_hook(lambda *_: None),
        lambda net: bn.freeze_(net),
        lambda net: setattr(net.stem.bn, "statistics", bn.Ghost(2)),
        lambda net: setattr(net.stem.bn, "activation", bn.BatchNorm2d(8, activation="tanh").activation),
        lambda net: setattr(net.pool1, "stride", 1) or setattr(net, "last", nn.Linear(240, 2).to(net.last.weight)),
        lambda net: setattr(net.pool1, "ceil_mode", True) or setattr(net, "last", nn.Linear(96, 2).to(net.last.weight)),
        lambda net: net.stem.bn.to(torch.float64),
        lambda net: net.stem.append(nn.Hardtanh(0, 0.5)),
        lambda net: setattr(net.stem.bn, "track_running_stats", False),
        lambda net: nn.utils.parametrize.register_parametrization(net.stem.bn, "weight", nn.Identity()),
    ],
    ids="unit_hook bn_hook pool_hook frozen ghost tanh stride ceil double appended untracked parametrized".split(),  # noqa: SIM905
)
def test_what_is_unusual_runs_layer_by_layer(fused, device, change):
    net, x = network(device)
    change(net)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_same_as_drawn(net, x)
    assert not fused


def test_evaluation_recomputation_transforms_and_global_hooks(fused, device):
    net, x = network(device)
    with bn.recompute():
        net(x).sum().backward()
    torch.fx.symbolic_trace(net)(x)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    net(x)
    handle.remove()
    net.eval()
    net(x)
    assert not fused
    net.train()
    torch.utils.checkpoint.checkpoint(net, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert len(fused) == 2
    assert int(net.stem.bn.num_batches_tracked) == 4  # the checkpoint's second forward pass does not count


@pytest.mark.gpu
def test_the_network_trains_in_a_graph_as_layer_by_layer():
    """Ten steps, seven of them in a CUDA graph, reach nearly the same loss as with hooks, which prevent fusion."""
    reached = []
    for hooked in (False, True):
        net = inception(size=97, width=0.25, classes=10, seed=1).cuda().to(memory_format=torch.channels_last)
        for module in (net.pool1, net.pool2) if hooked else ():
            module.register_forward_hook(lambda *_: None)
        generator = torch.Generator("cuda").manual_seed(2)
        x = torch.randn(16, 3, 97, 97, device="cuda", generator=generator)
        x, labels = x.contiguous(memory_format=torch.channels_last), torch.arange(16, device="cuda") % 10
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, 0.9)

        def step(net=net, x=x, labels=labels, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=False)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            return loss

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(7):
            graph.replay()
        reached.append((loss.detach().clone(), net.stem.bn.running_mean.clone(), net.conv2.bn.running_var.clone()))
    for a, b in zip(*reached, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.01)
