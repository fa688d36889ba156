"""Results do not depend on torch.set_default_device, because new tensors are created on the device of their operands.

The default device is "meta" here: a tensor that is created on it by mistake has no values, so something fails.
"""

import copy
import tempfile

import pytest
import torch
from blocks import Bottleneck
from torch import nn

import batchnorm as bn
from batchnorm import network_call


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        self.block, self.late = Bottleneck(), nn.BatchNorm2d(4)
        self.fc, self.norm, self.out = nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x):
        x = self.late(self.block(self.relu(self.bn(self.conv(x)))))
        return self.out(torch.sigmoid(self.norm(self.fc(x.flatten(1))))), 0.5


def insert(net, x):
    plain = nn.Sequential(net.conv, nn.Flatten(2), nn.ReLU(), nn.Flatten(), net.fc, nn.Tanh(), net.out)
    identity = bn.insert(plain, x, init="identity", batches=[x])
    return bn.insert(plain, x), bn.insert(plain, x, placement="after"), identity


def fold(net, x):
    return bn.fold(net, x), bn.fold(net, x, traced=True), bn.fold(bn.convert(net, x), x)


def estimate(net, x):
    bn.estimate_(net, [x, x + 1], upstream="population")
    return net, bn.adapt(net, [x], prior=2.0)


def freeze(net, x):
    frozen, loaded = bn.freeze_(bn.convert(net, x)), bn.convert(net, x)
    loaded.load_state_dict(frozen.state_dict())
    return frozen, loaded.train()(x)


def export(net, x):
    with tempfile.TemporaryDirectory() as folder:
        bn.export(net.eval(), x, f"{folder}/net.pt2")


def diagnose(net, x):
    return str(bn.diagnose(net, [x, x]))


def monitor(net, x):
    with bn.Monitor(net, every=1) as watched:
        net(x)
        net(x[:0])
    return watched.records


def train(net, x):
    optimizer = torch.optim.SGD(bn.param_groups(net, 0.1), lr=0.1)
    for _ in range(2):
        net.train()(x)[0].square().sum().backward()
        optimizer.step()
    return net


def train_converted(net, x):
    return train(bn.convert(net, x), x), bn.revert(bn.convert(net, x), x)


def train_layers(net, x):
    mask = torch.ones(8, 6, 6, dtype=torch.bool, device="cpu")
    results = []
    for options in ({"activation": "relu"}, {"statistics": bn.Ghost(2)}, {"statistics": bn.Renorm()}):
        for track in (True, False) if options.get("statistics") != bn.Renorm() else (True,):
            layer = bn.BatchNorm2d(3, device="cpu", track_running_stats=track, **options)
            results += [layer, layer(x), layer(x, x, mask), layer(x[..., ::2])]
    return results


def train_with_recomputation(net, x):
    with bn.recompute():
        loss = bn.convert(net, x)(x)[0].square().sum()
    loss.backward()
    return loss


def as_values(result):
    """Return the tensors and strings in a result, and the state dicts of its networks."""
    found = [item for _, item in network_call.walk([("", result)]) if isinstance(item, torch.Tensor | nn.Module | str)]
    return [item.state_dict() if isinstance(item, nn.Module) else item for item in found]


RUNS = (
    bn.convert, insert, fold, estimate, freeze, export, diagnose, monitor, train, train_converted, train_layers,
    train_with_recomputation,
)  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_the_default_device_changes_no_result(run):
    net, x = Net(), torch.randn(8, 3, 6, 6)
    expected = as_values(run(copy.deepcopy(net), x))
    torch.set_default_device("meta")
    try:
        found = as_values(run(net, x))
    finally:
        torch.set_default_device(None)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
