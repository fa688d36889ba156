"""Simulate a full disk."""

from contextlib import contextmanager

import pytest


@contextmanager
def no_room(size):
    """Limit files to ``size`` bytes, so that writing a larger file fails partway, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
