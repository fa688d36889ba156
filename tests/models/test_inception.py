"""Compare the network with the appendix's LaTeX table, copied independently of the code, and with known counts."""

import copy
import re

import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.models import describe, inception
from batchnorm.models.bn_inception.blocks import InceptionModule, SeparableConv2d, Unit
from batchnorm.models.bn_inception.network import LocalResponseNorm

# The columns are type & patch/stride & output & depth & 1x1 & 3x3 reduce & 3x3 & double reduce & double & pool.
LATEX = r"""
inception (3a) & & $28{\times}28{\times}256$ & 3 & 64 & 64 & 64 & 64 & 96 & avg + 32  \\
inception (3b) & & $28{\times}28{\times}320$ & 3 & 64 & 64 & 96 & 64 & 96 & avg + 64 \\
inception (3c) & stride 2 & $28{\times}28{\times}576$ & 3 & 0 & 128 & 160 & 64 & 96 & max + pass through \\
inception (4a) & & $14{\times}14{\times}576$ & 3 & 224 & 64 & 96 & 96 & 128 & avg + 128 \\
inception (4b) & & $14{\times}14{\times}576$ & 3 & 192 & 96 & 128 & 96 & 128 & avg + 128 \\
inception (4c) & & $14{\times}14{\times}576$ & 3 & 160 & 128 & 160 & 128 & 160 & avg + 128 \\
inception (4d) & & $14{\times}14{\times}576$ & 3 & 96 & 128 & 192 & 160 & 192 & avg + 128 \\
inception (4e) & stride 2 & $14{\times}14{\times}1024$ & 3 & 0 & 128 & 192 & 192 & 256 & max + pass through \\
inception (5a) & & $7{\times}7{\times}1024$ & 3 & 352 & 192 & 320 & 160 & 224 & avg + 128 \\
inception (5b) & & $7{\times}7{\times}1024$ & 3 & 352 & 192 & 320 & 192 & 224 & max + 128 \\
"""


def printed_rows():
    for line in LATEX.strip().splitlines():
        cells = [cell.strip(" \\") for cell in line.split("&")]
        size, _, channels = (int(n) for n in re.findall(r"\d+", cells[2]))
        pool, _, projection = cells[9].partition(" + ")
        filters = [int(cell) for cell in cells[4:9]]
        name, stride = cells[0][11:13], 2 if cells[1] else 1
        yield name, stride, size // stride, channels, filters, pool, int(projection) if projection.isdigit() else 0


@pytest.fixture(scope="module")
def layers():
    return {layer.name: layer for layer in describe(inception(projection=128)).layers}


@pytest.mark.parametrize("row", list(printed_rows()), ids=lambda row: row[0])
def test_rows_are_the_printed_ones(layers, row):
    name, _, size, _, (one, reduce3, three, reduce33, double), pool, projection = row
    made = {
        key.removeprefix(f"inception_{name}."): layer for key, layer in layers.items() if f"inception_{name}." in key
    }
    outputs = {key.removesuffix(".conv"): layer.output for key, layer in made.items() if layer.kind == "Conv2d"}
    assert outputs.get("one", (0,))[0] == one
    assert [outputs[k][0] for k in ("three.reduce", "three.conv")] == [reduce3, three]
    assert [outputs[f"double33.{k}"][0] for k in ("reduce", "conv1", "conv2")] == [reduce33, double, double]
    assert outputs.get("pool.project", (0,))[0] == projection
    assert made["pool.pool"].kind == {"avg": "AvgPool2d", "max": "MaxPool2d"}[pool]
    assert outputs["three.conv"][1:] == outputs["double33.conv2"][1:] == (size, size)


def test_outputs_are_the_printed_ones_with_projection_96():
    sizes = {}
    net = inception().eval()
    for name, module in net.named_children():
        module.register_forward_hook(lambda m, a, y, name=name: sizes.__setitem__(name, tuple(y.shape[1:])))
    net.to("meta")(torch.empty(1, 3, 224, 224, device="meta"))
    for name, _, size, channels, *_ in printed_rows():
        assert sizes[f"inception_{name}"] == (channels, size, size)
    assert [sizes[k] for k in ("stem", "pool1", "conv2", "pool2", "pool")] == [
        (64, 112, 112),
        (64, 56, 56),
        (192, 56, 56),
        (192, 28, 28),
        (1024, 1, 1),
    ]


