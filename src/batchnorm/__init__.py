"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch."""

from . import data, ops
from .inference import fold
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, unfreeze_
from .population import estimate_
from .surgery import insert

__version__ = "0.1.0"

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Ghost",
    "Renorm",
    "Sync",
    "data",
    "estimate_",
    "fold",
    "freeze_",
    "insert",
    "ops",
    "unfreeze_",
]
