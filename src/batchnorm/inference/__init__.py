"""N_tr to N_inf: the network that inference runs."""

from .fold import fold

__all__ = ["fold"]
