"""Image folders and shards with random pixels, and a small network with weights from a seed."""

import numpy as np
import torch
from pictures import encoded, tar_of
from PIL import Image
from torch import nn

CLASSES = ("ant", "bee", "cat")


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def folder(root, sizes, *, classes=CLASSES, split="val"):
    """Save one PNG for each size; the classes take turns."""
    for name in classes:
        (root / split / name).mkdir(parents=True, exist_ok=True)
    for k, (width, height) in enumerate(sizes):
        picture(width, height, k).save(root / split / classes[k % len(classes)] / f"{k:03d}.png")
    return root


def shards(root, sizes, *, count=2, split="val"):
    """Save the images of :func:`folder` as tar shards; the label of image k is k modulo 3."""
    root.mkdir(parents=True, exist_ok=True)
    for part in range(count):
        members = []
        for k in range(part, len(sizes), count):
            members.append((f"{k:03d}.png", encoded(picture(*sizes[k], k))))
            members.append((f"{k:03d}.cls", str(k % len(CLASSES)).encode()))
        (root / f"{split}-{part:06d}.tar").write_bytes(tar_of(members))
    return root


class Tiny(nn.Module):
    """A linear classifier on a few pooled pixels, with weights from a seed; images may have any size."""

    def __init__(self, classes=3, seed=0, sharpness=20.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(3 * 16, classes)
        with torch.no_grad():
            self.linear.weight.copy_(sharpness * torch.randn(classes, 48, generator=generator))
            self.linear.bias.zero_()

    def forward(self, x):
        return self.linear(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))
