"""N to N_tr: insert batch normalization into a network, or replace the kind it has."""

from .convert import convert
from .insert import insert
from .revert import revert

__all__ = ["convert", "insert", "revert"]
