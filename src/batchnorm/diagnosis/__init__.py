"""Find out what is wrong with a network's batch normalization."""

from .diagnose import diagnose
from .findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
