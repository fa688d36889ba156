"""Test short runs of the MNIST experiments: the results that they must show, and their files."""

import json

import pytest
import torch

from batchnorm.data import Digits, mnist
from batchnorm.models import perceptron
from batchnorm.reproduce.mnist import jacobian as jacobian_module
from batchnorm.reproduce.mnist.comparison import Comparison, comparison
from batchnorm.reproduce.mnist.comparison import draw as draw_comparison
from batchnorm.reproduce.mnist.initialization import Init, init
from batchnorm.reproduce.mnist.jacobian import Jacobian, jacobian
from batchnorm.reproduce.mnist.optimizers import OPTIMIZERS, Optimizers, optimizers
from batchnorm.reproduce.mnist.placement import Placement, build, placement, shape, shapes
from batchnorm.reproduce.mnist.saturation import Saturation, saturated, saturation
from batchnorm.reproduce.mnist.scale import Scale, identity_gaps, scale
from batchnorm.reproduce.mnist.section2 import Section2, section2, train_bias


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


def test_the_picture_of_short_runs_has_all_their_points_and_no_legend_over_them():
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = [
        {"network": n, "rate": 0.1, "steps": [20, 50], "mean": [0.1, 0.4], "spread": [None, None]}
        for n in ("without BN", "with BN")
    ]
    figure = draw_comparison({"sweep": rows, "best against best": rows, "equal rate": rows}, plt)
    figure.canvas.draw()
    for axes in figure.axes:
        assert axes.get_ylim()[0] <= 0.1
        assert not axes.get_legend().get_window_extent().overlaps(axes.bbox)
    plt.close(figure)


def test_init_small_weights_leave_the_plain_network_on_its_plateau(tmp_path):
    init(Init(stds=(1e-3, 0.3), steps=400, seeds=1, processes=1, out=tmp_path))
    rows = {(r["network"], r["std"]): r["mean"] for r in written(tmp_path, "init")["final test accuracy"]}
    assert rows["without BN", 1e-3] < 0.3
    assert rows["with BN", 1e-3] > 0.7
    assert rows["with BN", 0.3] > 0.7


def test_init_with_short_runs_gives_no_verdict(tmp_path, capsys):
    init(Init(stds=(0.1,), steps=5, seeds=1, processes=1, out=tmp_path))
    shown = capsys.readouterr().out
    assert "the runs were too short to tell: networks with BN exceed 90% at every standard deviation" in shown
    assert "refuted" not in shown


def test_saturation_starts_at_the_gaussian_tail_with_bn_and_everywhere_without():
    images = mnist().test.images[:500]
    plain, bn = (saturated(perceptron(batch_norm=b, std=1.0, seed=0), images, tail=0.05) for b in (False, True))
    assert plain["sigmoid1"] > 0.6  # |x| is about sqrt(100) = 10, far above logit(0.95) = 2.94
    assert max(bn.values()) < 0.05  # P(|N(0, 1)| > 2.94) = 0.3%


def test_saturation_command(tmp_path):
    saturation(Saturation(steps=60, points=3, stds=(1.0,), processes=1, out=tmp_path))
    runs = written(tmp_path, "saturation")["runs"]
    assert [r["network"] for r in runs] == ["without BN", "with BN"]
    assert all(len(r["saturated"]) == len(r["steps"]) == 4 for r in runs)


def test_section2_b_grows_without_end_while_the_loss_stays():
    data = mnist().train
    few = Digits(data.images[:300], data.labels[:300])
    ignored = train_bias(few, steps=200, rate=1.0, seed=0, through=False)
    norms, losses = ignored["norm of b"], ignored["loss"]
    assert max(losses) - min(losses) < 1e-9
    # x_hat does not depend on b, so the gradient stays the same, and b moves by the same amount in every step.
    assert norms[199] == pytest.approx(199 * norms[1], rel=1e-6)
    assert norms[1] > 1e-3
    through = train_bias(few, steps=200, rate=1.0, seed=0, through=True)
    assert max(through["norm of b"]) < 1e-10


def test_section2_command(tmp_path):
    section2(Section2(bias_steps=20, steps=40, rates=(0.1,), processes=1, out=tmp_path))
    runs = {r["variant"]: r["rows"][-1] for r in written(tmp_path, "section2")["whole network"]}
    assert len(runs) == 3
    # With BN, the gradient with respect to b is zero: b stays where it was, up to rounding of float32.
    assert runs["batch normalization"]["norm of b"] < 1e-4
    assert runs["centering outside the gradient"]["norm of b"] > 1e-3


