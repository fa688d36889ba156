"""The population statistics E[x] and Var[x] that the inference network normalizes by: Algorithm 2, lines 8 to 10.

    for k = 1 ... K:
        Process multiple training mini-batches B, each of size m, and average over them:
            E[x]   <-  E_B[mu_B]
            Var[x] <-  m/(m-1) E_B[sigma_B^2]

With rule "paper", :func:`population_statistics` computes this formula. :func:`estimate_` runs the network on the
mini-batches and computes the statistics for each batch normalization layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from graphlib import CycleError, TopologicalSorter
from itertools import chain, count, islice
from math import inf, prod
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.overrides import TorchFunctionMode

from . import collectives, network_call, ops
from .change_report import LayerStatistics, Population, Site
from .graph import Graph, TracedCall, trace
from .graph.kinds import is_scripted_norm, keeps_torch_forward
from .layers import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync
from .network_copy import changed, restored
from .ops.cpu.torch_kernels import CONDITION
from .ops.moments import AveragedMoments, MomentAccumulator, Moments, batch_moments, merge, merge_averages
from .progress import length_of, progress

__all__ = ["LayerStatistics", "Population", "estimate_"]

Rule = Literal["paper", "pooled"]
Upstream = Literal["batch", "population"]
Layers = dict[TorchBatchNorm, str]

# If a layer of one of these classes is called in training mode with momentum 1, its running mean and variance become
# the batch's mean and unbiased variance.
KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d)
ONE_SHOT = "upstream='population' reads the batches several times; pass a list or a DataLoader, not an iterator"
FUNCTIONS = (F.batch_norm, torch.batch_norm, torch.native_batch_norm)


def population_statistics(over_batches: AveragedMoments, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return E[x] and Var[x] from the averages E_B[mu_B] and E_B[sigma_B^2] over mini-batches.

    If mini-batches differ in size, the averages are weighted by size. With rule "paper", m is then the mean size, so
    that Var[x] = sum(m_B sigma_B^2) / sum(m_B - 1).

    Paper: Alg. 2, l. 10
    """
    m = over_batches.count / over_batches.batches
    E_x, E_var = over_batches.mean, over_batches.var
    # Rule "pooled" computes the variance of all samples together: the average variance within mini-batches plus the
    # variance of their means.
    Var_x = m / (m - 1) * E_var if rule == "paper" else E_var + over_batches.mean_spread
    return E_x, Var_x


