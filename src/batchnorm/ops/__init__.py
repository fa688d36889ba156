"""Algorithm 1 of the paper as tensor functions; functions with a trailing underscore update running averages."""

from .activation import Activation, as_activation
from .dispatch import Choice, batch_norm, batch_norm_, explain, normalize, normalize_batch_
from .moments import Moments, merge
from .recomputation import recompute
from .running import Running, update_

__all__ = [
    "Activation",
    "Choice",
    "Moments",
    "Running",
    "as_activation",
    "batch_norm",
    "batch_norm_",
    "explain",
    "merge",
    "normalize",
    "normalize_batch_",
    "recompute",
    "update_",
]
