"""Make the network that inference runs: N_tr to N_inf in Algorithm 2."""

from .export import export
from .fold import fold

__all__ = ["export", "fold"]
