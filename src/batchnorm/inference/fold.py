"""The inference network: batch normalization folded into the weights, the rest a fixed affine map."""

from __future__ import annotations

import warnings
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..graph import Graph, trace
from ..graph.rewrite import restore_
from ..graph.trace import READS
from ..layers.fusion import activations_after
from ..network_copy import Memo, copy_with, private_copy
from ..verb_report import Report, attach
from ..verify import verify
from .build import Makers, makers_for
from .fold_plan import has_nonlinear_part, make_plan
from .fold_report import functions_left, owners, reason_to_keep, sites_of
from .functional_to_module import UNOPENED, Opened, open_
from .traced_network import as_graph_module


def fold(
    net: nn.Module,
    example: Any,
    *,
    tolerance: float | None = None,
    traced: bool | None = None,
    forward: network_call.Forward | None = None,
) -> nn.Module:
    """Return the inference network, in which y = scale * x + shift replaces each BN(x) and goes into weights beside it.

    A layer goes into the Linear, convolution or transposed convolution that alone makes its input; else into those that
    alone read its output, if that is exact; else it stays as a fixed affine map with the activation after it. All of
    it follows the data flow of a real forward pass on ``example``, not the order in which modules were made. The result
    is computed in float64 and its output for ``example`` compared with the original's. ``net`` is not changed.

    If a module's own forward normalizes (a batch normalization subclass with its own forward, a call of
    ``F.batch_norm``), ``torch.fx`` traces that forward alone, and the batch normalization becomes a child of the
    module. All other Python stays as it is.

    Args:
        net: any network; its evaluation mode is folded, whichever mode it is in.
        example: a batch that takes the path through the network that inference takes.
        tolerance: the largest relative error to accept; by default what rounding can make in the network's precision.
        traced: True traces the whole network and returns a ``torch.fx.GraphModule``, in which each call of a module
            that is called twice is folded by itself; False traces nothing.
        forward: how to call the network, if the rule for batches does not fit.

    Returns:
        The network, in evaluation mode, with a ``report`` of what became of each layer and why.

    Warns:
        UserWarning: if a batch normalization is left.

    Raises:
        ValueError: if the outputs differ by more than the tolerance, or with ``traced=True`` if torch.fx cannot trace
            the network.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    >>> folded = fold(net, torch.randn(4, 2))
    >>> print(folded.report["1"])
    1: folded into '0'

    Paper: Alg. 2, l. 11
    """
    result, report = fold_with_report(net, example, tolerance, traced, forward)
    warn_of_left(report)
    return attach(result, report)


def warn_of_left(report: Report) -> None:
    """Warn the caller's caller if batch normalization is left."""
    if report.paths("kept"):
        warnings.warn(report.summary, stacklevel=3)


def fold_with_report(
    net: nn.Module,
    example: Any,
    tolerance: float | None = None,
    traced: bool | None = None,
    forward: network_call.Forward | None = None,
) -> tuple[nn.Module, Report]:
    """Fold a network as :func:`fold` does, and return the report instead of warning."""
    # The network itself first: a copy of a copy would not show that a copy still uses the network's own modules.
    paths = owners(net, trace(net, example, forward, training=False))
    source = _copy(net)
    if traced:
        return _fold(net, as_graph_module(source), UNOPENED, example, tolerance, traced, forward)
    if traced is False:
        paths = []
    opened = open_(source, paths, example, forward) if paths else UNOPENED
    try:
        return _fold(net, source, opened, example, tolerance, traced, forward)
    except Exception as error:
        if not (opened.layers or opened.modules):
            raise
        # The network may fold in the user's own Python, if what was traced does not compute the same.
        reason = f"its traced form failed: {str(error).partition(';')[0]}"
        opened = UNOPENED._replace(refused=dict.fromkeys(paths, reason))
        return _fold(net, _copy(net), opened, example, tolerance, False, forward)


def _copy(net: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode in which each module has its own forward, not one that ``convert`` gave it."""
    source = private_copy(net).eval()
    restore_(source)
    return source


def _fold(
    net: nn.Module,
    source: nn.Module,
    opened: Opened,
    example: Any,
    tolerance: float | None,
    traced: bool | None,
    forward: network_call.Forward | None,
) -> tuple[nn.Module, Report]:
    """Fold ``source``, a copy of ``net`` in evaluation mode."""
    graph = trace(source, example, forward, training=False)
    kept = {module: reason for module in source.modules() if (reason := reason_to_keep(module, graph))}
    while True:
        plan = make_plan(graph, [m for m in source.modules() if isinstance(m, TorchBatchNorm) and m not in kept])
        linear = [m for m in plan.remaining if not has_nonlinear_part(graph, m)]
        fused = {m: a for m, a in activations_after(source, [graph], linear)[0].items() if a not in kept}
        made: dict[nn.Module, nn.Module] = {}
        try:
            result = copy_with(source, _noting(makers_for(source, graph, plan, fused), made)).eval()
            after = _run(result, example, forward)
            break
        except AttributeError as error:
            module = made.get(error.obj)  # type: ignore[call-overload]
            if module is None or module in kept:
                raise
            kept[module] = f"the network's code reads its attribute '{error.name}'"
    difference = _verify(net, result, example, tolerance, traced, forward)
    sites = [*sites_of(source, plan, fused, kept, opened), *functions_left(after, kept, opened)]
    reads = [
        f"Python code reads values ({call}): other inputs may take another path" for call in graph.functions(*READS)
    ]
    notes = [
        f"'{path}' runs a traced form of its forward" if path else "its forward is traced" for path in opened.modules
    ]
    return result, Report("fold", tuple(sites), difference, (*reads[:1], *notes))


def _noting(makers: Makers, made: dict[nn.Module, nn.Module]) -> Makers:
    """Note which module of the network each new one replaces."""

    def noting(module: nn.Module) -> Any:
        def make(memo: Memo) -> nn.Module:
            new = makers[module](memo)
            made[new] = module
            return new

        return make

    return {module: noting(module) for module in makers}


def _run(net: nn.Module, example: Any, forward: network_call.Forward | None) -> Graph:
    """Trace the folded network; an attribute that it lacks is an AttributeError of its own module, not of a copy's."""
    try:
        return trace(net, example, forward, training=False)
    except AttributeError:
        twin = private_copy(net)
        names = {module: name for name, module in twin.named_modules()}
        try:
            with torch.no_grad(), network_call.eagerly(), torch.random.fork_rng():
                network_call.call(
                    twin, network_call.to_device(example, network_call.device_of(net), copy=True), forward
                )
        except AttributeError as error:
            if error.obj in names:
                error.obj = net.get_submodule(names[error.obj])
            raise
        raise


def _verify(
    old: nn.Module,
    new: nn.Module,
    example: Any,
    tolerance: float | None,
    traced: bool | None,
    forward: network_call.Forward | None,
) -> float:
    return verify(
        old,
        new,
        example,
        forward,
        what="the folded network",
        advice="The network's code may read modules in a way that was not observed; keep such layers out of the fold by"
        " giving them a forward hook",
        make=lambda net, batch: fold_with_report(net, batch, inf, traced, forward)[0],
        tolerance=tolerance,
    )
