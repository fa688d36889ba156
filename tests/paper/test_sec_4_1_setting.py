"""Section 4.1: the images and the length of the runs are those that the paper states."""

import torch

from batchnorm.data import mnist
from batchnorm.reproduce.mnist.fig1 import Fig1


def test_binary_images_of_28_by_28():
    for images, labels in mnist():
        assert images.shape == (len(labels), 28 * 28)
        assert images.unique().tolist() == [0, 1]
        assert labels.unique().tolist() == list(range(10))


def test_50000_steps_of_60_examples():
    assert {(s.steps, s.batch_size, s.batch_norm) for s in Fig1().settings().values()} == {
        (50_000, 60, False),
        (50_000, 60, True),
    }
    assert torch.equal(*(s.network().linear2.weight for s in Fig1().settings().values()))
