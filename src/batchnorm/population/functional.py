"""Find batch normalization that is a function call, not a layer."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm
from torch.overrides import TorchFunctionMode

from ..verb_report import Site

FUNCTIONS = (F.batch_norm, torch.batch_norm, torch.native_batch_norm)


class FunctionalCalls(TorchFunctionMode):
    """Note calls of ``F.batch_norm`` outside batch normalization layers while active.

    They cannot be estimated: the caller alone knows whether such a call should use the batch's statistics.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._net = net
        self._found: dict[tuple[str, str], None] = {}

    @property
    def sites(self) -> list[Site]:
        """Where the calls were."""
        return [Site(path, "left alone", reason) for path, reason in self._found]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            owner = _running_module()
            if not isinstance(owner, TorchBatchNorm):
                position = 1 if func is F.batch_norm else 3
                mean = args[position] if len(args) > position else kwargs.get("running_mean")
                self._note(owner, mean)
        return func(*args, **kwargs)

    def _note(self, owner: nn.Module | None, mean: Tensor | None) -> None:
        path = next((name for name, m in self._net.named_modules() if m is owner), "")
        name = next((f" '{name}'" for name, b in self._net.named_buffers() if b is mean), "")
        kept = "which keeps no running statistics" if mean is None else f"whose running mean{name} stays as it was"
        self._found[path, f"calls F.batch_norm, {kept}; use a batchnorm layer there"] = None


def _running_module() -> nn.Module | None:
    """Return the module whose method is running, found on the call stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back
    return None
