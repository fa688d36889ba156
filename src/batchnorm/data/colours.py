"""Colour distortions: four operations in a random order as one affine map of a pixel and its image's mean colour."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rec. 601: what grey is. The weights sum to 1, so that the grey of a grey is itself.
GREY = (0.299, 0.587, 0.114)
# Krizhevsky et al. (2012), Sec. 4.1: principal components of ImageNet's colours, each times its eigenvalue;
# the numbers as published with fb.resnet.torch. Columns are components.
COLOUR_COMPONENTS = (
    (-0.5675 * 0.2175, 0.7192 * 0.0188, 0.4009 * 0.0045),
    (-0.5808 * 0.2175, -0.0045 * 0.0188, -0.8140 * 0.0045),
    (-0.5836 * 0.2175, -0.6948 * 0.0188, 0.4203 * 0.0045),
)


class Strength(NamedTuple):
    """Hold how far colours are distorted: factors in [1 - factor, 1 + factor], lighting noise of this deviation."""

    factor: float
    lighting: float


# Not in the paper, which only says that distortions were reduced. Full is Howard's ("Some improvements on deep
# convolutional neural network based image classification", 2013), which GoogLeNet used; reduced is our choice.
STRENGTHS = {"full": Strength(0.5, 0.1), "reduced": Strength(0.2, 0.04)}


class Distortions:
    """Compose brightness, contrast, saturation and lighting, in each image's order, with the normalization.

    With G x = (w x, w x, w x) the grey of a colour x, and m the image's mean colour, a pixel has three parts:

        x = G m + G (x - m) + (x - G x)

    Brightness multiplies all three by b, contrast the last two by c, saturation the last by s: their order does not
    matter. Lighting adds l = G l + (l - G l) to the first and the last, and only the factors that come after it reach
    it: b' (b, or 1 where brightness came before), c' and s'. So the distorted pixel is

        y = b G m + bc G (x - m) + bcs (x - G x) + b' G l + b'c's' (l - G l)

    and everything but x and m is known without the image.

    Args:
        strength: how far colours are distorted.
        mean, std: of the normalization (y - mean) / std.

    >>> distortions = Distortions(Strength(0.5, 0.1), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    >>> maps = distortions(torch.full((1, 7), 0.5), torch.zeros(1, 3))  # factors of 1, no noise
    >>> (maps[0, 0] * 255).round().int().tolist()  # red is 4 x / 255 - 2
    [4, 0, 0, 0, 0, 0, -170]

    Paper: Sec. 4.2.1, "Reduce the photometric distortions"
    """

    def __init__(self, strength: Strength, mean: tuple[float, float, float], std: tuple[float, float, float]) -> None:
        self.strength = strength
        eye, grey = torch.eye(3).double(), torch.tensor(GREY).double().expand(3, 3)
        components = torch.tensor(COLOUR_COMPONENTS).double()
        # What b, bc, bcs, b' times the noise and b'c's' times the noise each stand for: (9, output channel, 7).
        parts = torch.zeros(9, 3, 7, dtype=torch.float64)
        parts[0, :, 3:6] = grey
        parts[1, :, :6] = torch.cat([grey, -grey], dim=1)
        parts[2, :, :3] = eye - grey
        parts[3:6, :, 6] = (grey @ components).T
        parts[6:9, :, 6] = ((eye - grey) @ components).T
        constant = torch.zeros(3, 7, dtype=torch.float64)
        constant[:, 6] = -torch.tensor(mean).double()
        # The offset is a term of each of the three products that are summed for the mean.
        scale = torch.tensor([1 / 255] * 6 + [1 / 3]).double() / torch.tensor(std).double()[:, None]
        self.parts, self.constant = (parts * scale).flatten(1), (constant * scale).flatten()

    def __call__(self, uniform: Tensor, normal: Tensor) -> Tensor:
        """Return each image's map: for each channel of y what multiplies x, what multiplies m, a third of the offset.

        Args:
            uniform: (n, 7) in [0, 1): brightness, contrast, saturation, and the places of these and of lighting in the
                order, as numbers to be sorted.
            normal: (n, 3): noise along each of the colours' principal components.

        Returns:
            (n, 3, 3 + 3 + 1) in float32, for x and m from 0 to 255.
        """
        # In double precision, which costs nothing here and which autocast leaves alone.
        factors = 1 + self.strength.factor * (2 * uniform[:, :3].double() - 1)
        later = torch.where(uniform[:, 3:6] > uniform[:, 6:], factors, 1.0).cumprod(1)
        noise = self.strength.lighting * normal.double()
        amounts = torch.cat([factors.cumprod(1), later[:, :1] * noise, later[:, 2:] * noise], dim=1)
        maps = torch.addmm(self.constant.to(amounts.device), amounts, self.parts.to(amounts.device))
        return maps.float().view(-1, 3, 7)
