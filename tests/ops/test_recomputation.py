"""Test recompute(): which tensors it saves, that results do not change, and cases in which it must not recompute."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from networks import Coded
from ranks import on_ranks
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import batchnorm as bn
from batchnorm import ops
from batchnorm.bench.memory import peak
from batchnorm.ops import Activation, Running, recomputation
from batchnorm.ops.call import Call
from batchnorm.ops.cpu import autograd as cpu_autograd
from batchnorm.ops.cuda import autograd, launch

CPU = torch.device("cpu")
INTERPRETED = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def gradients(net, x, *, less, forward=None, loss=lambda y: y.square().sum()):
    net = copy.deepcopy(net)
    x = x.clone().requires_grad_()
    with bn.recompute() if less else nullcontext():
        value = loss((forward or net.__class__.__call__)(net, x))
    value.backward()
    return [value.detach(), x.grad, *(p.grad for p in net.parameters()), *net.buffers()]


def assert_same(net, x, **options):
    """Check that loss, gradients and running statistics are bit for bit the same with and without recompute()."""
    plain, less = (gradients(net, x, less=less, **options) for less in (False, True))
    torch.testing.assert_close(less, plain, rtol=0, atol=0)


def kept(net, x, less, forward=None):
    """Return how much memory a forward pass allocates and keeps, as a multiple of the size of x."""
    net = copy.deepcopy(net)

    def call():
        with bn.recompute() if less else nullcontext():
            return (forward or net.__class__.__call__)(net, x).sum()

    return peak(call, CPU)[1] / x.nbytes


def chain(layers=3, channels=8, activation="relu", **options):
    block = [bn.BatchNorm2d(channels, activation=activation, **options), nn.Conv2d(channels, channels, 3, padding=1)]
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1), *(copy.deepcopy(m) for _ in range(layers) for m in block)
    )


LARGE = (32, 8, 32, 32)  # in both layouts, too large for torch's kernel if torch uses one thread
SMALL = (4, 8, 6, 6)


@pytest.mark.parametrize("kernel", ["kernel.c", "torch's or passes.py"])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("activation", ["identity", "relu", "leaky_relu", "sigmoid", "tanh", "silu"])
def test_gradients_are_the_same_bits(shape, layout, activation, kernel, monkeypatch):
    if kernel != "kernel.c":
        monkeypatch.setattr(cpu_autograd, "form_of", lambda *_: None)
    x = torch.randn(shape).contiguous(memory_format=layout)
    assert_same(chain(2, activation=activation).to(memory_format=layout), x)


@pytest.mark.parametrize("shape", [(64, 8), (64, 8, 5), (64, 8, 3, 3, 3)])
def test_other_dimensions(shape):
    layer = {2: bn.BatchNorm1d, 3: bn.BatchNorm1d, 5: bn.BatchNorm3d}[len(shape)](8, activation="relu")
    assert_same(nn.Sequential(layer, nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), 3)), torch.randn(shape))


@pytest.mark.parametrize("mean", [1e6, 0.0])
def test_shifted_batches(mean):
    assert_same(nn.Sequential(bn.BatchNorm2d(8, activation="relu"), nn.Conv2d(8, 2, 3)), torch.randn(SMALL) + mean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types(dtype):
    assert_same(chain(2).to(dtype), torch.randn(SMALL, dtype=dtype))


def test_autocast():
    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    assert_same(chain(2), torch.randn(SMALL), forward=forward)
    assert_same(chain(2), torch.randn(LARGE), forward=forward)


OPTIONS = {
    "per activation": {"num_features": (8, 6, 6)},
    "ghost": {"statistics": bn.Ghost(2)},
    "sync, one process": {"statistics": bn.Sync()},
    "renorm": {"statistics": bn.Renorm()},
    "no affine": {"affine": False},
    "no bias": {"bias": False},
    "no running averages": {"track_running_stats": False},
    "cumulative": {"momentum": None},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_layers_with_options(name):
    options = {"num_features": 8, **OPTIONS[name]}
    net = nn.Sequential(bn.BatchNorm2d(activation="relu", **options), nn.Conv2d(8, 4, 3))
    assert_same(net, torch.randn(SMALL))


def masked(net, x):
    return net[1](net[0](x, mask=torch.arange(6).expand(4, 6, 6) < 4))


def residual(net, x):
    for layer in net[1::2]:
        x = layer(x, residual=x)
    return x


@pytest.mark.parametrize("forward", [masked, residual])
def test_calls_with_more_than_an_input(forward):
    net = nn.Sequential(bn.BatchNorm2d(8, activation="relu"), nn.Conv2d(8, 4, 3)) if forward is masked else chain(3)
    assert_same(net, torch.randn(SMALL), forward=forward)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_one_tensor_per_layer(shape):
    x = torch.randn(shape)
    # Each layer also saves a few numbers per channel, which the tolerance allows for.
    assert kept(chain(4), x, less=False) == pytest.approx(8, abs=0.2)
    assert kept(chain(4), x, less=True) == pytest.approx(4, abs=0.2)


def test_a_chain_of_residuals_keeps_one_tensor_per_layer():
    def forward(net, x):
        x = net[0](x)
        for norm, conv in zip(net[1::2], net[2::2], strict=True):
            x = norm(conv(x), residual=x)
        return x

    x = torch.randn(LARGE)
    net = nn.Sequential(chain(4), *chain(4)[1:])
    assert kept(net, x, less=False, forward=forward) - kept(net, x, less=True, forward=forward) > 2.9
    assert_same(net, x, forward=forward)


def joined():
    """Return a module whose branches are concatenated, as in the appendix network."""
    pairs = [(nn.Conv2d(8, 4, 1, bias=False), bn.BatchNorm2d(4, activation="relu")) for _ in range(2)]
    branches = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)
    return Coded(lambda n, x: torch.cat([branch(x) for branch in n.branches], 1), branches=branches)


def test_a_concatenation_is_made_again_from_its_parts():
    net, x = nn.Sequential(nn.Conv2d(8, 8, 1), *(joined() for _ in range(4)), nn.Conv2d(8, 8, 1)), torch.randn(LARGE)
    # The first convolution's output and the inputs of the BN layers are always saved. Without recompute(), so are the
    # concatenated outputs and, if there is no C compiler, the outputs of the BN layers.
    assert kept(net, x, less=True) == pytest.approx(5, abs=0.1)
    assert kept(net, x, less=False) > 8.9
    assert_same(net, x)


@pytest.mark.parametrize(
    "join", [torch.concat, torch.concatenate, lambda parts, dim: torch.cat(tensors=parts, dim=dim)]
)
def test_other_names_of_concatenation(join):
    def forward(net, x):
        return net[2](join([net[0](x), net[0](x + 1)], dim=1))

    net = nn.Sequential(bn.BatchNorm2d(8, activation="relu"), nn.Identity(), nn.Conv2d(16, 8, 1))
    x = torch.randn(LARGE)
    assert_same(net, x, forward=forward)
    assert kept(net, x, less=True, forward=forward) < kept(net, x, less=False, forward=forward) - 1.9


def test_the_appendix_network():
    net = bn.models.inception(size=32, width=0.1, classes=10)
    x = torch.randn(4, 3, 32, 32)
    assert_same(net, x)
    for module in net.modules():
        if hasattr(module, "rearrange"):
            module.rearrange = True
        if hasattr(module, "lean"):
            module.lean = True
    assert_same(net, x)


@pytest.fixture
def counted(monkeypatch):
    """Return a list that grows by one entry each time that an output is recomputed."""
    times = []
    compute = recomputation.Recomputed.compute
    monkeypatch.setattr(recomputation.Recomputed, "compute", lambda recipe: times.append(recipe) or compute(recipe))
    return times


def test_several_readers_share_one_recomputation(counted):
    norm, convs = bn.BatchNorm2d(8, activation="relu"), [nn.Conv2d(8, 2, 3) for _ in range(3)]
    with bn.recompute():
        y = norm(torch.randn(SMALL, requires_grad=True))
        loss = sum(conv(y).square().sum() for conv in convs)
    del y
    loss.backward(retain_graph=True)
    assert len(counted) == 1
    loss.backward()
    assert len(counted) == 2


def test_what_was_computed_is_freed_at_the_end_of_the_backward_pass(counted):
    norm, conv, other = bn.BatchNorm2d(8, activation="relu"), nn.Conv2d(8, 2, 3), nn.Conv2d(8, 2, 3)
    with bn.recompute():
        y = norm(torch.randn(SMALL, requires_grad=True))
        a, b = conv(y).square().sum(), other(y).square().sum()
    (first,) = torch.autograd.grad(a, conv.weight, retain_graph=True)  # the other convolution does not ask for y
    assert counted[0].value is None
    (a + b).backward()
    torch.testing.assert_close(conv.weight.grad, first, rtol=0, atol=0)


def test_nothing_is_left_behind():
    net, x = chain(3), torch.randn(SMALL)
    with bn.recompute():
        loss = net(x).sum()
    loss.backward()
    with bn.recompute():
        loss = net(x).sum()  # a graph without a backward pass
    del loss
    gc.collect()
    assert not [
        o for o in gc.get_objects() if type(o) in (recomputation.Recomputed, recomputation.Kept, recomputation.Registry)
    ]


def test_around_a_whole_training_loop():
    net, x = chain(2), torch.randn(SMALL)
    expected = gradients(net, x, less=False)
    with bn.recompute():
        for _ in range(3):
            got = gradients(net, x, less=False)
            registry = recomputation._local.registry
            assert not registry.waiting
            assert len(registry.recipes) <= 2
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_without_gradients_nothing_is_held():
    x = torch.randn(LARGE)

    def forward(net, x):
        with torch.no_grad():
            return net(x)

    with bn.recompute():
        assert kept(chain(3), x, less=False, forward=forward) < 0.1


@pytest.mark.parametrize("freeze", [lambda n: bn.freeze_(n), lambda n: bn.freeze_(n, affine=False), lambda n: n.eval()])
def test_frozen_and_evaluating_layers(freeze):
    net = chain(3)
    freeze(net)
    assert_same(net, torch.randn(SMALL))


def test_double_backward():
    def penalty(net, x):
        (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return dx

    assert_same(chain(2), torch.randn(SMALL), forward=penalty)
    assert_same(chain(1, activation="silu"), torch.randn(LARGE), forward=penalty)


def test_views():
    def forward(net, x):
        y = net[0](x)
        return net[1](y.flatten(1)[:, 3:50:2]) + net[1](y.movedim(1, -1)[:, 1:, 1].reshape(4, -1)[:, :24])

    assert_same(
        nn.Sequential(bn.BatchNorm2d(8, activation="relu"), nn.Linear(24, 3)), torch.randn(SMALL), forward=forward
    )


def test_an_output_changed_in_place_before_it_is_read():
    def forward(net, x):
        y = net[0](x)
        y += 1
        y[:, 2] = 0
        return net[1](y)

    # Use silu: without a C compiler, relu, sigmoid and tanh save y for their derivatives, so autograd does not allow
    # changing y in place.
    assert_same(
        nn.Sequential(bn.BatchNorm2d(8, activation="silu"), nn.Conv2d(8, 4, 3)), torch.randn(LARGE), forward=forward
    )


def test_an_output_changed_in_place_after_it_is_read_is_computed_as_it_was():
    norm, conv = bn.BatchNorm2d(8, activation="silu"), nn.Conv2d(8, 4, 3)
    x = torch.randn(LARGE)
    expected = torch.autograd.grad(conv(norm(x)).square().sum(), conv.weight)
    with bn.recompute():
        y = norm(x)
        loss = conv(y).square().sum()
    y.data += 1
    y += 1
    torch.testing.assert_close(torch.autograd.grad(loss, conv.weight), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "reader", [torch.sigmoid, torch.square, nn.Conv2d(8, 2, 1)], ids=["sigmoid", "square", "convolution"]
)
def test_what_is_changed_in_place_is_an_error_as_ever(reader):
    with bn.recompute():
        x = torch.randn(SMALL, requires_grad=True) * 1
        y = reader(x)
    for t in (x, y):
        with torch.no_grad():
            t += 1
    with pytest.raises(RuntimeError, match=r"changed in place after it was saved: change a copy"):
        y.sum().backward()


def test_a_source_changed_in_place_is_an_error_and_not_a_wrong_number():
    norm, conv = bn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
    added = torch.randn(SMALL)
    with bn.recompute():
        loss = conv(norm(torch.randn(SMALL), residual=added)).sum()
    added += 1
    with pytest.raises(
        RuntimeError, match=r"needs a tensor of shape \(4, 8, 6, 6\) \(torch.float32\) that was changed"
    ):
        loss.backward()


def test_an_exception_leaves_nothing_on():
    with pytest.raises(ZeroDivisionError), bn.recompute():
        raise ZeroDivisionError
    assert kept(chain(4), torch.randn(SMALL), less=False) > 7.9


def test_is_active_in_this_thread_and_no_longer():
    def fail():
        with bn.recompute():
            raise KeyError

    assert not recomputation.is_active()
    with bn.recompute(), bn.recompute(), ThreadPoolExecutor(1) as other:
        assert recomputation.is_active()
        assert not other.submit(recomputation.is_active).result()
    with pytest.raises(KeyError):
        fail()
    assert not recomputation.is_active()
    assert recomputation._active == 0


def test_nested_in_itself(counted):
    with bn.recompute():
        with bn.recompute():
            y = bn.BatchNorm2d(8)(torch.randn(SMALL, requires_grad=True))
        loss = nn.Conv2d(8, 4, 3)(y).sum()
    loss.backward()
    assert len(counted) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_with_checkpoint(reentrant, inside):
    def forward(net, x):
        def block(x):
            with bn.recompute() if inside else nullcontext():
                return net[:3](x)

        return net[3:](checkpoint(block, x, use_reentrant=reentrant))

    assert_same(chain(3), torch.randn(SMALL), forward=forward)


def test_with_save_on_cpu():
    def forward(net, x):
        with save_on_cpu():
            return net(x)

    assert_same(chain(2), torch.randn(SMALL), forward=forward)


def on_one_rank(rank, world_size, less):
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(chain(2))
    x = torch.randn(8, *SMALL[1:]).chunk(world_size)[rank]
    with bn.recompute() if less else nullcontext():
        loss = net(x).square().sum()
    loss.backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.dist
def test_distributed_data_parallel():
    plain, less = (on_ranks(2, on_one_rank, less) for less in (False, True))
    torch.testing.assert_close(less, plain, rtol=0, atol=0)


def test_around_a_compiled_network():
    net, x = chain(2), torch.randn(SMALL)
    expected = gradients(net, x, less=False)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    got = gradients(net, x, less=True, forward=lambda _, x: compiled(x))
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile reads it
def test_around_a_compiled_part():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def part(x):
        return torch.cat([F.max_pool2d(x, 2), F.avg_pool2d(x, 2)], 1)

    assert_same(chain(2), torch.randn(SMALL), forward=lambda net, x: part(net[:2](x)))


def test_inside_a_compiled_function():
    net, x = chain(1), torch.randn(SMALL)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        with bn.recompute():
            return net(x).square().sum()

    step(x).backward()
    assert net[0].weight.grad.isfinite().all()


def test_sparse_and_integer_tensors_are_kept_as_they_are():
    table = nn.Embedding(10, 8, sparse=True)
    with bn.recompute():
        matrix = torch.eye(4).to_sparse().requires_grad_()
        x = table(torch.tensor([1, 2, 3, 4]))
        loss = torch.sparse.mm(matrix, bn.BatchNorm1d(8)(x)).square().sum()
    loss.backward()
    assert table.weight.grad.is_sparse


@INTERPRETED
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    "activation", ["relu", *(pytest.param(n, marks=pytest.mark.slow) for n in ("leaky_relu", "silu"))]
)
def test_fused_kernels_compute_the_same_bits_again(layout, has_residual, activation, device):
    x = torch.randn(3, 4, 4, 4, device=device) + 5
    x = (x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == "last" else x).requires_grad_()
    gamma, beta = (torch.randn(4, device=device, requires_grad=True) for _ in range(2))
    added = torch.randn_like(x).requires_grad_() if has_residual else None
    zero = torch.zeros((), dtype=torch.long, device=device)
    running = Running(torch.zeros(4, device=device), torch.ones(4, device=device), zero, zero.clone())
    with bn.recompute():
        y, _ = autograd.run(Call(x, gamma, beta, 1e-5, Activation(activation, 0.1), added, None, running, 0.1))
        loss = (y * y).sum()
        z, _ = autograd.run(Call(x, gamma, beta, 1e-5, Activation(activation, 0.1), added))
        other = (z * z).sum()
    again = loss.grad_fn.next_functions[0][0]._saved_self
    assert again.data_ptr() != y.data_ptr()
    assert again.stride() == y.stride()
    torch.testing.assert_close(again, y, rtol=0, atol=0)
    moved = running.mean.clone()
    (loss + other).backward()
    torch.testing.assert_close(running.mean, moved, rtol=0, atol=0)
    assert running.num_batches == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 256, 28, 28), (256, 512, 14, 14)], ids=["planes", "woven"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("activation", ["identity", "relu", "leaky_relu", "sigmoid", "tanh", "silu"])
def test_large_tensors_have_the_same_bits_again(shape, layout, activation):
    # One kernel computes the outputs, and another one recomputes them.
    x = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) + 3).contiguous(memory_format=layout)
    residual = torch.randn_like(x) if activation in ("relu", "leaky_relu") else None
    gamma, beta = torch.randn(shape[1], device="cuda"), torch.randn(shape[1], device="cuda")
    assert "forward resident" in ops.explain(x, gamma, beta, activation=activation, residual=residual).reason
    y, stats, _ = launch.forward(Call(x, gamma, beta, 1e-5, Activation(activation, 0.1), residual))
    again = launch.recompute(x, residual, stats, Activation(activation, 0.1))
    torch.testing.assert_close(again, y, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_on_a_gpu(layout, dtype):
    def forward(net, x):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = net(x)
            for norm in net[1::2]:
                y = norm(y, residual=y)
            return torch.cat([y, y], 1).float()

    net, x = chain(3).cuda().to(memory_format=layout), torch.randn(16, 8, 20, 20, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        assert_same(net, x.contiguous(memory_format=layout), forward=forward)


@pytest.mark.gpu
def test_captured_in_a_graph():
    net, x = chain(3).cuda(), torch.randn(16, 8, 20, 20, device="cuda")

    def step():
        for p in net.parameters():
            p.grad = None
        with bn.recompute():
            loss = net(x).square().sum()
        # Nondeterministic algorithms would sum the convolutions' gradients in another order in each run.
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
            loss.backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    expected = [p.grad.clone() for p in net.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.testing.assert_close([p.grad for p in net.parameters()], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_readers_on_two_streams_do_not_share_what_is_not_ready():
    torch.manual_seed(0)
    norm, convs = bn.BatchNorm2d(8, activation="relu").cuda(), [nn.Conv2d(8, 8, 3).cuda() for _ in range(2)]
    x = torch.randn(64, 8, 64, 64, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()

    def forward():
        y = norm(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = convs[0](y).square().sum()
        b = convs[1](y).square().sum()
        torch.cuda.current_stream().wait_stream(side)
        return a + b

    (expected,) = torch.autograd.grad(forward(), x)
    with bn.recompute():
        loss = forward()
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
