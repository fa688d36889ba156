"""Exporting a network in training mode silently gives a different function (pytorch 75252, 52867)."""

import pytest
import torch
from networks import scramble_
from torch import nn

import batchnorm as bn


def network():
    return scramble_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)))


def test_torchs_exporter_writes_the_training_function():
    net, x = network().train(), torch.randn(4, 3, 6, 6)
    program = torch.export.export(net, (x,)).module()
    assert (program(x) - net.eval()(x)).abs().max() > 0.1, "torch has fixed it"


@pytest.mark.parametrize("name", ["net.onnx", "net.pt2"])
def test_ours_writes_the_inference_network_and_says_so(tmp_path, name):
    net, x = network().train(), torch.randn(4, 3, 6, 6)
    with pytest.warns(UserWarning, match="the network is in training mode; export writes it in evaluation mode"):
        done = bn.export(net, x, tmp_path / name)
    assert net.training
    assert done.fold.paths("folded") == ["1"]
    if name == "net.pt2":
        program = torch.export.load(tmp_path / name).module()
        torch.testing.assert_close(program(x), net.eval()(x), rtol=1e-4, atol=1e-5)
