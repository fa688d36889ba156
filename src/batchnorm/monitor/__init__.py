"""Record the distributions of a network's activations over training, and measure how they shift."""

from .percentiles import Monitor
from .records import Change, Percentiles, Record
from .shift import drift, gradient_change, typical_unit
from .sinks import JSONLines, Memory, TensorBoard

__all__ = [
    "Change",
    "JSONLines",
    "Memory",
    "Monitor",
    "Percentiles",
    "Record",
    "TensorBoard",
    "drift",
    "gradient_change",
    "typical_unit",
]
