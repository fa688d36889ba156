"""Section 5: recomputed population statistics let a network work on a new data distribution."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    train, test = bn.data.mnist()
    net = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    net = bn.insert(net, train.images[:2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    for k in range(300):
        rows = slice(100 * k, 100 * (k + 1))
        loss = F.cross_entropy(net(train.images[rows]), train.labels[rows])
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    bn.estimate_(net, train.images[:10_000].split(500))
    return net.eval(), test


def accuracy(net, images, labels):
    with torch.no_grad():
        return (net(images).argmax(1) == labels).float().mean().item()


def shifted(images):
    """Return the images with lower contrast, higher brightness and noise."""
    return 0.4 * images + 0.5 + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))


def test_new_statistics_restore_the_accuracy(trained):
    net, (images, labels) = trained
    before, state = accuracy(net, images, labels), {k: v.clone() for k, v in net.state_dict().items()}
    assert before > 0.92
    new = shifted(images)
    assert accuracy(net, new, labels) < 0.6
    adapted = bn.adapt(net, new[:2000].split(500))  # without labels
    assert accuracy(adapted, new[2000:], labels[2000:]) > before - 0.05
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
    assert adapted.report.layers[0].mean_gap > 0.5


def test_a_prior_helps_if_there_are_few_samples(trained):
    net, (images, labels) = trained
    few = [images[:8]]  # the same domain: the old statistics are right
    alone, careful = (accuracy(bn.adapt(net, few, prior=prior), images, labels) for prior in (0, 4))
    assert careful > alone + 0.02
    assert careful > accuracy(net, images, labels) - 0.02


def test_statistics_are_averaged_as_stated():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), bn.BatchNorm1d(3, activation="relu"))
    batches = [torch.randn(16, 3) * 2 + 5 for _ in range(3)]
    new, mixed = bn.adapt(net, batches), bn.adapt(net, batches, prior=1)
    for k in (0, 2):
        torch.testing.assert_close(mixed[k].running_mean, 0.75 * new[k].running_mean)
        torch.testing.assert_close(mixed[k].running_var, 0.75 * new[k].running_var + 0.25)
    assert mixed.training
    with pytest.raises(ValueError, match="prior=-1: must be 0 or more"):
        bn.adapt(net, batches, prior=-1)


def test_a_layer_that_is_called_twice():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + super().forward(x + 4)

    net = Twice(nn.BatchNorm1d(3))
    net[0].running_mean.fill_(10)
    new = bn.adapt(net, [torch.randn(64, 3) for _ in range(3)])
    mixed = bn.adapt(net, [torch.randn(64, 3) for _ in range(3)], prior=3)
    torch.testing.assert_close(mixed[0].running_mean, (new[0].running_mean + 10) / 2, rtol=0.1, atol=0)


def test_old_statistics_that_are_not_finite():
    net = nn.Sequential(nn.BatchNorm1d(3))
    net[0].running_mean.fill_(float("nan"))
    assert bn.adapt(net, [torch.randn(8, 3)])[0].running_mean.isfinite().all()
    with pytest.raises(ValueError, match="the old running_mean of layer '0' is not finite: use prior=0"):
        bn.adapt(net, [torch.randn(8, 3)], prior=1)


def test_the_original_is_never_run():
    net, batches = nn.Sequential(nn.BatchNorm1d(3)), [torch.randn(8, 3)]
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match="a copy of the network still uses"):
        bn.adapt(net, batches, forward=lambda new, batch: net(batch))
    assert net[0].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_renorm_does_not_pull_toward_the_old_statistics():
    layers = [bn.BatchNorm1d(8, statistics=bn.Renorm()), nn.ReLU(), nn.Linear(8, 8)]
    net = nn.Sequential(*layers, bn.BatchNorm1d(8, statistics=bn.Renorm()))
    new = [torch.randn(64, 8) * 4 + 6 for _ in range(30)]
    out = bn.adapt(net, new).eval()(torch.cat(new))
    torch.testing.assert_close(out.mean(0), torch.zeros(8), rtol=0, atol=0.02)
    torch.testing.assert_close(out.std(0), torch.ones(8), rtol=0.02, atol=0)
    assert net[0].statistics == bn.Renorm()
