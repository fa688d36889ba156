"""Replace ``torch.nn``'s batch normalization with this library's, and fuse the sums and activations after it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from threading import RLock
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.nn.utils import parametrize

from .. import collectives, network_call
from ..change_report import Site, VerbReport, attach
from ..graph import Graph, trace_modes
from ..graph.rewrite import Rewritten, arguments_in, restore_, restore_unused_, restore_wrong_, rewrite_
from ..layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, Sync
from ..layers.fusion import Fused, activations_after, takes_activation
from ..layers.norm_act import NormAct, is_norm_act, joined
from ..layers.statistics import Statistics
from ..network_copy import Memo, copy_with
from ..ops import Activation
from ..ops.activation import as_activation
from ..progress import Steps
from .fusion_report import Count, Fusions, count, describe, fused_in, headline
from .verify_conversion import verify_conversion

OURS: dict[type, type[BatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}
THEIRS: dict[type, type[TorchBatchNorm]] = {ours: theirs for theirs, ours in OURS.items()}
# The attributes that this library's layers have, but torch.nn's layers do not.
OWN = ("activation", "statistics", "on_single", "_frozen", "_ranks_checked")
# convert holds this lock, because tracing patches torch and seeds random number generators, which affects all threads.
_ALONE = RLock()
BY_DIMENSIONS = {2: BatchNorm1d, 3: BatchNorm1d, 4: BatchNorm2d, 5: BatchNorm3d}

LARGE_ERROR = 0.01
AMPLIFIED = (
    "on this example, the network amplifies rounding errors, so the relative error is large although the networks are"
    " the same up to rounding; this error is usually smaller with more or larger inputs"
)


def convert(
    net: nn.Module,
    example: Any,
    *,
    forward: network_call.Forward | None = None,
    rewrite: bool = True,
    statistics: Statistics | None = None,
) -> nn.Module:
    """Return the network with this library's layers in place of ``torch.nn``'s, fused with sums and activations.

    ``BatchNorm1d/2d/3d``, ``SyncBatchNorm`` and timm's ``BatchNormAct2d`` are replaced. Parameters, statistics, hooks,
    shared modules, modes, devices and dtypes stay the same, except that half-precision running statistics become
    float32. Other batch normalization layers, such as subclasses and layers with a patched forward or a
    parametrization, are not converted, and the report says why. The report also lists calls of ``F.batch_norm``, which
    are not converted either.

    If a layer's output goes to an activation, or is added to a tensor of the same shape, ``convert`` tries to fuse the
    activation and the sum into the call of the layer. Activations and sums may be modules, functions, methods or
    operators, in place or not. A module whose forward contains such an activation or sum is traced with ``torch.fx``,
    in evaluation and in training mode. If the trace succeeds, the module becomes an instance of a generated subclass of
    its class. In each call, the new forward checks that the trace is still valid: non-tensor arguments, attributes,
    hooks, and the results of checks such as ``x.dim() == 3`` must be the same as during tracing. Otherwise, the
    original forward runs.

    The converted network is compared with the original on ``example``: outputs (with and without autocast), running
    statistics, and gradients (if possible, on the first three rows only). ``net`` is not changed. :func:`revert` undoes
    the conversion.

    A trace does not capture changes to Python globals, closures or classes, side effects such as ``print``, calls of
    ``type(x)``, or random numbers from a generator that the user created. Use ``rewrite=False`` for networks whose
    forwards depend on any of these.

    Args:
        net: any network.
        example: a batch; the network is traced on it in evaluation mode and, if possible, in training mode.
        forward: function that calls the network on a batch, as ``forward(net, batch)``; needed if the network takes
            several positional inputs.
        rewrite: if False, modules are replaced, but no forward is rewritten. An activation module is then fused if a
            ``Sequential``, or the graph of a ``torch.fx.GraphModule``, calls it after a batch normalization and nothing
            else refers to these two modules. With ``rewrite=False``, the network's code must not call the children of
            a ``Sequential`` one by one.
        statistics: how every layer computes its training statistics: ``Sync()``, ``Ghost(size)`` or ``Renorm()``; None
            keeps each layer's own setting.

    Returns:
        The network, with a ``report`` that says how many layers are fused, what was done with each layer, and why some
        layers are not fused.

    Raises:
        TypeError: if ``statistics`` is not a value such as ``Sync()``, or if the network is compiled or data-parallel.
        ValueError: if the network cannot be copied, or if the converted network computes different results.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> str(convert(net, torch.randn(2, 3, 5, 5)).report)[:63]
    'convert: 1 of 1 BN layers that feed an activation are fused; 1 '

    Beyond the paper: for networks that already have batch normalization.
    """
    if statistics is not None and (isinstance(statistics, type) or not hasattr(statistics, "batch_norm")):
        raise TypeError(f"statistics must be a value such as Sync(), Ghost(32) or Renorm(), not {statistics!r}")
    with _ALONE, Steps("convert", total=9, hidden=collectives.rank() > 0) as step:
        step("tracing the network")
        graphs, missing = trace_modes(net, example, forward)
        modes = dict(zip((False, True), graphs, strict=False))
        layers, refused = convertible(net, graphs[0])
        fused, unfused = activations_after(net, graphs, [m for m in layers if _has_room(m, graphs)])
        if rewrite:
            # Fuse activations in rewritten forwards, not by replacing activation modules: a rewritten forward stays
            # correct even if the user's code calls or replaces single children of a Sequential.
            fused = {}
        makers: dict[nn.Module, Any] = {
            layer: partial(_ours, layer, kind, as_activation(fused.get(layer))) for layer, kind in layers.items()
        }
        for activation in set(fused.values()):
            makers[activation] = partial(_fused, activation, [m for m, a in fused.items() if a is activation])
        result = copy_with(net, makers)
        restore_(result)
        done: dict[str, Rewritten] = {}
        notes = list(missing)
        if rewrite:
            step("recording the arguments of the modules")
            calls = {mode: arguments_in(result, example, forward, training=mode) for mode in modes}
            step("rewriting the network's code")
            done = rewrite_(result, calls, takes_activation)
            step("running the rewritten code")
            restore_unused_(result, example, forward, done)
        check = partial(verify_conversion, net, result, example, forward, modes=len(graphs), step=step)
        try:
            error = check()
        except Exception:
            for path, problem in restore_wrong_(result, check).items():
                done[path] = Rewritten({}, dict.fromkeys(modes, f"with rewritten code, {problem}"))
                notes.append(f"{_code_of(path)} was not rewritten: with rewritten code, {problem}")
            error = check()
    if error > LARGE_ERROR:
        notes.append(AMPLIFIED)
    if statistics is not None:
        for module in result.modules():
            if isinstance(module, BatchNorm):
                module.statistics, module._ranks_checked = statistics, False
    counts = []
    for mode, graph in modes.items():
        taken = fused_in(net, result, done, mode)
        counts.append((count(graph, taken), taken))
    sites = list(_sites(net, layers, refused, counts, unfused, done, graphs))
    if not _changes(net, result):
        notes.append("nothing changed: there is nothing that can be converted or fused")
    if not sites:
        told = "the network has no batch normalization, so convert changed nothing; to add it, call bn.insert"
        warnings.warn(told, stacklevel=2)
    return attach(result, VerbReport("convert", tuple(sites), error, tuple(notes), headline(counts)))


def _changes(net: nn.Module, result: nn.Module) -> bool:
    def state(net: nn.Module) -> list[Any]:
        return [(type(m), (m.activation, m.statistics) if isinstance(m, BatchNorm) else None) for m in net.modules()]

    return state(net) != state(result)


def _sites(
    net: nn.Module,
    layers: dict[TorchBatchNorm, type[BatchNorm]],
    refused: dict[nn.Module, str],
    counts: list[tuple[Count, Fusions]],
    unfused: dict[nn.Module, str],
    done: dict[str, Rewritten],
    graphs: list[Graph],
) -> Iterator[Site]:
    summands = set[nn.Module]().union(*(count.sum for count, _ in counts))
    feeding = summands.union(*(count.activation for count, _ in counts))
    unfused = {**unfused, **dict.fromkeys(summands, "none, its output goes to a sum")}
    for name, module in net.named_modules():
        if module in refused:
            yield Site(name, "refused", refused[module])
        elif module in layers:
            taken = [fused.get(module) for _, fused in counts]
            rewritten = done if module in feeding else {}
            reason = _why_not(module, unfused, rewritten, graphs) if None in taken else ""
            yield Site(name, "converted" + describe(taken), reason)
    functional = [call for graph in graphs for call in graph.functions("batch_norm", "native_batch_norm")]
    why = "batch_norm is called as a function, so there is no module to replace"
    yield from dict.fromkeys(Site(call.path, "not converted", why) for call in functional)


def _why_not(layer: nn.Module, unfused: dict[nn.Module, str], done: dict[str, Rewritten], graphs: list[Graph]) -> str:
    calls = [call for graph in graphs for call in graph.calls_of(layer)]
    readers = [reader for call in calls for reader in call.outputs[0].consumers]
    for caller in dict.fromkeys(call.caller for call in (*calls, *readers)):
        entry = done.get(caller or "")
        if entry is not None and entry.reasons:
            (reason, *_) = entry.reasons.values()
            return f"activation: {_code_of(caller)} was not rewritten: {reason}"
    return f"activation: {unfused[layer]}" if layer in unfused else ""


def _code_of(path: str | None) -> str:
    return f"the code of '{path}'" if path else "the code of the network"


def convertible(net: nn.Module, graph: Graph) -> tuple[dict[TorchBatchNorm, type[BatchNorm]], dict[nn.Module, str]]:
    """Return the layers that can be converted, with their new classes, and why the others cannot be converted."""
    layers: dict[TorchBatchNorm, type[BatchNorm]] = {}
    refused: dict[nn.Module, str] = {}
    for module in net.modules():
        if not isinstance(module, TorchBatchNorm):
            continue
        kind = type(module)
        calls = graph.calls_of(module)
        if parametrize.is_parametrized(module):
            refused[module] = "it is parametrized"
        elif "forward" in vars(module):
            refused[module] = "its forward was replaced on the instance"
        elif kind in OURS:
            layers[module] = OURS[kind]
        elif isinstance(module, BatchNorm) and (kind in THEIRS or isinstance(module, NormAct)):
            layers[module] = type(module)
        elif is_norm_act(kind):
            layers[module] = joined(kind)
        elif kind is nn.SyncBatchNorm and calls:
            dims = len(calls[0].inputs[0].shape)
            if dims in BY_DIMENSIONS:
                layers[module] = BY_DIMENSIONS[dims]
            else:
                refused[module] = f"its input has {dims} dimensions, but BatchNorm1d, 2d and 3d take at most 5"
        elif kind is nn.SyncBatchNorm:
            refused[module] = (
                "not called on the example in evaluation mode, so it is unknown whether it is 1d, 2d or 3d"
            )
        else:
            refused[module] = f"{kind.__name__} is a subclass of a batch normalization layer and may behave differently"
    return layers, refused


def _has_room(layer: nn.Module, graphs: list[Graph]) -> bool:
    """Return whether an activation could still be fused into the layer."""
    applies_one = isinstance(layer, BatchNorm) and layer.activation.name != "identity"
    return not applies_one and not any(graph.has_extra_inputs(layer) for graph in graphs)


def _ours(layer: TorchBatchNorm, kind: type[BatchNorm], activation: Activation, memo: Memo) -> nn.Module:
    plain = BatchNorm2d if issubclass(kind, NormAct) else kind
    new = plain(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="cpu")
    new.__class__ = kind
    own, skipped = {key: vars(new)[key] for key in OWN}, new.num_batches_skipped
    move_state(layer, new, memo)
    if not isinstance(layer, BatchNorm):
        vars(new).update(own)
        if skipped is not None and new.running_mean is not None:
            skipped = skipped.to(new.running_mean.device)
        new.register_buffer("num_batches_skipped", skipped, persistent=False)
        new._keep_statistics_wide()
    if isinstance(layer, nn.SyncBatchNorm):
        del new.process_group
        new.statistics = Sync(layer.process_group)
    if activation.name != "identity":
        new.activation = activation
    return new


def move_state(old: nn.Module, new: nn.Module, memo: Memo) -> None:
    """Copy all attributes of ``old`` to ``new``: tensors, hooks, mode, and attributes that users set."""
    memo[id(old)] = new  # set before copying, because a hook may be a bound method of the layer
    vars(new).update(copy.deepcopy(vars(old), memo))


def _fused(activation: nn.Module, layers: list[nn.Module], memo: Memo) -> nn.Module:
    # convert() lists the layers before the activations, so the memo already contains the new layers.
    return Fused(copy.deepcopy(activation, memo), [memo[id(layer)] for layer in layers])
