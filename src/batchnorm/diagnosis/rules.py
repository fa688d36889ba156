"""What can be wrong with a network's batch normalization: one function for each problem, and the limits it uses.

A rule takes the :class:`~batchnorm.diagnosis.evidence.Evidence` and yields its findings, the worst first. To add a
rule, write its function and add it to ``RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..graph import TracedCall, Value
from ..graph.kinds import is_affine, plain_name
from .evidence import Evidence, Layer
from .findings import Finding

MEAN_GAP = 0.25
"""The largest acceptable distance of a running mean from the population mean, in standard deviations."""
VAR_GAP = 0.5
"""The largest acceptable distance of a running variance from the population variance, relative to the latter."""
ERRORS = 3
"""How many standard errors a gap must exceed, so that it is not due to the choice of batches."""
FEW = 5
"""With fewer batches, the standard errors are too uncertain to judge running averages."""
SMALL = 16
"""Batches with fewer values per feature are small: the standard error of their means is 1/4 of a standard deviation."""
LARGE_MOMENTUM = 0.5
"""With a larger momentum, the last batch has more weight in the running averages than all earlier batches."""

Rule = Callable[[Evidence], Iterator[Finding]]


def not_finite(e: Evidence) -> Iterator[Finding]:
    """Find the first layer whose input has inf or NaN, and layers whose running averages have."""
    for layer in _in_order_of_execution(e):
        count = int(layer.not_finite)
        if count:
            yield Finding(
                "not_finite",
                layer.path,
                f"{count} of its inputs {'has' if count == 1 else 'have'} an inf or NaN",
                "look for the inf or NaN in the batches and in the weights before this layer",
            )
            break
    for layer in e.layers:
        kept = [b for b in (layer.module.running_mean, layer.module.running_var) if b is not None]
        if not all(bool(b.isfinite().all()) for b in kept):
            yield Finding(
                "not_finite",
                layer.path,
                "its running averages have an inf or NaN, so its outputs in evaluation mode have too",
                "call bn.estimate_(net, batches); this library's layers skip such batches, so train with them"
                " (bn.convert)",
            )


def no_statistics(e: Evidence) -> Iterator[Finding]:
    """Report why population statistics could not be estimated."""
    if e.failure:
        yield Finding("no_statistics", "", e.failure, "fix this first, because several rules need these statistics")


def stale_averages(e: Evidence) -> Iterator[Finding]:
    """Find layers whose running averages are far from the population statistics of the batches."""
    known = [(layer, layer.statistics) for layer in e.layers if layer.statistics is not None]
    for layer, s in sorted(known, key=lambda pair: -max(pair[1].mean_gap / MEAN_GAP, pair[1].var_gap / VAR_GAP)):
        reasons = []
        if s.mean_gap > max(MEAN_GAP, ERRORS * s.mean_error):
            reasons += [f"its running mean is off by {s.mean_gap:.2g} standard deviations"]
        if s.var_gap > max(VAR_GAP, ERRORS * s.var_error):
            reasons += [f"its running variance is off by {s.var_gap:.0%}"]
        if reasons and s.batches >= FEW and not _never_updated(layer):
            yield Finding(
                "stale_averages",
                layer.path,
                " and ".join(reasons),
                "call bn.estimate_(net, batches) before evaluation; if the network was just loaded, check that the"
                " batches are preprocessed as in its training",
            )


def never_updated(e: Evidence) -> Iterator[Finding]:
    """Find layers whose running averages have their initial values."""
    for layer in e.layers:
        if layer.statistics is not None and _never_updated(layer):
            yield Finding(
                "never_updated",
                layer.path,
                "its running averages have never been updated, so it does not normalize in evaluation mode",
                "train the network, load its weights, or call bn.estimate_(net, batches)",
            )


def thaws(e: Evidence) -> Iterator[Finding]:
    """Find layers in evaluation mode inside a network in training mode: the next ``net.train()`` undoes that."""
    for layer in e.layers:
        if e.net.training and not layer.module.training and layer.updates:
            yield Finding(
                "thaws",
                layer.path,
                "it was set to evaluation mode, but the next net.train() sets it to training mode again",
                "freeze it with bn.freeze_, which train() does not undo (for torch.nn's layers, call bn.convert first)",
            )


def half_frozen(e: Evidence) -> Iterator[Finding]:
    """Find layers whose gamma and beta are not trained, but whose running averages are updated."""
    if not any(p.requires_grad for p in e.net.parameters()):
        return
    for layer in e.layers:
        own = list(layer.module.parameters())
        trains = layer.module.training or not e.net.training
        if own and not any(p.requires_grad for p in own) and layer.updates and trains:
            yield Finding(
                "half_frozen",
                layer.path,
                "its gamma and beta are frozen, but training still normalizes by the batch and updates the averages",
                "freeze the statistics too, with bn.freeze_ (for torch.nn's layers, call bn.convert first)",
            )


def momentum(e: Evidence) -> Iterator[Finding]:
    """Find layers whose momentum disables the running averages, or makes them depend on the last batch."""
    for layer in e.layers:
        value = layer.module.momentum
        if value is None or not layer.updates:
            continue
        if not value:
            why = "momentum=0: the running averages are never updated"
        elif value > LARGE_MOMENTUM:
            why = f"momentum={value:g}: the last batch has most of the weight in the running averages"
        else:
            continue
        yield Finding(
            "momentum",
            layer.path,
            why,
            "use momentum=0.1, for example: in torch, momentum is the weight of the new batch, so TensorFlow's 0.99 is"
            " 0.01 here",
        )


def small_batches(e: Evidence) -> Iterator[Finding]:
    """Find layers that compute statistics of only a few values."""
    known = [(layer, layer.statistics.m) for layer in e.layers if layer.statistics is not None]
    for layer, m in sorted(known, key=lambda pair: pair[1]):
        if m < SMALL:
            yield Finding(
                "small_batches",
                layer.path,
                f"its statistics are over {m:.3g} values per feature, so they are noisy",
                "use larger batches, statistics=bn.Sync() with several GPUs, or statistics=bn.Renorm(); to fine-tune,"
                " use bn.freeze_",
            )


def different_inputs(e: Evidence) -> Iterator[Finding]:
    """Find layers that are called several times in a forward pass, on inputs with different statistics."""
    for layer in e.layers:
        worst = 0.0
        for a, b in combinations(layer.averages(), 2):
            scale = (torch.minimum(a.var, b.var) + layer.module.eps).sqrt()
            worst = max(worst, float(((a.mean - b.mean).abs() / scale).max()))
        if worst > MEAN_GAP and layer.updates:
            yield Finding(
                "different_inputs",
                layer.path,
                f"it is called {len(layer.inputs)} times in a forward pass, on inputs whose means differ by {worst:.2g}"
                " standard deviations; its running averages mix them",
                "use one batch normalization layer for each call",
            )


def functional(e: Evidence) -> Iterator[Finding]:
    """Find calls of ``F.batch_norm`` outside batch normalization layers."""
    for path in dict.fromkeys(call.path for call in e.graph.functions("batch_norm")):
        yield Finding(
            "functional",
            path,
            "it calls F.batch_norm, which estimate_, freeze_ and Sync cannot reach",
            "use a batch normalization layer instead",
        )


def dropout_before(e: Evidence) -> Iterator[Finding]:
    """Find layers with dropout between them and the batch normalization before them.

    Dropout changes the variance of later layers' inputs in training, but not in evaluation (Li et al., 2019).
    """
    if not e.trained_graph:
        return
    for layer in e.layers:
        dropout = next((d for call in e.graph.calls_of(layer.module) for d in _dropouts_before(call)), None)
        if dropout is not None and layer.updates:
            yield Finding(
                "dropout_before",
                layer.path,
                f"{dropout} comes before it, so the variance of its input differs between training and evaluation",
                "move the dropout after the last batch normalization, or call bn.estimate_, which turns dropout off",
            )


def tiny_variance(e: Evidence) -> Iterator[Finding]:
    """Find layers with features whose variance is below eps."""
    for layer in e.layers:
        if layer.var is None:
            continue
        below = int((layer.var < layer.module.eps).sum())
        constant = int((layer.var == 0).sum())
        if below:
            zero = f" ({constant} of them constant)" if constant else ""
            yield Finding(
                "tiny_variance",
                layer.path,
                f"the variance is below eps={layer.module.eps:g} for {below} of {layer.var.numel()} features{zero}, so"
                " the standard deviation after normalization is below 0.71 instead of 1",
                "check that the inputs and weights before this layer are not close to 0; a smaller eps also helps,"
                " except for constant features, which can be pruned",
            )


def dead_features(e: Evidence) -> Iterator[Finding]:
    """Find layers with features whose ReLU is 0 for every value in the batches."""
    for layer in e.layers:
        if layer.largest is None or not _has_relu(e, layer):
            continue
        dead = int((layer.largest <= 0).sum())
        if dead:
            yield Finding(
                "dead_features",
                layer.path,
                f"the ReLU after it is 0 for {dead} of {layer.largest.numel()} features, on all batches",
                "such features do not learn and can be pruned; if they are many, lower the learning rate",
            )


def bias_without_effect(e: Evidence) -> Iterator[Finding]:
    """Find biases that the next layer subtracts again, together with the mean of the batch.

    Paper: Sec. 3.2 (bias), "its effect will be canceled by the subsequent mean subtraction"
    """
    normalizing = {layer.module for layer in e.layers if layer.updates or layer.module.running_mean is None}
    found = {}
    for call in e.graph.calls:
        module = call.module
        if not is_affine(module) or module is None or getattr(module, "bias", None) is None:
            continue
        consumer = call.outputs[0].sole_consumer
        flat = not isinstance(module, nn.Linear) or len(call.outputs[0].shape) == 2
        first = consumer is not None and consumer.inputs[:1] == call.outputs[:1]
        if consumer is not None and consumer.module in normalizing and flat and first:
            found[call.path] = consumer.path
    for path, norm in found.items():
        yield Finding(
            "bias_without_effect",
            path,
            f"'{norm}' subtracts the mean, and with it the bias of this layer",
            "create the layer with bias=False",
        )


def weight_decay(e: Evidence) -> Iterator[Finding]:
    """Find layers whose gamma or beta has weight decay."""
    if e.optimizer is None:
        return
    decay = {id(p): group.get("weight_decay", 0) for group in e.optimizer.param_groups for p in group["params"]}
    for layer in e.layers:
        largest = max((decay.get(id(p), 0) for p in layer.module.parameters()), default=0)
        if largest:
            yield Finding(
                "weight_decay",
                layer.path,
                f"the optimizer decays its gamma or beta by {largest:g}, which changes what the network computes",
                "pass bn.param_groups(net, weight_decay) to the optimizer",
            )


def not_trained(e: Evidence) -> Iterator[Finding]:
    """Find parameters that the optimizer does not know, for example because ``convert`` returned a new network."""
    if e.optimizer is None:
        return
    known = {id(p) for group in e.optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in e.net.named_parameters() if p.requires_grad and id(p) not in known]
    if missing:
        listed = ", ".join([*missing[:3], "..."] if len(missing) > 3 else missing)
        total = sum(p.requires_grad for p in e.net.parameters())
        yield Finding(
            "not_trained",
            "",
            f"the optimizer does not have {len(missing)} of {total} parameters: {listed}",
            "create the optimizer after bn.insert or bn.convert, which return a new network, or set"
            " requires_grad=False for parameters that should not be trained",
        )


def half_precision(e: Evidence) -> Iterator[Finding]:
    """Find layers whose running averages have a 16-bit dtype."""
    for layer in e.layers:
        mean = layer.module.running_mean
        if mean is not None and mean.dtype.itemsize < 4:
            yield Finding(
                "half_precision",
                layer.path,
                f"its running averages are {mean.dtype}, which is too coarse to average many batches",
                "use this library's layers (bn.convert), which keep float32 averages under net.half(), or autocast",
            )


def never_called(e: Evidence) -> Iterator[Finding]:
    """Find layers that the network did not call on the batches."""
    for layer in e.layers:
        if not e.graph.calls_of(layer.module) and not layer.called:
            yield Finding(
                "never_called",
                layer.path,
                "the network did not call it on these batches, so its statistics stay as they are",
                "remove it, or pass batches that reach it",
            )


RULES: tuple[Rule, ...] = (
    not_finite,
    no_statistics,
    not_trained,
    never_updated,
    stale_averages,
    thaws,
    half_frozen,
    momentum,
    different_inputs,
    functional,
    half_precision,
    small_batches,
    dropout_before,
    tiny_variance,
    dead_features,
    never_called,
    weight_decay,
    bias_without_effect,
)


def unchecked(e: Evidence) -> Iterator[str]:
    """Say what could not be checked, and why."""
    if e.optimizer is None:
        yield "which parameters are trained and decayed (pass optimizer=)"
    if not e.trained_graph:
        yield "dropout, because the network does not run in training mode on the first batch"
    if e.batches < FEW:
        yield f"whether running averages are stale (pass at least {FEW} batches)"


def _never_updated(layer: Layer) -> bool:
    count, mean, var = layer.module.num_batches_tracked, layer.module.running_mean, layer.module.running_var
    initial = mean is not None and var is not None and bool((mean == 0).all() and (var == 1).all())
    return initial and (count is None or not int(count))


def _in_order_of_execution(e: Evidence) -> list[Layer]:
    place = {call.module: k for k, call in reversed(list(enumerate(e.graph.calls)))}
    return sorted(e.layers, key=lambda layer: place.get(layer.module, len(place)))


def _has_relu(e: Evidence, layer: Layer) -> bool:
    """Return whether a ReLU is fused into the layer or reads its output in every call."""
    fused = getattr(getattr(layer.module, "activation", None), "name", "identity")
    if fused != "identity":
        return fused in ("relu", "relu6")
    after = [call.outputs[0].sole_consumer for call in e.graph.calls_of(layer.module)]
    return bool(after) and all(call is not None and plain_name(call.name) in ("relu", "relu6") for call in after)


def _dropouts_before(call: TracedCall) -> Iterator[TracedCall]:
    """Yield the calls of dropout on the paths that end at a call, up to the batch normalizations before it."""
    waiting: list[Value] = call.inputs[:1]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        producer = value.producer
        if value in seen or producer is None:
            continue
        seen.add(value)
        if "dropout" in plain_name(producer.name) and getattr(producer.module, "p", None) != 0:
            yield producer
        elif not isinstance(producer.module, TorchBatchNorm):
            waiting += producer.inputs
