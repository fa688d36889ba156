"""Record the data flow of a network's forward pass, and rewrite ``forward`` methods to make fused calls."""

from .calls import Graph, TracedCall, Value
from .trace import trace, trace_modes

__all__ = ["Graph", "TracedCall", "Value", "trace", "trace_modes"]
