"""Data: the embedded MNIST, and batches fit for batch normalization."""

from .batches import BalancedBatches
from .digits import MNIST, Digits, mnist

__all__ = ["MNIST", "BalancedBatches", "Digits", "mnist"]