def estimate_(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    rule: Rule = "paper",
    upstream: Upstream = "batch",
    forward: network_call.Forward | None = None,
) -> Population:
    """Replace the running statistics of a network with population statistics over mini-batches, in place.

    Rule "paper": E[x] = E_B[mu_B] and Var[x] = m/(m-1) E_B[sigma_B^2]. If the batches differ in size m, each batch is
    weighted by its m, and Var[x] = sum(m sigma_B^2) / sum(m - 1). In convolutional layers, m counts locations too. A
    batch is what training normalizes together: with ``Ghost``, each group; with ``Sync``, the batches of all ranks.
    (With ``upstream="population"``, it is always the whole batch of one rank.)
    Rule "pooled": the mean and the biased variance (divided by N, not by N - 1) of all N values of a feature together.

    All layers except batch normalization run in evaluation mode, so dropout, for example, is off. Frozen batch
    normalization layers keep their statistics and normalize by them. A layer is frozen if ``freeze_`` froze its
    statistics, or if it is in evaluation mode inside a network in training mode. For calls of ``F.batch_norm`` outside
    batch normalization layers, no statistics are estimated; the report lists such calls if the first batch reaches
    them. Each estimated layer's ``num_batches_tracked`` is set to the number of averaged batches. All other buffers
    keep their values. If an exception is raised, every buffer keeps its value. Changes that the network's own
    ``forward`` makes to parameters and attributes, such as ``self.calls += 1``, remain. Call ``estimate_`` once after
    averaging weights (EMA, SWA), because a network with averaged weights has different statistics.

    In a distributed run, every rank calls ``estimate_`` on its own batches, and every rank gets the statistics of all
    batches. If the network has synchronized layers, all ranks need the same number of batches. With
    ``upstream="population"``, this is necessary only if a synchronized layer is called several times.

    Args:
        net: any network with batch normalization layers of this library or of ``torch.nn``.
        batches: training mini-batches; they are copied to the network's device. A batch is a tensor, a tuple or list
            whose first item is the input, or a dict of keyword arguments.
        rule: "paper" or "pooled".
        upstream: how the earlier batch normalization layers normalize while a later layer is estimated. "batch": by
            the statistics of each batch, as in training; this takes one pass over the batches. "population": by their
            own population statistics; this takes one pass for each batch normalization layer on the longest path
            through the network, and at most one more if the first batch does not reach all layers. With "population"
            and rule "pooled", the result does not depend on how the data is split into batches, unless a layer is
            called several times.
        forward: a function that takes the network and a batch, and calls the network; needed for batches of a
            type that is not listed under ``batches``.

    Raises:
        ValueError: if ``rule`` or ``upstream`` is unknown, if there are no layers to estimate, or if ``batches`` is
            empty, a single batch (a tensor or a dict) or, with ``upstream="population"``, an iterator.
        ValueError: if a moment is not finite, or if a batch has only one value per feature. With
            ``upstream="population"``, such a batch is an error only if it leaves the variance undefined or if the layer
            is called several times.
        ValueError: if synchronized layers need the same number of batches on all ranks, but the numbers differ.
        ValueError: if the network's code is found to call ``layer.forward(x)`` instead of ``layer(x)``.
        ValueError: if a layer has its own forward that never calls ``F.batch_norm`` or the forward of its base class,
            or that normalizes an input whose features do not match the layer's running mean.
        TypeError: if ``net`` is not a network. Also if it cannot be called on the batches; in this case, pass
            ``forward=`` to say how to call it.

    >>> net = nn.Sequential(nn.BatchNorm1d(1))
    >>> report = estimate_(net, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    >>> net[0].running_mean, net[0].running_var
    (tensor([3.]), tensor([2.]))

    Paper: Alg. 2, l. 8-10; Sec. 3.1
    """
    network_call.check_network(net)
    if rule not in ("paper", "pooled"):
        raise ValueError(f"rule={rule!r} is unknown: choose 'paper' or 'pooled'")
    if upstream not in ("batch", "population"):
        raise ValueError(f"upstream={upstream!r} is unknown: choose 'batch' or 'population'")
    network_call.check_batches(batches)
    layers, left_alone = _layers_to_estimate(net)
    functional = _FunctionalCalls(net)
    found: dict[TorchBatchNorm, AveragedMoments] = {}
    with torch.no_grad(), network_call.eagerly(), restored(net), _without_renorm(layers):
        for module in net.modules():
            module.training = upstream == "batch" and module in layers
        passes, unread, known = [layers], batches if layers else islice(batches, 1), 0
        if upstream == "population" and layers:
            passes, unread, known = _by_depth(net, layers, batches, forward)
        for number, together in enumerate(passes, 1):
            observers = [_Observer(m, path, rule, direct=upstream == "population") for m, path in together.items()]
            label = f"estimating population statistics, pass {number} of {len(passes)}"
            shown = progress(unread, label, length_of(batches), "batch") if collectives.rank() == 0 else unread
            read = _run(net, shown, forward, observers, functional)
            if known and not read:
                raise ValueError(ONE_SHOT)
            unread, known = batches, read
            for observer in observers:
                observer.layer.training = False
                averages = observer.averages()
                if averages is not None:
                    found[observer.layer] = averages
                    # The next pass normalizes by these statistics. On exit, `restored` restores the old ones.
                    _write(observer.layer, averages, rule)
    left_alone += functional.sites
    if not layers:
        why = "; ".join(map(str, left_alone)) or "it has no batch normalization layers"
        raise ValueError(f"the network has no statistics to estimate: {why}")
    if not found:
        raise ValueError(
            "no batch had values for any batch normalization layer, so nothing was estimated: check that batches is"
            " not empty, that masks are not all False, and that the network calls its layers as layer(x), not as"
            " layer.forward(x)"
        )
    compared = tuple(_compare(path, m, found[m], rule) for m, path in layers.items() if m in found)
    unreached = [path for m, path in layers.items() if m not in found]
    left_alone += [
        Site(path, "left alone", "not called on these batches, or only on empty or fully masked inputs")
        for path in unreached
    ]
    for layer, averages in found.items():
        _write(layer, averages, rule)
    return Population(compared, tuple(left_alone))


