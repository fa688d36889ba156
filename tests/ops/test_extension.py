"""Test autograd.cpp, which runs training calls without Python.

Except in the tests that need a GPU, Python functions stand in for the CUDA driver.
"""

import ctypes
import shutil
import threading

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.utils.checkpoint
from torch.utils._pytree import tree_map

import batchnorm as bn
from batchnorm import layers
from batchnorm.ops import compile_cache
from batchnorm.ops.activation import NAMES
from batchnorm.ops.cuda import autograd, driver, extension

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
STREAM = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


def as_float(pointer):
    return ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))


class Device:
    """A stand-in for CUDA: a launch records its arguments, and multiplies an array in CPU memory by a number."""

    def __init__(self):
        self.calls, self.capturing, self.result = [], 0, 0
        self.results, self.before = iter([]), lambda: None
        self.kept = (LAUNCH(self.launch), CAPTURING(self.is_capturing), STREAM(self.stream))

    def launch(self, function, programs, _1, _2, threads, _3, _4, shared, stream, arguments):
        self.before()
        self.calls.append((function, programs, threads, shared, stream))
        pointers = [ctypes.cast(arguments[k], ctypes.POINTER(ctypes.c_void_p))[0] for k in range(2)]
        value = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_float))[0]
        constant = ctypes.cast(arguments[3], ctypes.POINTER(ctypes.c_int))[0]
        read, written = as_float(pointers[0]), as_float(pointers[1])
        for k in range(constant):
            written[k] = value * read[k]
        return next(self.results, self.result)

    def is_capturing(self, stream, found):
        found[0] = self.capturing
        return 0

    def stream(self, index, found):
        found[0] = 77
        return 0

    def addresses(self):
        launch, capturing, stream = (ctypes.cast(f, ctypes.c_void_p).value for f in self.kept)
        return launch, launch, capturing, stream


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    source = extension.source()
    quick = tuple("-O0" if flag == "-O1" else flag for flag in source.flags)  # faster to compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert compile_cache.cached(source._replace(flags=quick)) is None
        return compile_cache.built(source._replace(flags=quick))[0]


def launches(size, slot):
    """Describe a launch that multiplies a tensor by a number.

    ``slot`` has three indices into the array ``values`` of autograd.cpp: of the input, the output and the number.
    """
    arguments = driver.Arguments("P", "P", "f", ctypes.c_int(size))
    image, starts, changing = arguments.layout((0, 0, 0.0))
    writes = [(*at, s) for at, s in zip(changing, slot, strict=True)]
    return [(4, 3, 128, 0, False, image, starts, writes)]


def test_a_described_call_is_launched_and_differentiated(module):
    device, otherwise = Device(), []
    python = lambda *args: otherwise.append(args) or (args[0] * 3, None, None, None)  # noqa: E731
    module.configure(*device.addresses(), NAMES, torch.nn.Parameter, *[python] * 6)
    x = torch.arange(12.0).reshape(4, 3).requires_grad_()
    running = (torch.zeros(3), torch.ones(3), torch.tensor(0), torch.tensor(0))
    rest = (0.1, 2.0, 1, 1, 0.5)  # momentum, eps, relu's code, bits, slope

    def train_(x, *, running=running):
        return module.train_(x, None, None, None, *running, *rest)

    assert train_(x) is None, "no launch has been added yet"
    module.add_forward(x, None, None, None, True, False, 1, False, ((3, 1), (), 4, 4, launches(12, (0, 1, 15))))
    assert train_(x) is None, "the stream has no workspace yet"
    room = torch.zeros(8)
    module.set_room(-1, 77, room.data_ptr(), 4, room.data_ptr(), 4)
    version = running[0]._version
    y = train_(x)
    assert torch.equal(y, 2.0 * x)
    assert y.requires_grad
    assert device.calls == [(4, 3, 128, 0, 77)]
    assert running[0]._version == version + 1

    dy = torch.ones(4, 3)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(dx, 3 * dy)
    assert otherwise[0][7:] == (2.0, 1, 0.5, None, False, (3, 1), (3, 1))
    module.add_backward(dy, x, None, None, None, 1, ((3, 1), (), 4, 4, launches(12, (0, 5, 11))))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, 0.5 * dy)
    assert len(otherwise) == 1
    assert module.counts() == (1, 1)

    # While torch 2.11's autograd runs a node, it excludes a dispatch key. Excluding any key simulates this.
    other = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    with torch._C._ExcludeDispatchKeyGuard(other):
        assert torch.equal(torch.autograd.grad(train_(x), x, dy)[0], 0.5 * dy)
    assert module.counts() == (2, 2)
    with torch.no_grad():
        assert not train_(x).requires_grad
    # Unusual calls return None, so that Python handles them.
    other = torch.arange(13.0)[1:].view(4, 3)
    assert train_(other) is None, "not aligned"
    assert train_(x.double()) is None
    assert train_(x.t().contiguous().t()) is None
    assert train_(x, running=(*running[:3], torch.tensor(0, dtype=torch.int32))) is None
    assert train_(torch.nn.Buffer(x.detach()).as_subclass(type("Mine", (torch.Tensor,), {}))) is None
    assert torch.func.vmap(lambda v: torch.tensor(train_(x) is None))(torch.zeros(2)).all()
    with torch.inference_mode():
        assert train_(x) is None
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert train_(x) is None
    with torch.device("cpu"):
        assert train_(x) is None
    with torch.autograd.forward_ad.dual_level():
        assert train_(torch.autograd.forward_ad.make_dual(x.detach(), x.detach())) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert train_(x) is not None
    device.capturing = 1
    assert train_(x) is None
    device.capturing, device.result = 0, 1
    assert train_(x) is None, "the launch failed"
    device.result = 0
    assert torch.equal(train_(x), 2.0 * x)


