"""One network's class probabilities for every image of a split, averaged over crops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Normalize
from ..data.loader import CorruptFile
from ..progress import progress
from .crops import Crops, crop_boxes
from .square_crops import SquareBatches, Squares


def cut_views(squares: Tensor, crops: Crops) -> Tensor:
    """Cut the crops out of squares of one scale; return uint8 of shape (crops per square, squares, 3, size, size).

    The order is the center, the corners, the whole square, then their mirror images.

    >>> cut_views(torch.zeros(6, 3, 73, 73, dtype=torch.uint8), Crops.of(144, size=64)).shape
    torch.Size([12, 6, 3, 64, 64])
    """
    n, side, size = len(squares), squares.shape[-1], crops.size
    boxes = crop_boxes(side, size, crops.corners)
    # Allocate the result, channels last, and fill it in place, so that each crop is written once.
    views = squares.new_empty(crops.per_square, n, size, size, 3).movedim(-1, 2)
    for view, box in zip(views, boxes, strict=False):
        view.copy_(squares[..., box.top : box.bottom, box.left : box.right])
    plain = len(boxes)
    if crops.whole:
        views[plain] = _shrink(squares, size)
        plain += 1
    if crops.mirror:
        views[plain:] = views[:plain].flip(-1)
    return views


class MeanProbabilities(nn.Module):
    """Compute the mean of a network's class probabilities over the crops of each image.

        p(y | image) = 1/|crops| sum_c softmax(net(crop_c))_y

    For each scale, the crops of all images of a step are put together and go through the network in batches of about
    ``batch_size`` crops. On a GPU, the network runs under autocast to bfloat16. Probabilities are float32.

    Args:
        net: a network that returns class scores for normalized images; put it into evaluation mode first.
        crops: the crops passed to :func:`batchnorm.evaluate.open_squares`.
        batch_size: crops per forward pass, approximately.

    Paper: Sec. 4.2.3
    """

    def __init__(self, net: nn.Module, crops: Crops, batch_size: int = 256) -> None:
        super().__init__()
        self.net, self.crops, self.batch_size, self.normalize = net, crops, batch_size, Normalize()

    def forward(self, squares: Squares) -> Tensor:
        """Return one row of probabilities for each image of the step."""
        device = self.normalize.shift.device
        levels = [self._level(pixels.to(device, non_blocking=True).movedim(-1, 1)) for pixels in squares.pixels]
        rows = squares.rows.to(device, non_blocking=True)
        return torch.stack(levels).mean(0)[rows].mean(1)

    def _level(self, squares: Tensor) -> Tensor:
        """Return each square's class probabilities, averaged over its crops; all squares have the same scale."""
        views = cut_views(squares, self.crops).flatten(0, 1)
        # Use batches of nearly equal size, because a small last batch would not keep the device busy.
        parts = max(1, round(len(views) / self.batch_size))
        probabilities = torch.cat([self.probabilities(part) for part in views.tensor_split(parts)])
        return probabilities.view(self.crops.per_square, -1, probabilities.shape[1]).mean(0)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the network's class probabilities for uint8 images."""
        return self.scores(images).float().softmax(1)

    def scores(self, images: Tensor) -> Tensor:
        """Return the network's output for uint8 images."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            return cast(Tensor, self.net(self.normalize(images)))


class Predictions(NamedTuple):
    """One network's class probabilities for this rank's images.

    >>> from batchnorm.evaluate import score
    >>> found = Predictions(torch.tensor([[0.8, 0.2]]), torch.tensor([0]), torch.tensor([7]), enlarged=0, corrupt=())
    >>> score(found.probabilities, found.labels).top1_error
    0.0

    Paper: Sec. 4.2.3
    """

    probabilities: Tensor
    """the mean over the crops, of shape (images, classes)"""
    labels: Tensor
    examples: Tensor
    """the index of each image in its split"""
    enlarged: int
    """number of images that are smaller than the crop"""
    corrupt: tuple[CorruptFile, ...]


@torch.no_grad()
def predict(net: nn.Module, batches: SquareBatches, *, batch_size: int = 256, name: str = "the network") -> Predictions:
    """Return a network's class probabilities for every image of this rank, averaged over the crops.

    The network is moved to the batches' device and runs in evaluation mode; its modules' modes are restored afterwards.

    Args:
        net: a network that returns class scores for normalized images of the crops' size.
        batches: the images, from :func:`batchnorm.evaluate.open_squares`.
        batch_size: crops per forward pass, approximately.
        name: the network's name in messages.

    Raises:
        ValueError: if the network raises an error for images of the crops' size, or if its number of scores differs
            from the data's number of classes.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from batchnorm.evaluate import open_squares
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, color in ("a", "red"), ("b", "lime"), ("c", "blue"):
    ...     (folder / "val" / name).mkdir(parents=True)
    ...     Image.new("RGB", (48, 40), color).save(folder / "val" / name / "0.png")
    >>> net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())  # scores are the means of red, green and blue
    >>> predict(net, open_squares(folder, crops=Crops.of(10, size=32))).probabilities.argmax(1)
    tensor([0, 1, 2])

    Paper: Sec. 4.2.3, "multicrop inference"
    """
    mean = MeanProbabilities(net, batches.crops, batch_size).to(batches.device)
    rows = batches.num_examples
    probabilities = torch.empty(rows, len(batches.classes), device=batches.device)
    # Keep labels and examples on the host: copying them to the device in each step would make the host wait.
    labels, examples = torch.empty(2, rows, dtype=torch.int64)
    corrupt: list[CorruptFile] = []
    done = enlarged = 0
    with evaluating(net):
        check_fits(mean, len(batches.classes), name)
        for squares in progress(
            batches, f"{name}, {batches.crops.count} {'crop' if batches.crops.count == 1 else 'crops'}"
        ):
            end = done + len(squares.labels)
            if end > done:
                probabilities[done:end] = mean(squares)
                labels[done:end], examples[done:end] = squares.labels, squares.examples
            done, enlarged = end, enlarged + squares.enlarged
            corrupt += squares.corrupt
    labels = labels[:done].to(batches.device)
    return Predictions(probabilities[:done], labels, examples[:done], enlarged, tuple(corrupt))


def check_fits(mean: MeanProbabilities, classes: int, name: str) -> None:
    """Try the network on a black image, on every rank, so that all ranks stop if the network does not fit the data.

    Raises:
        ValueError: for the same reasons as :func:`predict`.
    """
    size = mean.crops.size
    try:
        found = mean.scores(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=mean.normalize.shift.device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{name} raises an error for images of 3x{size}x{size}: evaluate the network at the size it was trained"
            f" for. The error was {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Tensor) or found.ndim < 2:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"{name} returns {kind} for one image: it must return a tensor of shape (images, classes)")
    if found.shape != (1, classes):
        raise ValueError(
            f"{name} gives {' x '.join(map(str, found.shape[1:]))} scores per image, but the data has {classes}"
            " classes: evaluate the network on the data it was trained on"
        )


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode inside the block; its modules' modes are restored afterwards."""
    before = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _shrink(squares: Tensor, size: int) -> Tensor:
    if squares.shape[-1] == size:
        return squares
    small = F.interpolate(squares.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
    return small.round().to(torch.uint8)
