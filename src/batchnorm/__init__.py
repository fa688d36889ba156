"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch."""

from typing import TYPE_CHECKING, Any

from . import data, models, ops
from .inference import export, fold
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, param_groups, unfreeze_
from .monitor import Monitor
from .ops import recompute
from .population import estimate_
from .surgery import convert, insert, revert

if TYPE_CHECKING:
    from .train.trained_run import load

__version__ = "0.1.0"

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Ghost",
    "Monitor",
    "Renorm",
    "Sync",
    "convert",
    "data",
    "estimate_",
    "export",
    "fold",
    "freeze_",
    "insert",
    "load",
    "models",
    "ops",
    "param_groups",
    "recompute",
    "revert",
    "unfreeze_",
]


# Imported when first used: training brings in much that the layers and verbs do not need.
_LAZY = {"load": "batchnorm.train.trained_run"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
