"""How a dense tensor (N, C, ...) lies in memory, and the passes over it that batch normalization needs.

Tensors have x's shape and strides. Per-channel vectors are float64 and numpy's: a call needs about 30 operations on
them, and numpy has less to do around each than torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

# Columns enough for full vectors and for loops worth their start, few enough that a row of sums stays in the nearest
# cache.
WIDTH = 1024
# Planes with fewer locations than this have loops too short to be worth their start.
SHORT = 32
# torch's kernels are vectorized over channels that lie side by side where there are so many of them.
VECTOR = 16
# They add rows one after the other in float32. After ROWS of one sign the error is below 1e-6, good enough for a mean;
# after GRADIENT_ROWS below 1e-5, good enough for the sums over gradients.
ROWS, GRADIENT_ROWS = 1 << 13, 1 << 18
# Its norm of so many values is good to 1e-6; of 64 times as many to 1e-4.
PIECE = 1 << 16

_backward = torch.ops.aten.native_batch_norm_backward.default
_ALL, _SUMS = (True, True, True), (False, True, True)  # of dx, dgamma, dbeta


class Layout(ABC):
    """The arithmetic of one arrangement in memory."""

    @abstractmethod
    def view(self, x: Tensor) -> Tensor:
        """Return x as it lies in memory."""

    @abstractmethod
    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Return one number per channel in the type of x, so that it broadcasts over ``view(x)``."""

    @abstractmethod
    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return the mean and the biased variance of each channel."""

    @abstractmethod
    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Return sum(g * x_hat) and sum(g) of each channel: dgamma and dbeta."""

    @abstractmethod
    def has_kernel(self, x: Tensor) -> bool:
        """Say whether torch's kernel for the whole backward pass knows this layout and is accurate."""

    @abstractmethod
    def kernel(
        self, g: Tensor, x: Tensor, gamma: Tensor | None, mean: Vector, invstd: Vector
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dx, dgamma and dbeta from that kernel."""

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Write a*x + b to ``out``, which may be ``x``."""
        torch.addcmul(self.spread(b, x), self.view(x), self.spread(a, x), out=self.view(out))

    def shift(self, x: Tensor, s: Vector, out: Tensor) -> None:
        """Write x - s to ``out``, which may be ``x``."""
        torch.sub(self.view(x), self.spread(s, x), out=self.view(out))

    def add_scaled_(self, out: Tensor, x: Tensor, a: Vector) -> None:
        """Add a*x to ``out``."""
        self.view(out).addcmul_(self.view(x), self.spread(a, x))


@dataclass(frozen=True, slots=True)
class Matrix(Layout):
    """Memory as a matrix whose columns each belong to one channel: (period, C, run) columns, read from the left.

    channels_last has the channels side by side, ``run`` 1, and with few of them several positions make one row
    (``period``). A contiguous tensor with few locations has ``run`` columns per channel.
    """

    period: int
    channels: int
    run: int

    def view(self, x: Tensor) -> Tensor:
        """Return the matrix."""
        memory = x.movedim(1, -1) if self.run == 1 else x
        return memory.view(-1, self.period * self.channels * self.run)

    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Repeat the number of each channel in its columns."""
        return torch.from_numpy(v.astype(_numpy_type(x)).take(_owners(self.period, self.channels, self.run)))

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Merge the moments of blocks of rows and of columns (Chan, Golub & LeVeque)."""
        # Several positions in a row make fewer and longer rows, which take fewer calls.
        wide = Matrix(_wide(x.numel() // self.channels, self.channels), self.channels, 1) if self.run == 1 else self
        blocks = wide.view(x).split(ROWS)
        parts = [torch.batch_norm_update_stats(b, None, None, 0.0) for b in blocks]
        mean, var = wide._columns([p[0] for p in parts]), wide._columns([p[1] for p in parts])
        weight = np.array([len(b) * self.channels / x.numel() for b in blocks])
        total = np.einsum("b,bpcr->c", weight, mean)
        mean -= total[:, None]
        var += np.square(mean, out=mean)
        return total, np.einsum("b,bpcr->c", weight, var)

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Add up by torch's kernel over blocks of rows, then over blocks and columns in float64."""
        statistics = self.spread(mean, x), self.spread(invstd, x)
        blocks = zip(self.view(g).split(ROWS), self.view(x).split(ROWS), strict=True)
        parts = [_backward(*b, None, None, None, *statistics, True, 0.0, _SUMS) for b in blocks]
        return self._columns([p[1] for p in parts]).sum((0, 1, 3)), self._columns([p[2] for p in parts]).sum((0, 1, 3))

    def has_kernel(self, x: Tensor) -> bool:
        """Say whether the channels lie side by side and fill vectors."""
        return self.run == 1 and self.channels >= VECTOR and x.numel() <= GRADIENT_ROWS * self.channels

    def kernel(
        self, g: Tensor, x: Tensor, gamma: Tensor | None, mean: Vector, invstd: Vector
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call it on a matrix with one column per channel."""
        rows = Matrix(1, self.channels, 1)
        statistics = rows.spread(mean, x), rows.spread(invstd, x)
        dx, dgamma, dbeta = _backward(rows.view(g), rows.view(x), gamma, None, None, *statistics, True, 0.0, _ALL)
        return dx.view(x.movedim(1, -1).shape).movedim(-1, 1), dgamma, dbeta

    def _columns(self, parts: list[Tensor]) -> Vector:
        rows = np.array([p.numpy() for p in parts], dtype=np.float64)
        return rows.reshape(-1, self.period, self.channels, self.run)


@dataclass(frozen=True, slots=True)
class Planes(Layout):
    """Memory as N times C planes of contiguous locations."""

    channels: int

    def view(self, x: Tensor) -> Tensor:
        """Return (N, C, locations)."""
        return x.view(x.shape[0], self.channels, -1)

    def spread(self, v: Vector, x: Tensor) -> Tensor:
        """Return a column."""
        return torch.from_numpy(v.astype(_numpy_type(x))[:, None])

    def moments(self, x: Tensor) -> tuple[Vector, Vector]:
        """Add up x and x^2 in each plane, then over planes in float64.

        The caller rejects a variance that is small beside mean^2, so that their difference keeps its digits.
        """
        planes = self.view(x)
        m = planes.shape[0] * planes.shape[2]
        mean = np.add.reduce(planes.sum(2).numpy(), 0, np.float64) / m
        square = np.zeros(self.channels)
        for piece in planes.split(PIECE, 2) if planes.shape[2] > PIECE else (planes,):
            norms = torch.linalg.vector_norm(piece, dim=2).numpy()
            square += np.einsum("nc,nc->c", norms, norms, dtype=np.float64)
        return mean, np.maximum(square / m - mean * mean, 0)

    def reduce(self, g: Tensor, x: Tensor, mean: Vector, invstd: Vector) -> tuple[Vector, Vector]:
        """Add up by torch's kernel, which goes plane by plane."""
        statistics = (self.spread(v, x).view(-1) for v in (mean, invstd))
        _, dgamma, dbeta = _backward(self.view(g), self.view(x), None, None, None, *statistics, True, 0.0, _SUMS)
        return dgamma.numpy().astype(np.float64), dbeta.numpy().astype(np.float64)

    def has_kernel(self, x: Tensor) -> bool:
        """Say yes: the kernel adds up plane by plane."""
        return True

    def kernel(
        self, g: Tensor, x: Tensor, gamma: Tensor | None, mean: Vector, invstd: Vector
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call it on the planes."""
        statistics = (self.spread(v, x).view(-1) for v in (mean, invstd))
        dx, dgamma, dbeta = _backward(self.view(g), self.view(x), gamma, None, None, *statistics, True, 0.0, _ALL)
        return dx.view(x.shape), dgamma, dbeta

    def affine(self, x: Tensor, a: Vector, b: Vector, out: Tensor) -> None:
        """Take two passes: torch vectorizes an operation with one scalar operand, not with two."""
        torch.mul(self.view(x), self.spread(a, x), out=self.view(out)).add_(self.spread(b, x))


def layout_of(x: Tensor) -> Matrix | Planes | None:
    """Return the layout of a dense tensor (N, C, ...), or None where it is neither contiguous nor channels_last."""
    channels, locations = x.shape[1], prod(x.shape[2:])
    if x.is_contiguous() and locations > 1:
        return Matrix(1, channels, locations) if locations < SHORT and channels > 1 else Planes(channels)
    if x.movedim(1, -1).is_contiguous():
        return Matrix(1 if channels >= VECTOR else _wide(x.numel() // channels, channels), channels, 1)
    return None


def flatten(t: Tensor, x: Tensor) -> Tensor:
    """Return ``t``, of x's shape, in the form in which torch's kernels read gradients of ``x`` right.

    In four and more dimensions they tell contiguous gradients from channels_last ones by their strides. If a dimension
    has size 1 its stride says nothing, and they read one layout as the other. Of rows (M, C) and planes (N, C, L) they
    know one layout each, and autograd brings gradients into that form.
    """
    if x.dim() < 4 or 1 not in x.shape:
        return t
    rows = x.shape[1] > 1 and x.movedim(1, -1).is_contiguous()
    return t.movedim(1, -1).flatten(0, -2) if rows else t.flatten(2)


def unflatten(y: Tensor, x: Tensor) -> Tensor:
    """Undo :func:`flatten`."""
    if y.dim() == x.dim():
        return y
    return y.view(x.movedim(1, -1).shape).movedim(-1, 1) if y.dim() == 2 else y.view(x.shape)


@lru_cache(maxsize=1024)
def _wide(m: int, channels: int) -> int:
    """Return how many of m positions make a row of at most WIDTH columns."""
    return next(k for k in range(max(1, WIDTH // channels), 0, -1) if m % k == 0)


@lru_cache(maxsize=64)
def _owners(period: int, channels: int, run: int) -> NDArray[np.intp]:
    """Return which channel each column belongs to.

    >>> _owners(2, 3, 1)
    array([0, 1, 2, 0, 1, 2])
    """
    return np.tile(np.arange(channels).repeat(run), period)


def _numpy_type(x: Tensor) -> type[np.float32] | type[np.float64]:
    return np.float32 if x.dtype == torch.float32 else np.float64
