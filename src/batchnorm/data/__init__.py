"""Data: a copy of MNIST, batches of images from folders and tar shards, augmentation, and balanced batch sampling."""

from .augment import Augment, Normalize
from .digits import MNIST, Digits, mnist
from .images import ImageBatches, TooManyCorruptError, open_images
from .order import BalancedBatches, Order
from .random_numbers import seed_at

__all__ = [
    "MNIST",
    "Augment",
    "BalancedBatches",
    "Digits",
    "ImageBatches",
    "Normalize",
    "Order",
    "TooManyCorruptError",
    "mnist",
    "open_images",
    "seed_at",
]
