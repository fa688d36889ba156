"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch."""

from . import data, models, ops
from .inference import fold
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, unfreeze_
from .monitor import Monitor
from .population import estimate_
from .surgery import insert

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
    "fold",
    "freeze_",
    "insert",
    "models",
    "ops",
    "unfreeze_",
]
