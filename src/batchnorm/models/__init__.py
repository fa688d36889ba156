"""The paper's networks."""

from .perceptron import perceptron

__all__ = ["perceptron"]