@contextmanager
def _without_renorm(layers: Layers) -> Iterator[None]:
    """Inside the block, layers with ``Renorm`` normalize by the batch alone, without the old running statistics."""
    with ExitStack() as stack:
        for layer in layers:
            if isinstance(layer, BatchNorm) and isinstance(layer.statistics, Renorm):
                stack.enter_context(changed(layer, statistics=None))
        yield


def _layers_to_estimate(net: nn.Module) -> tuple[Layers, list[Site]]:
    chosen, left = {}, []
    for path, m in net.named_modules():
        if is_scripted_norm(m, that_updates=True):
            left.append(Site(path, "left alone", "it is scripted; call estimate_ before scripting the network"))
        if not isinstance(m, TorchBatchNorm):
            continue
        if m.running_mean is None or m.running_var is None:
            left.append(Site(path, "left alone", "keeps no running statistics"))
        elif getattr(m, "frozen_statistics", False):
            left.append(Site(path, "left alone", "its statistics are frozen"))
        elif net.training and not m.training:
            left.append(Site(path, "left alone", "in evaluation mode inside a network in training mode"))
        else:
            chosen[m] = path
    return chosen, left


def _by_depth(
    net: nn.Module, layers: Layers, batches: Iterable[Any], forward: network_call.Forward | None
) -> tuple[list[Layers], Iterable[Any], int]:
    """Group the layers into passes, so that each layer is in a later pass than the layers that its inputs depend on.

    If a layer is shared, that is, called several times, another layer and the shared layer can depend on each other.
    In this case, the other layer does not wait for the shared layer. All ranks get the same passes.

    Return the passes, the batches for the first pass, and how many batches are known to exist: 0 or 1.
    """
    iterator = iter(batches)
    if iterator is batches:
        raise ValueError(ONE_SHOT)
    first = list(islice(iterator, 1))
    graphs = []
    for batch in first:
        with network_call.at_index(0, batch):
            graphs.append(trace(net, batch, forward))
    unread: Iterable[Any] = chain(first, iterator)
    missing: set[nn.Module] = {m for m in layers if not any(graph.calls_of(m) for graph in graphs)}
    if missing:
        graphs += _graphs_of_others(net, missing, iterator, forward)
        unread = batches
    # `above` maps each batch normalization layer to those on the paths from the network's input to its calls.
    above: dict[nn.Module, set[nn.Module]] = {}
    shared = set[nn.Module]()
    for graph in graphs:
        # `reaching` maps each call to the batch normalization layers on the paths from the network's input to the call,
        # including the called layer.
        reaching: dict[TracedCall, set[nn.Module]] = {}
        for call in graph.calls:
            found = reaching[call] = set().union(*(reaching.get(v.producer, ()) for v in call.inputs if v.producer))
            if isinstance(call.module, TorchBatchNorm) and call.module in layers:
                above.setdefault(call.module, set()).update(found)
                found.add(call.module)
        shared |= {m for m in above if len(graph.calls_of(m)) > 1}
    above, shared = _of_all_ranks(layers, above, shared)
    for m in shared:
        m.training = True  # a shared layer uses batch statistics until its population statistics are estimated
    # The transitive closure of `above`: a layer that depends on a shared layer also depends on every layer before any
    # call of that shared layer.
    depends = {m: set(found) for m, found in above.items()}
    for middle in above:
        for found in depends.values():
            if middle in found:
                found |= depends[middle]
    # A layer `m` does not wait for a shared layer `n` that depends on `m`; otherwise, each would wait for the other.
    sorter = TopologicalSorter(
        {m: {n for n in above[m] - {m} if n not in shared or m not in depends[n]} for m in above}
    )
    try:
        sorter.prepare()
    except CycleError:
        raise ValueError(
            "batches pass through the network's layers in different orders, so upstream='population' cannot estimate"
            " one layer after the other: use upstream='batch'"
        ) from None
    passes = []
    while sorter.is_active():
        ready = sorter.get_ready()
        passes.append({m: layers[m] for m in layers if m in ready})
        sorter.done(*ready)
    return passes, unread, len(first)