def test_saved_tensor_hooks_and_double_backward_go_through_python(module):
    device, otherwise = Device(), []
    python = lambda *args: otherwise.append(args) or (args[0] * args[1], None, None, None)  # noqa: E731
    module.configure(*device.addresses(), NAMES, torch.nn.Parameter, *[python] * 6)
    x = torch.arange(10.0).reshape(5, 2).requires_grad_()
    running, rest = (torch.zeros(2), torch.ones(2), torch.tensor(0), torch.tensor(0)), (0.1, 2.0, 1, 1, 0.5)
    module.add_forward(x, None, None, None, True, False, 1, False, ((2, 1), (), 0, 0, launches(10, (0, 1, 15))))
    module.add_backward(x, x, None, None, None, 1, ((2, 1), (), 0, 0, launches(10, (0, 5, 11))))
    module.set_room(-1, 77, 0, 0, 0, 0)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
        y = module.train_(x, None, None, None, *running, *rest)
    assert any(torch.equal(t, x) for t in seen)
    (dx,) = torch.autograd.grad(y, x, torch.ones(5, 2), create_graph=True)
    assert otherwise
    assert dx.requires_grad
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(ddx, torch.ones(5, 2))

    y = module.train_(x, None, None, None, *running, *rest)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(torch.ones(5, 2))
    # With backend="eager", compiled autograd calls the extension's node on real tensors, so the kernel is launched.
    assert torch.equal(x.grad, 0.5 * torch.ones(5, 2))

    y = module.train_(x, None, None, None, *running, *rest)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Wrapped(torch.Tensor):
    """A tensor without storage of its own, such as a compressed tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, t):
        found = torch.Tensor._make_wrapper_subclass(cls, t.shape, strides=t.stride(), dtype=t.dtype)
        found.t = t
        return found

    def __init__(self, t):
        pass

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = tree_map(lambda a: a.t if isinstance(a, cls) else a, args)
        return tree_map(lambda t: cls(t) if type(t) is torch.Tensor else t, function(*args, **(kwargs or {})))


def test_unusual_tensors_go_to_python(module):
    device, otherwise = Device(), []
    python = lambda *args: otherwise.append(args) or (args[0] * 3, None, None, None)  # noqa: E731
    module.configure(*device.addresses(), NAMES, torch.nn.Parameter, *[python] * 6)
    running, rest = (torch.zeros(5), torch.ones(5), torch.tensor(0), torch.tensor(0)), (0.1, 2.0, 1, 1, 0.5)
    module.set_room(-1, 77, 0, 0, 0, 0)
    assert module.train_(torch.eye(5).to_sparse(), None, None, None, *running, *rest) is None
    x = torch.arange(20.0).reshape(4, 5).requires_grad_()
    module.add_forward(x, None, None, None, True, False, 1, False, ((5, 1), (), 0, 0, launches(20, (0, 1, 15))))
    module.add_backward(x, x, None, None, None, 1, ((5, 1), (), 0, 0, launches(20, (0, 5, 11))))
    unpack = lambda t: Wrapped(t) if t.shape == (4, 5) else t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = module.train_(x, None, None, None, *running, *rest)
    y.backward(torch.ones(4, 5))
    assert len(otherwise) == 1

    # If a launch fails after another one has moved the averages, Python does not run the call, because it would move
    # them again.
    two = launches(30, (0, 1, 15)) * 2
    x = torch.arange(30.0).reshape(6, 5)
    module.add_forward(x, None, None, None, True, False, 1, False, ((5, 1), (), 0, 0, two))
    device.results = iter([0, 701])
    with pytest.raises(RuntimeError, match="failed to launch"):
        module.train_(x, None, None, None, *running, *rest)


def test_other_threads_run_during_a_launch(module):
    device, seen, entered = Device(), [], threading.Event()
    python = lambda *args: (args[0], None, None, None)  # noqa: E731
    module.configure(*device.addresses(), NAMES, torch.nn.Parameter, *[python] * 6)
    x = torch.arange(14.0).reshape(7, 2)
    running, rest = (torch.zeros(2), torch.ones(2), torch.tensor(0), torch.tensor(0)), (0.1, 2.0, 1, 1, 0.5)
    module.add_forward(x, None, None, None, True, False, 1, False, ((2, 1), (), 0, 0, launches(14, (0, 1, 15))))
    module.set_room(-1, 77, 0, 0, 0, 0)
    other = threading.Thread(target=lambda: entered.wait(60) and seen.append(1))
    other.start()
    device.before = lambda: (entered.set(), other.join(60))
    assert module.train_(x, None, None, None, *running, *rest) is not None
    assert seen == [1]


def test_a_compiled_layer_is_not_compiled_again_once_the_extension_is_there(monkeypatch):
    graphs = []
    monkeypatch.setattr(layers.batch_norm, "train_", autograd.train_)  # the function that runs for CUDA tensors
    compiled = torch.compile(bn.BatchNorm2d(8), backend=lambda graph, _: graphs.append(1) or graph)
    compiled(torch.randn(4, 8, 3, 3))
    monkeypatch.setattr(extension, "module", object())
    compiled(torch.randn(4, 8, 3, 3))
    assert graphs == [1]


def test_what_fails_to_load_or_compile_is_said(monkeypatch, tmp_path):
    def broken(_):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(extension, "unavailable", None)
    extension._use(None, broken)
    assert extension.unavailable == "RuntimeError: no such operator"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cause, remembered in ((OSError("the disk is full"), False), (ImportError("the compiler is too old"), True)):
        error = compile_cache.Unavailable(str(cause))
        error.__cause__ = cause
        compile_cache.remember_failure(extension.source(), error)
        if remembered:
            with pytest.raises(compile_cache.Unavailable, match="the compiler is too old"):
                compile_cache.cached(extension.source())
        else:
            assert compile_cache.cached(extension.source()) is None


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compile_cache.Path, "home", home)
    assert compile_cache.cached(extension.source()) is None
    compile_cache.remember_failure(extension.source(), compile_cache.Unavailable("nothing"))


def python_alone(monkeypatch):
    monkeypatch.setattr(extension, "module", None)


def one_step(layer, x, residual, dy):
    leaves = [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, residual) if t is not None
    ]
    layer.zero_grad()
    y = layer(*leaves)
    y.backward(dy)
    return y, [
        y.detach(),
        *[t.grad for t in leaves],
        *[p.grad.clone() for p in layer.parameters()],
        *map(torch.clone, layer.buffers()),
    ]


@pytest.fixture
def built():
    extension.start(autograd._configure)
    assert extension.wait() is None
    return extension.module


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "silu", "hardswish", "relu6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_on_a_gpu_it_does_what_python_does(built, monkeypatch, activation, dtype, layout):
    for shape in ((8, 64, 14, 14), (4, 24, 7, 5), (16, 256, 28, 28)):
        for added in (False, True):
            torch.manual_seed(0)
            x, dy, r = (torch.randn(shape, device="cuda").to(dtype, memory_format=layout) for _ in range(3))
            layer = bn.BatchNorm2d(shape[1], activation=activation, device="cuda")
            state = {k: v.clone() for k, v in layer.state_dict().items()}
            with monkeypatch.context() as patch:
                python_alone(patch)
                for _ in range(2):  # the first call compiles
                    layer.load_state_dict(state)
                    y, expected = one_step(layer, x, r if added else None, dy)
                assert "_Fused" in type(y.grad_fn).__name__
            for call in range(3):
                before = built.counts()
                layer.load_state_dict(state)
                y, found = one_step(layer, x, r if added else None, dy)
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a, b), (shape, added, call)
                    assert a.stride() == b.stride()
            assert built.counts() == (before[0] + 1, before[1] + 1), (shape, added)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_on_a_gpu_everything_unusual_still_works(built):
    layer = bn.BatchNorm2d(32, activation="relu", device="cuda")
    x = torch.randn(8, 32, 14, 14, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(3):
        layer(x).sum().backward()  # the gradient of sum() is an expanded tensor, which is copied
    for _ in range(3):
        layer(x).square().sum().backward()
    assert "Fused" in layer(x).grad_fn.name()
    # Checkpointing runs the forward pass twice, but moves the averages only once.
    count = int(layer.num_batches_tracked)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    y.square().sum().backward()
    assert layer.num_batches_tracked == count + 1
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    # Use another stream, which has its own workspace.
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            found = torch.autograd.grad(layer(x).square().sum(), x)[0]
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.square().sum(), x)
    assert ddx.isfinite().all()
    # Capture calls of known shapes in a CUDA graph.
    graph, leaf = torch.cuda.CUDAGraph(), x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.cuda.graph(graph):
        (captured,) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(32))
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    eager = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
    moved = {k: v.clone() for k, v in layer.state_dict().items()}
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(3):
        layer.load_state_dict(before)
        found = torch.autograd.grad(compiled(x).square().sum(), [x, layer.weight, layer.bias])
        for a, b in zip(found, eager, strict=True):
            torch.testing.assert_close(a, b)
        for key, value in layer.state_dict().items():
            torch.testing.assert_close(value, moved[key])
