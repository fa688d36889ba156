"""Compare the augmentation of batches with a reference that processes one image at a time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchnorm.data import Augment, Normalize
from batchnorm.data.augment import COLOR_COMPONENTS, GRAY, IMAGENET_MEAN, IMAGENET_STD, STRENGTHS


def images(n=16, side=7):
    return torch.randint(0, 256, (n, 3, side, side + 1), dtype=torch.uint8)


def draws_of(augment, n, seed=0):
    return augment.draw(n, torch.Generator().manual_seed(seed))


def numbers_of(n, seed=0):
    """Return the random numbers of n images: one for mirroring, three factors, four sort keys, three for noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.rand(n, 8, generator=generator), torch.randn(n, 3, generator=generator)], dim=1)


def gray(x):
    return sum(w * c for w, c in zip(GRAY, x, strict=True))


def reference(image, numbers, strength, flip=True):
    """Augment one image in float64, one operation after the other, in the way that Augment's docstring describes."""
    x = image.double() / 255
    if flip and numbers[0] < 0.5:
        x = x.flip(-1)
    b, c, s = (1 + strength.factor * (2 * numbers[1:4].double() - 1)).tolist()
    noise = torch.tensor(COLOR_COMPONENTS).double() @ (strength.lighting * numbers[8:11].double())
    operations = [
        lambda x: b * x,
        lambda x: c * x + (1 - c) * gray(x).mean(),
        lambda x: s * x + (1 - s) * gray(x),
        lambda x: x + noise[:, None, None],
    ]
    for k in numbers[4:8].argsort().tolist():
        x = operations[k](x)
    x = x.clamp(0, 1)
    mean, std = (torch.tensor(v).double()[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
    return ((x - mean) / std).float()


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("photometric", ["full", "reduced"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_equals_one_image_at_a_time(photometric, layout, flip):
    augment = Augment(photometric, flip=flip)
    n, strength = 256, STRENGTHS[photometric]
    x = images(n).contiguous(memory_format=layout)
    draws, numbers = draws_of(augment, n), numbers_of(n)
    assert len({tuple(order) for order in numbers[:, 4:8].argsort(1).tolist()}) == 24
    y = augment(x, draws)
    expected = torch.stack([reference(*pair, strength, flip) for pair in zip(x, numbers, strict=True)])
    torch.testing.assert_close(y, expected, atol=5e-6, rtol=1e-5)
    assert y.is_contiguous(memory_format=layout)
    assert Augment("none")(x, draws).is_contiguous(memory_format=layout)
    rounded = Augment(photometric, flip=flip, dtype=torch.bfloat16)(x, draws)
    assert rounded.is_contiguous(memory_format=layout)
    torch.testing.assert_close(rounded, y.bfloat16(), atol=0, rtol=0)


def test_the_place_of_lighting_in_the_order_matters():
    numbers = numbers_of(1)[0]
    first, last = numbers.clone(), numbers.clone()
    first[4:8], last[4:8] = torch.tensor([0.2, 0.3, 0.4, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    x = images(1)[0]
    a, b = (reference(x, v, STRENGTHS["full"]) for v in (first, last))
    assert (a - b).abs().max() > 0.01


def test_other_means_and_deviations():
    x, mean, std = images(), (0.1, 0.5, 0.7), (0.5, 0.3, 0.2)
    usual, other = Augment("full"), Augment("full", mean=mean, std=std)

    def colors(y, mean, std):
        mean, std = (torch.tensor(v)[:, None, None] for v in (mean, std))
        return y * std + mean

    expected = colors(usual(x, draws_of(usual, 16)), IMAGENET_MEAN, IMAGENET_STD)
    torch.testing.assert_close(colors(other(x, draws_of(other, 16)), mean, std), expected, atol=2e-6, rtol=1e-5)


def test_autocast_rounds_nothing():
    augment, x = Augment("full"), images()
    expected = augment(x, draws_of(augment, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(x, draws_of(augment, 16)), expected)


class Launches(TorchDispatchMode):
    """Count the calls that would launch a kernel; views and allocations launch none."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function is not torch.ops.aten.empty_like.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("photometric", "flip", "most"), [("full", True, 10), ("full", False, 7), ("none", True, 4)])
def test_few_kernels_are_launched(photometric, flip, most):
    augment = Augment(photometric, flip=flip, dtype=torch.bfloat16)
    x, draws = images(), draws_of(augment, 16)
    with Launches() as launches:
        augment(x, draws)
    assert launches.count <= most


def test_half_of_the_images_are_mirrored():
    augment = Augment("none")
    x = images(1).expand(1000, -1, -1, -1)
    y, plain = augment(x, draws_of(augment, 1000)), Normalize()(x)
    mirrored = (y == plain.flip(-1)).flatten(1).all(1)
    assert torch.equal(~mirrored, (y == plain).flatten(1).all(1))
    assert 430 < mirrored.sum() < 570
    without = Augment("none", flip=False)
    torch.testing.assert_close(without(x, draws_of(without, 1000)), plain, atol=0, rtol=0)


def test_normalization():
    x = images()
    mean, std = (torch.tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(Normalize()(x), (x / 255 - mean) / std)
    assert Normalize(dtype=torch.bfloat16)(x).dtype == torch.bfloat16
    assert Augment(dtype=torch.bfloat16)(x, draws_of(Augment(), 16)).dtype == torch.bfloat16


def test_reduced_distorts_less_than_full():
    x = images(200)
    moved = {}
    for photometric in ("none", "reduced", "full"):
        augment = Augment(photometric, flip=False)
        moved[photometric] = (augment(x, draws_of(augment, 200)) - Normalize()(x)).square().mean().sqrt()
    assert moved["none"] == 0
    assert 0.05 < moved["reduced"] < 0.6 * moved["full"]


def test_draws_depend_on_the_generator_alone():
    augment = Augment()
    assert torch.equal(draws_of(augment, 8, seed=1), draws_of(augment, 8, seed=1))
    assert not torch.equal(draws_of(augment, 8, seed=1), draws_of(augment, 8, seed=2))
    x = images(8)
    draws = draws_of(augment, 8)
    torch.testing.assert_close(torch.cat([augment(x[:3], draws[:3]), augment(x[3:], draws[3:])]), augment(x, draws))


def test_an_empty_batch_and_no_state():
    augment = Augment()
    assert augment(images(0), draws_of(augment, 0)).shape == (0, 3, 7, 8)
    assert not augment.state_dict()


def test_unknown_strength():
    with pytest.raises(ValueError, match="choose 'full', 'reduced' or 'none'"):
        Augment("strong")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("photometric", ["full", "none"])
def test_a_captured_graph_replays_it(photometric, dtype):
    augment = Augment(photometric, dtype=dtype).cuda()
    generator = torch.Generator().manual_seed(0)
    x = images(32).contiguous(memory_format=torch.channels_last).cuda()
    draws = augment.draw(32, generator).cuda()
    expected = augment(x, draws)
    on_host = Augment(photometric)(x.cpu(), draws.cpu())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(expected.cpu().float(), on_host, atol=tolerance, rtol=tolerance)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = augment(x, draws)
    assert y.is_contiguous(memory_format=torch.channels_last)
    draws.copy_(augment.draw(32, generator))
    graph.replay()
    torch.testing.assert_close(y, augment(x, draws))
    assert not torch.equal(y, expected)


@pytest.mark.gpu
def test_draws_are_made_where_the_generator_is():
    draws = Augment("full").draw(4, torch.Generator("cuda").manual_seed(0))
    assert draws.is_cuda
    assert draws.shape == (4, 22)
