"""A finished run as an object: its network, classes, preprocessing and metrics, and predictions for images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Normalize
from ..data.augment import IMAGENET_MEAN, IMAGENET_STD
from ..data.crop_boxes import center_box
from ..data.decode import CorruptImageError, crop_image, decode_crop
from ..errors import at_least
from ..evaluate import Crops
from ..evaluate.predictions import MeanProbabilities, evaluating
from ..optional_packages import require
from ..progress import progress
from .final_network import folded_network
from .metrics import read
from .recipe import Recipe
from .saved_runs import SavedRun, open_run

if TYPE_CHECKING:
    from PIL.Image import Image

    AnImage = str | os.PathLike[str] | Image | Tensor
    """a file, a Pillow image, or a uint8 RGB tensor of shape (3, height, width)"""


@dataclass(frozen=True)
class Preprocessing:
    """Preprocess images as in validation: cut out the center square, resize it, and compute (x / 255 - mean) / std.

    Args:
        size: height and width of the input.
        mean, std: mean and standard deviation of each channel (red, green, blue), for values from 0 to 1.

    >>> Preprocessing(32)(torch.zeros(3, 48, 64, dtype=torch.uint8)).shape
    torch.Size([1, 3, 32, 32])
    """

    size: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def crops(self, images: AnImage | Sequence[AnImage]) -> Tensor:
        """Return the images' center squares, as uint8 of shape (images, 3, size, size).

        Args:
            images: one or several files, Pillow images or uint8 tensors of shape (3, height, width), or one tensor of
                shape (images, 3, height, width). To save time, large JPEG files are decoded at a reduced size, so their
                pixels differ slightly from those of the same image given as a Pillow image.

        Raises:
            OSError: if a file cannot be read.
            ValueError: if an image cannot be decoded or has an unsupported type; the message names the image.
        """
        return self._crops(_as_list(images))

    def __call__(self, images: AnImage | Sequence[AnImage]) -> Tensor:
        """Return the images as a normalized float32 batch; see :meth:`crops`."""
        with torch.device("cpu"):
            normalize = Normalize(self.mean, self.std)
        normalized: Tensor = normalize(self.crops(images))
        return normalized

    def _crops(self, images: list[AnImage], first: int = 0) -> Tensor:
        """Return the images' center squares; error messages count the images from ``first``."""
        out = torch.empty(len(images), self.size, self.size, 3, dtype=torch.uint8, device="cpu")
        for position, (image, crop) in enumerate(zip(images, out, strict=True), first):
            self._crop(image, position, crop)
        return out.movedim(-1, 1)

    def _crop(self, image: AnImage, position: int, out: Tensor) -> None:
        choose = partial(center_box, size=self.size)
        try:
            if isinstance(image, str | os.PathLike):
                decode_crop(Path(image).expanduser().read_bytes(), choose, out)
            elif not isinstance(image, Tensor) and not isinstance(image, require("PIL.Image", "train").Image):
                raise ValueError(
                    f"image {position} is of type {type(image).__name__}: give a path, a Pillow image or a uint8 tensor"
                )
            elif isinstance(image, Tensor) and not _is_rgb(image):
                raise ValueError(
                    f"image {position} is a {image.dtype} tensor of shape {tuple(image.shape)}: give a uint8 tensor of"
                    " shape (3, height, width)"
                )
            else:
                crop_image(image, choose, out)
        except CorruptImageError as error:
            name = str(image) if isinstance(image, str | os.PathLike) else f"image {position}"
            raise ValueError(f"{name} cannot be read as an image ({error})") from error


class Prediction(NamedTuple):
    """A network's predictions for a list of images."""

    probabilities: Tensor
    """float32 of shape (images, classes), on the CPU"""
    classes: tuple[str, ...]
    """the name of each image's most probable class"""


