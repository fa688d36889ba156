"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch."""

from . import data, models, ops
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, unfreeze_
from .monitor import Monitor
from .population import estimate_

__version__ = "0.1.0"

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Ghost",
    "Monitor",
    "Renorm",
    "Sync",
    "data",
    "estimate_",
    "freeze_",
    "models",
    "ops",
    "unfreeze_",
]
