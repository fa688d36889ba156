"""Insert batch normalization into a network, as lines 1 to 5 of Algorithm 2 do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import network_call
from ..change_report import Site, VerbReport, attach
from ..graph import trace_modes
from ..layers import BatchNorm, BatchNorm1d
from ..layers.normalized import Normalized
from ..network_copy import Memo, copy_with, private_copy
from ..ops.moments import MomentAccumulator, batch_moments
from ..progress import progress
from ..verify import verify
from .convert import BY_DIMENSIONS
from .places import Candidate, Place, activation_places, affine_places

Where = Iterable[str] | Callable[[str, nn.Module], bool]


def insert(
    net: nn.Module,
    example: Any,
    *,
    where: Where | None = None,
    init: Literal["unit", "identity"] = "unit",
    batches: Iterable[Any] | None = None,
    placement: Literal["before", "after"] = "before",
    per_activation: bool = False,
    forward: network_call.Forward | None = None,
) -> nn.Module:
    """Return the network with a batch normalization between each affine layer and the nonlinearity that it feeds.

    z = g(Wu + b) becomes z = g(BN(Wu)). A small container, :class:`~batchnorm.layers.normalized.Normalized`, replaces
    the affine layer (linear, convolution or transposed convolution) and holds this layer and its batch normalization.
    For a layer named ``conv``, the state-dict entry ``conv.weight`` becomes ``conv.affine.weight``, and the entries
    ``conv.norm.*`` are added. Insertion also works if the nonlinearity is a function, or if there are sums,
    concatenations or pools between the affine layer and the nonlinearity. The bias is dropped, because subtracting the
    mean would cancel it; a parametrized bias stays. By default, layers that feed no nonlinearity, such as the last
    layer, stay as they are. ``net`` is not changed.

    Args:
        net: any network.
        example: a batch; a copy of the network runs on it in evaluation mode and, if possible, in training mode.
        where: the layers to normalize instead of the default layers: a list of names, or a function
            ``where(name, module)`` that returns True for these layers. The chosen layers must be affine layers for
            ``placement="before"``, and activation modules for "after".
        init: "unit" sets gamma = 1 and beta = 0. "identity" computes E[x] and Var[x] from ``batches`` and sets gamma =
            sqrt(Var[x] + eps) and beta = E[x], so that the outputs in evaluation mode do not change.
        batches: the batches for "identity".
        placement: "before" the nonlinearity, as in the paper, or "after" it (the standardization layer of Gulcehre &
            Bengio, for comparison). For "after", the nonlinearity must be a module that is called once, and the
            features must be in dimension 1 or the last dimension of its output. The container then replaces this
            module, and no bias is dropped.
        per_activation: give each activation of a feature map its own gamma, beta and statistics.
        forward: function that calls the network on a batch, as ``forward(net, batch)``; needed if the network takes
            several positional inputs.

    Returns:
        The network, with a ``report`` that says for each candidate layer whether batch normalization was inserted and,
        if not, why.

    Raises:
        TypeError: if the network is compiled or data-parallel.
        ValueError: if ``init`` or ``placement`` is unknown, if ``where`` contains a name that cannot be chosen (the
            message lists the names that can), or if the network cannot be copied. With "identity", also if ``batches``
            is missing, if no batch reaches a chosen layer, or if the new network computes different results.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    >>> normalized = insert(net, torch.randn(2, 4))
    >>> print(normalized.report)
    insert: 1 of 2 layers normalized, 1 skipped: feeds no nonlinearity
      0: inserted BatchNorm1d(8)
      2: skipped (feeds no nonlinearity)

    Paper: Alg. 2, l. 1-5; Sec. 3.2; Sec. 3 (identity)
    """
    if init not in ("unit", "identity"):
        raise ValueError(f"init={init!r} is unknown: choose 'unit' or 'identity'")
    if placement not in ("before", "after"):
        raise ValueError(f"placement={placement!r} is unknown: choose 'before' or 'after'")
    if init == "identity" and batches is None:
        raise ValueError("init='identity' computes E[x] and Var[x] from data: pass batches=")
    graphs, notes = trace_modes(net, example, forward)
    find = affine_places if placement == "before" else activation_places
    places, sites = _select(find(net, graphs), where)
    norms = {place: _norm(place, per_activation) for place in places}
    if init == "identity":
        _set_identity(net, norms, [] if batches is None else batches, forward)
    result = copy_with(net, {place.module: partial(_make, place, norm) for place, norm in norms.items()})
    error = None
    if init == "identity":
        advice = "Use where= to leave out each layer whose type is checked in the network's code"
        if placement == "before":
            advice += ", or whose weight or bias is read there without a call of the layer"
        error = verify(net, result, example, forward, what="the network with init='identity'", advice=advice)
    done = {}
    for place, norm in norms.items():
        shared = f", shared by {place.calls} calls" if place.calls > 1 else ""
        done[place.path] = Site(place.path, f"inserted {type(norm).__name__}({norm.num_features}){shared}")
    listed = tuple(done.get(site.path, site) for site in sites)
    return attach(result, VerbReport("insert", listed, error, notes))


def _select(candidates: Iterable[Candidate], where: Where | None) -> tuple[list[Place], list[Site]]:
    """Return the chosen places, and a report entry for each candidate, with the reason if the candidate is skipped."""
    if isinstance(where, str):
        where = [where]
    names = None if where is None or callable(where) else set(where)
    places: list[Place] = []
    sites: list[Site] = []
    known: set[str] = set()
    for place, site, default in candidates:
        sites.append(site)
        if place is None:
            continue
        known.add(place.path)
        chosen = default
        if names is not None:
            chosen = place.path in names
        elif callable(where):
            chosen = where(place.path, place.module)
        if chosen and not place.problem:
            places.append(place)
        elif chosen:
            sites[-1] = Site(place.path, "skipped", place.problem)
        elif where is not None:
            sites[-1] = Site(place.path, "skipped", "where= does not select it")
    if names is not None and names - known:
        unknown = ", ".join(sorted(names - known))
        choices = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"where= contains {unknown}, but batch normalization cannot be inserted there; choose from: {choices}"
        )
    return places, list(dict.fromkeys(sites))


@torch.inference_mode(False)
def _norm(place: Place, per_activation: bool) -> BatchNorm:
    features = place.features(per_activation)
    like = next(place.affine.parameters(), torch.empty(0))
    kind = BatchNorm1d if place.features_last else BY_DIMENSIONS[len(place.shape)]
    layer = kind(features if len(features) > 1 else features[0], device=like.device, dtype=like.dtype)
    return layer.train(place.module.training)


def _set_identity(
    net: nn.Module, norms: dict[Place, BatchNorm], batches: Iterable[Any], forward: network_call.Forward | None
) -> None:
    """Set gamma, beta and the running statistics so that the outputs in evaluation mode do not change.

    gamma = sqrt(Var[x] + eps) and beta = E[x]. The running mean is E[x] minus the bias that is dropped.

    Paper: Sec. 3, "could recover the original activations"
    """
    network_call.check_batches(batches)
    accumulators = {place: MomentAccumulator() for place in norms}
    twin = private_copy(net).eval()
    for place, accumulator in accumulators.items():
        twin.get_submodule(place.path).register_forward_hook(partial(_measure, place, norms[place], accumulator))
    with torch.no_grad(), network_call.eagerly():
        for number, batch in enumerate(progress(batches, "measuring activations")):
            with network_call.at_index(number, batch):
                network_call.call(twin, network_call.copy_for(net, batch), forward)
    for place, accumulator in accumulators.items():
        _set_from(place, norms[place], accumulator)


def _measure(
    place: Place, norm: BatchNorm, accumulator: MomentAccumulator, module: nn.Module, args: Any, out: Tensor
) -> None:
    x = out.flatten(0, -2) if place.features_last else out
    moments, _ = batch_moments(x, [0, *range(1 + len(norm.features), x.dim())])
    m = x.numel() // max(prod(norm.features), 1)
    accumulator.add(m, moments.mean.reshape(norm.features), moments.var.reshape(norm.features))


def _set_from(place: Place, norm: BatchNorm, accumulator: MomentAccumulator) -> None:
    moments = accumulator.averages()
    if moments is None:
        raise ValueError(
            f"layer '{place.path}' gets no data from the batches: pass batches that reach it, or exclude it with where="
        )
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: PT018
    bias = torch.zeros(1, device="cpu") if place.bias is None else place.bias.detach().cpu().double()
    with torch.no_grad():
        norm.running_mean.copy_(moments.mean - bias.reshape(-1, *[1] * (moments.mean.dim() - 1)))
        norm.running_var.copy_(moments.var + moments.mean_spread)
        norm.bias.copy_(moments.mean)
        # Compute gamma from the rounded variance in the buffer, because evaluation uses this variance.
        norm.weight.copy_(torch.sqrt(norm.running_var.double() + norm.eps))


def _make(place: Place, norm: BatchNorm, memo: Memo) -> nn.Module:
    module = copy.deepcopy(place.module, memo)
    if place.bias is not None:
        module.bias = None  # type: ignore[assignment]
    container = Normalized(module, norm, features_last=place.features_last)
    container.training = module.training
    return container
