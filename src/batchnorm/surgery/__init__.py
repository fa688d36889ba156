"""N to N_tr: put batch normalization into a network, and exchange the kind it has."""

from .convert import convert
from .insert import insert
from .revert import revert

__all__ = ["convert", "insert", "revert"]
