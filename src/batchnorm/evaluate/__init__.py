"""How good a network is."""

from .accuracy import Accuracy, count_correct

__all__ = ["Accuracy", "count_correct"]
