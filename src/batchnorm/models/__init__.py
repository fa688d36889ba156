"""The paper's networks."""

from .bn_inception.network import inception
from .describe import Description, describe
from .perceptron import perceptron

__all__ = ["Description", "describe", "inception", "perceptron"]
