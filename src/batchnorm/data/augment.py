"""What is done to training images on the device, in batches: mirror, distort the colours, normalize."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Photometric = Literal["none", "reduced", "full"]

# Not in the paper: means and deviations of ImageNet's training images, as commonly used.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# Rec. 601: what grey is.
GREY = (0.299, 0.587, 0.114)
# Krizhevsky et al. (2012), Sec. 4.1: principal components of ImageNet's colours, each times its eigenvalue;
# the numbers as published with fb.resnet.torch. Columns are components.
COLOUR_COMPONENTS = (
    (-0.5675 * 0.2175, 0.7192 * 0.0188, 0.4009 * 0.0045),
    (-0.5808 * 0.2175, -0.0045 * 0.0188, -0.8140 * 0.0045),
    (-0.5836 * 0.2175, -0.6948 * 0.0188, 0.4203 * 0.0045),
)
OPERATIONS = ("brightness", "contrast", "saturation", "lighting")


class Strength(NamedTuple):
    """Hold how far colours are distorted: factors in [1 - factor, 1 + factor], lighting noise of this deviation."""

    factor: float
    lighting: float


# Not in the paper, which only says that distortions were reduced. Full is Howard's ("Some improvements on deep
# convolutional neural network based image classification", 2013), which GoogLeNet used; reduced is our choice.
STRENGTHS = {"full": Strength(0.5, 0.1), "reduced": Strength(0.2, 0.04)}


class Normalize(nn.Module):
    """Turn uint8 images into floats of about zero mean and unit variance: y = (x / 255 - mean) / std.

    >>> Normalize()(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))[0, 0, 0, 0]
    tensor(-2.1179)

    Beyond the paper: input whitening by constants.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images."""
        scale, shift = 1 / (255 * self.std), -self.mean / self.std
        return torch.addcmul(_per_channel(shift), images, _per_channel(scale)).to(self.dtype)


class Augment(Normalize):
    """Mirror, distort the colours of and normalize a batch, each image by draws of its own.

    With x in [0, 1] and grey(x) = w x, in a random order for each image:

        brightness  x <- b x                            saturation  x <- s x + (1 - s) grey(x)
        contrast    x <- c x + (1 - c) E[grey(x)]       lighting    x <- x + P a

    where E is over the image's pixels; the result is clamped to [0, 1] once, at the end. Each of these is affine in a
    pixel's colour, and so is any sequence of them: the whole distortion, with the normalization, is one 3x3 matrix and
    one offset for each image.

    Nothing here waits for the device, so it can be captured in a CUDA graph.

    Args:
        photometric: how strong distortions are: ``"full"``, ``"reduced"`` or ``"none"``.
        flip: mirror half of the images.
        mean, std, dtype: as in :class:`Normalize`.

    >>> augment = Augment("reduced")
    >>> draws = augment.draw(8, torch.Generator().manual_seed(0))
    >>> augment(torch.full((8, 3, 4, 4), 128, dtype=torch.uint8), draws).shape
    torch.Size([8, 3, 4, 4])

    Paper: Sec. 4.2.1, "Reduce the photometric distortions"
    """

    grey: Tensor
    components: Tensor
    identity: Tensor

    def __init__(
        self,
        photometric: Photometric = "full",
        *,
        flip: bool = True,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(mean, std, dtype)
        if photometric not in ("none", *STRENGTHS):
            raise ValueError(f"photometric={photometric!r} is unknown: choose 'full', 'reduced' or 'none'")
        self.photometric, self.flip = photometric, flip
        self.register_buffer("grey", torch.tensor(GREY), persistent=False)
        self.register_buffer("components", torch.tensor(COLOUR_COMPONENTS), persistent=False)
        self.register_buffer("identity", torch.eye(3), persistent=False)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Return the random numbers for ``n`` images, one row each; ranks that share a batch take their rows of it."""
        uniform = torch.rand(n, 8, generator=generator, device=generator.device)
        normal = torch.randn(n, 3, generator=generator, device=generator.device)
        return torch.cat([uniform, normal], dim=1)

    def forward(self, images: Tensor, draws: Tensor) -> Tensor:  # type: ignore[override]
        """Return the augmented, normalized images; ``draws`` has a row for each."""
        if self.flip:
            images = torch.where(draws[:, 0, None, None, None] < 0.5, images.flip(-1), images)
        if self.photometric == "none":
            return super().forward(images)
        matrix, offset = self._distortion(images, draws, STRENGTHS[self.photometric])
        matrix, offset = matrix / (255 * self.std[:, None]), (offset - self.mean) / self.std
        # In place, because a result of broadcast single channels would lose the images' memory format.
        y = torch.empty_like(images, dtype=torch.float32).copy_(offset[:, :, None, None])
        for channel in range(3):
            y.addcmul_(matrix[:, :, channel, None, None], images[:, channel : channel + 1])
        black, white = -self.mean / self.std, (1 - self.mean) / self.std
        return y.clamp_(_per_channel(black), _per_channel(white)).to(self.dtype)

    def _distortion(self, images: Tensor, draws: Tensor, strength: Strength) -> tuple[Tensor, Tensor]:
        """Compose the four operations in each image's order: x <- A x + t."""
        mean = images.mean((2, 3), dtype=torch.float32) / 255
        brightness, contrast, saturation = (1 + strength.factor * (2 * draws[:, 1:4] - 1)).unbind(1)
        lighting = strength.lighting * draws[:, 8:11] @ self.components.T
        desaturate = torch.lerp(self.grey.expand(3, 3), self.identity, saturation[:, None, None])
        eye = self.identity.expand(len(draws), 3, 3)
        matrices = torch.stack([brightness[:, None, None] * eye, contrast[:, None, None] * eye, desaturate, eye], dim=1)
        a, t, nothing = eye, torch.zeros_like(mean), torch.zeros_like(mean)
        for operation in draws[:, 4:8].argsort(dim=1).unbind(1):
            # The contrast's grey is that of the image as distorted so far.
            grey = (1 - contrast) * ((torch.einsum("nij,nj->ni", a, mean) + t) @ self.grey)
            offsets = torch.stack([nothing, grey[:, None].expand(-1, 3), nothing, lighting], dim=1)
            m = _pick(matrices, operation)
            a, t = m @ a, torch.einsum("nij,nj->ni", m, t) + _pick(offsets, operation)
        return a, t


def _pick(choices: Tensor, which: Tensor) -> Tensor:
    return choices[torch.arange(len(which), device=which.device), which]


def _per_channel(values: Tensor) -> Tensor:
    return values[None, :, None, None]
