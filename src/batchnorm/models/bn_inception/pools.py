"""The network's pools: torch's modules, computed on a GPU by this library's kernels, which know 3x3 windows alone."""

from __future__ import annotations

from torch import Tensor, nn

from . import pooling
from .channels_last import takes


class MaxPool2d(nn.MaxPool2d):
    """Take the largest value of 3x3 windows, padded by 1.

    >>> import torch
    >>> MaxPool2d(2)(torch.arange(16.0).view(1, 1, 4, 4))
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])

    Paper: Appendix (max pool)
    """

    stride: int

    def __init__(self, stride: int) -> None:
        super().__init__(3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pool."""
        return pooling.max_pool(x, self.stride) if self.stride in (1, 2) and takes(x) else super().forward(x)


class AvgPool2d(nn.AvgPool2d):
    """Average 3x3 windows at stride 1 over those of their pixels that are in the image.

    >>> import torch
    >>> AvgPool2d()(torch.ones(1, 1, 2, 2))  # a constant stays one at the border
    tensor([[[[1., 1.],
              [1., 1.]]]])

    Paper: Appendix (avg pool)
    """

    def __init__(self) -> None:
        super().__init__(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pool."""
        return pooling.average_pool(x) if takes(x) else super().forward(x)
