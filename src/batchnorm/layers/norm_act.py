"""This library's version of timm's BatchNormAct2d, a batch normalization with an activation."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import Tensor, nn

from ..graph.kinds import is_quiet
from ..graph.references import is_plain_identity
from ..ops.activation import Activation, as_activation, from_module
from .batch_norm import BatchNorm2d, _is_symbolic


class NormAct(BatchNorm2d):
    """Normalize, then apply the child modules ``drop`` and ``act``; fuse ``act`` into the normalization if possible.

    ``convert`` gives timm's ``BatchNormAct2d`` layers a class that derives from both this class and timm's.
    """

    drop: nn.Module
    act: nn.Module
    _made_from: Any

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        activation: str | Activation | None = None,
    ) -> Tensor:
        """Return act(drop(g(BN(input) + residual))), where g is ``activation`` or, by default, ``self.activation``."""
        if _is_symbolic(input):
            return self._made_from.forward(self, input)  # type: ignore[no-any-return]
        fused = from_module(self.act) if is_plain_identity(self.drop) and is_quiet(self.act) else None
        g = self.activation if activation is None else as_activation(activation)
        if fused is not None and "identity" in (g.name, fused.name):
            return super().forward(input, residual, mask, activation=fused if g.name == "identity" else g)
        y = super().forward(input, residual, mask, activation=g)
        return self.act(self.drop(y))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__ and type(self) is joined(self._made_from):  # type: ignore[attr-defined]
            return (_new, (self._made_from,), *reduced[2:])
        return reduced


def is_norm_act(kind: type) -> bool:
    """Return whether a class is timm's BatchNormAct2d."""
    return (
        kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.") and issubclass(kind, nn.BatchNorm2d)
    )


_joined: dict[type, type[NormAct]] = {}


def joined(kind: type[nn.Module]) -> type[NormAct]:
    """Return a class that derives from both NormAct and ``kind``, timm's BatchNormAct2d."""
    if kind not in _joined:
        names = {"_made_from": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _joined[kind] = type(kind.__name__, (NormAct, kind), names)
    return _joined[kind]


def _new(kind: type[nn.Module]) -> nn.Module:
    made = joined(kind)
    return made.__new__(made)