def _graphs_of_others(
    net: nn.Module, missing: set[nn.Module], batches: Iterable[Any], forward: network_call.Forward | None
) -> Iterator[Graph]:
    """Trace each batch that reaches a layer that no earlier batch has reached."""
    reached = set[nn.Module]()
    for number, batch in enumerate(batches, 1):
        with network_call.at_index(number, batch), ExitStack() as stack:
            for m in missing:
                stack.enter_context(m.register_forward_pre_hook(lambda m, _: reached.add(m)))
            network_call.call(net, network_call.copy_for(net, batch), forward)
        if reached & missing:
            yield trace(net, batch, forward)
            missing = missing - reached
        if not missing:
            break


def _of_all_ranks(
    layers: Layers, above: dict[nn.Module, set[nn.Module]], shared: set[nn.Module]
) -> tuple[dict[nn.Module, set[nn.Module]], set[nn.Module]]:
    """Merge ``above`` and ``shared``, which each rank found on its own batches."""
    by_path: dict[str, nn.Module] = {path: m for m, path in layers.items()}
    path_of = {m: path for path, m in by_path.items()}
    mine = {path_of[m]: [path_of[n] for n in found] for m, found in above.items()}, [path_of[m] for m in shared]
    merged: dict[nn.Module, set[nn.Module]] = {}
    for theirs, _ in (ranks := collectives.gather_objects(mine)):
        for path, found in theirs.items():
            merged.setdefault(by_path[path], set()).update(by_path[name] for name in found)
    return merged, {by_path[path] for _, paths in ranks for path in paths}


def _run(
    net: nn.Module,
    batches: Iterable[Any],
    forward: network_call.Forward | None,
    observers: list[_Observer],
    functional: _FunctionalCalls,
) -> int:
    """Run the network on all batches while the observers record their layers' moments; return the number of batches."""
    number = -1
    functional.observers = {observer.layer: observer for observer in observers if observer.own_forward}
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.observing())
        if any(m.training and is_synchronized(m) for m in net.modules()):
            batches = equal_on_all_ranks(
                batches, " or, if the network calls each synchronized layer only once, use upstream='population'"
            )
        for number, batch in enumerate(batches):
            watched = functional if number == 0 or functional.observers else nullcontext()
            with network_call.at_index(number, batch), watched:
                network_call.call(net, network_call.copy_for(net, batch), forward)
    return number + 1


def is_synchronized(module: nn.Module) -> bool:
    """Return whether a layer computes its training statistics over all ranks."""
    synchronized = isinstance(getattr(module, "statistics", None), Sync) or isinstance(module, nn.SyncBatchNorm)
    return synchronized and not getattr(module, "frozen_statistics", False)


def group_of(layer: nn.Module) -> Any:
    """Return the process group of a synchronized layer, or None for the default group."""
    statistics = getattr(layer, "statistics", None)
    return statistics.group if isinstance(statistics, Sync) else getattr(layer, "process_group", None)


def moments_of(
    layer: nn.Module, x: Tensor, mask: Tensor | None, features: tuple[int, ...]
) -> Iterator[tuple[Tensor | int, Tensor, Tensor]]:
    """Yield the count, the mean and the biased variance of this rank's part of each batch that a layer normalizes.

    In training, a layer with ``Ghost`` normalizes groups of examples; any other layer normalizes the whole input.
    """
    k = len(features)
    statistics = getattr(layer, "statistics", None)
    groups = statistics.groups(x, k) if layer.training and isinstance(statistics, Ghost) else 1
    masks = [None] * groups if mask is None else mask.tensor_split(groups)
    for part, own in zip(x.tensor_split(groups), masks, strict=True):
        where = None if own is None else own.reshape(own.shape[0], *[1] * k, *own.shape[1:])
        (_, mu, var), _ = batch_moments(part, [0, *range(1 + k, part.dim())], where)
        count = prod((part.shape[0], *part.shape[1 + k :])) if own is None else own.sum(dtype=torch.float64)
        yield count, mu.reshape(features), var.reshape(features)