@pytest.mark.parametrize(
    ("stem", "projection", "expected"),
    [
        ("separable", 96, 11_188_288),
        ("separable", 128, 11_278_528),
        ("plain", 96, 11_194_984),
        ("plain", 128, 11_285_224),
    ],
)
def test_parameter_counts(stem, projection, expected):
    net = inception(stem=stem, projection=projection)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_the_plain_form_has_biases_in_place_of_gamma_and_beta():
    plain, normalized = inception(norm=None), inception()
    channels = sum(m.num_features for m in normalized.modules() if isinstance(m, bn.BatchNorm2d))
    count = {net: sum(p.numel() for p in net.parameters()) for net in (plain, normalized)}
    assert count[normalized] - count[plain] == channels
    assert not any(isinstance(m, bn.BatchNorm2d) for m in plain.modules())
    assert all(m.activation.name == "relu" for m in normalized.modules() if isinstance(m, bn.BatchNorm2d))


def test_switches():
    net = inception(norm=None, activation="sigmoid", local_response=True, dropout=0.4, classes=7, size=64)
    kinds = [type(m) for m in net.modules()]
    names = [name for name, _ in net.named_children()]
    assert kinds.count(LocalResponseNorm) == 2
    assert nn.ReLU not in kinds
    assert net.dropout.p == 0.4
    assert net.classifier.out_features == 7
    # As in GoogLeNet, lrn1 follows the first pool (left out at 64 px), and lrn2 precedes the second pool.
    assert names[:6] == ["stem", "lrn1", "reduce2", "conv2", "lrn2", "pool2"]
    assert isinstance(inception(stem="plain").stem.conv, nn.Conv2d)


@pytest.mark.parametrize(
    ("size", "last", "stem_stride", "has_pool"),
    [
        (224, 7, 2, True),
        (97, 4, 2, True),  # the smallest size that keeps all strides
        (96, 6, 2, False),
        (65, 5, 2, False),  # all maps have odd sizes
        (64, 4, 2, False),
        (49, 4, 2, False),
        (48, 6, 1, False),
        (32, 4, 1, False),
    ],
)
def test_small_images_drop_early_strides(size, last, stem_stride, has_pool):
    net = inception(size=size, classes=5)
    assert net.stem.conv.depthwise.stride == (stem_stride, stem_stride)
    assert hasattr(net, "pool1") == has_pool
    layer = next(layer for layer in describe(net, size).layers if layer.name == "inception_5b.pool.pool")
    assert layer.output == (1024, last, last)