class TrainedRun:
    """A finished run of ``batchnorm train``, as returned by :func:`load`."""

    def __init__(self, saved: SavedRun, device: torch.device) -> None:
        net, classes = saved.trained()
        self.folder: Path = saved.folder
        self.recipe: Recipe = saved.recipe
        """the settings that the network was trained with"""
        self.classes: tuple[str, ...] = classes
        """the names of the classes; a label is an index into them"""
        self.preprocessing = Preprocessing(saved.recipe.size)
        """the preprocessing of images in validation"""
        self.trained: nn.Module = net.to(device)
        """the network before folding, with its population or frozen statistics, in evaluation mode"""

    @cached_property
    def network(self) -> nn.Module:
        """The inference network: batch normalization folded into the weights, in evaluation mode."""
        return folded_network(self.trained, self.recipe.size)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl: losses and accuracies, with their steps."""
        return read(self.folder / "metrics.jsonl")

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.folder)!r}, {self.recipe.size} px, {len(self.classes)} classes)"

    @torch.no_grad()
    def predict(self, images: AnImage | Sequence[AnImage], *, batch_size: int = 64) -> Prediction:
        """Return the folded network's class probabilities for images, preprocessed as in validation.

        Args:
            images: see :meth:`Preprocessing.crops`.
            batch_size: images per forward pass.

        Raises:
            OSError: if a file cannot be read.
            TypeError: if ``batch_size`` is not an int.
            ValueError: if an image cannot be decoded or has an unsupported type; the message names the image.
        """
        if not isinstance(batch_size, int):
            raise TypeError(f"batch_size must be an int, not {type(batch_size).__name__}")
        at_least(1, batch_size=batch_size)
        given = _as_list(images)
        device = next(self.network.parameters()).device
        with torch.device("cpu"):
            mean = MeanProbabilities(self.network, Crops(self.recipe.size), batch_size).to(device)
            parts = [torch.empty(0, len(self.classes))]
        with evaluating(self.network):
            for start in progress(range(0, len(given), batch_size), f"batches of {batch_size} images"):
                crops = self.preprocessing._crops(given[start : start + batch_size], start)
                parts.append(mean.probabilities(crops.to(device)).cpu())
        probabilities = torch.cat(parts)
        return Prediction(probabilities, tuple(self.classes[k] for k in probabilities.argmax(1).tolist()))


def load(run: str | os.PathLike[str], *, device: torch.device | str = "cpu", trust: bool = False) -> TrainedRun:
    """Load a finished run of ``batchnorm train``: its network, classes, recipe, preprocessing and metrics.

    The files of a run cannot execute code: the weights are in a safetensors file, ``state.pt`` is read with
    ``weights_only=True``, and the other files are JSON. The weights and ``state.pt`` are checked against the SHA-256 in
    their manifest. If the run trained a network of your own, loading calls the function that recipe.json names, and
    therefore needs ``trust=True``. Networks of the paper, torchvision and timm load without ``trust``.

        run = bn.load("runs/mine")
        run.predict(["cat.jpg", "dog.jpg"]).classes

    Args:
        run: the run's folder.
        device: the device for the run's networks.
        trust: allow calling the function that recipe.json names. Set this only for runs from someone you trust.

    Raises:
        FileNotFoundError: if ``run`` is not the folder of a run.
        ValueError: if the run is unfinished or diverged, its files are damaged, its weights do not fit its recipe or
            classes, or loading it needs ``trust``.

    Beyond the paper: using a trained network.
    """
    return TrainedRun(open_run(Path(run).expanduser(), trust=trust), torch.device(device))


def _is_rgb(image: Tensor) -> bool:
    return image.dtype == torch.uint8 and image.dim() == 3 and image.shape[0] == 3 and image.numel() > 0


def _as_list(images: AnImage | Sequence[AnImage]) -> list[AnImage]:
    if isinstance(images, Tensor):
        return list(images) if images.dim() == 4 else [images]
    # Iterating over any of these types, or over an array of numbers, would not give images.
    single = (str, bytes, os.PathLike, Mapping, IOBase, nn.Module)
    numbers = isinstance(images, np.ndarray) and images.dtype.kind not in "OU"
    if numbers or isinstance(images, single) or not hasattr(images, "__iter__"):
        return [images]  # type: ignore[list-item]
    return list(images)
