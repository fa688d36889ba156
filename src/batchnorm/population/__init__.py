"""The population statistics E[x] and Var[x] that the inference network normalizes by."""

from .estimate import estimate_
from .report import LayerStatistics, Population

__all__ = ["LayerStatistics", "Population", "estimate_"]
