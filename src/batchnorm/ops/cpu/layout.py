"""How a dense tensor (N, C, ...) lies in memory, and the passes over it that batch normalization needs.

Each layout offers the same words: ``moments`` and ``reduce`` add up over the batch, ``affine``, ``shift`` and
``add_scaled_`` apply one number per channel. Tensors have x's shape and strides. Per-channel vectors are float64 and
numpy's: an operation on one costs 0.4 us there and 2 to 5 us in torch, and a call needs about 30 of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

# Columns enough for full vectors and for loops worth their start, few enough that a row of sums stays in the nearest
# cache: 0.08 ns per element at 512 to 1024, 0.14 at 2048, 2 at 3.
WIDTH = 1024
# Planes with fewer locations than this have loops too short to be worth their start.
SHORT = 32
# torch's kernels add rows one after the other in float32; after this many the error is still below 1e-6.
ROWS = 8192

_backward = torch.ops.aten.native_batch_norm_backward.default


class Layout(Protocol):
    """The arithmetic of one arrangement in memory."""

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return the mean and the biased variance of each channel."""
        ...

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Return sum(g * x_hat) and sum(g) of each channel: dgamma and dbeta."""
        ...

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Write a*x + b to ``out``, which may be ``x``."""
        ...

    def shift(self, x: Tensor, s: Vector) -> Tensor:
        """Return x - s."""
        ...

    def add_scaled_(self, out: Tensor, x: Tensor, a: Vector) -> None:
        """Add a*x to ``out``."""
        ...


class Matrix(NamedTuple):
    """Memory as a matrix whose columns each belong to one channel: (period, C, run) columns, read from the left.

    channels_last has the channels side by side, ``run`` 1, and with few of them several positions make one row
    (``period``). A contiguous tensor with few locations has ``run`` columns per channel.
    """

    period: int
    channels: int
    run: int

    def _view(self, x: Tensor) -> Tensor:
        memory = x.movedim(1, -1) if self.run == 1 else x
        return memory.view(-1, self.period * self.channels * self.run)

    def _columns(self, v: Vector, x: Tensor) -> Tensor:
        narrow = v.astype(_numpy_type(x))
        if self.period == self.run == 1:
            return torch.from_numpy(narrow)
        return torch.from_numpy(np.broadcast_to(narrow[None, :, None], self).ravel())

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Merge the moments of blocks of rows and of columns (Chan, Golub & LeVeque)."""
        matrix = self._view(x)
        blocks = matrix.split(ROWS)
        parts = [torch.batch_norm_update_stats(b, None, None, 0.0) for b in blocks]
        mean, var = (np.array([p[i].numpy() for p in parts], dtype=np.float64) for i in (0, 1))
        if mean.size == self.channels:
            return mean.ravel(), var.ravel()
        mean, var = mean.reshape(-1, *self), var.reshape(-1, *self)
        weight = np.array([len(b) / (len(matrix) * self.period * self.run) for b in blocks]).reshape(-1, 1, 1, 1)
        total = (weight * mean).sum((0, 1, 3))
        between = np.square(mean - total[:, None])
        return total, (weight * (var + between)).sum((0, 1, 3))

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Add up by torch's kernel over blocks of rows, then over blocks and columns in float64."""
        columns = self._columns(mean, x), self._columns(invstd, x)
        pairs = zip(self._view(g).split(ROWS), self._view(x).split(ROWS), strict=True)
        sums = [_backward(g, x, None, None, None, *columns, True, 0.0, (False, True, True))[1:] for g, x in pairs]
        dgamma, dbeta = (
            np.array([s[i].numpy() for s in sums], dtype=np.float64).reshape(-1, *self).sum((0, 1, 3)) for i in (0, 1)
        )
        return dgamma, dbeta

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Take one pass: all operands are vectors."""
        torch.addcmul(self._columns(b, x), self._view(x), self._columns(a, x), out=self._view(out))

    def shift(self, x: Tensor, s: Vector) -> Tensor:
        """Subtract row by row."""
        out = torch.empty_like(x)
        torch.sub(self._view(x), self._columns(s, x), out=self._view(out))
        return out

    def add_scaled_(self, out: Tensor, x: Tensor, a: Vector) -> None:
        """Add row by row."""
        self._view(out).addcmul_(self._view(x), self._columns(a, x))


class Planes(NamedTuple):
    """Memory as N times C planes of contiguous locations."""

    channels: int

    def _view(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.channels, -1)

    def _scalars(self, v: Vector, x: Tensor) -> Tensor:
        return torch.from_numpy(v.astype(_numpy_type(x))[:, None])

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Add up x and x^2 in each plane, then over planes in float64.

        The caller rejects a variance that is small beside mean^2, so that their difference keeps its digits.
        """
        planes = self._view(x)
        m = planes.shape[0] * planes.shape[2]
        mean = np.add.reduce(planes.sum(2).numpy(), 0, np.float64) / m
        norms = torch.linalg.vector_norm(planes, dim=2).numpy()
        square = np.einsum("nc,nc->c", norms, norms, dtype=np.float64) / m
        return mean, np.maximum(square - mean * mean, 0)

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Add up by torch's kernel, which goes plane by plane."""
        g, x, kind = self._view(g), self._view(x), _numpy_type(x)
        scalars = torch.from_numpy(mean.astype(kind)), torch.from_numpy(invstd.astype(kind))
        _, dgamma, dbeta = _backward(g, x, None, None, None, *scalars, True, 0.0, (False, True, True))
        return dgamma.numpy().astype(np.float64), dbeta.numpy().astype(np.float64)

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Take two passes: torch vectorizes an operation with one scalar operand, not with two."""
        torch.mul(self._view(x), self._scalars(a, x), out=self._view(out)).add_(self._scalars(b, x))

    def shift(self, x: Tensor, s: Vector) -> Tensor:
        """Subtract plane by plane."""
        out = torch.empty_like(x)
        torch.sub(self._view(x), self._scalars(s, x), out=self._view(out))
        return out

    def add_scaled_(self, out: Tensor, x: Tensor, a: Vector) -> None:
        """Add plane by plane."""
        self._view(out).addcmul_(self._view(x), self._scalars(a, x))


def layout_of(x: Tensor) -> Matrix | Planes | None:
    """Return the layout of a dense tensor (N, C, ...), or None where it is neither contiguous nor channels_last."""
    channels, locations = x.shape[1], prod(x.shape[2:])
    if x.is_contiguous() and locations > 1:
        return Matrix(1, channels, locations) if locations < SHORT and channels > 1 else Planes(channels)
    if x.movedim(1, -1).is_contiguous():
        return Matrix(_period(x.numel() // channels, channels), channels, 1)
    return None


@lru_cache(maxsize=1024)
def _period(m: int, channels: int) -> int:
    """Return how many of m positions make a row of at most WIDTH columns."""
    if channels >= 16 and m <= ROWS:
        return 1
    return next(k for k in range(max(1, WIDTH // channels), 0, -1) if m % k == 0)


def _numpy_type(x: Tensor) -> type[np.float32] | type[np.float64]:
    return np.float32 if x.dtype == torch.float32 else np.float64
