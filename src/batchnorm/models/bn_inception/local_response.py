"""Local response normalization: torch's module, computed on a GPU as a convolution."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .channels_last import takes


class LocalResponseNorm(nn.LocalResponseNorm):
    """Divide each value by a power of the mean square of its neighbours in other channels.

        y_c = x_c (k + alpha / n sum_{|c' - c| <= n/2} x_{c'}^2)^-beta

    Torch pools over a fifth dimension, in another memory format. The sum is a product with a matrix that has ones along
    its diagonal, at each pixel: a 1x1 convolution.

    >>> norm, x = LocalResponseNorm(5, alpha=0.5), torch.randn(2, 8, 3, 3)
    >>> torch.allclose(norm.convolved(x), norm(x), atol=1e-5)
    True

    Paper: Sec. 4.2.1, "Remove Local Response Normalization"
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        # A compiler fuses what torch's own form is made of.
        return self.convolved(x) if not torch.compiler.is_compiling() and takes(x) else super().forward(x)

    def convolved(self, x: Tensor) -> Tensor:
        """Normalize images by a convolution."""
        weight = _neighbours(x.shape[1], self.size, self.alpha / self.size, x.dtype, x.device)
        # In full precision: in bfloat16, next to k = 1, most sums would be lost.
        return x * (F.conv2d(x * x, weight).to(torch.promote_types(x.dtype, torch.float32)) + self.k).pow(
            -self.beta
        ).to(x.dtype)


@cache
def _neighbours(channels: int, size: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the kernel that adds up ``size`` channels around each, times a factor."""
    with torch.inference_mode(False):  # kept for training as well
        c = torch.arange(channels)
        distance = c[None, :] - c[:, None]
        near = (distance >= -(size // 2)) & (distance <= (size - 1) // 2)
        return (factor * near).to(device, dtype)[:, :, None, None]
