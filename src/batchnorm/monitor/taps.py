"""Read the inputs of a network's nonlinearities in a forward pass, and run a pass without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as TorchNorm

from .. import collectives, network_call, ops
from ..layers import Sync
from ..layers.batch_norm import BatchNorm
from ..network_copy import changed
from ..ops import Activation, Moments, Running

Seen = Callable[[str, Tensor, Tensor], None]

# The elementwise nonlinearities of torch.nn. nn.ReLU6 is included as a subclass of nn.Hardtanh.
NONLINEARITIES = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.ReLU, nn.RReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip


def nonlinearities(net: nn.Module) -> list[str]:
    """Return the names of the nonlinearities, and of the batch normalizations that are fused with a nonlinearity.

    If there are none, return the names of all batch and instance normalizations.
    """
    named = [(name, m) for name, m in net.named_modules() if name]
    found = [name for name, m in named if isinstance(m, NONLINEARITIES) or _fuses(m)]
    return found or [name for name, m in named if isinstance(m, TorchNorm)]


def _fuses(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.activation.name != "identity"


class Taps:
    """A context manager that calls ``seen(name, z, x)`` each time one of the chosen layers is called.

    For a batch or instance normalization, z is the output before any fused nonlinearity. If a nonlinearity is fused,
    the input is normalized a second time to compute z. For any other layer, z is the input. If z is the output of a
    batch or instance normalization, and was not changed in place since (for example, by adding a residual), x is the
    input of that normalization; if not, x is z. A layer's second call in one pass is reported as ``name#2``.

    This context manager adds no communication between ranks.
    """

    def __init__(self, net: nn.Module, names: Iterable[str], seen: Seen) -> None:
        self.net, self.names, self.seen = net, list(names), seen
        self._handles = ExitStack()
        self._calls: dict[str, int] = {}
        self._normalized: list[tuple[Tensor, int, Tensor]] = []

    def __enter__(self) -> Taps:
        for name in self.names:
            module = self.net.get_submodule(name)
            if isinstance(module, TorchNorm) and not _fuses(module):
                self._attach(module.register_forward_hook(partial(self._plain, name), with_kwargs=True))
                continue
            hook = self._fused if isinstance(module, TorchNorm) else self._nonlinearity
            self._attach(module.register_forward_pre_hook(partial(hook, name), with_kwargs=True))
        for module in self.net.modules():
            if isinstance(module, TorchNorm) and not _fuses(module):
                self._attach(module.register_forward_hook(self._remember, with_kwargs=True))
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.close()
        self._normalized.clear()
        self._calls.clear()

    def _attach(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        self._handles.callback(handle.remove)

    def _remember(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if isinstance(output, Tensor):
            self._normalized.append((output, _version(output), _input(args, kwargs)))

    def _nonlinearity(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        z = _input(args, kwargs)
        if not isinstance(z, Tensor):
            return
        x = next((x for y, version, x in self._normalized if y is z and version == _version(z)), z)
        self._report(name, z, x)

    def _plain(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        self._report(name, output, _input(args, kwargs))

    def _fused(self, name: str, module: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        statistics, x = module.statistics, _input(args, kwargs)
        if (
            isinstance(statistics, Sync)
            and module.training
            and module.uses_batch_statistics
            and collectives.world_size(statistics.group) > 1
        ):
            # A second call of the layer would wait for the other ranks, which may have no monitor.
            module.statistics = _Shown(statistics.group, lambda z: self._report(name, z, x))

            def restore(module: BatchNorm, *_: object) -> None:
                module.statistics = statistics
                handle.remove()

            handle = module.register_forward_hook(restore, always_call=True)
            return
        with torch.no_grad(), borrowed_buffers([module]), changed(module, activation=Activation()):
            z = module.forward(*args, **kwargs)
        self._report(name, z, x)

    def _report(self, name: str, z: Tensor, x: Tensor) -> None:
        self._calls[name] = call = self._calls.get(name, 0) + 1
        self.seen(name if call == 1 else f"{name}#{call}", z, x)


def _version(t: Tensor) -> int:
    """Return how often a tensor was changed in place, or 0 for tensors of inference mode, which do not count this."""
    return 0 if t.is_inference() else t._version


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a layer's input, passed by position or by name, or None if the layer was called without arguments."""
    return args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))


@dataclass(frozen=True)
class _Shown(Sync):
    """Do the same as ``Sync``, and also call ``show`` with the output before the activation."""

    show: Callable[[Tensor], None] = lambda z: None

    def batch_norm(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, running: Running | None, **options: Any
    ) -> tuple[Tensor, Moments]:
        y, moments = super().batch_norm(x, gamma, beta, eps, running, **options)
        with torch.no_grad():
            plain = {**options, "activation": Activation()}
            self.show(ops.normalize(x, moments.mean, moments.var, gamma, beta, eps, **plain))
        return y, moments


@contextmanager
def unsynchronized(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block, synchronized layers normalize by this rank's batch, so other ranks need not take part."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(getattr(module, "statistics", None), Sync):
                stack.enter_context(changed(module, statistics=None))
            if type(module) is nn.SyncBatchNorm:
                stack.enter_context(changed(module, forward=partial(nn.BatchNorm1d.forward, module)))
        yield


@contextmanager
def borrowed_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside the block, give modules copies of their buffers; updates to the copies are discarded."""
    kept = {m: dict(m._buffers) for m in modules}
    # Replace the tensors, not their values, because autograd may need the old values for a later backward pass.
    copies = {b: b.clone() for buffers in kept.values() for b in buffers.values() if b is not None}
    try:
        for module, buffers in kept.items():
            module._buffers.update({name: b if b is None else copies[b] for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in kept.items():
            module._buffers.update(buffers)


@contextmanager
def probing(net: nn.Module) -> Iterator[None]:
    """Inside the block, the network runs without side effects, but with batch statistics if it is in training mode.

    Batch and instance normalizations keep their mode; everything else, such as dropout, runs in evaluation mode.
    Buffers, random number generators and modes are restored at the end. Other ranks need not take part.
    """
    modules = list(net.modules())
    modes = [m.training for m in modules]
    with (
        torch.no_grad(),
        network_call.eagerly(),
        torch.random.fork_rng({p.device for p in net.parameters() if p.is_cuda}),
        borrowed_buffers(modules),
        unsynchronized(modules),
    ):
        try:
            for m in modules:
                m.training = m.training and isinstance(m, TorchNorm)
            yield
        finally:
            for m, mode in zip(modules, modes, strict=True):
                m.training = mode
