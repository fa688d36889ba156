"""Section 3.3's conjecture: do layer Jacobians between normalized vectors have singular values close to 1?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...layers import BatchNorm1d
from ...pictures import GRAY
from ..publish import Experiment, color, label, publish
from .training import Setting, digits, order, train_


@dataclass(frozen=True)
class Jacobian(Experiment):
    """Measure the singular values of the Jacobians between consecutive hidden layers, with and without BN.

    A Jacobian is J = d z_hat / d x_hat. Here, x_hat and z_hat are the normalized inputs of the nonlinearities of the
    lower and the upper layer.

    Paper: Sec. 3.3, layer Jacobians
    """

    steps: int = 5000
    """Updates per network; J is measured before the first and after the last update."""
    rate: float = 0.1
    """Learning rate."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    examples: int = 100
    """Number of test digits at which J is computed."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""
    out: Path = Path("runs/jacobian")


class HiddenLayer(NamedTuple):
    """A hidden layer y = gamma x_hat + beta with x_hat = (Wu + b - mu) / sd, where u is the layer's input.

    Here mu and sd are the population mean and standard deviation of Wu + b; with batch normalization, eps is added to
    the variance. Without batch normalization, gamma = sd and beta = mu, so that y = Wu + b.
    """

    weight: Tensor
    bias: Tensor
    mu: Tensor
    sd: Tensor
    gamma: Tensor
    beta: Tensor


def jacobian(options: Jacobian) -> dict[str, Any]:
    """Run the experiment and write its result."""
    settings = [Setting(kind, options.steps, options.rate, options.std, seed=options.seed) for kind in (False, True)]
    results = options.run(_measure, [(s, options.examples) for s in settings])
    rows = [
        {"network": label(s.batch_norm), **row} for s, found in zip(settings, results, strict=True) for row in found
    ]
    claim = "Batch Normalization may lead the layer Jacobians to have singular values close to 1."
    null = "Gaussian matrices of the same size and Frobenius norm, one for each Jacobian"
    findings = {"null": null, "pairs": rows}
    return publish(options, claim, findings, _verdicts(rows), draw)


def _verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    last = max(row["step"] for row in rows)
    near = {(row["layers"], row["network"]): row for row in rows if row["step"] == last}
    pairs = {layers for layers, _ in near}

    def share(layers: str, kind: bool, of: str) -> float:
        return float(near[layers, label(kind)][of]["fraction between 1/2 and 2"])

    return {
        "for all layer pairs, more singular values are near 1 with BN than without": all(
            share(layers, True, "J") > share(layers, False, "J") for layers in pairs
        ),
        "for all layer pairs, with BN, more singular values are near 1 than in random matrices of the same norm": all(
            share(layers, True, "J") > share(layers, True, "random") for layers in pairs
        ),
    }


def _measure(job: tuple[Setting, int]) -> list[dict[str, Any]]:
    setting, examples = job
    net, data = setting.network(), digits()
    images = data.test.images[:examples]
    rows = []
    for step, _ in chain([(0, 0.0)], train_(net, data.train, setting, [setting.steps])):
        batches = [data.train.images[row] for row in order(setting, len(data.train.images), 0, 200).unbind()]
        if not all(parameter.isfinite().all() for parameter in net.parameters()):
            raise ValueError(f"the network {label(setting.batch_norm)} diverged: choose a rate below {setting.rate:g}")
        layers = population_layers(net, batches)
        for k, (x_hat, *pair) in enumerate(_pairs(layers, images), 1):
            matrices = layer_jacobian(x_hat, *pair)
            values = torch.linalg.svdvals(matrices)
            null = torch.linalg.svdvals(like_random(matrices))
            rows.append({"step": step, "layers": f"{k} to {k + 1}", "J": _summary(values), "random": _summary(null)})
    return rows


@torch.no_grad()
def population_layers(net: nn.Sequential, batches: Sequence[Tensor]) -> list[HiddenLayer]:
    """Return a perceptron's hidden layers with population statistics, estimated from all batches together.

    The first layer's statistics are estimated first, because a layer's input depends on the layers below it.

    Paper: Alg. 2, l. 10; Sec. 3.3
    """
    layers: list[HiddenLayer] = []
    u = torch.cat(list(batches)).double()
    for linear, bn in pairwise(net):
        if not isinstance(linear, nn.Linear):
            continue
        weight = linear.weight.double()
        given: Tensor | None = linear.bias
        bias = weight.new_zeros(len(weight)) if given is None else given.double()
        x = u @ weight.t() + bias
        var, mu = torch.var_mean(x, 0, correction=1)
        if isinstance(bn, BatchNorm1d):
            sd = (var + bn.eps).sqrt()
            layer = HiddenLayer(weight, bias, mu, sd, bn.weight.double(), bn.bias.double())
        else:
            sd = var.sqrt()
            layer = HiddenLayer(weight, bias, mu, sd, sd, mu)
        layers.append(layer)
        u = torch.sigmoid(layer.gamma * (x - mu) / sd + layer.beta)
    return layers


def layer_jacobian(x_hat: Tensor, below: HiddenLayer, above: HiddenLayer) -> Tensor:
    """Return J = diag(1/sd') W' diag(dg(gamma x_hat + beta) gamma) for each example, of shape (examples, K', K).

    J is the derivative of z_hat = (W' g(gamma x_hat + beta) + b' - mu') / sd' with respect to x_hat. Primes mark the
    layer above, dg is the derivative of the sigmoid g, and the layers have K and K' units.

    Paper: Sec. 3.3, z_hat = F(x_hat)
    """
    z = torch.sigmoid(below.gamma * x_hat + below.beta)
    slope = z * (1 - z) * below.gamma
    return above.weight / above.sd[:, None] * slope[:, None, :]


def like_random(matrices: Tensor) -> Tensor:
    """Return random Gaussian matrices of the same sizes and Frobenius norms as ``matrices``, as a baseline."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(matrices.shape, generator=generator, dtype=matrices.dtype)
    given: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    scale: Tensor = given / torch.linalg.matrix_norm(random, keepdim=True)
    return random * scale


def _pairs(layers: Sequence[HiddenLayer], images: Tensor) -> list[tuple[Tensor, HiddenLayer, HiddenLayer]]:
    pairs, u = [], images.double()
    for layer, above in pairwise(layers):
        x_hat = (u @ layer.weight.t() + layer.bias - layer.mu) / layer.sd
        pairs.append((x_hat, layer, above))
        u = torch.sigmoid(layer.gamma * x_hat + layer.beta)
    return pairs


def _summary(values: Tensor) -> dict[str, Any]:
    """Return percentiles, the fraction near 1, and other statistics of singular values of shape (examples, values)."""
    q = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=values.dtype)
    near = ((values > 0.5) & (values < 2)).double().mean()
    return {
        "percentiles 5, 25, 50, 75, 95": [round(v, 5) for v in values.flatten().quantile(q).tolist()],
        "fraction between 1/2 and 2": round(near.item(), 4),
        "largest": round(values[:, 0].median().item(), 5),
        "condition": float(f"{(values[:, 0] / values[:, -1]).median().item():.4g}"),
        "mean spectrum": [round(v, 5) for v in values.mean(0).tolist()],
    }


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the singular values of each Jacobian and of random matrices of the same norm, averaged over examples."""
    rows = result["pairs"]
    pairs = sorted({(row["layers"], row["step"]) for row in rows})
    figure, axes = plt.subplots(1, len(pairs), figsize=(11, 2.7), sharey=True)
    for axis, (layers, step) in zip(axes, pairs, strict=True):
        for row in (r for r in rows if (r["layers"], r["step"]) == (layers, step)):
            name = row["network"]
            axis.plot(row["J"]["mean spectrum"], color=color(name), label=name)
            axis.plot(row["random"]["mean spectrum"], ":", lw=1, color=color(name), label="random of the same norm")
        axis.axhline(1, color=GRAY, lw=0.7)
        axis.set(title=f"layer {layers}, step {step:,}", xlabel="index", yscale="log", ylim=(1e-3, 30))
    axes[0].set_ylabel("singular value of J")
    axes[0].legend(fontsize=6)
    return figure
