"""Augmentation in batches against one image at a time, operation by operation."""

import pytest
import torch

from batchnorm.data import Augment, Normalize
from batchnorm.data.augment import COLOUR_COMPONENTS, GREY, IMAGENET_MEAN, IMAGENET_STD, STRENGTHS


def images(n=16, side=7):
    return torch.randint(0, 256, (n, 3, side, side + 1), dtype=torch.uint8)


def draws_of(augment, n, seed=0):
    return augment.draw(n, torch.Generator().manual_seed(seed))


def grey(x):
    return sum(w * c for w, c in zip(GREY, x, strict=True))


def reference(image, draw, strength):
    """One image in float64, one operation after the other, as the docstring states them."""
    x = image.double() / 255
    if draw[0] < 0.5:
        x = x.flip(-1)
    b, c, s = (1 + strength.factor * (2 * draw[1:4].double() - 1)).tolist()
    noise = torch.tensor(COLOUR_COMPONENTS).double() @ (strength.lighting * draw[8:11].double())
    operations = [
        lambda x: b * x,
        lambda x: c * x + (1 - c) * grey(x).mean(),
        lambda x: s * x + (1 - s) * grey(x),
        lambda x: x + noise[:, None, None],
    ]
    for k in draw[4:8].argsort().tolist():
        x = operations[k](x)
    x = x.clamp(0, 1)
    mean, std = (torch.tensor(v).double()[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
    return ((x - mean) / std).float()


@pytest.mark.parametrize("photometric", ["full", "reduced"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_equals_one_image_at_a_time(photometric, layout):
    augment = Augment(photometric)
    x = images(64).contiguous(memory_format=layout)
    draws = draws_of(augment, 64)
    y = augment(x, draws)
    expected = torch.stack([reference(*pair, STRENGTHS[photometric]) for pair in zip(x, draws, strict=True)])
    torch.testing.assert_close(y, expected, atol=2e-5, rtol=1e-5)
    assert y.is_contiguous(memory_format=layout)
    assert Augment("none")(x, draws).is_contiguous(memory_format=layout)


def test_orders_are_all_there_and_matter():
    augment = Augment("full", flip=False)
    draws = draws_of(augment, 2000)
    orders = {tuple(o) for o in draws[:, 4:8].argsort(1).tolist()}
    assert len(orders) == 24
    x = images(1).expand(2, -1, -1, -1)
    pair = draws[:1].repeat(2, 1)
    pair[0, 4:8], pair[1, 4:8] = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    a, b = augment(x, pair)
    assert (a - b).abs().max() > 0.01


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
def test_a_captured_graph_replays_it():
    augment = Augment("full").cuda()
    generator = torch.Generator("cuda").manual_seed(0)
    x, draws = images(32).cuda(), augment.draw(32, generator)
    expected = augment(x, draws)
    torch.testing.assert_close(expected.cpu(), Augment("full")(x.cpu(), draws.cpu()), atol=1e-4, rtol=1e-4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = augment(x, draws)
    draws.copy_(augment.draw(32, generator))
    graph.replay()
    torch.testing.assert_close(y, augment(x, draws))
    assert not torch.equal(y, expected)
