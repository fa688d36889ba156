"""Turn a trained network into the network for inference, as Algorithm 2 turns N_tr into N_inf."""

from .export import export
from .fold import fold

__all__ = ["export", "fold"]
