"""Batch-normalize a network: N to N_tr."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from .. import network_call
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from ..layers.normalized import Normalized
from ..network_copy import Memo, copy_with
from ..verb_report import Site, VerbReport, attach
from ..verify import verify
from .counterparts import notes_on, traces
from .identity_init import set_identity
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

    z = g(Wu + b) becomes z = g(BN(Wu)): the layer sits beside the Linear, convolution or transposed convolution in a
    small container (:class:`~batchnorm.layers.normalized.Normalized`: the state-dict entry ``conv.weight`` becomes
    ``conv.affine.weight``, the new ones are ``conv.norm.*``), so it is found also where the nonlinearity is a function,
    and where sums, joins or pools lie between. Its bias, which the mean would cancel, is dropped. Layers that feed no
    nonlinearity, such as the last one, are left alone. ``net`` is not changed.

    Args:
        net: any network.
        example: a batch; a copy of the network is run on it in evaluation and, where that works, in training.
        where: another subset of activations: the names of affine layers, or a predicate of name and module. With
            ``placement="after"``, of activation modules.
        init: "unit" is gamma = 1 and beta = 0. "identity" sets gamma = sqrt(Var[x] + eps) and beta = E[x] and the
            statistics likewise, from ``batches``, so that in evaluation the network computes what it computed.
        batches: what "identity" takes the moments from.
        placement: "before" the nonlinearity, as in the paper, or "after" it (the standardization layer of Gulcehre &
            Bengio, for comparison), where it has to be a module that is called once.
        per_activation: one gamma, beta and pair of statistics for each activation of a feature map.
        forward: how to call the network, where the rule for batches does not fit.

    Returns:
        The network with a ``report``: each affine layer, whether a layer was inserted, and if not, why.

    Raises:
        ValueError: for a name in ``where`` that cannot be normalized; where "identity" has no batches; or where the
            network with "identity" computes something else.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2))
    >>> normalized = insert(net, torch.randn(2, 4))
    >>> print(normalized.report)
    insert: 1 of 2 layers normalized, 1 skipped: feeds no nonlinearity
      0: inserted BatchNorm1d(8)
      2: skipped (feeds no nonlinearity)

    Paper: Alg. 2, l. 1-5; Sec. 3.2; Sec. 3 (identity)
    """
    if init not in ("unit", "identity") or placement not in ("before", "after"):
        raise ValueError(f"init is 'unit' or 'identity', placement 'before' or 'after', not {init!r}, {placement!r}")
    if init == "identity" and batches is None:
        raise ValueError("init='identity' takes E[x] and Var[x] from data: give batches=")
    graphs = traces(net, example, forward)
    find = affine_places if placement == "before" else activation_places
    places, sites = _select(find(net, graphs), where)
    norms = {place: _norm(place, per_activation) for place in places}
    if init == "identity":
        set_identity(net, norms, batches or [], forward)
    result = copy_with(net, {place.module: partial(_make, place, norm) for place, norm in norms.items()})
    error = _compare(net, result, example, forward) if init == "identity" else None
    done = {place.path: Site(place.path, _describe(place, norm)) for place, norm in norms.items()}
    listed = tuple(done.get(site.path, site) for site in sites)
    return attach(result, VerbReport("insert", listed, error, notes_on(graphs)))


def _select(candidates: Iterable[Candidate], where: Where | None) -> tuple[list[Place], list[Site]]:
    """Choose among the candidates, and say of each what would be said if it is not chosen."""
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
            sites[-1] = Site(place.path, "skipped", "not chosen by where=")
    if names is not None and names - known:
        unknown = ", ".join(sorted(names - known))
        raise ValueError(f"where= names {unknown}, but what can be normalized is {', '.join(sorted(known))}")
    return places, list(dict.fromkeys(sites))


def _norm(place: Place, per_activation: bool) -> BatchNorm:
    features = place.features(per_activation)
    like = next(place.module.parameters(), torch.empty(0))
    kinds = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}
    kind = BatchNorm1d if place.features_last else kinds[len(place.shape)]
    layer = kind(features if len(features) > 1 else features[0], device=like.device, dtype=like.dtype)
    return layer.train(place.module.training)


def _make(place: Place, norm: BatchNorm, memo: Memo) -> nn.Module:
    module = copy.deepcopy(place.module, memo)
    if place.bias is not None:
        module.bias = None  # type: ignore[assignment]
    container = Normalized(module, norm, features_last=place.features_last)
    container.training = module.training
    return container


def _describe(place: Place, norm: BatchNorm) -> str:
    shared = f", shared by {place.calls} calls" if place.calls > 1 else ""
    return f"inserted {type(norm).__name__}({norm.num_features}){shared}"


def _compare(old: nn.Module, new: nn.Module, example: Any, forward: network_call.Forward | None) -> float:
    advice = "Does its code read the weights or biases of layers outside their calls?"
    return verify(old, new, example, forward, what="the network with init='identity'", advice=advice)
