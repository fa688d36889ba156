"""Who feeds whom in any network, read from a real forward pass."""

from .calls import Call, Graph, Value
from .trace import trace

__all__ = ["Call", "Graph", "Value", "trace"]
