"""The problems that ``diagnose`` looks for: one function for each problem, and the limits that the functions use.

A rule takes the :class:`~batchnorm.diagnosis.evidence.Evidence` and yields the problems that it finds, in the order in
which they are shown. To add a rule, write its function, add it to ``RULES``, and describe it in docs/diagnose.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import log

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..errors import listed
from ..graph import Graph, TracedCall, Value
from ..graph.kinds import has_hooks, has_initial_statistics, is_affine, plain_name
from ..layers import BatchNorm, Ghost, Renorm
from ..layers.parameters import own_parameters
from ..ops.moments import AveragedMoments, merge_averages
from ..population import population_statistics
from . import remedies
from .evidence import Evidence, Layer

MEAN_GAP = 0.25
"""The largest acceptable distance of a running mean from the population mean, in standard deviations."""
FACTOR = 2
"""The largest acceptable ratio between a running variance and the population variance, the larger over the smaller."""
SHARE = 0.02
"""The largest acceptable share of features whose running averages are stale."""
ERRORS = 3
"""A gap of at most this many standard errors may be due to the choice of batches."""
FEW = 5
"""With fewer batches, the standard errors are too uncertain to judge running averages or the means of inputs."""
SMALL = 16
"""Batches with fewer values per feature are small: the standard error of their means is above std / 4."""
TINY = 0.1
"""A variance below this share of eps is tiny: the standard deviation after normalization is below 0.31."""
ROUNDING = 1e-12
"""A feature is constant if its variance is at most this share of its squared mean."""
LARGE_MOMENTUM = 0.5
"""With a larger momentum, the last batch has more weight in the running averages than all earlier batches."""

Problem = tuple[str, str, str]
"""The path of a layer, what is wrong with it, and the fix."""
Rule = Callable[[Evidence], Iterator[Problem]]


def _is_finite(p: Tensor) -> bool:
    narrow = p.is_floating_point() and p.dtype.itemsize < 2  # isfinite does not support float8
    return bool((p.float() if narrow else p).isfinite().all())


def not_finite(e: Evidence) -> Iterator[Problem]:
    """Find parameters with an inf or NaN, the first layer whose input has one, and running averages that have one."""
    parameters = dict(e.net.named_parameters())
    broken = [name for name, p in parameters.items() if not _is_finite(p)]
    averages = {layer: (layer.module.running_mean, layer.module.running_var) for layer in e.layers}
    bad = [layer for layer, kept in averages.items() if not all(b is None or bool(b.isfinite().all()) for b in kept)]
    in_order = _in_order_of_execution(e)
    first = next((layer for layer in in_order if layer.not_finite), None)
    # A layer that normalized the batches by bad running averages may be the source of the first inf or NaN.
    before = in_order[: in_order.index(first)] if first is not None else []
    source = next((layer for layer in before if layer in bad and not layer.used_batch), None)
    if broken:
        has = "has" if len(broken) == 1 else "have"
        why = f"{len(broken)} of {len(parameters)} parameters {has} an inf or NaN: {listed(broken, 3)}"
        yield "", why, remedies.LOAD_WEIGHTS
    if first is not None:
        fix = "look for the inf or NaN in the batches, and for values that overflow before this layer"
        if source is not None:
            fix = f"repair the running averages of '{source.path}'"
        count = int(first.not_finite)
        why = f"{count} of its inputs {'has' if count == 1 else 'have'} an inf or NaN"
        yield first.path, why, remedies.LOAD_WEIGHTS if broken else fix
    for layer in bad:
        fix = remedies.estimate(e, layer)
        if broken:
            fix = remedies.LOAD_WEIGHTS
        elif first is not None and source is None:
            fix = f"first repair the inputs that have an inf or NaN, then {fix}"
        elif remedies.can_be_ours(e, layer) and not isinstance(layer.module, BatchNorm):
            fix += (
                "; to prevent this, train with this library's layers (bn.convert), which do not update their averages"
                " from a batch with inf or NaN"
            )
        yield layer.path, "its running averages have an inf or NaN, so its outputs in evaluation mode are wrong", fix


def single_value(e: Evidence) -> Iterator[Problem]:
    """Find layers that get only one value per feature from some batches, so that the variance is undefined."""
    for layer in e.layers:
        if layer.single:
            fix = "use drop_last=True in the data loader or larger batches"
            if remedies.can_be_ours(e, layer) and layer.module.running_mean is not None:
                fix += f", or {remedies.convert(layer)}set the layer's on_single to 'running'"
            yield (
                layer.path,
                f"{layer.single} of {e.batches} batches have only one value per feature, so the variance is undefined",
                fix + remedies.fine_tune(e, layer),
            )


def stale_averages(e: Evidence) -> Iterator[Problem]:
    """Find layers whose running averages are far from the population statistics of the batches."""
    found: list[tuple[float, Problem]] = []
    for layer in e.layers:
        averages = merge_averages(layer.averages)
        if averages is None or averages.batches < FEW or e.batches < FEW or has_initial_statistics(layer.module):
            continue
        gap, factor, off, features = _gaps(layer, averages)
        if off > SHARE * features:
            why = (
                f"its running averages are off for {off} of {features} features: the mean by up to {gap:.2g} standard"
                f" deviations, the variance by a factor of up to {factor:.2g}{' (it is frozen)' * layer.frozen}"
            )
            fix = (
                "if the network was just loaded, check that the batches are preprocessed as in its training; before"
                f" evaluation, {remedies.estimate(e, layer)}"
            )
            found.append((max(gap / MEAN_GAP, factor / FACTOR), (layer.path, why, fix)))
    yield from (problem for _, problem in sorted(found, key=lambda pair: -pair[0]))


def _gaps(layer: Layer, averages: AveragedMoments) -> tuple[float, float, int, int]:
    """Compare running averages with the population.

    Return four values: the largest gap between the means (in standard deviations) and the largest ratio of the
    variances, both over the features that are off; the number of these features; and the number of all features.
    """
    undefined = averages.count == averages.batches  # every batch had only one value per feature
    if layer.module.running_mean is None or layer.module.running_var is None or undefined:
        return 0.0, 1.0, 0, 0
    running_mean, running_var = layer.module.running_mean.cpu().double(), layer.module.running_var.cpu().double()
    mean, var = population_statistics(averages, "paper")
    # Do not divide by `var` alone: a few batches may lack rare values, so their variance may be near 0.
    scale = torch.maximum(var, running_var) + layer.module.eps
    others = averages.batches - 1
    # With more features, the largest of their random errors is larger, so allow more standard errors.
    sigmas = (ERRORS**2 + 2 * log(max(var.numel(), 1))) ** 0.5
    mean_error = (torch.maximum(averages.mean_spread / others, running_var / averages.count) / scale).sqrt()
    mean_gap = (running_mean - mean).abs() / scale.sqrt()
    var_error = (averages.var_spread / others).sqrt() / scale
    var_gap = (running_var - var).abs() / scale
    off = mean_gap > (sigmas * mean_error).clamp(min=MEAN_GAP)
    # A feature that is constant on these batches may vary on others, so its variance is unknown.
    off |= (var > 0) & (var_gap > (sigmas * var_error).clamp(min=1 - 1 / FACTOR))
    if not off.any():
        return 0.0, 1.0, 0, off.numel()
    factor = scale / (torch.minimum(var, running_var) + layer.module.eps)
    return float(mean_gap[off].max()), float(factor[off].max()), int(off.sum()), off.numel()


def never_updated(e: Evidence) -> Iterator[Problem]:
    """Find layers whose running averages still have their initial values."""
    for layer in e.layers:
        if layer.called and has_initial_statistics(layer.module):
            yield (
                layer.path,
                "its running averages have never been updated, so it does not normalize in evaluation mode",
                f"{'train the network, ' if layer.updates else ''}load its weights, or {remedies.estimate(e, layer)}",
            )


def thaws(e: Evidence) -> Iterator[Problem]:
    """In a network in training mode, find layers in evaluation mode that ``net.train()`` would set to training mode."""
    for layer in e.layers:
        if e.net.training and not layer.module.training and layer.updates:
            yield (
                layer.path,
                "it was set to evaluation mode, but the next net.train() sets it to training mode again",
                remedies.freeze(e, layer),
            )


def half_frozen(e: Evidence) -> Iterator[Problem]:
    """Find layers whose gamma and beta are not trained, but whose running averages are updated."""
    if not any(p.requires_grad for p in e.net.parameters()):
        return
    for layer in e.layers:
        own = own_parameters(layer.module)
        if own and not any(p.requires_grad for p in own) and layer.updates and layer.ran_in_training:
            yield (
                layer.path,
                "its gamma and beta are frozen, but training still normalizes by the batch and updates the averages",
                remedies.freeze(e, layer),
            )


def momentum(e: Evidence) -> Iterator[Problem]:
    """Find layers whose momentum never changes the running averages, or makes them depend mostly on the last batch."""
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
        yield (
            layer.path,
            why,
            "use momentum=0.1, for example: in torch, momentum is the weight of the new batch, so TensorFlow's 0.99 is"
            " 0.01 here",
        )


def small_batches(e: Evidence) -> Iterator[Problem]:
    """Find layers that compute statistics of only a few values."""
    for layer in sorted(e.layers, key=lambda layer: layer.m):
        if 0 < layer.m < SMALL and layer.uses_batch and not isinstance(_source(layer), Renorm):
            ways = ["make the groups larger" if isinstance(_source(layer), Ghost) else "use larger batches"]
            if remedies.can_be_ours(e, layer):
                ways.append("statistics=bn.Sync() with several GPUs")
                ways += ["statistics=bn.Renorm()"] * (layer.module.running_mean is not None)
            fix = f"{' or '.join(ways)}{remedies.fine_tune(e, layer)}"
            yield layer.path, f"its statistics are over {layer.m:.3g} values per feature, so they are noisy", fix


def different_inputs(e: Evidence) -> Iterator[Problem]:
    """Find layers that are called several times in a forward pass, on inputs with different statistics."""
    for layer in e.layers:
        known = [averages for averages in layer.averages if averages.batches >= FEW]
        if len(known) < 2 or not layer.updates:
            continue
        means = torch.stack([averages.mean for averages in known])
        scale = (torch.stack([averages.var for averages in known]).amin(0) + layer.module.eps).sqrt()
        errors = torch.stack([(averages.mean_spread / (averages.batches - 1)).sqrt() for averages in known])
        gap = float(((means.amax(0) - means.amin(0)) / scale).max())
        error = float((errors.amax(0) * 2**0.5 / scale).max())  # the standard error of a difference of two means
        if gap > max(MEAN_GAP, ERRORS * error):
            yield (
                layer.path,
                f"it is called {len(layer.inputs)} times in a forward pass, on inputs whose means differ by {gap:.2g}"
                " standard deviations; its running averages mix them",
                "use one batch normalization layer for each call, or pass all inputs in one batch",
            )


def functional(e: Evidence) -> Iterator[Problem]:
    """Find code that applies batch normalization to activations without calling a registered layer."""
    names = {
        id(value): layer
        for layer in e.layers
        for tensor in (layer.module.running_mean, layer.module.weight)
        if tensor is not None and (value := e.graph.value_of(tensor)) is not None
    }
    found: dict[str, tuple[str, str]] = {}
    for call in functional_calls(e.graph):
        layer = next((names[id(value)] for value in call.inputs if id(value) in names), None)
        if layer is not None:
            found[layer.path] = (
                "it is called as layer.forward(x), which skips hooks, so estimate_ and diagnose cannot observe it",
                "call it as layer(x)",
            )
        else:
            found[call.path] = (
                "it calls F.batch_norm without a registered layer, so estimate_, freeze_ and Sync cannot reach it",
                "use a batch normalization layer, and register it as an attribute or in nn.ModuleList",
            )
    for path, (why, fix) in found.items():
        yield path, why, fix


def dropout_before(e: Evidence) -> Iterator[Problem]:
    """Find layers with dropout between them and the previous batch normalization or the network's input.

    Dropout changes the variance of later layers' inputs in training, but not in evaluation (Li et al., 2019).
    """
    if not e.shows_training:
        return
    for layer in e.layers:
        dropout = next((d for call in e.graph.calls_of(layer.module) for d in _dropouts_before(call)), None)
        if dropout is not None and layer.updates:
            yield (
                layer.path,
                f"{dropout} comes before it, so the variance of its input differs between training and evaluation",
                "move the dropout after the last batch normalization, or call bn.estimate_ after training, which"
                " estimates the statistics without dropout",
            )


def tiny_variance(e: Evidence) -> Iterator[Problem]:
    """Find layers with features whose variance is far below eps."""
    for layer in e.layers:
        averages = merge_averages(layer.averages)
        if averages is None:
            continue
        var = averages.var + averages.mean_spread
        tiny = var < TINY * layer.module.eps
        below, constant = int(tiny.sum()), int((tiny & (var <= ROUNDING * averages.mean.square())).sum())
        if below:
            zero = f" ({constant} of them constant)" if constant else ""
            yield (
                layer.path,
                f"{below} of {var.numel()} features{zero} have a variance below a tenth of eps={layer.module.eps:g}, so"
                " after normalization, their standard deviation is below 0.31 instead of 1",
                "check that the inputs and weights before this layer are not close to 0; a smaller eps also helps,"
                " except for constant features, which can be pruned",
            )


def dead_features(e: Evidence) -> Iterator[Problem]:
    """Find layers with features whose ReLU is 0 for every value in the batches."""
    for layer in e.layers:
        if layer.largest is None or not _has_relu(e, layer):
            continue
        dead = int((layer.largest <= 0).sum())
        if dead:
            stale = "" if layer.used_batch else "check that its running averages are not stale; if they are not, "
            yield (
                layer.path,
                f"the ReLU after it is 0 for {dead} of {layer.largest.numel()} features, on all batches",
                f"{stale}such features do not learn and can be pruned; if there are many, lower the learning rate",
            )


def bias_without_effect(e: Evidence) -> Iterator[Problem]:
    """Find biases that the next layer subtracts again, together with the mean of the batch.

    Paper: Sec. 3.2 (bias), "its effect will be canceled by the subsequent mean subtraction"
    """
    normalizing: dict[nn.Module | None, Layer] = {
        layer.module: layer for layer in e.layers if layer.uses_batch and layer.standard
    }
    owners = Counter(id(p) for m in e.net.modules() for p in m._parameters.values())
    for path, module in e.net.named_modules():
        bias = getattr(module, "bias", None) if is_affine(module) and not has_hooks(module) else None
        calls = e.graph.calls_of(module)
        if bias is None or not calls or owners[id(bias)] != 1 or e.graph.readers_of(bias):
            continue
        norms = [norm for call in calls if (norm := normalizing.get(_subtracting(module, call))) is not None]
        if len(norms) == len(calls):
            fix = "create the layer with bias=False"
            if any(n.module.running_mean is not None and not has_initial_statistics(n.module) for n in norms):
                fix = (
                    "keep the bias in this trained network, or subtract it from the running mean, which includes it,"
                    " and set the layer's bias to None; in a new network, create the layer with bias=False"
                )
            yield path, f"'{norms[0].path}' subtracts the mean, and with it the bias of this layer", fix


def weight_decay(e: Evidence) -> Iterator[Problem]:
    """Find layers whose gamma or beta has weight decay."""
    if e.optimizer is None:
        return
    decay = {id(p): group.get("weight_decay", 0) for group in e.optimizer.param_groups for p in group["params"]}
    for layer in e.layers:
        largest = max((decay.get(id(p), 0) for p in own_parameters(layer.module) if p.requires_grad), default=0)
        if largest:
            yield (
                layer.path,
                f"the optimizer decays its gamma or beta by {largest:g}, which changes what the network computes",
                "pass bn.param_groups(net, weight_decay) to the optimizer",
            )


def not_trained(e: Evidence) -> Iterator[Problem]:
    """Find trainable parameters that the optimizer lacks, for example because ``convert`` returned a new network."""
    if e.optimizer is None:
        return
    known = {id(p) for group in e.optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in e.net.named_parameters() if p.requires_grad and id(p) not in known]
    if missing:
        total = sum(p.requires_grad for p in e.net.parameters())
        yield (
            "",
            f"the optimizer does not have {len(missing)} of {total} parameters: {listed(missing, 3)}",
            "create the optimizer after bn.insert or bn.convert, which return a new network, or set"
            " requires_grad=False for parameters that should not be trained",
        )


def half_precision(e: Evidence) -> Iterator[Problem]:
    """Find layers whose running averages have a 16-bit dtype."""
    for layer in e.layers:
        mean = layer.module.running_mean
        if mean is not None and mean.dtype.itemsize < 4:
            yield (
                layer.path,
                f"its running averages are {mean.dtype}, which is too coarse to average many batches",
                "use autocast, or this library's layers (bn.convert), which keep float32 averages under net.half()",
            )


def never_called(e: Evidence) -> Iterator[Problem]:
    """Find layers that the network did not call on the batches."""
    for layer in e.layers:
        tensors = [t for t in (layer.module.running_mean, layer.module.weight) if t is not None]
        used = e.graph.calls_of(layer.module) or any(e.graph.readers_of(t) for t in tensors)
        if not used and not layer.called:
            yield (
                layer.path,
                "the network did not call it on these batches, so its statistics stay as they are",
                "remove it, or pass batches that reach it",
            )


RULES: tuple[Rule, ...] = (
    not_finite,
    single_value,
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
    if not e.shows_training:
        yield "dropout, because the network does not run in training mode on the first batch"
    if e.batches < FEW:
        yield (
            "whether running averages are stale or mix different inputs"
            f" ({FEW} or more batches are needed; got {e.batches})"
        )
    own = [layer.path for layer in e.layers if not layer.standard]
    if own:
        yield f"the inputs of layers whose class has its own forward: {', '.join(own)}"


def functional_calls(graph: Graph) -> list[TracedCall]:
    """Return the calls of F.batch_norm on activations, but not those on weights, as in weight standardization."""
    calls = graph.functions("batch_norm", "native_batch_norm")
    return [call for call in calls if call.inputs and graph.follows_input(call.inputs[0])]


def _source(layer: Layer) -> object:
    return getattr(layer.module, "statistics", None)


def _subtracting(module: nn.Module, call: TracedCall) -> nn.Module | None:
    """Return the module that alone reads a call's output, if it may subtract the called module's bias; else None.

    A batch normalization subtracts one mean for each index of dimension 1. So it does not subtract the bias of a Linear
    whose output has more than two dimensions, because that bias differs along the last dimension.
    """
    (out, *_) = call.outputs
    consumer = out.sole_consumer
    flat = not isinstance(module, nn.Linear) or len(out.shape) == 2
    return consumer.module if consumer is not None and flat and consumer.inputs[:1] == [out] else None


def _in_order_of_execution(e: Evidence) -> list[Layer]:
    place = {call.module: k for k, call in reversed(list(enumerate(e.graph.calls)))}
    return sorted(e.layers, key=lambda layer: place.get(layer.module, len(place)))


def _has_relu(e: Evidence, layer: Layer) -> bool:
    """Return whether a ReLU is fused into the layer, or is the only reader of the output of each call."""
    fused = getattr(getattr(layer.module, "activation", None), "name", "identity")
    if fused != "identity":
        return fused in ("relu", "relu6")
    after = [call.outputs[0].sole_consumer for call in e.graph.calls_of(layer.module)]
    return bool(after) and all(call is not None and plain_name(call.name) in ("relu", "relu6") for call in after)


def _is_dropout(call: TracedCall) -> bool:
    name = plain_name(call.name)  # alpha dropout keeps the variance
    return "dropout" in name and "alpha" not in name and getattr(call.module, "p", None) != 0


def _dropouts_before(call: TracedCall) -> Iterator[TracedCall]:
    """Follow a call's input back to the batch normalizations before it, and yield the calls of dropout on the way."""
    waiting: list[Value] = call.inputs[:1]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        producer = value.producer
        if value in seen or producer is None:
            continue
        seen.add(value)
        if _is_dropout(producer):
            yield producer
        elif not isinstance(producer.module, TorchBatchNorm):
            waiting += producer.inputs
