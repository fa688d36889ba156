"""The paper's networks."""

from .describe import Description, describe
from .inception import inception

__all__ = ["Description", "describe", "inception"]
