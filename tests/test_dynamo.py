"""Test that torch.compile(net, backend="batchnorm") gives the same results and running statistics as stock torch."""

import copy
import logging
import tomllib
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch._dynamo
from blocks import Block, Bottleneck, DenseBlock, MobileOneLike, RegNetLike, UNet
from networks import scramble_
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm.dynamo import compile_graph
from batchnorm.ops.activation import NAMES, Activation, to_module

ROOT = Path(__file__).parents[1]
IN_PYTHON = partial(compile_graph, inner="eager", everywhere=True)
TRACED = partial(compile_graph, inner="aot_eager", everywhere=True)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def image(*shape):
    return torch.randn(*(shape or (3, 4, 6, 6)), dtype=torch.double)


def step(net, x, call):
    """Run a forward and a backward pass through ``call``, and return the output and the gradients."""
    for p in net.parameters():
        p.grad = None
    x = x.clone().requires_grad_()
    out = call(x)
    if out.requires_grad:
        (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)).sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in net.named_parameters()}


def assert_as_stock(net, inputs=None, backend=IN_PYTHON, fullgraph=True, close=None, **options):
    """Compare training steps with stock torch in eager mode, and return the backend's counters."""
    close = close or {"rtol": 1e-9, "atol": 1e-9}
    inputs = [image(), image()] if inputs is None else inputs
    net = scramble_(net).to(inputs[0].dtype)
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend=backend, fullgraph=fullgraph, **options)
    for x in inputs:
        torch.testing.assert_close(step(other, x, compiled), step(net, x, net), **close)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), **close)
    found = counters["batchnorm"]
    return found["calls"], found["fused"], found["activations"], found["residuals"]


def conv_norm_relu():
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


@pytest.mark.parametrize(
    ("net", "shape", "counts"),
    [
        (conv_norm_relu(), (), (1, 1, 1, 0)),
        (Bottleneck(), (), (3, 3, 3, 1)),
        (RegNetLike(), (), (4, 4, 3, 1)),
        (DenseBlock(), (), (4, 4, 4, 0)),
        (UNet(), (), (6, 6, 6, 0)),
        (nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), (), (1, 1, 0, 0)),
        (nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.LeakyReLU(0.3)), (), (1, 1, 1, 0)),
        (nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), nn.SiLU(True)), (), (1, 1, 1, 0)),
        (nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), (5, 4), (1, 1, 1, 0)),
        (nn.BatchNorm1d(4), (2, 4, 5), (1, 1, 0, 0)),
        (nn.Sequential(nn.BatchNorm3d(4), nn.GELU()), (2, 4, 2, 3, 2), (1, 1, 0, 0)),
        (nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU()), (), (1, 1, 1, 0)),  # without ranks, it calls F.batch_norm
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_networks_train_as_before(net, shape, counts):
    assert assert_as_stock(net, [image(*shape), image(*shape)]) == counts


@pytest.mark.parametrize("name", sorted({*NAMES} - {"identity"}))
def test_every_activation_is_fused(name):
    net = nn.Sequential(nn.BatchNorm2d(4), to_module(Activation(name)))
    assert assert_as_stock(net) == (1, 1, 1, 0)


def test_aot_autograd_traces_the_fused_calls():
    net = nn.Sequential(Bottleneck(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))), nn.BatchNorm2d(4))
    assert assert_as_stock(net, backend=TRACED) == (5, 5, 3, 1)


@pytest.mark.inductor
def test_inductor_compiles_the_fused_calls():
    net = Block(lambda n, x: torch.relu(n.bn1(x) + x))
    assert assert_as_stock(net, backend=partial(compile_graph, everywhere=True)) == (1, 1, 1, 1)


def test_evaluation_is_left_to_inductor():
    net = scramble_(Bottleneck()).double().eval()
    other = copy.deepcopy(net)
    x = image()
    torch.testing.assert_close(torch.compile(other, backend=IN_PYTHON)(x), net(x))
    torch.testing.assert_close(other.state_dict(), net.state_dict())
    assert counters["batchnorm"]["fused"] == 0


def test_cpus_are_left_to_inductor():
    assert assert_as_stock(Bottleneck(), backend=partial(compile_graph, inner="eager")) == (3, 0, 0, 0)


