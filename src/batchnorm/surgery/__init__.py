"""Insert batch normalization into a network, as in Algorithm 2, or replace its existing batch normalization."""

from .convert import convert
from .insert import insert
from .revert import revert

__all__ = ["convert", "insert", "revert"]
