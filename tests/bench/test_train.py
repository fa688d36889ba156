import pytest
import torch
from torch import nn

from batchnorm.bench.contenders import OURS, STOCK, STOCK_COMPOSED, Timed
from batchnorm.bench.kernels import kernels
from batchnorm.bench.step_profile import Launch, summary
from batchnorm.bench.train import StepTime, check_same_function, profile_report, report, train
from batchnorm.layers import BatchNorm
from batchnorm.models.bn_inception import pooling


def test_stock_parts_are_torchs():
    net = STOCK.network(64, torch.device("cpu"))
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 70 - 1  # after each convolution, except the depthwise one in the stem
    assert not any(isinstance(m, BatchNorm | pooling.MaxPool2d | pooling.AvgPool2d) for m in net.modules())


def test_contenders_compute_the_same_loss():
    ready = [Timed(contender, 2, 64, torch.device("cpu")) for contender in (STOCK, STOCK_COMPOSED, OURS)]
    losses = {timed.contender.name: timed.first_loss() for timed in ready}
    check_same_function(losses)
    losses[OURS.name] *= 1.1
    with pytest.raises(RuntimeError, match="nothing is timed"):
        check_same_function(losses)


def test_the_table_says_whether_the_bar_is_reached():
    stock = [StepTime("stock", 32, 6.0, 5333.0, 1.0, 0.9), StepTime("composed", 32, 5.4, 5926.0, 1.1, 1.0)]
    fast, slow = (StepTime("ours", 32, 1.0, speed, 2.2, ratio) for speed, ratio in ((11_000.0, 2.0), (10_000.0, 1.9)))
    assert report([*stock, fast], 32, 224).count(": reached") == 2
    assert report([*stock, slow], 32, 224).count(": MISSED") == 2
    assert "reached" not in report([*stock, fast], 32, 64)  # the goals are for images of 224 px


def test_a_profile_sums_kernels_by_kind():
    names = ["sm90_xmma_dgrad_x", "backward_layers", "max_backward_2", "forward_layers_2", "Memset (Device)", "forward"]
    found = summary([Launch(name, 10 * k, 10 * k + 5) for k, name in enumerate(names)], steps=2)
    assert found["launches"] == 3
    assert found["busy"] == 6 * 5 / 55
    assert list(found["milliseconds"].values()) == pytest.approx([0.0025] * 6)
    assert found["longest_rest"] == {"forward_layers_2": 0.0025}  # no kernel of this library has this name
    assert "BN, backward" in profile_report(found)
    assert "3 launches" in profile_report(found)
    with pytest.raises(RuntimeError, match="no kernels"):
        summary([], 1)


@pytest.mark.gpu
def test_a_step_is_profiled():
    found = Timed(OURS, 2, 64, torch.device("cuda")).profile()
    assert found["milliseconds"]["BN, forward"] > 0
    assert found["milliseconds"]["convolutions, forward"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("benchmark", [train, kernels])
def test_without_a_gpu(benchmark):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        benchmark()