@pytest.mark.parametrize("a", [0.01, 0.5, 3.0, 100.0])
def test_scale_identities_hold_up_to_eps(a):
    u, weight = torch.randn(60, 20, dtype=torch.float64), torch.randn(7, 20, dtype=torch.float64)
    gamma, beta = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    exact = identity_gaps(u, weight, gamma, beta, eps=0.0, a=a)
    assert max(exact["output gap"], exact["du"], exact["dW"]) < 1e-9
    gaps = identity_gaps(u, weight, gamma, beta, eps=1e-3, a=a)
    assert 0 < gaps["output"] <= 1


def test_scale_command(tmp_path):
    scale(Scale(steps=40, points=2, rates=(0.1, 1.0), processes=1, out=tmp_path))
    result = written(tmp_path, "scale")
    assert len(result["growth"]) == 4
    assert len(result["identities"]) == 2 * 2 * 3 * 4
    assert result["largest"]["output"] <= 1


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_jacobian_is_autograds(batch_norm):
    net = perceptron(batch_norm=batch_norm, inputs=8, widths=(6, 5, 4), std=1.0, seed=0)
    for name, p in net.named_parameters():
        if "bn" in name or "bias" in name:
            torch.nn.init.normal_(p)
    below, above, _ = jacobian_module.population_layers(net, [torch.randn(50, 8)])
    x_hat = torch.randn(3, 6, dtype=torch.float64)

    def between(x_hat):
        u = torch.sigmoid(below.gamma * x_hat + below.beta)
        return (u @ above.weight.t() + above.bias - above.mu) / above.sd

    expected = torch.stack([torch.autograd.functional.jacobian(between, row) for row in x_hat])
    torch.testing.assert_close(jacobian_module.layer_jacobian(x_hat, below, above), expected)


def test_jacobian_command_and_its_null(tmp_path):
    jacobian(Jacobian(steps=30, examples=10, processes=1, out=tmp_path))
    pairs = written(tmp_path, "jacobian")["pairs"]
    assert [(p["network"], p["step"], p["layers"]) for p in pairs][:2] == [
        ("without BN", 0, "1 to 2"),
        ("without BN", 0, "2 to 3"),
    ]
    assert len(pairs) == 8
    matrices = torch.randn(4, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(jacobian_module.like_random(matrices).norm(dim=(1, 2)), matrices.norm(dim=(1, 2)))


def test_shape_of_known_distributions():
    normal = shape(torch.randn(100_000, 20, dtype=torch.float64))
    assert normal["skewness"] < 0.05
    assert abs(normal["excess kurtosis"]) < 0.1
    exponential = shape(-torch.rand(100_000, 20, dtype=torch.float64).log())
    assert exponential["skewness"] == pytest.approx(2, rel=0.05)
    assert exponential["excess kurtosis"] == pytest.approx(6, rel=0.2)
    assert shape(torch.eye(10, dtype=torch.float64))["sparsity"] == 1
    assert shape(torch.ones(3, 10, dtype=torch.float64))["sparsity"] == pytest.approx(0, abs=1e-4)


def test_relu_outputs_are_sparser_and_more_skewed_than_their_inputs():
    found = shapes(build("before", "relu", std=0.1, seed=0), mnist().test.images[:1000])
    for k in "123":
        assert found[f"u {k}"]["sparsity"] > found[f"Wu {k}"]["sparsity"] + 0.1
        assert found[f"u {k}"]["skewness"] > found[f"Wu {k}"]["skewness"]


def test_placement_command(tmp_path):
    placement(Placement(steps=20, seeds=1, processes=1, out=tmp_path))
    runs = written(tmp_path, "placement")["runs"]
    assert len(runs) == 4
    assert set(runs[0]["shapes"]) == {"0", "20"}


def test_every_optimizer_trains_with_bn(tmp_path):
    optimizers(Optimizers(steps=250, batch_steps=40, batch=600, processes=1, out=tmp_path))
    runs = written(tmp_path, "optimizers")["runs"]
    assert len(runs) == 2 * len(OPTIMIZERS)
    for run in (r for r in runs if r["network"] == "with BN"):
        assert run["loss"][-1] < run["loss"][0]
        assert run["accuracy"][-1] > 0.7, run["optimizer"]


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads
