"""Section 3.3: BN makes a layer's output independent of the scale of its weights. Does it also limit their growth?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...layers import BatchNorm1d
from ...ops import reference
from ..publish import Experiment, color, label, publish
from .training import Setting, digits, evenly, train_


@dataclass(frozen=True)
class Scale(Experiment):
    """Check Section 3.3's identities during training, and measure the growth of weights at large learning rates.

    Paper: Sec. 3.3
    """

    steps: int = 3000
    """Updates per run."""
    rates: tuple[float, ...] = (0.1, 1.0, 10.0)
    """Learning rates."""
    factors: tuple[float, ...] = (0.1, 0.5, 2.0, 10.0)
    """The factors a > 0 by which the identities multiply a layer's weights W."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    points: int = 20
    """Number of measurements during each run; the weights' norms are also measured before training."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""
    out: Path = Path("runs/scale")


def scale(options: Scale) -> dict[str, Any]:
    """Run the experiment and write its result."""
    marks = evenly(options.steps, options.points)
    settings = [
        Setting(kind, options.steps, rate, options.std, seed=options.seed)
        for kind in (False, True)
        for rate in options.rates
    ]
    results = options.run(_follow, [(s, marks, options.factors) for s in settings])
    growth = [
        {"network": label(s.batch_norm), "rate": s.rate, "steps": [0, *marks], **growth}
        for s, (growth, _) in zip(settings, results, strict=True)
    ]
    identities = [{"rate": s.rate, **row} for s, (_, rows) in zip(settings, results, strict=True) for row in rows]
    claim = "BN((aW)u) = BN(Wu); d BN((aW)u) / du = d BN(Wu) / du; d BN((aW)u) / d(aW) = (1/a) d BN(Wu) / dW;"
    claim += " larger weights lead to smaller gradients, and Batch Normalization will stabilize the parameter growth."
    findings: dict[str, Any] = {"growth": growth, "identities": identities, "largest": largest(identities)}
    verdicts = {"BN((aW)u) = BN(Wu), within the bound that eps sets": findings["largest"]["output"] <= 1}
    return publish(options, claim, findings, verdicts, draw)


def identity_gaps(u: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float, a: float) -> dict[str, float]:
    """Return by how much each of Section 3.3's identities is violated.

    Because of eps, the outputs BN(aWu) and BN(Wu) are not exactly equal. The elementwise bound on |BN(aWu) - BN(Wu)| is
    |gamma x_hat| eps |1 - 1/a^2| / (sigma^2 + eps/a^2), where x_hat and sigma are those of Wu. All gradients are
    computed for one random output gradient.

    Returns:
        A dict with four values:

        - "output": the largest ratio of |BN(aWu) - BN(Wu)| to its bound, which should be at most 1.
        - "output gap": the largest value of |BN(aWu) - BN(Wu)|.
        - "du": the relative distance between the gradients with respect to u, computed with W and with aW.
        - "dW": the relative distance between the gradient with respect to W, and a times the gradient with respect
          to aW.
    """
    values = [_forward_and_gradients(u, factor * weight, gamma, beta, eps) for factor in (1.0, a)]
    (one, du, dw), (other, du_a, dw_a) = values
    bound = (one.y - beta).abs() * eps * abs(1 - a**-2) / (one.var + eps / a**2)
    # Allow for rounding in float64, because the bound is 0 for units that are constant on the batch.
    ratio = (other.y - one.y).abs() / (bound + 1e-12 * one.y.abs().clamp(min=1))
    return {
        "output": ratio.max().item(),
        "output gap": (other.y - one.y).abs().max().item(),
        "du": ((du_a - du).norm() / du.norm()).item(),
        "dW": ((a * dw_a - dw).norm() / dw.norm()).item(),
    }


def _forward_and_gradients(
    u: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float
) -> tuple[reference.Algorithm1, Tensor, Tensor]:
    u, weight = u.detach().requires_grad_(), weight.detach().requires_grad_()
    normalized = reference.batch_norm(u @ weight.t(), gamma, beta, eps)
    cotangent = torch.randn(normalized.y.shape, generator=torch.Generator().manual_seed(0), dtype=u.dtype)
    du, dw = torch.autograd.grad(normalized.y, (u, weight), cotangent)
    return reference.Algorithm1(*(v.detach() for v in normalized)), du, dw


def largest(identities: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the maximum over all rows of each value that :func:`identity_gaps` returns."""
    return {key: max(row[key] for row in identities) for key in ("output", "output gap", "du", "dW")}


def _follow(job: tuple[Setting, Sequence[int], Sequence[float]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    setting, marks, factors = job
    net, data = setting.network(), digits()
    batch = data.train.images[:60]
    norms = [_norms(net)]
    rows: list[dict[str, Any]] = []
    for step, _ in train_(net, data.train, setting, marks):
        norms.append(_norms(net))
        if setting.batch_norm:
            rows += [{"step": step, **row} for row in _identities(net, batch, factors)]
    return {"norms": {name: [n[name] for n in norms] for name in norms[0]}}, rows


def _norms(net: nn.Module) -> dict[str, float]:
    return {name: m.weight.norm().item() for name, m in net.named_modules() if isinstance(m, nn.Linear)}


@torch.no_grad()
def _identities(net: nn.Sequential, batch: Tensor, factors: Sequence[float]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    u = batch.double()
    for (_, linear), (name, bn) in pairwise(net.named_children()):
        if not isinstance(bn, BatchNorm1d) or not isinstance(linear, nn.Linear):
            continue
        weight = linear.weight.double()
        gamma, beta = bn.weight.double(), bn.bias.double()
        with torch.enable_grad():
            gaps = [{"layer": name, "a": a, **identity_gaps(u, weight, gamma, beta, bn.eps, a)} for a in factors]
        rows += gaps
        u = torch.sigmoid(reference.batch_norm(u @ weight.t(), gamma, beta, bn.eps).y)
    return rows


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the norm of each layer's weights during training."""
    growth = result["growth"]
    layers = list(growth[0]["norms"])
    figure, axes = plt.subplots(1, len(layers), figsize=(11, 2.9))
    dashes = dict(zip(sorted({row["rate"] for row in growth}), cycle((":", "-", "--", "-.")), strict=False))
    for axis, layer in zip(axes, layers, strict=True):
        for row in growth:
            name = f"{row['network']}, rate {row['rate']:g}"
            axis.plot(row["steps"], row["norms"][layer], dashes[row["rate"]], color=color(row["network"]), label=name)
        axis.set(title=f"norm of W, {layer}", xlabel="training steps")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    return figure
