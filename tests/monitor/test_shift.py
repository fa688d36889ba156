import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchnorm.models import perceptron
from batchnorm.monitor import Percentiles, Record, drift, gradient_change, typical_unit


def records(*tables):
    return [Record(k, {"fc": Percentiles(q, q)}) for k, q in enumerate(tables)]


def test_drift_is_the_formula_and_ignores_scale():
    a, b = torch.randn(3, 5).sort(0).values, torch.randn(3, 5).sort(0).values
    width = ((a[2] - a[0]) + (b[2] - b[0])) / 2
    expected = (b - a).abs().mean(0) / width
    torch.testing.assert_close(drift(records(a, b), "fc")[0], expected)
    torch.testing.assert_close(drift(records(1000 * a, 1000 * b), "fc")[0], expected)


def test_a_unit_that_is_constant_and_stays_has_no_drift():
    q = torch.zeros(3, 1)
    assert drift(records(q, q), "fc").item() == 0


def test_the_typical_unit_is_the_median():
    start = torch.tensor([[-1.0] * 5, [0.0] * 5, [1.0] * 5])
    assert typical_unit(records(start, start + torch.tensor([0.1, 0.5, 0.2, 0.9, 0.3])), "fc") == 4


@pytest.mark.parametrize("batch_norm", [False, True])
def test_gradient_change_is_section_2_by_hand(batch_norm):
    net = perceptron(batch_norm=batch_norm, inputs=6, widths=(5, 4), classes=3, std=0.5, seed=0).double()
    batch = (torch.randn(20, 6, dtype=torch.float64), torch.randint(3, (20,)))
    before = copy.deepcopy(net.state_dict())

    def gradients(model):
        model.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    found = gradient_change(net, lambda y, b: F.cross_entropy(y, b[1]), batch, rate=0.3)
    assert list(found) == ["linear2", "output"]
    old = gradients(copy.deepcopy(net))
    for layer, below, own in (
        ("linear2", ("linear1", "bn1"), ("linear2", "bn2")),
        ("output", ("linear1", "bn1", "linear2", "bn2"), ("output",)),
    ):
        moved = copy.deepcopy(net)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                if name.startswith(below):
                    p -= 0.3 * old[name]
        new = gradients(moved)
        g, h = (torch.cat([d[n].flatten() for n in d if n.startswith(own)]) for d in (old, new))
        assert found[layer].relative == pytest.approx(((h - g).norm() / g.norm()).item(), rel=1e-9)
        assert found[layer].cosine == pytest.approx(F.cosine_similarity(g, h, dim=0).item(), rel=1e-9)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"


def test_gradient_change_draws_the_same_dropout_each_time():
    net = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1))
    change = gradient_change(net, lambda y, _: y.square().mean(), torch.randn(8, 4), rate=0.0)
    assert change["2"].relative == 0