def test_statistics_move_without_gradients():
    net = Bottleneck()
    with torch.no_grad():
        assert assert_as_stock(net)[1] == 3


def test_cumulative_averages():
    # torch.nn computes the momentum in Python, which is a graph break with every backend.
    assert_as_stock(nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.ReLU()), fullgraph=False)


def test_a_batch_with_nan_leaves_what_it_leaves_in_stock():
    x = image()
    x[0, 0, 0, 0] = float("nan")
    net, other = conv_norm_relu().double(), conv_norm_relu().double()
    other.load_state_dict(net.state_dict())
    net(x)
    torch.compile(other, backend=IN_PYTHON)(x)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), equal_nan=True)


def test_statistics_in_half_precision():
    net = scramble_(conv_norm_relu()).bfloat16()
    other = copy.deepcopy(net)
    x = image().bfloat16()
    net(x)
    torch.compile(other, backend=IN_PYTHON)(x)
    assert other[1].running_mean.dtype is torch.bfloat16
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("residual", [torch.bfloat16, torch.float32])
def test_sums_under_autocast_have_the_type_that_torch_gives_them(residual):
    net = scramble_(Block(lambda n, x: torch.relu(n.bn1(n.conv1(x)) + x.to(residual))))
    other = copy.deepcopy(net)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return other(x)

    x = torch.randn(3, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
    found = torch.compile(run, backend=TRACED, fullgraph=True)(x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=1e-5, atol=1e-5)
    assert counters["batchnorm"]["residuals"] == (residual is torch.bfloat16)


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
def test_one_graph_serves_all_batch_sizes(how):
    inputs = [image(n, 4, 6, 6) for n in (3, 5, 4)]
    net, options = Block(lambda n, x: torch.relu(n.bn1(n.conv1(x)) + x)), {"dynamic": True}
    if how == "mark_dynamic":
        options = {}
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
    backend = Counting(TRACED)
    net = scramble_(net).double()
    compiled = torch.compile(copy.deepcopy(net), backend=backend, fullgraph=True, **options)
    torch.testing.assert_close(compiled(inputs[0]), net(inputs[0]))
    graphs = backend.graphs  # Dynamo may compile twice, to turn numbers such as eps into constants
    assert counters["batchnorm"]["fused"] == graphs
    assert counters["batchnorm"]["residuals"] == graphs
    for x in inputs[1:]:
        torch.testing.assert_close(compiled(x), net(x))
    assert backend.graphs == graphs


class Counting:
    def __init__(self, backend):
        self.backend, self.graphs = backend, 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return self.backend(module, inputs)


def read_later(net, x):
    y = net.bn1(x)
    return torch.relu(y) + y


def written_and_read_later(net, x):
    identity = net.conv1(x)
    other = identity
    identity += net.bn1(x)
    return torch.relu(identity) * other


def gradients_off_between(net, x):
    y = net.bn1(net.conv1(x))
    with torch.no_grad():
        z = torch.relu(y)
    return net.conv2(z)


@torch.no_grad()
def input_written_between(net, x):
    u = net.conv1(x)
    y = net.bn1(u)
    u.mul_(2)
    return torch.relu(y + u)


LEFT_ALONE = {
    "BN is read twice": (read_later, (1, 1, 0, 0)),
    "the sum is written into what is read later": (written_and_read_later, (1, 1, 0, 0)),
    "gradients are off for the activation": (gradients_off_between, (1, 1, 0, 0)),
    "BN's input is written before the sum": (input_written_between, (1, 1, 0, 0)),
    "the residual broadcasts": (lambda n, x: torch.relu(n.bn1(x) + x[:, :, :1]), (1, 1, 0, 0)),
    "the input is not dense": (lambda n, x: torch.relu(n.bn1(x[:, :, ::2])).view(3, -1), (1, 0, 0, 0)),
    "averages are read": (lambda n, x: torch.relu(n.bn1(x)) * n.bn1.running_mean.sum(), (1, 0, 0, 0)),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_cannot_be_fused_is_left_alone(case):
    code, counts = LEFT_ALONE[case]
    assert assert_as_stock(Block(code)) == counts


FUSED = {
    "layers called twice": (lambda n, x: torch.relu(n.bn1(n.conv1(torch.relu(n.bn1(x))))), (2, 2, 2, 0)),
    "a sum written into a new tensor": (lambda n, x: torch.relu(n.conv2(x).add_(n.bn1(x))), (1, 1, 1, 1)),
    "branches": (lambda n, x: n.branches(n.relu(n.bn1(x))), (5, 5, 2, 3)),
    "two BN outputs": (lambda n, x: torch.relu(n.bn1(x) + n.shortcut(x)), (2, 2, 1, 1)),
    "BN first, in place": (lambda n, x: n.bn1(n.conv1(x)).add_(x).relu_(), (1, 1, 1, 1)),
    "torch.batch_norm": (
        lambda n, x: torch.batch_norm(x, n.bn1.weight, None, None, None, True, 0.1, 1e-3, False).relu(),
        (1, 1, 1, 0),
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_what_can_be_fused_is(case):
    code, counts = FUSED[case]
    net = Block(code)
    net.branches = MobileOneLike()
    assert assert_as_stock(net) == counts


def test_transforms_are_left_alone():
    def code(net, x):
        return torch.vmap(lambda x: torch.relu(nn.functional.batch_norm(x, None, None, training=True)))(x)

    assert assert_as_stock(Block(code), [image(2, 3, 4, 5)]) == (1, 0, 0, 0)


def test_checkpointed_blocks():
    net = scramble_(Block(lambda n, x: checkpoint(n.f, x, use_reentrant=False) + x)).double()
    net.f.activation = torch.relu
    other, x = copy.deepcopy(net), image()
    # Compile the stock network, too: in eager mode, checkpointed stock layers count each batch twice.
    expected = step(net, x, torch.compile(net, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(step(other, x, torch.compile(other, backend=TRACED, fullgraph=True)), expected)
    torch.testing.assert_close(other.state_dict(), net.state_dict())
    assert counters["batchnorm"]["activations"] == 1


def test_code_that_is_traced_knows_that_it_is_compiled():
    seen = []
    graph = torch.fx.symbolic_trace(nn.ReLU())
    compile_graph(graph, [], inner=lambda module, inputs: seen.append(torch.compiler.is_compiling()))
    assert seen == [True]
    assert not torch.compiler.is_compiling()


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gpu_trains_as_before(dynamic):
    inputs = [torch.randn(n, 4, 64, 64, device="cuda") for n in (64, 32)]
    close = {"rtol": 1e-2, "atol": 1e-2}
    counts = assert_as_stock(Bottleneck().cuda(), inputs, compile_graph, close=close, dynamic=dynamic)
    assert counts[1] > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch warms up with an empty graph
@pytest.mark.parametrize("converts", [False, True])
def test_a_gpu_trains_as_before_with_inductors_cuda_graphs(converts):
    inputs = [torch.randn(32, 4, 32, 32, device="cuda") for _ in range(4)]  # warm up, record, and replay twice
    net = Bottleneck().cuda()
    net, backend = (bn.convert(net, inputs[0]), "inductor") if converts else (net, compile_graph)
    assert_as_stock(net, inputs, backend, close={"rtol": 1e-2, "atol": 1e-2}, mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_mode_and_options_reach_inductor():
    x = torch.randn(3, 4, 6, 6)
    with pytest.raises(Exception, match="nonsense"):
        torch.compile(conv_norm_relu(), backend=compile_graph, mode="nonsense")(x)
    with pytest.raises(Exception, match="Unexpected optimization option nonsense"):
        torch.compile(conv_norm_relu(), backend=compile_graph, options={"nonsense": 1})(x)


@pytest.fixture
def named(monkeypatch):
    """Register the backend as torch does for an installed package, even if this package is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch_dynamo_backends"].items()
    registry._lazy_import()
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, value, "torch_dynamo_backends"))
    yield name
    registry._COMPILER_FNS.pop(name, None)


@pytest.mark.inductor
def test_the_backend_has_a_name_and_logs_what_it_did(named, caplog):
    caplog.set_level(logging.INFO, "batchnorm.dynamo")
    net = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())
    x = torch.randn(3, 4)
    assert named == "batchnorm"
    compiled = torch.compile(net, backend="batchnorm", mode="reduce-overhead")
    torch.testing.assert_close(compiled(x), net(x))
    assert caplog.messages == [
        "0 of 1 batch normalizations in training mode fused, 0 with an activation, 0 with a residual"
    ]
