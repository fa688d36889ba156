"""Make the inference network: fold batch normalization into weights, and verify the result against the original."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from .. import network_call
from ..change_report import Site, VerbReport, attach
from ..graph import Graph, trace
from ..graph.kinds import Affine, base_type, has_hooks, has_initial_statistics, is_scripted_norm
from ..graph.rewrite import restore_
from ..graph.trace import READS
from ..layers import BatchNorm
from ..layers.fusion import Fused, activations_after
from ..layers.normalized import Normalized
from ..network_copy import Memo, copy_with, private_copy, run_copy
from ..ops import Activation
from ..ops.activation import from_module, to_module
from ..verify import verify
from .affine import FixedAffine, fold_after, fold_before, weights_of
from .fold_plan import (
    BY_MINI_BATCH,
    FoldPlan,
    functional_norms,
    has_nonlinear_part,
    make_plan,
    modules_that_normalize,
    reason_to_keep,
)
from .functional_to_module import NOTHING_TRACED, TracedForwards, as_graph_module, trace_forwards_

READS_VALUES = "Python code reads the values of a tensor"
SETTINGS = (bool, int, float, str, type(None))
Makers = dict[nn.Module, Callable[[Memo], nn.Module]]


def fold(
    net: nn.Module,
    example: Any,
    *,
    tolerance: float | None = None,
    traced: bool | None = None,
    forward: network_call.Forward | None = None,
) -> nn.Module:
    """Return the inference network: each BN(x) becomes y = scale * x + shift, folded into adjacent weights if possible.

    A batch normalization is folded into the affine layer (Linear, convolution or transposed convolution) that produces
    its input or, if that is not possible, into the affine layers that consume its output. A batch normalization that
    cannot be folded becomes a fixed affine map, which also applies the activation after it if possible. A forward pass
    on ``example`` shows which layers are adjacent; the order in which they were defined does not matter. Weights are
    folded in float64, and the new network's outputs for ``example`` are compared with the original's. ``net`` is not
    changed.

    Some modules normalize in their own code: they call ``F.batch_norm``, or their class derives from a batch
    normalization layer and has a forward of its own. Such a forward is traced with ``torch.fx``, and its batch
    normalization becomes a child of the module. A traced forward uses the values that the module's attributes had
    during the trace. A forward is not traced if it assigns to attributes, or if it changes a tensor or a list that the
    module holds. Modules that are not traced keep their own Python code.

    Args:
        net: any network, in either mode; it is folded in evaluation mode.
        example: a batch for which the network's code takes the same branches as at inference.
        tolerance: the largest relative error to accept; by default, the error that rounding can cause in the network's
            precision.
        traced: True traces the whole network and returns a ``torch.fx.GraphModule``; if a module is called more than
            once, each call is folded separately. False traces nothing. None traces only the forwards that contain a
            batch normalization, as described above.
        forward: function that calls the network on a batch, as ``forward(net, batch)``; needed if the network takes
            several positional inputs.

    Returns:
        The network, in evaluation mode, with a ``report`` that says what each layer became and why.

    Warns:
        UserWarning: if a batch normalization was left unchanged.

    Raises:
        TypeError: if the network is wrapped in a compiled or data-parallel module; pass the network inside it.
        ValueError: if the network cannot be copied, if the outputs differ by more than the tolerance or, with
            ``traced=True``, if torch.fx cannot trace the network.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
    >>> folded = fold(net, torch.randn(4, 2))
    >>> print(folded.report["1"])
    1: folded into '0'

    Paper: Alg. 2, l. 11
    """
    result, report = fold_with_report(net, example, tolerance, traced, forward)
    warn_of_left(report)
    return attach(result, report)


def warn_of_left(report: VerbReport) -> None:
    """Warn if the report lists a batch normalization that was left unchanged; the warning points at the user's call."""
    if report.paths("kept"):
        warnings.warn(report.summary, stacklevel=3)


def fold_with_report(
    net: nn.Module,
    example: Any,
    tolerance: float | None = None,
    traced: bool | None = None,
    forward: network_call.Forward | None = None,
) -> tuple[nn.Module, VerbReport]:
    """Fold a network as :func:`fold` does, without a warning; return the network and the report."""
    # Trace `net`, not `source`: only this trace can detect that a copy of `net` still uses modules of `net` itself.
    paths = modules_that_normalize(net, trace(net, example, forward, training=False))
    source = _copy(net)
    if traced:
        return _fold(net, as_graph_module(source), NOTHING_TRACED, example, tolerance, traced, forward)
    if traced is False:
        paths = []
    forwards = trace_forwards_(source, paths, example, forward) if paths else NOTHING_TRACED
    try:
        return _fold(net, source, forwards, example, tolerance, traced, forward)
    except Exception as error:
        if not (forwards.layers or forwards.modules):
            raise
        # Folding with traced forwards failed or changed the outputs, so fold without them.
        reason = f"its traced form failed: {str(error).partition(';')[0]}"
        forwards = NOTHING_TRACED._replace(refused=dict.fromkeys(paths, reason))
        return _fold(net, _copy(net), forwards, example, tolerance, False, forward)