@pytest.mark.parametrize("size", [64, 65])
def test_per_activation_normalization_of_the_last_rows(size):
    net = inception(size=size, classes=5, per_activation=("4e", "5b"))
    assert net.inception_5b.one.bn.num_features == (352, *[-(-size // 16)] * 2)
    assert net.inception_5a.one.bn.num_features == 352
    small = inception(size=size, classes=5, per_activation=("4e", "5b"), width=0.0625)
    small(torch.randn(2, 3, size, size)).sum().backward()
    assert small.inception_4e.double33.conv1.bn.weight.grad.shape == (16, *[-(-size // 8)] * 2)


def test_the_argument_has_the_name_that_sequentials_give_it():
    net, x = inception(size=32, width=0.1, classes=2).eval(), torch.zeros(1, 3, 32, 32)
    assert torch.equal(net(input=x), net(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"norm": "layer"}, "norm='layer' is unknown: choose 'batch' or None"),
        ({"stem": "wide"}, "stem='wide' is unknown: choose 'separable' or 'plain'"),
        ({"projection": 64}, "projection=64 is unknown: choose 96 or 128"),
        ({"init": "zeros"}, "init='zeros' is unknown"),
        ({"activation": "gelu"}, "activation='gelu' is unknown"),
        ({"classes": 0}, "classes=0"),
        ({"width": 0.0}, "width=0.0"),
        ({"init_scale": float("inf")}, "init_scale=inf"),
    ],
)
def test_unknown_values(given, message):
    with pytest.raises(ValueError, match=message):
        inception(**given)


def test_refusals():
    with pytest.raises(ValueError, match="32 px or more, not 31"):
        inception(size=31)
    with pytest.raises(ValueError, match="name Inception modules from 3a to 5b"):
        inception(per_activation=("6a",))
    with pytest.raises(ValueError, match="norm='batch'"):
        inception(norm=None, per_activation=("5b",))


@pytest.mark.parametrize("norm", ["batch", None])
def test_the_rearranged_form_computes_the_same_function_and_gradients(norm):
    net = inception(size=32, classes=5, norm=norm, seed=1, width=0.125).double()
    for p in net.parameters():  # change biases, betas and gammas from their initial 0 and 1
        if p.dim() == 1:
            nn.init.normal_(p, 0.5, 0.2)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    results = []
    for rearrange in (False, True):
        for m in net.modules():
            if isinstance(m, Unit | SeparableConv2d | InceptionModule):
                m.rearrange = rearrange
        net.zero_grad()
        y = net(x)
        y.square().sum().backward()
        results.append((y.detach(), [p.grad.clone() for p in net.parameters()]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("size", [(32, 32), (33, 37)])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_the_stem_by_blocks_of_pixels(size, kernel):
    conv = SeparableConv2d(3, 8, kernel, stride=2).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = conv(x)
    conv.rearrange = conv.by_blocks = True
    torch.testing.assert_close(conv(x), expected)
    last = conv(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, expected)


@pytest.mark.parametrize("kernel", [2, 4, (3, 7), (7, 3)])
def test_kernels_that_blocks_of_pixels_do_not_fit(kernel):
    conv = SeparableConv2d(3, 8, 7, stride=2)
    padding = [n // 2 for n in (kernel if isinstance(kernel, tuple) else (kernel, kernel))]
    conv.depthwise = torch.nn.Conv2d(3, 24, kernel, 2, padding, groups=3, bias=False)
    conv, x = conv.double(), torch.randn(2, 3, 20, 22, dtype=torch.float64)
    expected = conv(x)
    conv.rearrange = conv.by_blocks = True
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_local_response_normalization_as_a_convolution(size):
    norm = LocalResponseNorm(size, alpha=0.3, beta=0.6, k=1.5)
    x = torch.randn(3, 7, 4, 5, dtype=torch.float64, requires_grad=True)
    results = [(y.detach(), *torch.autograd.grad(y.sin().sum(), x)) for y in (norm(x), norm.convolved(x))]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_squares_that_overflow_in_half_precision(dtype):
    norm, x = LocalResponseNorm(5), torch.zeros(1, 8, 2, 2)
    x[:, 0] = 300
    with torch.autocast("cpu", torch.float16):
        y = norm.convolved(x.to(dtype))
    torch.testing.assert_close(y.float(), norm(x), rtol=1e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_on_a_gpu_the_network_without_normalization_computes_the_same(activation):
    net = inception(size=32, classes=5, norm=None, local_response=True, activation=activation, seed=1, width=0.125)
    for p in net.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, 0.5, 0.2)
    net, x = net.cuda().to(memory_format=torch.channels_last), torch.randn(4, 3, 32, 32, device="cuda")
    results = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for run in (net, copy.deepcopy(net).cpu().double()):
            run.dropout.p = 0.0
            y = run(x.to(next(run.parameters())))
            y.square().sum().backward()
            results.append([y.detach().cpu().double(), *(p.grad.cpu().double() for p in run.parameters())])
    for got, expected in zip(*results, strict=True):
        # With sigmoids, the gradients in the stem are smaller than 1e-6, and their terms nearly cancel, so the relative
        # rounding error is large.
        assert (got - expected).norm() <= (1e-3 if activation == "relu" else 2e-2) * expected.norm()


@pytest.mark.parametrize(
    "change",
    [
        lambda conv: conv.depthwise.register_forward_hook(lambda _, inputs, y: y + 1),
        lambda conv: conv.pointwise.register_forward_pre_hook(lambda _, inputs: 2 * inputs[0]),
        lambda conv: setattr(conv.depthwise, "forward", lambda x, run=conv.depthwise.forward: run(2 * x)),
        lambda conv: (
            setattr(conv.depthwise, "padding_mode", "circular")
            or setattr(conv.depthwise, "_reversed_padding_repeated_twice", [1] * 4)
        ),
        lambda conv: setattr(conv.depthwise, "padding", (0, 0)),
        lambda conv: setattr(conv.depthwise, "bias", nn.Parameter(torch.ones(12))),
        lambda conv: setattr(conv.pointwise, "stride", (2, 2)),
        lambda conv: conv.append(nn.ReLU()),
    ],
    ids="hook pre_hook forward mode padding bias stride appended".split(),  # noqa: SIM905
)
def test_a_changed_separable_convolution_runs_as_drawn(change):
    conv, x = SeparableConv2d(3, 5, 3, stride=2, multiplier=4), torch.randn(2, 3, 8, 8)
    change(conv)
    for conv.rearrange in (False, True):
        torch.testing.assert_close(conv(x), nn.Sequential(*conv)(x))


def test_a_rearranged_separable_convolution_takes_a_single_image():
    conv = SeparableConv2d(3, 16, 7, stride=2)
    conv.rearrange = True
    x = torch.randn(3, 9, 9)
    torch.testing.assert_close(conv(x), conv(x[None])[0])


def test_global_hooks_see_a_separable_convolution_as_drawn():
    conv, x, seen = SeparableConv2d(3, 5, 3, multiplier=4), torch.randn(2, 3, 8, 8), []
    conv.rearrange = True
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    conv(x)
    handle.remove()
    assert seen == [*conv, conv]


def test_what_was_appended_to_a_unit_is_called():
    net = inception(size=32, classes=5, norm=None, seed=1, width=0.125).eval()
    x, module = torch.randn(2, 3, 32, 32), net.inception_3a
    for unit in (net.reduce2, module.one, module.pool.project):
        unit.append(nn.Tanh())
    expected = net(x)
    for m in net.modules():
        if isinstance(m, Unit | InceptionModule):
            m.rearrange = True
    torch.testing.assert_close(net(x), expected)


def test_who_listens_to_a_branch_hears_it():
    net = inception(size=32, classes=5, seed=1, width=0.125).eval()
    x, module, heard = torch.randn(2, 3, 32, 32), net.inception_3a, []
    expected, module.rearrange = net(x), True
    torch.testing.assert_close(net(x), expected)
    module.one.register_forward_hook(lambda *_: heard.append("one"))
    module.double33.reduce.conv.register_forward_hook(lambda *_: heard.append("reduce"))
    torch.testing.assert_close(net(x), expected)
    assert heard == ["one", "reduce"]


@pytest.mark.parametrize("norm", ["batch", None])
@pytest.mark.parametrize("rearrange", [None, True])
def test_recorded_in_training(norm, rearrange):
    net = inception(size=32, classes=5, norm=norm, seed=1, width=0.125)
    for m in net.modules():
        if isinstance(m, Unit | SeparableConv2d | InceptionModule):
            m.rearrange = rearrange
    recorded, x = torch.fx.symbolic_trace(net), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(recorded.eval()(x), net.eval()(x))


def test_local_response_normalization_is_trained_after_inference():
    # No other test uses 11 channels, so the kernel for them is not cached yet.
    norm, x = LocalResponseNorm(3, alpha=0.3), torch.randn(2, 11, 4, 5)
    with torch.inference_mode():
        expected = norm.convolved(x)
    y = norm.convolved(x.requires_grad_())
    y.sum().backward()
    torch.testing.assert_close(y, expected)


def test_initialization():
    kaiming, xavier = (inception(init=init, seed=3) for init in ("kaiming", "xavier"))
    conv = "inception_4c.double33.conv1.conv.weight"  # 128 -> 160, 3x3
    torch.testing.assert_close(kaiming.get_parameter(conv).std(), torch.tensor((2 / 1152) ** 0.5), rtol=0.02, atol=0)
    expected = torch.tensor((2 / (1152 + 1440)) ** 0.5)
    torch.testing.assert_close(xavier.get_parameter(conv).std(), expected, rtol=0.02, atol=0)
    larger = inception(seed=3, init_scale=2.0)
    assert torch.equal(larger.get_parameter(conv), 2 * kaiming.get_parameter(conv))
    assert torch.equal(larger.classifier.weight, kaiming.classifier.weight)
    assert torch.equal(inception(seed=3).classifier.weight, kaiming.classifier.weight)
    plain = inception(norm=None, seed=3)  # the random weights are the same with and without normalization
    assert torch.equal(plain.get_parameter(conv), kaiming.get_parameter(conv))


def test_it_trains():
    torch.manual_seed(0)
    net = inception(size=32, classes=2, width=0.25)
    x, labels = torch.randn(8, 3, 32, 32), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
def test_the_normalized_form_is_insert_of_the_plain_form(activation):
    plain, normalized = (
        inception(size=32, classes=5, norm=norm, activation=activation, width=0.1, seed=1, eps=1e-5).double()
        for norm in (None, "batch")
    )
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    inserted = bn.insert(plain, x)
    sizes = [sorted(p.numel() for p in net.parameters()) for net in (inserted, normalized)]
    assert sizes[0] == sizes[1]
    assert len(inserted.report.sites) == 2 + sum(isinstance(m, bn.BatchNorm2d) for m in normalized.modules())
    for mode in (True, False):
        outputs = [net.train(mode)(x) for net in (inserted, normalized)]
        torch.testing.assert_close(*outputs)
    # The same weights have the same gradients in both networks.
    for net in (inserted, normalized):
        net.train()(x).square().sum().backward()
    grads = [net.inception_4c.double33.conv1.conv for net in (inserted, normalized)]
    torch.testing.assert_close(grads[0].affine.weight.grad, grads[1].weight.grad)


def test_folding_leaves_no_normalization():
    net = inception(size=32, classes=5, width=0.1, seed=1)
    net(torch.randn(16, 3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    folded = bn.fold(net, x)
    assert not any(isinstance(m, bn.BatchNorm2d) for m in folded.modules())
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-4, atol=1e-4)
