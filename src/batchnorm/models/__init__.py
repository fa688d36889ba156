"""The paper's networks."""

from .bn_inception.network import inception
from .description import Description, describe
from .perceptron import perceptron

__all__ = ["Description", "describe", "inception", "perceptron"]
