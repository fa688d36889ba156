"""Monitor the percentiles of nonlinearity inputs over the course of training, as in Figure 1 (b, c)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .. import network_call
from ..network_copy import changed, unwrapped
from ..ops.torch_state import is_compiled
from .records import Percentiles, Record, percentiles_of
from .shift import gradient_change
from .sinks import Memory, Sink
from .taps import Taps, nonlinearities, probing

_COMPILED = (
    "the monitored network runs in compiled code, which would ignore the monitor's hooks: create the Monitor with"
    " the network that torch.compile returned (use net = torch.compile(net) instead of net.compile()). If you compile a"
    " larger function, use the monitor without a with statement, and call monitor.record(step, batch) outside that"
    " function"
)


class NothingToRecordError(ValueError):
    """Raised if a network has no layers that a monitor can watch, or calls none of them."""


class Monitor:
    """Record percentiles of a network's nonlinearity inputs while it trains, without altering the training.

    Inside a ``with`` block, the monitor counts the calls ``net(...)`` in training mode with gradients enabled, starting
    at 0, and records those whose number is a multiple of ``every``. It does not see calls of ``net.forward`` or of
    single layers. If your training loop uses them, call :meth:`record` at each step that you want to record. If ``net``
    is compiled, give the monitor the network that ``torch.compile`` returned. Calls that are recorded run uncompiled.
    In a distributed run, not every rank needs a monitor, and the ranks' monitors may differ.

    Args:
        net: any network. Nonlinearities are found if they are modules or fused into this library's batch normalization.
        layers: names of the layers to watch. For a batch or instance normalization, the monitor records the output
            before any fused nonlinearity; for any other layer, it records the input. None watches every nonlinearity
            or, if none is found, every batch and instance normalization.
        percentiles: the percentiles to record, at least two, in ascending order.
        every: steps between records. Each time there are ``points`` records, every second record is dropped and
            ``every`` doubles, so memory is bounded for a run of any length.
        points: the maximum number of records in memory, separately for percentiles and for gradient changes.
        probe: a batch to run for each record, instead of recording the training batch. The probe runs as in training,
            normalized by its own statistics (also in layers with ``Sync``), but without dropout. Running it changes
            neither the network's buffers nor the state of random number generators.
        unit_dim: the dimension that holds a layer's units, or a mapping from layer names to dimensions. Layers that are
            not in the mapping use dimension 1.
        sinks: objects that also receive the records, e.g. :class:`batchnorm.monitor.JSONLines`. The monitor closes
            them on exit.

    Raises:
        ValueError: if a layer is not in the network, if ``layers`` is None and no layer is found, or if ``every``,
            ``percentiles`` or ``points`` is invalid.
        RuntimeError: in the first training pass, if the network runs inside compiled code, which ignores hooks.

    Warns:
        UserWarning: at the end of the ``with`` block, if there was nothing to record.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 1))
    >>> with Monitor(net, every=2) as monitor:
    ...     for _ in range(4):
    ...         _ = net(torch.randn(8, 4))
    >>> [(record.step, record.percentiles["1"].z.shape) for record in monitor.records]
    [(0, torch.Size([3, 3])), (2, torch.Size([3, 3]))]

    Paper: Sec. 4.1; Fig. 1 b, c
    """

    def __init__(
        self,
        net: nn.Module,
        layers: Sequence[str] | None = None,
        *,
        percentiles: Sequence[float] = (15, 50, 85),
        every: int = 100,
        points: int = 500,
        probe: Any = None,
        unit_dim: int | Mapping[str, int] = 1,
        sinks: Sequence[Sink] = (),
    ) -> None:
        network_call.check_network(net)
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        ascending = list(percentiles) == sorted(percentiles)
        if not ascending or len(percentiles) < 2 or not 0 <= percentiles[0] <= percentiles[-1] <= 100:
            raise ValueError(f"percentiles={percentiles}: give at least two numbers from 0 to 100, in ascending order")
        self.net, self.every, self.percentiles, self.probe = net, every, tuple(percentiles), probe
        self.layers = _chosen(net, layers)
        self.sinks, self.step = tuple(sinks), 0
        self._percentiles, self._changes = Memory(points), Memory(points)
        self._unit_dim = unit_dim if isinstance(unit_dim, Mapping) else dict.fromkeys(self.layers, unit_dim)
        self._hooks, self._taps, self._end = ExitStack(), ExitStack(), ExitStack()
        self._seen: dict[str, Percentiles] | None = None
        self._busy = False
        self._missed = False  # whether a pass that was to be recorded ran none of the layers

    @property
    def records(self) -> list[Record]:
        """The records of percentiles that are still in memory, oldest first."""
        return self._percentiles.records

    @property
    def gradient_changes(self) -> list[Record]:
        """The records of gradient changes that are still in memory, oldest first."""
        return self._changes.records

    def __repr__(self) -> str:
        """Return the number of layers, the steps between records, and the number of records in memory."""
        layers, records = len(self.layers), len(self.records)
        return (
            f"Monitor({layers} layer{'s' * (layers != 1)}, every={self.every}, {records} record{'s' * (records != 1)})"
        )

    def __enter__(self) -> Monitor:
        self._hooks.callback(self.net.register_forward_pre_hook(self._before).remove)
        return self

    def __exit__(self, *exc: object) -> None:
        for hooks in (self._taps, self._end, self._hooks):
            hooks.close()
        for sink in self.sinks:
            sink.close()
        if any(exc) or self.records or self.gradient_changes:
            return
        if self._missed:
            warnings.warn(f"the monitor recorded nothing: {self._no_layer_ran()}", stacklevel=2)
        elif not self.step:
            warnings.warn(
                "the monitor recorded nothing, because the network was not called in training mode with gradients"
                " enabled. If your loop calls the network that torch.compile returned, pass that network to Monitor. If"
                " your loop calls another compiled function, or net.forward, call monitor.record(step, batch)",
                stacklevel=2,
            )

    def _no_layer_ran(self) -> str:
        names = ", ".join(self.layers[:3]) + (f" and {len(self.layers) - 3} more" if len(self.layers) > 3 else "")
        return (
            f"the network did not call the layers that the monitor watches ({names}); use layers= to name layers that"
            " it calls. A monitor cannot watch functions such as F.relu"
        )

    def record(self, step: int, batch: Any = None) -> Record:
        """Run ``batch``, or the probe, without side effects; store and return the record.

        Batch and instance normalizations run in their current mode, and everything else runs in evaluation mode.

        Raises:
            ValueError: if there is no batch, or if the network calls none of the monitor's layers.
        """
        batch = self.probe if batch is None else batch
        if batch is None:
            raise ValueError("nothing to record: pass a batch to record(), or create the Monitor with probe=")
        record = self._probe(step, batch)
        if record is None:
            raise NothingToRecordError(f"nothing to record: {self._no_layer_ran()}")
        return record

    def _probe(self, step: int, batch: Any) -> Record | None:
        """Run a batch, and store and return the record; return None if none of the watched layers ran."""
        seen: dict[str, Percentiles] = {}
        with changed(self, _busy=True), probing(self.net), self._reading(seen):
            # If the network is wrapped, call the inner network: DistributedDataParallel would wait for other ranks.
            network_call.call(unwrapped(self.net)[1], batch)
        return self._keep(Record(step, seen)) if seen else None

    def record_gradient_change(self, step: int, loss: Callable[[Any, Any], Tensor], batch: Any, rate: float) -> Record:
        """Store and return how each layer's gradient changes if only the layers below it take a gradient step.

        The arguments after ``step`` are those of :func:`batchnorm.monitor.gradient_change`, which runs a forward and
        backward pass per layer.
        """
        with changed(self, _busy=True):
            return self._keep(Record(step, {}, gradient_change(self.net, loss, batch, rate)))

    def _before(self, net: nn.Module, args: tuple[Any, ...]) -> None:
        if self._busy or not (net.training and torch.is_grad_enabled()):
            return
        if is_compiled():
            raise RuntimeError(_COMPILED)
        self._end.close()
        self._taps.close()
        if self.step % self.every == 0:
            if self.probe is not None:
                self._missed = self._probe(self.step, self.probe) is None
            else:
                self._seen = {}
                self._taps.enter_context(network_call.eagerly())
                # Attach the hooks for this pass only, because permanent hooks would slow down all other steps.
                self._taps.enter_context(self._reading(self._seen))
                # Remove `_after` only before the next pass, because torch iterates over the hooks while `_after` runs.
                self._end.callback(net.register_forward_hook(self._after, always_call=True).remove)
        self.step += 1

    def _after(self, net: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._busy or self._seen is None:
            return
        self._taps.close()
        seen, self._seen = self._seen, None
        if output is None:  # after an exception
            return
        if seen:
            self._keep(Record(self.step - 1, seen))
        else:
            self._missed = True

    def _reading(self, seen: dict[str, Percentiles]) -> Taps:
        def read(name: str, z: Tensor, x: Tensor) -> None:
            dim = self._unit_dim.get(name.split("#")[0], 1)
            q = percentiles_of(z, self.percentiles, unit_dim=dim)
            seen[name] = Percentiles(q, q if x is z else percentiles_of(x, self.percentiles, unit_dim=dim))

        return Taps(self.net, self.layers, read)

    def _keep(self, record: Record) -> Record:
        memory = self._percentiles if record.percentiles else self._changes
        thinned = memory.thinned
        memory.write(record)
        if memory is self._percentiles:
            self.every *= 2 ** (memory.thinned - thinned)
        for sink in self.sinks:
            sink.write(record)
        return record


def _chosen(net: nn.Module, layers: Sequence[str] | None) -> list[str]:
    names = dict(net.named_modules())
    if layers is None:
        layers = nonlinearities(net)
        if not layers:
            raise NothingToRecordError(
                "the network has no nonlinearity modules and no batch or instance normalization; use layers= to name"
                " the layers to watch"
            )
    for name in layers:
        if name not in names or not name:
            raise ValueError(f"the network has no layer {name!r}; its layers are {', '.join(n for n in names if n)}")
    return list(layers)
