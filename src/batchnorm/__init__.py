"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch."""

from . import data, models, ops
from .inference import export, fold
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, param_groups, unfreeze_
from .monitor import Monitor
from .ops import recompute
from .population import estimate_
from .surgery import convert, insert, revert

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
    "models",
    "ops",
    "param_groups",
    "recompute",
    "revert",
    "unfreeze_",
]
