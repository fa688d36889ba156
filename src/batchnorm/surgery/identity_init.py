"""Start a batch normalization as the identity transform, from data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import network_call
from ..layers import BatchNorm
from ..network_copy import private_copy
from ..ops.moments import MomentAccumulator, batch_moments
from ..progress import progress
from .places import Place


def set_identity(
    net: nn.Module,
    norms: dict[Place, BatchNorm],
    batches: Iterable[Any],
    forward: network_call.Forward | None,
) -> None:
    """Set gamma = sqrt(Var[x] + eps) and beta = E[x], and the running statistics to those of x without its bias.

    Paper: Sec. 3, "could recover the original activations"
    """
    accumulators = {place: MomentAccumulator() for place in norms}
    twin = private_copy(net).eval()
    for place, accumulator in accumulators.items():
        twin.get_submodule(place.path).register_forward_hook(partial(_measure, place, norms[place], accumulator))
    device = network_call.device_of(net)
    with torch.no_grad(), network_call.eagerly():
        for batch in progress(batches, "measuring activations"):
            network_call.call(twin, network_call.to_device(batch, device, copy=True), forward)
    for place, accumulator in accumulators.items():
        _set(place, norms[place], accumulator)


def _measure(
    place: Place, norm: BatchNorm, accumulator: MomentAccumulator, module: nn.Module, args: Any, out: Tensor
) -> None:
    x = out.flatten(0, -2) if place.features_last else out
    moments, _ = batch_moments(x, [0, *range(1 + len(norm.features), x.dim())])
    m = x.numel() // max(prod(norm.features), 1)
    accumulator.add(m, moments.mean.reshape(norm.features), moments.var.reshape(norm.features))


def _set(place: Place, norm: BatchNorm, accumulator: MomentAccumulator) -> None:
    moments = accumulator.averages()
    if moments is None:
        raise ValueError(f"layer '{place.path}': no batch reaches it, so there are no moments to set it from")
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
    bias = torch.zeros(1) if place.bias is None else place.bias.detach().cpu().double()
    with torch.no_grad():
        norm.running_mean.copy_(moments.mean - bias.reshape(-1, *[1] * (moments.mean.dim() - 1)))
        norm.running_var.copy_(moments.var + moments.mean_spread)
        norm.bias.copy_(moments.mean)
        # From the rounded value that evaluation divides by, so that the two cancel.
        norm.weight.copy_(torch.sqrt(norm.running_var.double() + norm.eps))
