"""Augment batches of training images on the device: mirror, distort the colours, normalize."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Photometric = Literal["none", "reduced", "full"]
Colour = tuple[float, float, float]

# Not in the paper: the commonly used means and standard deviations of ImageNet's training images.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# The luma weights of Rec. 601. They sum to 1, so grey pixels keep their value.
GREY = (0.299, 0.587, 0.114)
# The principal components of ImageNet's colours, each multiplied by its eigenvalue (Krizhevsky et al. 2012, Sec. 4.1).
# The numbers are those of fb.resnet.torch. Each column is a component.
COLOUR_COMPONENTS = (
    (-0.5675 * 0.2175, 0.7192 * 0.0188, 0.4009 * 0.0045),
    (-0.5808 * 0.2175, -0.0045 * 0.0188, -0.8140 * 0.0045),
    (-0.5836 * 0.2175, -0.6948 * 0.0188, 0.4203 * 0.0045),
)


class Strength(NamedTuple):
    """The strength of distortions: random factors lie in [1 - factor, 1 + factor]; ``lighting`` scales normal noise."""

    factor: float
    lighting: float


# Not in the paper, which says only that distortions were reduced. "full" uses the strengths in Howard ("Some
# improvements on deep convolutional neural network based image classification", 2013), whose distortions GoogLeNet
# used. "reduced" is our choice.
STRENGTHS = {"full": Strength(0.5, 0.1), "reduced": Strength(0.2, 0.04)}


class Normalize(nn.Module):
    """Turn uint8 images into floats of about zero mean and unit variance: y = (x / 255 - mean) / std.

    Args:
        mean: the mean of each channel, for values in [0, 1].
        std: the standard deviation of each channel, for values in [0, 1].
        dtype: the dtype of the result.

    >>> Normalize()(torch.zeros(1, 3, 2, 2, dtype=torch.uint8))[0, 0, 0, 0]
    tensor(-2.1179)

    Beyond the paper: normalizing the input by constants.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Colour = IMAGENET_MEAN, std: Colour = IMAGENET_STD, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("scale", _per_channel(1 / (255 * torch.tensor(std))), persistent=False)
        self.register_buffer("shift", _per_channel(-torch.tensor(mean) / torch.tensor(std)), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images."""
        # A single kernel computes in float32 and rounds to the result's dtype when it writes.
        return torch.addcmul(self.shift, images, self.scale, out=torch.empty_like(images, dtype=self.dtype))


class Augment(Normalize):
    """Mirror the images of a batch, distort their colours and normalize them, each image with its own random numbers.

    Let x be a pixel's colour in [0, 1], and grey(x) = w x its luma, with weights w. The colours of each image are
    distorted in four steps, in a random order:

        brightness  x <- b x                            saturation  x <- s x + (1 - s) grey(x)
        contrast    x <- c x + (1 - c) E[grey(x)]       lighting    x <- x + P a

    where b, c and s are random factors, E is the mean over the image's pixels, P holds the principal components of
    ImageNet's colours, and a is normal noise. The result is clamped to [0, 1] once, at the end. Each step is affine in
    the pixel's colour, and so is any sequence of steps. Let m be the image's mean colour. The distortion and the
    normalization together are

        y = A x + T m + t

    where A, T and t depend only on the random draws. :meth:`draw` computes them, so :meth:`forward` never synchronizes
    and can be captured in a CUDA graph.

    Args:
        photometric: the strength of the distortions, ``"full"``, ``"reduced"`` or ``"none"``.
        flip: whether to mirror each image with probability 1/2.
        mean: the mean of each channel, as in :class:`Normalize`.
        std: the standard deviation of each channel.
        dtype: the dtype of the result.

    >>> augment = Augment("reduced")
    >>> draws = augment.draw(8, torch.Generator().manual_seed(0))
    >>> augment(torch.full((8, 3, 4, 4), 128, dtype=torch.uint8), draws).shape
    torch.Size([8, 3, 4, 4])

    Paper: Sec. 4.2.1, "Reduce the photometric distortions"
    """

    white: Tensor

    def __init__(
        self,
        photometric: Photometric = "full",
        *,
        flip: bool = True,
        mean: Colour = IMAGENET_MEAN,
        std: Colour = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(mean, std, dtype)
        if photometric not in ("none", *STRENGTHS):
            raise ValueError(f"photometric={photometric!r} is unknown: choose 'full', 'reduced' or 'none'")
        self.photometric, self.flip = photometric, flip
        self.register_buffer("white", _per_channel((1 - torch.tensor(mean)) / torch.tensor(std)), persistent=False)
        self.distortions = None if photometric == "none" else Distortions(STRENGTHS[photometric], mean, std)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for ``n`` images, one row each; ranks that share a batch each take their own rows.

        An image is mirrored if the first number of its row is below 0.5. If colours are distorted, the row also holds
        the image's A, T and t / 3; :meth:`forward` adds t / 3 three times.
        """
        uniform = torch.rand(n, 8, generator=generator, device=generator.device)
        normal = torch.randn(n, 3, generator=generator, device=generator.device)
        if self.distortions is None:
            return uniform[:, :1].contiguous()
        return torch.cat([uniform[:, :1], self.distortions(uniform[:, 1:], normal).view(n, 21)], dim=1)

    def forward(self, images: Tensor, draws: Tensor) -> Tensor:  # type: ignore[override]
        """Return the augmented, normalized images; ``draws`` has one row per image."""
        if self.flip:
            images = torch.where(draws[:, 0, None, None, None] < 0.5, images.flip(-1), images)
        if self.distortions is None:
            return super().forward(images)
        of_pixel, of_mean, third = draws[:, 1:].unflatten(1, (3, 7)).split((3, 3, 1), dim=2)
        mean = images.mean((2, 3), dtype=torch.float32)
        # A matrix product would take as many launches, and autocast would round its operands.
        sums = torch.addcmul(third, of_mean, mean[:, None]).sum(2)[:, :, None, None]
        # Allocate the output in the images' memory format, which a result broadcast from one channel would not have.
        y = torch.empty_like(images, dtype=torch.float32)
        for channel in range(3):
            sums = torch.addcmul(sums, of_pixel[:, :, channel, None, None], images[:, channel : channel + 1], out=y)
        out = y if self.dtype == y.dtype else torch.empty_like(y, dtype=self.dtype)
        return torch.clamp(y, self.shift, self.white, out=out)


class Distortions:
    """Combine brightness, contrast, saturation and lighting, in each image's random order, with the normalization.

    Let G x = (w x, w x, w x) be the grey of a colour x, and m the image's mean colour. A pixel is a sum of three parts:

        x = G m + G (x - m) + (x - G x)

    Brightness multiplies all three parts by b, contrast multiplies the last two by c, and saturation multiplies the
    last by s. The order of these three steps does not matter. Lighting adds a colour l, that is, G l to the first part
    and l - G l to the last. Only the factors of steps after lighting apply to l: b' is b, or 1 if brightness came
    before lighting; c' and s' are defined likewise. So the distorted pixel is

        y = b G m + bc G (x - m) + bcs (x - G x) + b' G l + b'c's' (l - G l)

    where only x and m depend on the image.

    Args:
        strength: the strength of the distortions.
        mean, std: the constants of the normalization (y - mean) / std.

    >>> distortions = Distortions(Strength(0.5, 0.1), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    >>> maps = distortions(torch.full((1, 7), 0.5), torch.zeros(1, 3))  # factors of 1, no noise
    >>> (maps[0, 0] * 255).round().int().tolist()  # red is 4 x / 255 - 2
    [4, 0, 0, 0, 0, 0, -170]
    """

    def __init__(self, strength: Strength, mean: Colour, std: Colour) -> None:
        self.strength = strength
        eye, grey = torch.eye(3).double(), torch.tensor(GREY).double().expand(3, 3)
        components = torch.tensor(COLOUR_COMPONENTS).double()
        # One map per coefficient of y in the class docstring: b, bc, bcs, then b' and b'c's' for each of the three
        # noise components. A map has one row per output channel: the factors of x, the factors of m and the offset.
        parts = torch.zeros(9, 3, 7, dtype=torch.float64)
        parts[0, :, 3:6] = grey
        parts[1, :, :6] = torch.cat([grey, -grey], dim=1)
        parts[2, :, :3] = eye - grey
        parts[3:6, :, 6] = (grey @ components).T
        parts[6:9, :, 6] = ((eye - grey) @ components).T
        constant = torch.zeros(3, 7, dtype=torch.float64)
        constant[:, 6] = -torch.tensor(mean).double()
        # Augment.forward adds the offset to each of the three products in T m before it sums them, so store a third of
        # the offset.
        scale = torch.tensor([1 / 255] * 6 + [1 / 3]).double() / torch.tensor(std).double()[:, None]
        self.parts, self.constant = (parts * scale).flatten(1), (constant * scale).flatten()

    def __call__(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return each image's map: for each channel of y, the factors of x and of m, and a third of the offset.

        Args:
            uniform: numbers in [0, 1) of shape (n, 7): three for the factors of brightness, contrast and saturation,
                then four sort keys that order brightness, contrast, saturation and lighting.
            normal: normal noise of shape (n, 3), one column for each principal component of the colours.

        Returns:
            A float32 tensor of shape (n, 3, 3 + 3 + 1), for x and m from 0 to 255.
        """
        # These tensors are small, so float64 is cheap. Autocast does not affect float64.
        factors = 1 + self.strength.factor * (2 * uniform[:, :3].double() - 1)
        later = torch.where(uniform[:, 3:6] > uniform[:, 6:], factors, 1.0).cumprod(1)
        noise = self.strength.lighting * normal.double()
        amounts = torch.cat([factors.cumprod(1), later[:, :1] * noise, later[:, 2:] * noise], dim=1)
        maps = torch.addmm(self.constant.to(amounts.device), amounts, self.parts.to(amounts.device))
        return maps.float().view(-1, 3, 7)


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
