"""Run every function on networks that use a PackedSequence, inside their forward or as their batch.

A PackedSequence is a named tuple, but its constructor accepts only tensors, and its batch_sizes stay on the CPU.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import batchnorm as bn
from batchnorm import network_call

LENGTHS = (3, 5, 2, 4, 5, 3)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.relu = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()
        self.lstm, self.hidden, self.tanh, self.out = nn.LSTM(6, 5), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)


class Inside(Layers):
    """Takes a padded batch, and packs it in forward."""

    def forward(self, x):
        packed = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
        packed = packed._replace(data=self.relu(self.norm(self.fc(packed.data))))
        y, lengths = pad_packed_sequence(self.lstm(packed)[0])
        return self.out(self.tanh(self.hidden(y[-1]))), lengths


class Packed(Layers):
    """Takes and returns a PackedSequence."""

    def forward(self, packed):
        y, _ = self.lstm(packed._replace(data=self.relu(self.norm(self.fc(packed.data)))))
        return y._replace(data=self.out(self.tanh(self.hidden(y.data))))


PACKED = pack_sequence([torch.randn(n, 4) for n in LENGTHS], enforce_sorted=False)
CASES = [
    (Inside, torch.randn(5, 6, 4)),
    (Packed, PACKED),
    (Packed, (PACKED, torch.zeros(6))),
    (Packed, {"packed": PACKED}),
]


@pytest.mark.parametrize(("make", "batch"), CASES)
def test_every_function_handles_packed_sequences(make, batch):
    torch.manual_seed(0)
    net = make()

    def outputs(of):
        return network_call.call(of.eval(), batch)

    assert not bn.estimate_(net, [batch, batch], upstream="population").left_alone
    x = net.fc(batch if make is Inside else PACKED.data).detach()
    if make is Packed:
        torch.testing.assert_close(net.norm.running_mean, x.mean(0))
    expected = outputs(net)
    assert bn.insert(net, batch).report.paths("inserted") == ["hidden"]
    torch.testing.assert_close(outputs(bn.insert(net, batch, init="identity", batches=[batch])), expected)
    converted = bn.convert(net, batch)
    assert converted.report.paths("converted") == ["norm"]
    torch.testing.assert_close(outputs(converted), expected)
    torch.testing.assert_close(outputs(bn.revert(converted, batch)), expected)
    folded = bn.fold(net, batch)
    assert folded.report["norm"].action == "folded into 'fc'"
    torch.testing.assert_close(outputs(folded), expected)
    assert bn.adapt(net, [batch]).report.layers
    assert [finding.path for finding in bn.diagnose(net, [batch, batch])] == ["fc"]


@pytest.mark.parametrize(("make", "batch"), CASES)
def test_a_monitor_records_with_packed_sequences(make, batch):
    net = make().train()
    with bn.Monitor(net, every=1, probe=batch) as monitor:
        network_call.call(net, batch)
        monitor.record(1, batch)
    assert [sorted(record.percentiles) for record in monitor.records] == [["relu", "tanh"]] * 2


def test_batch_sizes_stay_on_the_cpu():
    moved = network_call.copy_for(nn.Linear(1, 1, device="meta"), {"packed": PACKED})["packed"]
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
