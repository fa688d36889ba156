"""N_tr to N_inf: the network that inference runs."""

from .export import export
from .fold import fold

__all__ = ["export", "fold"]
