"""Record the data flow of any network in a real forward pass."""

from .calls import Graph, TracedCall, Value
from .trace import trace, trace_modes

__all__ = ["Graph", "TracedCall", "Value", "trace", "trace_modes"]
