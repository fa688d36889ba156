"""Test the layers as drop-in replacements for torch.nn's."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from networks import Coded
from torch import multiprocessing, nn
from torch.utils.checkpoint import checkpoint

import batchnorm as bn

SHAPES = {
    "1d": (bn.BatchNorm1d, nn.BatchNorm1d, (6, 5)),
    "1d, sequence": (bn.BatchNorm1d, nn.BatchNorm1d, (6, 5, 7)),
    "2d": (bn.BatchNorm2d, nn.BatchNorm2d, (6, 5, 7, 4)),
    "3d": (bn.BatchNorm3d, nn.BatchNorm3d, (3, 5, 4, 3, 2)),
}
OPTIONS = [
    {},
    {"eps": 1e-2, "momentum": 0.7},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


def pair(kind, **options):
    ours_type, torch_type, shape = SHAPES[kind]
    ours, theirs = ours_type(5, **options), torch_type(5, **options)
    if theirs.affine:
        nn.init.uniform_(theirs.weight)
        nn.init.normal_(theirs.bias)
        ours.load_state_dict(theirs.state_dict())
    return ours, theirs, shape


def assert_same_step(ours, theirs, x):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ya, yb = ours(a), theirs(b)
    torch.testing.assert_close(ya, yb, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(ya)
    ya.backward(dy)
    yb.backward(dy)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=name)
    state, want = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(want)
    torch.testing.assert_close(dict(state), dict(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_training_and_evaluation_equal_torch(kind, options):
    ours, theirs, shape = pair(kind, **options)
    for _ in range(3):
        assert_same_step(ours, theirs, torch.randn(shape) * 2 + 1)
    ours.eval(), theirs.eval()
    assert_same_step(ours, theirs, torch.randn(shape) * 2 + 1)
    # Evaluation has no effect on the training after it.
    ours.train(), theirs.train()
    assert_same_step(ours, theirs, torch.randn(shape))


def test_same_constructor_and_class():
    layer = bn.BatchNorm2d(4, 1e-3, 0.2, False, True, "cpu", torch.float64)
    assert isinstance(layer, nn.BatchNorm2d)
    assert (layer.eps, layer.momentum, layer.affine) == (1e-3, 0.2, False)
    assert layer.running_mean.dtype == torch.float64
    with pytest.raises(TypeError):
        bn.BatchNorm2d(4, 1e-3, 0.2, False, True, "cpu", torch.float64, "relu")
    assert bn.BatchNorm2d(4, bias=False).bias is None


def test_repr_extends_torchs():
    text = repr(bn.BatchNorm2d(4, activation=nn.LeakyReLU(0.2), on_single="running"))
    assert text.startswith("BatchNorm2d(4, eps=1e-05, momentum=0.1, affine=True")
    assert text.endswith("activation=leaky_relu(0.2), on_single=running)")
    theirs = repr(nn.BatchNorm2d(4))
    assert repr(bn.BatchNorm2d(4)) == theirs


@pytest.mark.parametrize("kind", SHAPES)
def test_state_dict_goes_both_ways_strictly(kind):
    ours, theirs, shape = pair(kind)
    ours(torch.randn(shape))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


def test_loads_a_checkpoint_from_before_the_counter():
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    old = dict(state.items())  # a plain dict has no version metadata, as in old files
    bn.BatchNorm2d(3).load_state_dict(old)


def test_activation_and_residual_are_fused():
    ours, theirs, shape = pair("2d")
    ours.activation = bn.ops.Activation("relu")
    x, residual = torch.randn(shape), torch.randn(shape)
    torch.testing.assert_close(ours(x, residual=residual), torch.relu(theirs(x) + residual), rtol=1e-5, atol=1e-5)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x, residual=residual), torch.relu(theirs(x) + residual), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.LeakyReLU(0.3), nn.Identity()])
def test_activation_given_as_a_module(module):
    x = torch.randn(8, 3)
    want = module(nn.BatchNorm1d(3)(x))
    torch.testing.assert_close(bn.BatchNorm1d(3, activation=module)(x), want, rtol=1e-5, atol=1e-5)


def test_unknown_activation_and_policy():
    with pytest.raises(ValueError, match="cannot be fused"):
        bn.BatchNorm1d(3, activation=nn.GELU())
    with pytest.raises(ValueError, match="not one of"):
        bn.BatchNorm1d(3, activation="gelu")
    with pytest.raises(ValueError, match="on_single"):
        bn.BatchNorm1d(3, on_single="nan")


@pytest.mark.parametrize(
    ("layer", "features", "shape"),
    [(bn.BatchNorm2d, (3, 4, 5), (6, 3, 4, 5)), (bn.BatchNorm1d, (3, 4), (6, 3, 4)), (bn.BatchNorm1d, (3,), (6, 3))],
)
def test_per_activation_is_fully_connected_on_the_flattened_input(layer, features, shape):
    x = torch.randn(shape)
    ours, flat = layer(features), nn.BatchNorm1d(x[0].numel())
    assert ours.weight.shape == ours.running_mean.shape == features
    torch.testing.assert_close(ours(x).flatten(1), flat(x.flatten(1)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var.flatten(), flat.running_var)
    torch.testing.assert_close(ours.eval()(x).flatten(1), flat.eval()(x.flatten(1)), rtol=1e-5, atol=1e-5)


class TestErrors:
    net = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), bn.BatchNorm2d(3)))

    def test_wrong_channels_name_the_layer(self):
        with pytest.raises(ValueError, match=r"layer '1\.1' \(BatchNorm2d\): expected 3 features.*has 4"):
            self.net(torch.randn(2, 4, 5, 5))

    def test_wrong_dimensions(self):
        with pytest.raises(ValueError, match=r"layer '1\.1' .*expected 4D input \(got 3D input\)"):
            self.net(torch.randn(2, 3, 5))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
    def test_wrong_types(self, dtype):
        with pytest.raises(TypeError, match=r"layer '1\.1'.*real floating-point input"):
            self.net(torch.ones(2, 3, 5, 5, dtype=dtype))


def test_a_residual_of_another_shape_names_the_layer():
    block = Coded(lambda n, x: n.norm(n.conv(x), residual=x), conv=nn.Conv2d(3, 4, 1), norm=bn.BatchNorm2d(4))
    with pytest.raises(ValueError, match=r"layer '0\.norm' .*residual of shape \(2, 3, 5, 5\).*project the residual"):
        nn.Sequential(block)(torch.randn(2, 3, 5, 5))


def test_autocast_keeps_statistics_wide():
    net = nn.Sequential(nn.Linear(4, 8), bn.BatchNorm1d(8, activation="relu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(torch.randn(16, 4))
    assert y.dtype == torch.bfloat16
    assert net[1].running_var.dtype == torch.float32
    y.float().sum().backward()
    assert net[1].weight.grad.dtype == torch.float32


class TestCopies:
    def trained(self):
        net = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3, activation="relu"))
        net(torch.randn(8, 4))
        bn.freeze_(net, affine=False)
        return net

    def assert_equal(self, a, b):
        x = torch.randn(5, 4)
        torch.testing.assert_close(a(x), b(x), rtol=0, atol=0)
        assert a[1]._frozen == b[1]._frozen
        assert repr(a) == repr(b)

    def test_deepcopy(self):
        net = self.trained()
        twin = copy.deepcopy(net)
        self.assert_equal(net, twin)
        bn.unfreeze_(twin)
        assert net[1].frozen_statistics

    def test_pickle(self):
        net = self.trained()
        self.assert_equal(net, pickle.loads(pickle.dumps(net)))

    def test_torch_save(self):
        net, file = self.trained(), io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        self.assert_equal(net, torch.load(file, weights_only=False))

    def test_state_dict_loads_weights_only(self):
        net, file = self.trained(), io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        twin = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3, activation="relu"))
        twin.load_state_dict(torch.load(file, weights_only=True))
        self.assert_equal(net, twin)

    @pytest.mark.dist
    def test_multiprocessing(self):
        net, x = self.trained(), torch.randn(5, 4)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            y = pool.apply(_forward, (net, x))
        torch.testing.assert_close(net(x).detach(), y)


def _forward(net, x):
    return net(x).detach()


def test_reset_sets_both_counters_back():
    layer = bn.BatchNorm1d(2)
    layer(torch.randn(4, 2))
    layer(torch.full((4, 2), float("inf")))
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (1, 1)
    layer.reset_running_stats()
    assert (layer.num_batches_tracked, layer.num_batches_skipped) == (0, 0)


def test_meta_device_then_materialized():
    with torch.device("meta"):
        layer = bn.BatchNorm2d(3).half()
    assert layer.running_mean.dtype == torch.float32
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(2, 3, 4, 4).half()).isfinite().all()


@pytest.mark.parametrize(
    ("statistics", "masked", "compiled"),
    [
        *((s, masked, False) for s in (None, bn.Sync(), bn.Ghost(2), bn.Renorm()) for masked in (False, True)),
        (None, False, True),
    ],
)
def test_a_state_dict_loaded_into_a_layer_on_meta(statistics, masked, compiled):
    with torch.device("meta"):
        layer = bn.BatchNorm2d(3, statistics=statistics)
    layer.load_state_dict(nn.BatchNorm2d(3).state_dict(), assign=True)
    same = bn.BatchNorm2d(3, statistics=statistics)
    x = torch.randn(4, 3, 2, 2) + 5
    mask = torch.ones(4, 2, 2, dtype=torch.bool) if masked else None
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    torch.testing.assert_close(run(x, mask=mask), same(x, mask=mask))
    assert same.num_batches_tracked == 1
    torch.testing.assert_close(dict(layer.named_buffers()), dict(same.named_buffers()))


def test_a_state_dict_resets_the_count_that_it_does_not_contain():
    layer = bn.BatchNorm2d(3)
    layer.num_batches_skipped.fill_(-1)  # to_empty() may leave any value here
    layer.load_state_dict(nn.BatchNorm2d(3).state_dict())
    assert layer.num_batches_skipped == 0


def test_symbolic_tracing_takes_it_as_a_leaf_like_torchs():
    norm = bn.BatchNorm2d(3, activation="relu")
    net = Coded(lambda n, x: n.bn(n.conv(x), residual=x) * 2, conv=nn.Conv2d(3, 3, 1), bn=norm)
    x = torch.randn(4, 3, 5, 5)
    traced = torch.fx.symbolic_trace(net)
    assert "bn" in [n.target for n in traced.graph.nodes if n.op == "call_module"]
    torch.testing.assert_close(traced(x), net(x))
    assert traced.bn.num_batches_tracked == 2
    assert net.eval()(x).shape == traced.eval()(x).shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_mode_without_gradients(mode):
    layer, other = bn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    with mode():
        y = layer(x)
    torch.testing.assert_close(y.clone(), other(x).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(layer.state_dict()), dict(other.state_dict()))
    layer(x).sum().backward()


def test_features_may_be_a_list():
    assert bn.BatchNorm2d([3, 4, 5]).features == (3, 4, 5)


def test_changing_batch_size_under_compile():
    layer = bn.BatchNorm1d(3)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (4, 7, 16):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), nn.BatchNorm1d(3)(x), rtol=1e-4, atol=1e-5)
    assert layer.num_batches_tracked == 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"statistics": "sync"}, TypeError, "must be a value such as Sync"),
        ({"statistics": bn.Sync}, TypeError, "must be a value such as Sync"),
        ({"activation": torch.relu}, TypeError, r"torch.nn module such as nn.ReLU\(\)"),
        ({"eps": -1.0}, ValueError, "must not be negative"),
    ],
    ids=["name for value", "class for value", "function for name", "negative eps"],
)
def test_constructor_refuses_what_forward_could_not_use(options, error, words):
    with pytest.raises(error, match=words):
        bn.BatchNorm2d(4, **options)


def test_a_forgotten_dimension_is_not_taken_for_another_normalization():
    with pytest.raises(ValueError, match="the shape of an example"):
        bn.BatchNorm2d((6, 4))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_no_count_of_batches_as_in_torch(momentum):
    ours, theirs = bn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    ours.num_batches_tracked = theirs.num_batches_tracked = None
    for _ in range(2):
        x = torch.randn(4, 3, 5, 5) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked is None
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for layer in (ours, theirs):
        bn.estimate_(layer, [x])
        torch.testing.assert_close(layer.running_mean, x.mean((0, 2, 3)))


@pytest.mark.parametrize("statistics", [None, bn.Ghost(2)])
def test_no_averages_but_a_count_as_in_torch(statistics):
    ours, theirs = bn.BatchNorm2d(3, statistics=statistics), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    for layer in (ours, theirs):
        layer.running_mean = layer.running_var = None
        layer(x)
        layer(x)
        layer.eval()(x)  # normalizes by the batch's statistics, but does not count the batch
        layer.train().track_running_stats = False
        layer(x)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
    ours.track_running_stats = True
    checkpoint(ours, x, use_reentrant=False).sum().backward()
    assert ours.num_batches_tracked == 3, "counted once, although it ran twice"


def test_swapped_parameters():
    layer = bn.BatchNorm1d(3)
    layer(torch.randn(4, 3)).sum().backward()
    other = {k: v + 1 for k, v in bn.BatchNorm1d(3).state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(other)
        layer.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert (layer.running_mean == 1).all()
    layer(torch.full((4, 3), 5.0))
    torch.testing.assert_close(layer.running_mean, torch.full((3,), 1.4))
    assert layer.num_batches_tracked == 2


def test_numbers_of_features():
    assert bn.BatchNorm1d(np.int64(3)).num_features == 3
    assert bn.BatchNorm1d(torch.tensor(3)).features == (3,)
    assert bn.BatchNorm1d(0)(torch.randn(4, 0)).shape == (4, 0)
    assert bn.estimate_(bn.BatchNorm1d(0), [torch.randn(4, 0)]).layers[0].mean_gap == 0
    for wrong in (-1, (3, -1)):
        with pytest.raises(ValueError, match="must be the number of channels"):
            bn.BatchNorm1d(wrong)
    with pytest.raises(ValueError, match=r"the shape of an example$"):
        bn.layers.BatchNorm(-1)
    for wrong in (3.0, (3, 1.5), None):
        with pytest.raises(TypeError, match="must be an integer or a shape"):
            bn.BatchNorm1d(wrong)


@pytest.mark.parametrize("mask", [torch.ones(4, 5), torch.ones(4, 3, 5, dtype=torch.bool)])
def test_a_wrong_mask_names_the_layer(mask):
    with pytest.raises(ValueError, match=r"layer 'norm' .*: the mask must be bool of shape \(4, 5\)"):
        Coded(lambda n, x: n.norm(x, mask=mask), norm=bn.BatchNorm1d(3))(torch.randn(4, 3, 5))
