"""Turn a trained network into a network for inference, as at the end of Algorithm 2."""

from .export import export
from .fold import fold

__all__ = ["export", "fold"]
