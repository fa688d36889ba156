"""Measure internal covariate shift: how distributions drift, and how a layer's gradient changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as TorchNorm

from .. import network_call
from ..network_copy import unwrapped
from .records import Change, Record
from .taps import unsynchronized


def drift(records: Sequence[Record], layer: str, of: Literal["z", "x"] = "z") -> Tensor:
    """Return how far each unit's distribution moved between consecutive records, relative to its width.

    The drift is mean_p |q_p(t) - q_p(s)| / w, where q_p(s) and q_p(t) are the percentiles at consecutive records s
    and t, and w is the distance from the lowest percentile to the highest, averaged over both records. The result has
    shape (records - 1, units). Multiplying all values by a constant does not change the drift.

    Args:
        records: a monitor's records, in order.
        layer: the layer's name in the records.
        of: "z" for the nonlinearity's inputs, "x" for the values before normalization, x = Wu.

    >>> from batchnorm.monitor import Percentiles
    >>> def record(step, shift):
    ...     q = torch.tensor([[-1.0], [0.0], [1.0]]) + shift
    ...     return Record(step, {"fc": Percentiles(q, q)})
    >>> drift([record(0, 0.0), record(1, 1.0)], "fc")  # moved by half of its width
    tensor([[0.5000]])

    Paper: Sec. 2, "the change in the distribution of network activations"; Fig. 1 b, c
    """
    q = torch.stack([getattr(r.percentiles[layer], of) for r in records if layer in r.percentiles])
    width = q[:, -1] - q[:, 0]
    moved = (q[1:] - q[:-1]).abs().mean(1)
    scale = (width[1:] + width[:-1]) / 2
    return torch.where(moved == 0, 0.0, moved / scale.clamp(min=1e-30))


def typical_unit(records: Sequence[Record], layer: str) -> int:
    """Return the index of the unit with the median total drift among a layer's recorded units.

    Args:
        records: a monitor's records, in order.
        layer: the layer's name in the records.

    >>> from batchnorm.monitor import Percentiles
    >>> q = torch.tensor([[-1.0] * 3, [0.0] * 3, [1.0] * 3])
    >>> shifted = q + torch.tensor([5.0, 0.0, 1.0])
    >>> typical_unit([Record(0, {"fc": Percentiles(q, q)}), Record(1, {"fc": Percentiles(shifted, shifted)})], "fc")
    2

    Paper: Fig. 1 b, c, "a typical sigmoid"
    """
    total = drift(records, layer).sum(0)
    return int(total.argsort(stable=True)[(len(total) - 1) // 2])


def gradient_change(net: nn.Module, loss: Callable[[Any, Any], Tensor], batch: Any, rate: float) -> dict[str, Change]:
    """Measure how much each layer's gradient changes if only the layers below it take a gradient step.

    For each layer k, the gradient g = dl/dW_k at (W_1, ..., W_K) is compared with g', its value on the same batch at
    (W_1 - rate dl/dW_1, ..., W_{k-1} - rate dl/dW_{k-1}, W_k, ..., W_K). A layer is a module with trainable
    parameters, together with the batch or instance normalizations between it and the next such module. Layers are in
    the order of registration. The first layer has no layers below it and is left out. The network is not changed.

    Args:
        net: any network; it runs in its current mode (training or evaluation).
        loss: takes the network's output and the batch, and returns a scalar.
        batch: a tensor, a tuple or list whose first item is the network's input, or a dict of keyword arguments.
        rate: the learning rate of the gradient step.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    >>> gradient_change(net, lambda y, batch: y.square().mean(), torch.randn(8, 3), rate=0.0)
    {'1': Change(relative=0.0, cosine=1.0)}

    Paper: Sec. 2, internal covariate shift
    """
    prefix, inner = unwrapped(net)
    groups = _layers(net)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}

    def gradients(values: Mapping[str, Tensor], of: Sequence[str]) -> dict[str, Tensor]:
        leaves = {name: v.detach().requires_grad_(name in of) for name, v in values.items()}
        # Copy the buffers, so that the network's running averages do not change. Restore the random number generators
        # after each call, so that every call draws the same numbers.
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        with (
            torch.enable_grad(),
            network_call.eagerly(),
            torch.random.fork_rng({p.device for p in parameters.values() if p.is_cuda}),
            unsynchronized(inner.modules()),
        ):
            tensors = {name.removeprefix(prefix): v for name, v in (*leaves.items(), *buffers.items())}
            output = torch.func.functional_call(inner, tensors, *network_call.arguments(batch))
            grads = torch.autograd.grad(loss(output, batch), [leaves[name] for name in of])
        return dict(zip(of, grads, strict=True))

    before = gradients(parameters, list(parameters))
    moved: dict[str, Tensor] = dict(parameters)
    changes: dict[str, Change] = {}
    for k, (layer, names) in enumerate(groups.items()):
        if k > 0:
            changes[layer] = _change(before, gradients(moved, names))
        for name in names:
            moved[name] = parameters[name].detach() - rate * before[name]
    return changes


def _layers(net: nn.Module) -> dict[str, list[str]]:
    """Group the trainable parameters' names by layer; a ``TorchNorm`` belongs to the layer before it."""
    groups: dict[str, list[str]] = {}
    for layer, module in net.named_modules():
        names = [f"{layer}.{n}" if layer else n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        if names and groups and isinstance(module, TorchNorm):
            next(reversed(groups.values())).extend(names)
        elif names:
            groups[layer] = names
    return groups


def _change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Change:
    g = torch.cat([before[name].flatten() for name in after]).double()
    h = torch.cat([v.flatten() for v in after.values()]).double()
    norm = g.norm().clamp(min=1e-300)
    cosine = (g @ h) / (norm * h.norm().clamp(min=1e-300))
    return Change(float((h - g).norm() / norm), round(min(float(cosine), 1.0), 12))
