"""Augment batches of training images on the device: mirror, distort the colors, normalize."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Photometric = Literal["none", "reduced", "full"]
Color = tuple[float, float, float]

# Not in the paper: the commonly used means and standard deviations of ImageNet's training images.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
# The weights of red, green and blue in the luma of Rec. 601.
GRAY = (0.299, 0.587, 0.114)
# The principal components of ImageNet's colors, each multiplied by its eigenvalue (Krizhevsky et al. 2012, Sec. 4.1).
# The numbers are taken from fb.resnet.torch. Each column is a component.
COLOR_COMPONENTS = (
    (-0.5675 * 0.2175, 0.7192 * 0.0188, 0.4009 * 0.0045),
    (-0.5808 * 0.2175, -0.0045 * 0.0188, -0.8140 * 0.0045),
    (-0.5836 * 0.2175, -0.6948 * 0.0188, 0.4203 * 0.0045),
)


class Strength(NamedTuple):
    """The strength of color distortions.

    Brightness, contrast and saturation are multiplied by random factors from 1 - ``factor`` to 1 + ``factor``. The
    random noise that is added along the principal components of ImageNet's colors is multiplied by ``lighting``.
    """

    factor: float
    lighting: float


# The paper gives no strengths; it says only that distortions were reduced. "full" uses the strengths of Howard ("Some
# improvements on deep convolutional neural network based image classification", 2013), whose distortions GoogLeNet
# used. The strengths of "reduced" are this library's choice.
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
        self, mean: Color = IMAGENET_MEAN, std: Color = IMAGENET_STD, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("scale", _per_channel(1 / (255 * torch.tensor(std))), persistent=False)
        self.register_buffer("shift", _per_channel(-torch.tensor(mean) / torch.tensor(std)), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images."""
        # With out=, a single CUDA kernel converts the images, computes in float32 and rounds to the result's dtype.
        return torch.addcmul(self.shift, images, self.scale, out=torch.empty_like(images, dtype=self.dtype))


