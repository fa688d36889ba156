"""Record the data flow in a network's forward pass, and rewrite forwards to use fused calls."""

from .calls import Graph, TracedCall, Value
from .trace import trace, trace_modes

__all__ = ["Graph", "TracedCall", "Value", "trace", "trace_modes"]