def _copy(net: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, with the original forwards of the modules that ``convert`` rewrote."""
    source = private_copy(net).eval()
    restore_(source)
    return source


def _fold(
    net: nn.Module,
    source: nn.Module,
    forwards: TracedForwards,
    example: Any,
    tolerance: float | None,
    traced: bool | None,
    forward: network_call.Forward | None,
) -> tuple[nn.Module, VerbReport]:
    """Fold ``source``, a copy of ``net`` in evaluation mode."""
    graph = trace(source, example, forward, training=False)
    kept = {module: reason for module in source.modules() if (reason := reason_to_keep(module, graph))}
    while True:
        plan = make_plan(graph, [m for m in source.modules() if isinstance(m, TorchBatchNorm) and m not in kept])
        linear = [m for m in plan.remaining if not has_nonlinear_part(graph, m)]
        fused = {m: a for m, a in activations_after(source, [graph], linear)[0].items() if a not in kept}
        substitutes = _substitutes(source, graph, plan, fused)
        try:
            result = copy_with(source, _makers(source, plan, substitutes)).eval()
            after = _run(result, example, forward)
            break
        except AttributeError as error:
            read = [old for old, new in substitutes.items() if new is error.obj]
            if not read or read[0] in kept:
                raise
            kept[read[0]] = f"the network's code reads its attribute '{error.name}'"
    difference = verify(
        net,
        result,
        example,
        forward,
        what="the folded network",
        advice="The network's code may use modules in ways that the trace did not record; to keep fold from changing a"
        " layer, register a forward hook on it",
        make=lambda net, batch: fold_with_report(net, batch, inf, traced, forward)[0],
        tolerance=tolerance,
    )
    sites = [*_sites(source, plan, fused, kept, forwards), *_functions_left(after, kept, forwards)]
    reads = [
        f"{READS_VALUES} ({call}), so the network may take other branches for other inputs"
        for call in graph.functions(*READS)
    ]
    left_out = [
        name
        for name, module in source.named_modules()
        if isinstance(module, TorchBatchNorm) and module not in kept and not graph.calls_of(module)
    ]
    notes = (
        *reads[:1],
        *_notes_on(forwards),
        *_notes_on_statistics(net),
        *_notes_on_calls(net, left_out, example, forward),
    )
    return result, VerbReport("fold", tuple(sites), difference, notes)


def _notes_on_statistics(net: nn.Module) -> list[str]:
    untrained = sum(isinstance(m, TorchBatchNorm) and has_initial_statistics(m) for m in net.modules())
    if not untrained:
        return []
    layers = "1 batch norm has" if untrained == 1 else f"{untrained} batch norms have"
    return [f"{layers} never been updated: train the network, load its weights, or call bn.estimate_ first"]


def _notes_on_calls(
    net: nn.Module, left_out: list[str], example: Any, forward: network_call.Forward | None
) -> list[str]:
    """Return a note on batch norms that the example does not reach, except those that only training uses."""
    if left_out:
        called = _called(net, example, forward, training=False) | _called(net, example, forward, training=True)
        left_out = [repr(name) for name in left_out if name not in called]
    if not left_out:
        return []
    more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    return [
        f"the example does not reach {', '.join(left_out[:3])}{more}, so outputs for inputs that take another path"
        " through the network were not checked and may be wrong: fold the network separately for each path"
    ]


def _called(net: nn.Module, example: Any, forward: network_call.Forward | None, *, training: bool) -> set[str]:
    """Return the names of the batch norms that the network calls on the example."""
    twin, called = private_copy(net).train(training), set[str]()
    for name, module in twin.named_modules():
        if isinstance(module, TorchBatchNorm):
            module.eval()  # in training mode, it would reject an example with one value per feature
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
    with suppress(Exception):  # training mode may need targets, for example
        run_copy(net, twin, example, forward)
    return called


def _run(net: nn.Module, example: Any, forward: network_call.Forward | None) -> Graph:
    """Trace the folded network.

    Raises:
        AttributeError: if the network's code reads an attribute that a module lacks; the error's ``obj`` is that module
            in ``net``.
    """
    try:
        return trace(net, example, forward, training=False)
    except AttributeError:
        twin = private_copy(net)
        names = {module: name for name, module in twin.named_modules()}
        try:
            run_copy(net, twin, example, forward)
        except AttributeError as error:
            if isinstance(error.obj, nn.Module) and error.obj in names:
                error.obj = net.get_submodule(names[error.obj])
            raise
        raise


@torch.inference_mode(False)
def _substitutes(
    net: nn.Module, graph: Graph, plan: FoldPlan, fused: dict[nn.Module, nn.Module]
) -> dict[nn.Module, nn.Module]:
    """Return the replacements of batch normalizations, of activations fused into them, and of Fused placeholders."""
    new: dict[nn.Module, nn.Module] = {}
    for layer in plan.gone:
        activation = _activation_of(layer)
        new[layer] = FixedAffine(None, None, activation) if graph.has_extra_inputs(layer) else to_module(activation)
    for layer, left in plan.remaining.items():
        activation = (from_module(fused[layer]) if layer in fused else None) or _activation_of(layer)
        scale, shift = (v.to(layer.running_mean) for v in left)
        new[layer] = FixedAffine(scale, shift, activation)
    for module in (*fused.values(), *(m for m in net.modules() if isinstance(m, Fused))):
        new[module] = nn.Identity()
    for old, substitute in new.items():
        for name, value in vars(old).items():
            # Copy settings such as num_features, because the user's code may read them.
            if not name.startswith("_") and isinstance(value, SETTINGS) and not hasattr(substitute, name):
                vars(substitute)[name] = value
    return new


def _activation_of(layer: nn.Module) -> Activation:
    return layer.activation if isinstance(layer, BatchNorm) else Activation()


def _makers(net: nn.Module, plan: FoldPlan, substitutes: dict[nn.Module, nn.Module]) -> Makers:
    """Return, for each module that changes, a function that makes its replacement."""
    makers: Makers = {module: partial(_folded_affine, module, plan) for module in {**plan.before, **plan.after}}
    for container in (m for m in net.modules() if isinstance(m, Normalized)):
        # If only the affine layer is left in a container made by insert(), replace the container with that layer.
        empty = container.norm in plan.gone and _activation_of(container.norm).name == "identity"
        if empty and container.affine in makers and not has_hooks(container):
            makers[container] = lambda memo, affine=container.affine: memo[id(affine)]  # type: ignore[misc]
    return makers | {old: lambda memo, new=new: new for old, new in substitutes.items()}


def _folded_affine(module: nn.Module, plan: FoldPlan, memo: Memo) -> nn.Module:
    affine = copy.deepcopy(module, memo)
    assert isinstance(affine, Affine)
    weights = weights_of(affine)
    if module in plan.before:
        weights = fold_before(affine, weights, plan.before[module])
    if module in plan.after:
        weights = fold_after(affine, weights, plan.after[module])
    trained, like = affine.weight.requires_grad, affine.weight.detach()
    if parametrize.is_parametrized(affine):
        # Do not call remove_parametrizations: it would delete the property `weight` from the generated class, which is
        # also the class of the user's own module.
        affine.__class__ = base_type(affine)  # type: ignore[assignment]
        del affine._modules["parametrizations"]
    affine.weight = nn.Parameter(weights.weight.to(like), requires_grad=trained)
    affine.bias = nn.Parameter(weights.bias.to(like), requires_grad=trained)
    return affine


def _sites(
    net: nn.Module,
    plan: FoldPlan,
    fused: dict[nn.Module, nn.Module],
    kept: dict[nn.Module, str],
    forwards: TracedForwards,
) -> Iterator[Site]:
    names = {module: name for name, module in net.named_modules()}
    for module, name in names.items():
        # If the forward of a user's layer was traced, report the path of that layer, not of the batch normalization
        # inside it.
        parent = name.rpartition(".")[0]
        path = parent if parent in forwards.layers and isinstance(module, TorchBatchNorm) else name
        if module in kept and isinstance(module, TorchBatchNorm | torch.jit.ScriptModule):
            why = kept[module] + (f"; {forwards.refused[name]}" if name in forwards.refused else "")
            yield Site(path, "kept", why)
        elif module in plan.gone:
            yield Site(path, "folded into " + ", ".join(f"'{names[m]}'" for m in plan.gone[module]))
        elif module in plan.remaining:
            with_activation = f" with {type(fused[module]).__name__}" if module in fused else ""
            yield Site(path, "fixed affine map" + with_activation, plan.reasons[module])


def _notes_on(forwards: TracedForwards) -> Iterator[str]:
    """Yield notes on the modules that run a traced form of their forward."""
    ignores = "which ignores attributes that are set later"
    for path in forwards.modules:
        yield f"{repr(path) if path else 'the network'} runs a traced form of its forward, {ignores}"
    if forwards.layers:
        yield f"batch norm subclasses run a traced form of their forward, {ignores}"


def _functions_left(graph: Graph, kept: dict[nn.Module, str], forwards: TracedForwards) -> Iterator[Site]:
    """Yield a report entry for each functional batch normalization that the folded network calls."""
    scripted = any(is_scripted_norm(module) for module in kept)
    for call in functional_norms(graph):
        if scripted and isinstance(call.target, torch._ops.OpOverload):
            continue  # the call is inside a scripted module, for which the report has another entry
        why = forwards.refused.get(call.path, "batch_norm is called as a function, so there is no module to replace")
        yield Site(call.path, "kept", BY_MINI_BATCH if call.argument(5, "training") else why)
