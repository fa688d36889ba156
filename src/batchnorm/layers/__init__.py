"""Batch normalization layers: the paper's Algorithm 1 as modules, with running averages."""

from .batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from .freeze import freeze_, unfreeze_
from .parameters import param_groups
from .statistics import Ghost, Renorm, Sync

__all__ = [
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Ghost",
    "Renorm",
    "Sync",
    "freeze_",
    "param_groups",
    "unfreeze_",
]
