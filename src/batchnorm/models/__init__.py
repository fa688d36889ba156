"""The paper's networks."""

from .describe import Description, describe
from .inception import inception
from .perceptron import perceptron

__all__ = ["Description", "describe", "inception", "perceptron"]
