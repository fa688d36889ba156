"""The commands of Sections 1 to 3 on MNIST, short: what is certain about each, and what it writes."""

import json

import pytest
import torch

from batchnorm.data import mnist
from batchnorm.models import perceptron
from batchnorm.reproduce.comparison import Comparison, comparison
from batchnorm.reproduce.init import Init, init
from batchnorm.reproduce.saturation import Saturation, saturated, saturation


def written(out, name):
    assert (out / f"{name}.png").stat().st_size > 5000
    result = json.loads((out / f"{name}.json").read_text())
    assert {"claim", "options", "environment"} <= result.keys()
    return result


def test_comparison(tmp_path):
    comparison(Comparison(rates=(0.1, 1.0), sweep_steps=400, marks=(200, 500), seeds=2, processes=1, out=tmp_path))
    result = written(tmp_path, "comparison")
    assert len(result["sweep"]) == 4
    plain, bn = result["equal rate"]
    assert bn["rate"] == plain["rate"] == 0.1
    assert bn["mean"][1] > plain["mean"][1] + 0.3
    assert len(bn["runs"]) == 2
    assert {row["network"]: row["rate"] for row in result["best against best"]} == result["best rate"]


def test_init_small_weights_leave_the_plain_network_on_its_plateau(tmp_path):
    init(Init(stds=(1e-3, 0.3), steps=400, seeds=1, processes=1, out=tmp_path))
    rows = {(r["network"], r["std"]): r["mean"] for r in written(tmp_path, "init")["final test accuracy"]}
    assert rows["without BN", 1e-3] < 0.3
    assert rows["with BN", 1e-3] > 0.7
    assert rows["with BN", 0.3] > 0.7


def test_saturation_starts_at_the_gaussian_tail_with_bn_and_everywhere_without():
    images = mnist().test.images[:500]
    plain, bn = (saturated(perceptron(batch_norm=b, std=1.0, seed=0), images, tail=0.05) for b in (False, True))
    assert plain["sigmoid1"] > 0.6  # |x| is about sqrt(100 ones) = 10, against 2.94 = logit(0.95)
    assert max(bn.values()) < 0.05  # P(|N(0, 1)| > 2.94) = 0.3%


def test_saturation_command(tmp_path):
    saturation(Saturation(steps=60, points=3, stds=(1.0,), processes=1, out=tmp_path))
    runs = written(tmp_path, "saturation")["runs"]
    assert [r["network"] for r in runs] == ["without BN", "with BN"]
    assert all(len(r["saturated"]) == len(r["steps"]) == 4 for r in runs)


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
