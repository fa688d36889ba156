"""Test that common workflows give the same results with a converted network as with the stock network."""

import copy
import threading
import warnings

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from networks import Residual, scramble_
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn

CLOSE = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """Return the device; convolutions on a GPU do not round to TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield torch.device(request.param)


@pytest.fixture
def one_rank(where):
    kind = "nccl" if where.type == "cuda" else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(kind, store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def pair(where, layout=torch.channels_last):
    """Return a stock network, its converted form, and two batches."""
    net = scramble_(Residual()).to(where, memory_format=layout)
    batches = [torch.randn(8, 3, 16, 16).to(where, memory_format=layout) for _ in range(2)]
    return net, bn.convert(net, batches[0]), batches


def step(call, net, x):
    """Train on a batch; return the output and clear the gradients."""
    y = call(x)
    (y * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    return y.detach()


def assert_trains_alike(stock, net, batches, as_used=lambda net: net, close=None):
    """Compare the outputs of training steps, and the networks after these steps."""
    calls = as_used(stock), as_used(net)
    for x in [*batches, *batches]:
        was, now = (step(call, model, x) for call, model in zip(calls, (stock, net), strict=True))
        torch.testing.assert_close(now, was, **(close or CLOSE))
    theirs, ours = stock.state_dict(), net.state_dict()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], **(close or CLOSE), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_training(where, layout):
    assert_trains_alike(*pair(where, layout))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(where, reentrant):
    stock, net, batches = pair(where)

    def as_used(model):
        if model is stock:
            return model  # with checkpoints, stock layers move the averages twice

        def call(x):
            x = checkpoint(net.stem, x.clone().requires_grad_(), use_reentrant=reentrant)
            for block in net.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return net.head(x.mean((2, 3)))

        return call

    assert_trains_alike(stock, net, batches, as_used)


def test_saved_tensors_on_the_cpu(where):
    def as_used(net):
        def call(x):
            with torch.autograd.graph.save_on_cpu():
                return net(x)

        return call

    assert_trains_alike(*pair(where), as_used)


def test_anomaly_mode(where):
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        assert_trains_alike(*pair(where))


def test_deterministic_algorithms(where):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        stock, net, batches = pair(where)
        assert_trains_alike(stock, net, batches)
        twins = copy.deepcopy(net), copy.deepcopy(net)
        first, second = (step(twin, twin, batches[0]) for twin in twins)
        assert torch.equal(first, second)
        for a, b in zip(twins[0].state_dict().values(), twins[1].state_dict().values(), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_gradients(where):
    stock, net, (x, _) = pair(where)
    found = []
    for model in (stock, net):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [leaf, *model.parameters()], allow_unused=True))
    for now, was in zip(found[1], found[0], strict=True):
        if was is not None:
            torch.testing.assert_close(now, was, rtol=1e-2, atol=1e-3 * float(was.abs().max()))


def test_many_gradients_at_once(where):
    # On a GPU, stock layers do not support batched gradients in channels_last.
    stock, net, (x, _) = pair(where, torch.contiguous_format)
    found = []
    for model in (stock, net):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        several = torch.stack([torch.ones_like(y), torch.linspace(-1, 1, y.numel(), device=where).view(y.shape)])
        found.append(torch.autograd.grad(y, leaf, several, is_grads_batched=True)[0])
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_functional_transforms(where):
    stock, net, (x, _) = pair(where)
    stock.eval(), net.eval()
    found = []
    for model in (stock, net):

        def loss(parameters, x, model=model):
            return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

        per_example = torch.func.vmap(torch.func.grad(loss), (None, 0))
        found.append(per_example(dict(model.named_parameters()), x))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def test_forward_mode(where):
    stock, net, (x, v) = pair(where)
    was, now = (torch.func.jvp(model.eval(), (x,), (v,)) for model in (stock, net))
    torch.testing.assert_close(now, was, **CLOSE)


def test_two_threads(where):
    stock, net, batches = pair(where)
    was = [stock.eval()(x) for x in batches]
    net.eval()
    now = [None, None]

    def work(i):
        stream = torch.cuda.Stream() if where.type == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(10):
                now[i] = net(batches[i])
        if stream is not None:
            stream.synchronize()

    if where.type == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(now, was, **CLOSE)


def test_networks_move_between_devices(where, tmp_path):
    stock, net, batches = pair(where)
    step(net, net, batches[0]), step(stock, stock, batches[0])
    torch.save(net.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(net).cpu()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, map_location="cpu"))
    step(stock.cpu(), stock, batches[1].cpu()), step(other, other, batches[1].cpu())
    torch.testing.assert_close(other.eval()(batches[0].cpu()), stock.eval()(batches[0].cpu()), **CLOSE)
    back = bn.revert(other.to(where))
    torch.testing.assert_close(back(batches[0]), stock.to(where)(batches[0]), **CLOSE)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "sync"])
@pytest.mark.usefixtures("one_rank")
def test_one_rank(where, wrapper):
    stock, net, batches = pair(where, torch.contiguous_format)
    if wrapper == "sync":
        net = bn.convert(stock, batches[0], statistics=bn.Sync())

    def as_used(net):
        if wrapper == "ddp":
            return nn.parallel.DistributedDataParallel(net)
        return torch.distributed.fsdp.fully_shard(net) if wrapper == "fsdp2" else net

    assert_trains_alike(stock, net, batches, as_used)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("where", ["cuda"], indirect=True)
def test_graphed_callables(where):
    stock, net, batches = pair(where)
    before = copy.deepcopy(net.state_dict())
    graphed = torch.cuda.make_graphed_callables(net, (batches[0].clone(),))
    net.load_state_dict(before)  # warming up has moved the running averages
    for x in [*batches, *batches]:
        torch.testing.assert_close(step(graphed, net, x), step(stock, stock, x), **CLOSE)
    for name, t in stock.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], t, **CLOSE)


@pytest.mark.gpu
def test_fp16_with_a_scaler_that_skips_a_step():
    stock, net, batches = pair(torch.device("cuda"))
    for model in (stock, net):
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x in batches * 4:
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(x).float(), torch.zeros(8, dtype=torch.long, device="cuda"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() < 2.0**24
    for name, t in stock.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], t, rtol=0.05, atol=0.02)


def test_statistics_folding_and_export(where, tmp_path):
    stock, net, batches = pair(where)
    for model in (stock, net):
        bn.estimate_(model, [x.cpu() for x in batches])  # batches are moved to the network's device
        model.eval()
    torch.testing.assert_close(net(batches[0]), stock(batches[0]), **CLOSE)
    folded = bn.fold(net, batches[0])
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    torch.testing.assert_close(folded(batches[0]), stock(batches[0]), **CLOSE)
    bn.export(net, batches[0], tmp_path / "net.pt2")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        loaded = torch.export.load(tmp_path / "net.pt2").module()
    torch.testing.assert_close(loaded(batches[0]), stock(batches[0]), **CLOSE)


def test_freezing_and_inserting(where):
    stock, net, batches = pair(where)
    bn.freeze_(net)
    kept = {k: v.clone() for k, v in net.state_dict().items() if "running" in k or "bn" in k}
    net.train()
    y = net(batches[0])
    y.square().sum().backward()
    torch.testing.assert_close(y, stock.eval()(batches[0]), **CLOSE)
    for name, t in kept.items():
        assert torch.equal(net.state_dict()[name], t)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(where)
    inserted = bn.insert(plain, batches[0], init="identity", batches=[x.cpu() for x in batches])
    assert any(isinstance(m, bn.BatchNorm2d) for m in inserted.modules())
    torch.testing.assert_close(inserted.eval()(batches[0]), plain(batches[0]), **CLOSE)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("backend", ["inductor", "batchnorm"])
def test_compiled_as_one_graph(where, backend):
    from batchnorm.dynamo import compile_graph

    torch._dynamo.reset()
    stock, net, batches = pair(where)
    chosen = compile_graph if backend == "batchnorm" else backend
    used = stock if backend == "batchnorm" else net
    twin = copy.deepcopy(stock)
    compiled = torch.compile(used, backend=chosen, fullgraph=True)
    for x in batches:
        torch.testing.assert_close(step(compiled, used, x), step(twin, twin, x), **CLOSE)