def equal_on_all_ranks(batches: Iterable[Any], otherwise: str = "") -> Iterator[Any]:
    """Yield the batches; if ranks have different numbers of batches, raise ValueError instead of hanging.

    The error message says to leave out batches; ``otherwise``, which is appended to it, names an alternative.
    """
    iterator = iter(batches)
    for number in count():
        batch = next(iterator, iterator)
        left = collectives.gather_objects(batch is not iterator)
        if any(left) and not all(left):
            raise ValueError(
                f"rank {left.index(False)} ran out of batches after {number}, but rank {left.index(True)} has more:"
                " synchronized layers need the same number of batches on every rank; the network was not changed. Leave"
                f" out the surplus batches{otherwise}"
            )
        if not any(left):
            return
        yield batch


class _Observer:
    """Accumulate the moments of each call of a layer.

    A layer of a ``KNOWN`` class in training mode computes the moments itself: with momentum 1, its buffers hold the
    batch's mean and unbiased variance after the call. The observer computes the moments for all other layers, and for
    layers with half-precision buffers, without a batch counter, with their own forward, or with a ``statistics`` object
    such as ``Sync()``. If ``direct`` is true, the observer computes the moments for every layer. A layer with its own
    forward may change its input before normalizing it, so the observer records what this layer passes to
    ``F.batch_norm`` or to ``BatchNorm.forward``.
    """

    def __init__(self, layer: TorchBatchNorm, path: str, rule: Rule, *, direct: bool) -> None:
        self.layer, self.path, self.rule = layer, path, rule
        narrow = layer.running_mean is None or layer.running_mean.dtype.itemsize < 4
        own = getattr(layer, "statistics", None) is not None
        uncounted = layer.num_batches_tracked is None or not layer.track_running_stats
        ours = type(layer).forward is BatchNorm.forward and "forward" not in vars(layer)
        self.own_forward = not (ours or keeps_torch_forward(layer))
        self.direct = direct or type(layer) not in KNOWN or narrow or own or uncounted or self.own_forward
        self._moments = MomentAccumulator(unbiased=not self.direct)
        self._called = False
        self._counted: Tensor | int = 0  # the value that num_batches_tracked has if every call was observed
        self._m: Tensor | int = 0

    @contextmanager
    def observing(self) -> Iterator[None]:
        layer = self.layer
        with ExitStack() as stack:
            stack.enter_context(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            if not self.direct:
                # Let num_batches_tracked start at 0, because `averages` compares it with the number of observed calls.
                layer._buffers["num_batches_tracked"] = torch.zeros_like(layer.num_batches_tracked)  # type: ignore[arg-type]
                layer.momentum = 1.0
                stack.enter_context(layer.register_forward_hook(self._after, with_kwargs=True))
            if self.own_forward and isinstance(layer, BatchNorm):
                # BatchNorm.forward passes what it normalizes to _check_input, so replace that method with one that
                # records the input. Disable the fast path, which does not call _check_input.
                stack.enter_context(changed(layer, _fast=lambda *args: None, _check_input=self._check_input))
            yield

    def _before(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self._called = True
        if not self.own_forward:
            x = args[0] if args else kwargs["input"]
            self.observe(x, args[2] if len(args) > 2 else kwargs.get("mask"))

    def _check_input(self, input: Tensor, residual: Tensor | None, mask: Tensor | None) -> None:
        assert isinstance(self.layer, BatchNorm)
        type(self.layer)._check_input(self.layer, input, residual, mask)
        self.observe(input, mask)

    def observe(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Record one input that the layer normalizes."""
        features = tuple(self.layer.running_mean.shape)  # type: ignore[union-attr]
        k = len(features)
        if self.own_forward and tuple(x.shape[1 : 1 + k]) != features:
            raise ValueError(
                f"layer '{self.path}': its forward normalizes an input of shape {tuple(x.shape)}, but its running mean"
                f" has shape {features}, so its statistics cannot be estimated"
            )
        self._m = prod((x.shape[0], *x.shape[1 + k :])) if mask is None else mask.sum(dtype=torch.float64)
        ranks = (
            collectives.world_size(group_of(self.layer)) if self.layer.training and is_synchronized(self.layer) else 1
        )
        if self.layer.training and mask is None and self._m == 1 and ranks == 1:
            raise ValueError(
                f"layer '{self.path}': for one batch, its input of shape {tuple(x.shape)} has only one value per"
                " feature, so the variance is undefined; drop that batch or, if the network calls this layer only once,"
                " use upstream='population' with rule='pooled'"
            )
        if self.direct:
            for count, mu, var in moments_of(self.layer, x, mask, features):
                if ranks > 1:
                    own = Moments(torch.as_tensor(count, device=mu.device).double(), mu.double(), var.double())
                    count, mu, var = merge(collectives.gather_moments(own, group_of(self.layer)))
                    if collectives.rank(group_of(self.layer)) > 0:
                        continue  # every rank has the same moments, so count them on one rank only
                self._moments.add(count, mu, var)
        else:
            for key in ("running_mean", "running_var"):
                self.layer._buffers[key] = torch.zeros_like(self.layer._buffers[key])  # type: ignore[arg-type]

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        mu, var = self.layer.running_mean, self.layer.running_var
        assert mu is not None and var is not None  # noqa: PT018
        if mu.is_cpu and not isinstance(layer, BatchNorm) and bool((mu**2 > CONDITION**2 * var).any()):
            # torch's CPU kernels are inaccurate if means are large.
            ((_, mu, biased),) = moments_of(self.layer, args[0] if args else kwargs["input"], None, tuple(mu.shape))
            var = biased * (self._m / max(self._m - 1, 1))
        # torch.nn's layers increase num_batches_tracked for empty batches too; this library's layers do not.
        self._counted = self._counted + (self._m > 0 if isinstance(layer, BatchNorm) else 1)
        self._moments.add(self._m, mu, var)

    def averages(self) -> AveragedMoments | None:
        """Return the averages over the batches of all ranks, or None if no batch had values for this layer.

        Raises:
            ValueError: if a moment is not finite, if the layer's forward was called without the hooks, if the layer has
                its own forward and the input that it normalizes could not be observed, or if there are too few values
                for a variance.
        """
        surplus = 0 if self.direct else int(self.layer.num_batches_tracked) - int(self._counted)  # type: ignore[arg-type]
        hidden = self.own_forward and self._called
        ranks = collectives.gather_objects((self._moments.averages(), surplus, hidden))
        found = merge_averages(part for part, *_ in ranks)
        finite = found is None or bool((found.mean + found.var + found.mean_spread).isfinite().all())
        if any(surplus > 0 for _, surplus, _ in ranks):
            raise ValueError(
                f"layer '{self.path}': some batches seem to have been passed to its forward method, which skips the"
                " hooks that observe the layer's inputs; the network was not changed. In the network's code, write"
                " layer(x) instead of layer.forward(x)"
            )
        if found is None and any(hidden for *_, hidden in ranks):
            raise ValueError(
                f"layer '{self.path}': the forward of {type(self.layer).__name__} never called F.batch_norm or the"
                " forward of its base class on a batch with values, so what it normalizes cannot be observed; the"
                " network was not changed. To leave the layer out, call net.train(), and then eval() on the layer"
            )
        if not finite or any(surplus < 0 for _, surplus, _ in ranks):
            raise ValueError(
                f"layer '{self.path}': a batch gave no usable statistics; the network was not changed. Look for inf or"
                " NaN in the batches or in the weights before this layer, or for a mask that leaves a single value"
            )
        if found is not None and self.rule == "paper" and found.count == found.batches:
            raise ValueError(
                f"layer '{self.path}': every batch has only one value per feature, so rule='paper' has no variances to"
                " average; the network was not changed. Use larger batches, or rule='pooled'"
            )
        if found is not None and not _fits(self.layer, found, self.rule):
            raise ValueError(
                f"layer '{self.path}': the statistics are too large for its half-precision buffers; the network was not"
                " changed. Convert it with bn.convert, whose layers keep float32 statistics"
            )
        if found is not None and found.count == 1:
            raise ValueError(
                f"layer '{self.path}': all batches together have only one value per feature, so the variance is"
                " undefined; the network was not changed. Use more data"
            )
        return found


class _FunctionalCalls(TorchFunctionMode):
    """While active, list calls of the ``FUNCTIONS``, such as ``F.batch_norm``, outside batch normalization layers.

    The statistics of such calls cannot be estimated, because only the code that calls ``F.batch_norm`` knows whether
    the call should use the batch's statistics. If a layer in ``observers`` calls ``F.batch_norm``, the layer's observer
    records the input.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net
        self.sites: list[Site] = []
        self.observers: dict[nn.Module, _Observer] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith(ops.__name__):
            # This library's own code made the call. If the layer has an observer, the input is already recorded.
            return func(*args, **kwargs)
        owner = _running_module() if func in FUNCTIONS else None
        if owner in self.observers:
            self.observers[owner].observe(args[0] if args else kwargs["input"])
        elif func in FUNCTIONS and not isinstance(owner, TorchBatchNorm):
            position = 1 if func is F.batch_norm else 3
            mean = args[position] if len(args) > position else kwargs.get("running_mean")
            path = next((name for name, m in self._net.named_modules() if m is owner), "")
            name = next((f" '{name}'" for name, b in self._net.named_buffers() if b is mean), "")
            kept = "without running statistics" if mean is None else f"with a running mean{name} that was not updated"
            site = Site(path, "left alone", f"it calls F.batch_norm {kept}; use a batch normalization layer instead")
            if site not in self.sites:
                self.sites.append(site)
        return func(*args, **kwargs)


def _running_module() -> nn.Module | None:
    """Return the ``self`` of the innermost stack frame whose ``self`` is an nn.Module, or None if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None


def _compare(path: str, layer: TorchBatchNorm, averages: AveragedMoments, rule: Rule) -> LayerStatistics:
    """Compare population statistics with the running averages that the layer holds."""
    mean, var = population_statistics(averages, rule)
    running_mean, running_var = layer.running_mean.cpu().double(), layer.running_var.cpu().double()  # type: ignore[union-attr]
    scale = var + layer.eps
    others = averages.batches - 1

    def worst(per_feature: Tensor) -> float:
        return float(per_feature.max()) if per_feature.numel() else 0.0

    return LayerStatistics(
        path=path,
        batches=averages.batches,
        count=averages.count,
        mean_gap=worst((running_mean - mean).abs() / scale.sqrt()),
        var_gap=worst((running_var - var).abs() / scale),
        mean_error=worst((averages.mean_spread / others / scale).sqrt()) if others else inf,
        var_error=worst(_var_error(averages, rule) / scale) if others else inf,
    )


def _var_error(averages: AveragedMoments, rule: Rule) -> Tensor:
    """Return the standard error of Var[x]; for rule "pooled", it is assumed that the batches' means are normal."""
    m, others = averages.count / averages.batches, averages.batches - 1
    if rule == "paper":
        return m / (m - 1) * (averages.var_spread / others).sqrt()
    return ((averages.var_spread + 2 * averages.mean_spread.square()) / others).sqrt()


def _fits(layer: TorchBatchNorm, averages: AveragedMoments, rule: Rule) -> bool:
    """Return whether the population statistics stay finite in the dtype of the layer's buffers."""
    dtype = layer.running_var.dtype  # type: ignore[union-attr]
    return all(bool(v.to(dtype).isfinite().all()) for v in population_statistics(averages, rule))


def _write(layer: TorchBatchNorm, averages: AveragedMoments, rule: Rule) -> None:
    mean, var = population_statistics(averages, rule)
    assert layer.running_mean is not None and layer.running_var is not None  # noqa: PT018
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(averages.batches)
