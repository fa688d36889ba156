"""The embedded data set: MNIST as the paper's 28x28 binary images."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Digits(NamedTuple):
    """Images of shape (N, 784) with values 0 and 1, and their labels from 0 to 9.

    >>> images, labels = mnist().test
    >>> images.shape, images.max(), labels[:3]
    (torch.Size([10000, 784]), tensor(1.), tensor([7, 2, 1]))

    Paper: Sec. 4.1
    """

    images: Tensor
    labels: Tensor


class MNIST(NamedTuple):
    """The training set and the test set.

    >>> train, test = mnist()
    >>> len(train.labels), len(test.labels)
    (60000, 10000)

    Paper: Sec. 4.1
    """

    train: Digits
    test: Digits


def mnist(dtype: torch.dtype = torch.float32) -> MNIST:
    """Return MNIST, 60,000 training and 10,000 test digits, as binary images; nothing is downloaded.

    Args:
        dtype: the dtype of the images.

    MNIST is by Y. LeCun and C. Cortes, under the license CC BY-SA 3.0; see ``LICENSE-mnist.md`` in this package.

    >>> mnist().train.images.shape, mnist().test.labels[:3]
    (torch.Size([60000, 784]), tensor([7, 2, 1]))

    Paper: Sec. 4.1
    """
    with files(__package__).joinpath("mnist-binary.npz").open("rb") as file:
        packed = np.load(file, allow_pickle=False)
        return MNIST(
            *(_unpack(packed[f"{part}_images"], packed[f"{part}_labels"], dtype) for part in ("train", "test"))
        )


def _unpack(bits: np.ndarray, labels: np.ndarray, dtype: torch.dtype) -> Digits:
    images = torch.from_numpy(np.unpackbits(bits, axis=1)).to(dtype)
    return Digits(images, torch.from_numpy(labels.astype(np.int64)))
