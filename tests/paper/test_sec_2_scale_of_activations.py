"""Section 2: statistics of a single example or of a single location discard the scale of the activations."""

import torch
import torch.nn.functional as F

import batchnorm as bn

f64 = torch.float64


def test_statistics_of_a_single_example_discard_its_scale():
    x = torch.randn(8, 5, dtype=f64)
    x[1] = 3 * x[0]
    by_example = F.layer_norm(x, (5,), eps=0.0)
    torch.testing.assert_close(by_example[1], by_example[0])
    y, _ = bn.ops.batch_norm(x, eps=0.0)
    assert (y[1] - y[0]).norm() > 0.5
    # BN maps both examples by the same increasing function of each feature, so their order stays the same.
    assert torch.equal(y[1] > y[0], x[1] > x[0])


def test_statistics_over_feature_maps_at_a_location_discard_its_scale():
    x = torch.randn(4, 6, 3, 3, dtype=f64)
    x[:, :, 0, 1] = 3 * x[:, :, 0, 0]
    by_location = F.layer_norm(x.movedim(1, -1), (6,), eps=0.0).movedim(-1, 1)
    torch.testing.assert_close(by_location[:, :, 0, 1], by_location[:, :, 0, 0])
    y, _ = bn.ops.batch_norm(x, eps=0.0)
    assert (y[:, :, 0, 1] - y[:, :, 0, 0]).norm() > 0.5