class Augment(Normalize):
    """Mirror the images of a batch, distort their colors and normalize them, each image with its own random numbers.

    Let x be a pixel's color, with values in [0, 1], and gray(x) its luma. The colors of each image are distorted in
    four steps, in a random order:

        brightness  x <- b x                            saturation  x <- s x + (1 - s) gray(x)
        contrast    x <- c x + (1 - c) E[gray(x)]       lighting    x <- x + P a

    where b, c and s are random factors, E is the mean over the image's pixels, the columns of P are the principal
    components of ImageNet's colors, each multiplied by its eigenvalue, and a is normal noise. The result is clamped to
    [0, 1] once, at the end. Let m be the image's mean color. Each step is affine in x and m, and so is any sequence of
    steps. Before clamping, the distorted and normalized color is

        y = A x + T m + t

    where A, T and t do not depend on the image. :meth:`draw` computes A, T and t in advance, so :meth:`forward`
    never synchronizes and can be captured in a CUDA graph.

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
        mean: Color = IMAGENET_MEAN,
        std: Color = IMAGENET_STD,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(mean, std, dtype)
        if photometric not in ("none", *STRENGTHS):
            raise ValueError(f"photometric={photometric!r} is unknown: choose 'full', 'reduced' or 'none'")
        self.photometric, self.flip = photometric, flip
        self.register_buffer("white", _per_channel((1 - torch.tensor(mean)) / torch.tensor(std)), persistent=False)
        self.distortions = None if photometric == "none" else Distortions(STRENGTHS[photometric], mean, std)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for ``n`` images, and return a tensor with one row per image.

        With ``flip``, an image is mirrored if the first number of its row is below 0.5. If colors are distorted, the
        row also holds A / 255, T / 255 and t / 3, with A, T and t from the class docstring: pixels have values up to
        255, and :meth:`forward` adds t / 3 three times. In a distributed run, draw for the whole batch on every rank,
        and pass each rank's rows to its :meth:`forward`.
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
        # Do not use a matrix product: it would not save kernel launches, and autocast would round its operands.
        sums = torch.addcmul(third, of_mean, mean[:, None]).sum(2)[:, :, None, None]
        # Allocate y in the images' memory format. Without out=, the first product below would have another format,
        # because it is broadcast from a single channel.
        y = torch.empty_like(images, dtype=torch.float32)
        for channel in range(3):
            sums = torch.addcmul(sums, of_pixel[:, :, channel, None, None], images[:, channel : channel + 1], out=y)
        out = y if self.dtype == y.dtype else torch.empty_like(y, dtype=self.dtype)
        return torch.clamp(y, self.shift, self.white, out=out)


class Distortions:
    """Combine brightness, contrast, saturation and lighting, in each image's random order, with the normalization.

    Let G x = (w x, w x, w x) be the gray of a color x, where w x is its luma, and let m be the image's mean color. A
    pixel is a sum of three terms:

        x = G m + G (x - m) + (x - G x)

    Brightness multiplies all three terms by b, contrast multiplies the last two by c, and saturation multiplies the
    last by s. The order of these three steps does not matter. Lighting adds a color l, that is, G l to the first term
    and l - G l to the last. Only the factors of steps after lighting apply to l: b' is b, or 1 if brightness came
    before lighting; c' and s' are defined likewise. So the distorted pixel is

        y = b G m + bc G (x - m) + bcs (x - G x) + b' G l + b'c's' (l - G l)

    where only x and m depend on the image.

    Args:
        strength: the strength of the distortions.
        mean, std: the constants of the normalization (y - mean) / std.

    >>> distortions = Distortions(Strength(0.5, 0.1), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    >>> maps = distortions(torch.full((1, 7), 0.5), torch.zeros(1, 3))  # factors of 1, no noise
    >>> (maps[0, 0] * 255).round().int().tolist()  # red is 4 x / 255 - 2; a third of -2 is stored
    [4, 0, 0, 0, 0, 0, -170]
    """

    def __init__(self, strength: Strength, mean: Color, std: Color) -> None:
        self.strength = strength
        eye, gray = torch.eye(3).double(), torch.tensor(GRAY).double().expand(3, 3)
        components = torch.tensor(COLOR_COMPONENTS).double()
        # `parts` has one 3 x 7 matrix for each coefficient in the class docstring's formula for y: b, bc and bcs, then
        # b' for each of the three noise components, then b'c's' for each of them. A matrix has one row per output
        # channel, with three factors of x, three factors of m and the offset.
        parts = torch.zeros(9, 3, 7, dtype=torch.float64)
        parts[0, :, 3:6] = gray
        parts[1, :, :6] = torch.cat([gray, -gray], dim=1)
        parts[2, :, :3] = eye - gray
        parts[3:6, :, 6] = (gray @ components).T
        parts[6:9, :, 6] = ((eye - gray) @ components).T
        constant = torch.zeros(3, 7, dtype=torch.float64)
        constant[:, 6] = -torch.tensor(mean).double()
        # Store a third of the offset, because Augment.forward adds the stored value three times, once for each channel
        # of the mean color m.
        scale = torch.tensor([1 / 255] * 6 + [1 / 3]).double() / torch.tensor(std).double()[:, None]
        self.parts, self.constant = (parts * scale).flatten(1), (constant * scale).flatten()

    def __call__(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return each image's affine map: per channel of y, the factors of x and of m, and a third of the offset.

        Args:
            uniform: numbers in [0, 1) of shape (n, 7): three for the factors of brightness, contrast and saturation,
                then four sort keys that order brightness, contrast, saturation and lighting.
            normal: normal noise of shape (n, 3), one column for each principal component of the colors.

        Returns:
            A float32 tensor of shape (n, 3, 3 + 3 + 1). The factors apply to x and m with values from 0 to 255.
        """
        # Compute in float64, because autocast does not round float64, and the tensors are small.
        factors = 1 + self.strength.factor * (2 * uniform[:, :3].double() - 1)
        later = torch.where(uniform[:, 3:6] > uniform[:, 6:], factors, 1.0).cumprod(1)
        noise = self.strength.lighting * normal.double()
        amounts = torch.cat([factors.cumprod(1), later[:, :1] * noise, later[:, 2:] * noise], dim=1)
        maps = torch.addmm(self.constant.to(amounts.device), amounts, self.parts.to(amounts.device))
        return maps.float().view(-1, 3, 7)


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
