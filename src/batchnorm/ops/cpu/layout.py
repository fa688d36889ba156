"""How a dense tensor (N, C, ...) lies in memory, and the three passes over it that batch normalization needs.

Each layout offers the same words: ``moments`` and ``reduce`` add up over the batch, ``affine`` computes a*x + b with
one a and b per channel. They take dense tensors of x's shape and strides; per-channel vectors are float64.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Wide enough for full vectors and loops worth their start, narrow enough that a row of sums stays in the first cache:
# 0.08 ns per element at 512 to 1024 columns, 0.14 at 2048, 30 times that at 3.
WIDTH = 1024
# Planes with fewer locations than this have loops too short to be worth their start.
SHORT = 32
# torch's kernels add rows one after the other in float32; their error is still below 1e-6 after this many.
ROWS = 8192

_backward = torch.ops.aten.native_batch_norm_backward.default


class Layout(Protocol):
    """The arithmetic of one arrangement in memory."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the biased variance of each channel."""
        ...

    def reduce(self, g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
        """Return sum(g * x_hat) and sum(g) of each channel: dgamma and dbeta."""
        ...

    def affine(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Write a*x + b to ``out``, which may be ``x``."""
        ...

    def shift(self, x: Tensor, s: Tensor) -> Tensor:
        """Return x - s."""
        ...

    def add_scaled_(self, out: Tensor, x: Tensor, a: Tensor) -> None:
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
        return memory.reshape(-1, self.period * self.channels * self.run)

    def _columns(self, v: Tensor, x: Tensor) -> Tensor:
        v = v.to(x.dtype)
        if self.period == self.run == 1:
            return v
        return v.view(1, -1, 1).expand(self).contiguous().view(-1)  # torch's kernels read bare memory

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Merge the moments of blocks of rows and of columns (Chan, Golub & LeVeque)."""
        matrix = self._view(x)
        blocks = matrix.split(ROWS)
        parts = [torch.stack(torch.batch_norm_update_stats(b, None, None, 0.0)) for b in blocks]
        mean, var = torch.stack(parts).double().view(-1, 2, *self).unbind(1)
        if mean.shape[:2] == (1, 1) and self.run == 1:
            return mean.view(-1), var.view(-1)
        sizes = torch.tensor([len(b) for b in blocks], dtype=torch.float64).view(-1, 1, 1, 1)
        weight = sizes / (len(matrix) * self.period * self.run)
        total = (weight * mean).sum((0, 1, 3))
        between = (mean - total.view(1, 1, -1, 1)).square_()
        return total, (weight * between.add_(var)).sum((0, 1, 3))

    def reduce(self, g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
        """Add up by torch's kernel over blocks of rows, then over blocks and columns in float64."""
        mean, invstd = self._columns(mean, x), self._columns(invstd, x)
        pairs = zip(self._view(g).split(ROWS), self._view(x).split(ROWS), strict=True)
        sums = [_backward(g, x, None, None, None, mean, invstd, True, 0.0, (False, True, True))[1:] for g, x in pairs]
        dgamma, dbeta = torch.stack([torch.stack(s) for s in sums]).double().view(-1, 2, *self).sum((0, 2, 4))
        return dgamma, dbeta

    def affine(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Take one pass: all operands are vectors."""
        torch.addcmul(self._columns(b, x), self._view(x), self._columns(a, x), out=self._view(out))

    def shift(self, x: Tensor, s: Tensor) -> Tensor:
        """Subtract row by row."""
        out = torch.empty_like(x)
        torch.sub(self._view(x), self._columns(s, x), out=self._view(out))
        return out

    def add_scaled_(self, out: Tensor, x: Tensor, a: Tensor) -> None:
        """Add row by row."""
        self._view(out).addcmul_(self._view(x), self._columns(a, x))


class Planes(NamedTuple):
    """Memory as N times C planes of contiguous locations."""

    channels: int

    def _view(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.channels, -1)

    def _column(self, v: Tensor, x: Tensor) -> Tensor:
        return v.to(x.dtype).view(-1, 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Add up x and x^2 in each plane, then over planes in float64.

        The caller rejects a variance that is small beside mean^2, so that the difference keeps its digits.
        """
        planes = self._view(x)
        m = planes.shape[0] * planes.shape[2]
        mean = planes.sum(2).double().sum(0) / m
        square = torch.linalg.vector_norm(planes, dim=2).double().square_().sum(0) / m
        return mean, torch.addcmul(square, mean, mean, value=-1).clamp_(min=0)

    def reduce(self, g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor) -> tuple[Tensor, Tensor]:
        """Add up by torch's kernel, which goes plane by plane."""
        g, x, mean, invstd = self._view(g), self._view(x), mean.to(x.dtype), invstd.to(x.dtype)
        _, dgamma, dbeta = _backward(g, x, None, None, None, mean, invstd, True, 0.0, (False, True, True))
        return dgamma.double(), dbeta.double()

    def affine(self, x: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Take two passes: torch vectorizes an operation with one scalar operand, not with two."""
        torch.mul(self._view(x), self._column(a, x), out=self._view(out)).add_(self._column(b, x))

    def shift(self, x: Tensor, s: Tensor) -> Tensor:
        """Subtract plane by plane."""
        out = torch.empty_like(x)
        torch.sub(self._view(x), self._column(s, x), out=self._view(out))
        return out

    def add_scaled_(self, out: Tensor, x: Tensor, a: Tensor) -> None:
        """Add plane by plane."""
        self._view(out).addcmul_(self._view(x), self._column(a, x))


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
    if channels >= 64 and m <= ROWS:
        return 1
    return next(k for k in range(max(1, WIDTH // channels), 0, -1) if m % k == 0)
