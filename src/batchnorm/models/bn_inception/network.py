"""The Inception network of the paper's appendix: the table as printed, and one function that builds all variants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import above, at_least
from ...graph.kinds import is_quiet, is_watched
from ...layers import BatchNorm2d
from .blocks import InceptionModule, InceptionRow, SeparableConv2d, Unit, scaled
from .channels_last import takes
from .pooling import GlobalAvgPool2d, MaxPool2d
from .weight_gradients import is_aside, linear, note_cut

# The table as printed, which contradicts itself: by its filter counts, 4c and 4d each have 608 output channels, but its
# output column says 576. inception(projection=128) follows the filter counts. With 96, the default, the pool
# projections of 4c and 4d have fewer filters than printed, and the modules have 576 output channels.
# fmt: off
APPENDIX = (
    #            name stride #1x1 3x3 reduce, 3x3  double reduce, double  pool + projection (0: no projection)
    InceptionRow("3a",  1,    64,      64,    64,           64,     96,   "avg",  32),
    InceptionRow("3b",  1,    64,      64,    96,           64,     96,   "avg",  64),
    InceptionRow("3c",  2,     0,     128,   160,           64,     96,   "max",   0),
    InceptionRow("4a",  1,   224,      64,    96,           96,    128,   "avg", 128),
    InceptionRow("4b",  1,   192,      96,   128,           96,    128,   "avg", 128),
    InceptionRow("4c",  1,   160,     128,   160,          128,    160,   "avg", 128),
    InceptionRow("4d",  1,    96,     128,   192,          160,    192,   "avg", 128),
    InceptionRow("4e",  2,     0,     128,   192,          192,    256,   "max",   0),
    InceptionRow("5a",  1,   352,     192,   320,          160,    224,   "avg", 128),
    InceptionRow("5b",  1,   352,     192,   320,          192,    224,   "max", 128),
)
# fmt: on
AMBIGUOUS = ("4c", "4d")
# With WeightGradients (see weight_gradients.py), the backward pass is divided at the input of this layer. The weights
# of this layer and of all later layers, about 90% of all weights, are updated while the backward pass of the earlier
# layers runs.
CUT = "inception_4a"
SMALLEST_MAP = 4  # for small images, early strides are dropped to keep the last feature map at least this high


def inception(
    *,
    classes: int = 1000,
    size: int = 224,
    norm: Literal["batch"] | None = "batch",
    activation: Literal["relu", "sigmoid"] = "relu",
    stem: Literal["separable", "plain"] = "separable",
    projection: Literal[96, 128] = 96,
    local_response: bool = False,
    dropout: float = 0.0,
    per_activation: Collection[str] = (),
    width: float = 1.0,
    init: Literal["kaiming", "xavier"] = "kaiming",
    init_scale: float = 1.0,
    eps: float = 1e-3,
    momentum: float | None = 0.1,
    seed: int | None = None,
) -> nn.Sequential:
    """Build the appendix network, from the image to the class scores.

    The defaults build the network of the paper's BN-x5 and BN-x30. To build the paper's Inception, which has no batch
    normalization, pass ``norm=None, local_response=True, dropout=0.4``. For small images, early strides are dropped so
    that the last feature map is at least 4x4: below 97 px the first max pool is left out, and below 49 px the first
    convolution has stride 1 instead of 2.

    Args:
        classes: the number of classes.
        size: height and width of the images, 32 or more.
        norm: "batch" normalizes before every nonlinearity; None uses biases instead of normalization.
        activation: the nonlinearity.
        stem: kind of the first convolution (7x7): "separable", with depth multiplier 8, or "plain".
        projection: filters of the pool projection in 4c and 4d. The table prints 128, but its output column
            agrees only with 96, the default.
        local_response: apply local response normalization after the first pool and before the second, as GoogLeNet
            does; the paper does not say where its network applies it.
        dropout: probability of the dropout before the classifier.
        per_activation: the names of Inception modules, such as ("5b",), whose batch normalization has statistics, gamma
            and beta for each activation instead of each feature map.
        width: factor for all numbers of filters: 1 for the paper's network, less for quick trials on a CPU.
        init: "kaiming", or "xavier", which was usual in 2014; the paper does not name its initialization.
        init_scale: factor for the initial weights of the convolutions, except the depthwise one.
        eps: number added to the variance; the paper gives no value (1e-3 is TF-Slim's).
        momentum: weight of a new batch in the running averages; None weights all batches equally. The paper gives no
            value.
        seed: seed of the initial weights; None draws from torch's global generator.

    Raises:
        ValueError: if an argument has an unknown value or a number that is too small, if ``per_activation`` names an
            unknown module, or if ``per_activation`` is given without normalization.

    >>> net = inception(classes=10, size=32)
    >>> net.eval()(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])

    Paper: Appendix; Sec. 4.2; Sec. 4.2.3 (per activation, larger initial weights)
    """
    known: dict[str, tuple[object, tuple[object, ...]]] = {
        "norm": (norm, ("batch", None)),
        "activation": (activation, ("relu", "sigmoid")),
        "stem": (stem, ("separable", "plain")),
        "projection": (projection, (96, 128)),
        "init": (init, ("kaiming", "xavier")),
    }
    for name, (given, choices) in known.items():
        if given not in choices:
            raise ValueError(f"{name}={given!r} is unknown: choose {' or '.join(map(repr, choices))}")
    at_least(1, classes=classes)
    above(0, width=width, init_scale=init_scale)
    unknown = set(per_activation) - {row.name for row in APPENDIX}
    if size < 32:
        raise ValueError(f"the network takes images of 32 px or more, not {size}: choose a larger size")
    if unknown or (per_activation and norm is None):
        raise ValueError(
            f"per_activation={tuple(per_activation)} must name Inception modules from 3a to 5b, and needs batch"
            " normalization (norm='batch')"
        )

    def unit(inputs: int, outputs: int, kernel: int, stride: int, out: int, row: str = "") -> Unit:
        bias = norm is None  # a bias before the normalization would be subtracted with the mean (Sec. 3.2)
        conv: nn.Module = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias)
        if row == "stem" and stem == "separable":
            conv = SeparableConv2d(inputs, outputs, kernel, stride=stride, multiplier=8, bias=bias)
        if norm is None:
            return Unit(OrderedDict(conv=conv, activation=nn.ReLU() if activation == "relu" else nn.Sigmoid()))
        features = (outputs, out, out) if row in per_activation else outputs
        return Unit(OrderedDict(conv=conv, bn=BatchNorm2d(features, eps, momentum, activation=activation)))

    stem_stride, pool_stride = early_strides(size)
    first, channels = scaled(64, width), scaled(192, width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = unit(3, first, 7, stem_stride, size, "stem")
    size = -(-size // stem_stride)
    if pool_stride == 2:
        layers["pool1"] = MaxPool2d(2)
        size = -(-size // 2)
    if local_response:
        layers["lrn1"] = LocalResponseNorm(5, alpha=1e-4, beta=0.75)  # GoogLeNet's constants; the paper gives none
    layers["reduce2"] = unit(first, first, 1, 1, size)
    layers["conv2"] = unit(first, channels, 3, 1, size)
    if local_response:
        layers["lrn2"] = LocalResponseNorm(5, alpha=1e-4, beta=0.75)
    layers["pool2"] = MaxPool2d(2)
    size = -(-size // 2)
    for row in (row.times(width) for row in rows(projection)):
        layers[f"inception_{row.name}"] = InceptionModule(channels, row, size, unit)
        size, channels = -(-size // row.stride), row.outputs(channels)
    layers["pool"] = GlobalAvgPool2d()
    layers["flatten"] = nn.Flatten()
    layers["dropout"] = nn.Dropout(dropout)
    layers["classifier"] = nn.Linear(channels, classes)
    net = Network(layers)
    initialize_(net, init, init_scale, seed)
    return net


class Network(nn.Sequential):
    """Call the layers in order, but if possible compute a unit together with a max pool that follows it.

    The outputs of units before max pools are large. If a unit is computed together with the pool, its output need not
    be written to memory.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the class scores."""
        x, layers = input, list(self)
        cut = getattr(self, CUT, None)
        while layers:
            layer = layers.pop(0)
            if layer is cut:
                note_cut(x)
            if type(layer) is Unit and layers and layer.pools(layers[0], x):
                x = layer.pooled(x, layers.pop(0))
            elif type(layer) is nn.Linear and is_aside() and is_quiet(layer) and not is_watched():
                x = linear(x, layer.weight, layer.bias)
            else:
                x = layer(x)
        return x


def rows(projection: Literal[96, 128] = 96) -> tuple[InceptionRow, ...]:
    """Return the table's rows, with ``projection`` filters in the pool projections of 4c and 4d.

    >>> sum(row.projection for row in rows(96)), sum(row.projection for row in APPENDIX)
    (800, 864)

    Paper: Appendix, Inception architecture
    """
    return tuple(row._replace(projection=projection) if row.name in AMBIGUOUS else row for row in APPENDIX)


def early_strides(size: int) -> tuple[int, int]:
    """Return the strides of the first convolution and the first max pool for images of ``size`` px.

    If the stride of the max pool is 1, the network is built without that pool.

    >>> early_strides(224), early_strides(64), early_strides(32)
    ((2, 2), (2, 1), (1, 1))
    """
    for strides in ((2, 2), (2, 1)):
        if -(-size // (8 * strides[0] * strides[1])) >= SMALLEST_MAP:
            return strides
    return (1, 1)


def early_strides_note(size: int) -> str | None:
    """Describe which early strides are dropped for images of ``size`` px, or return None if none are.

    >>> early_strides_note(64)
    'at 64 px the first max pool is left out'
    """
    stem, pool = early_strides(size)
    if (stem, pool) == (2, 2):
        return None
    return f"at {size} px the first max pool is left out" + (" and the first convolution has stride 1" * (stem == 1))


def initialize_(
    net: nn.Module, init: Literal["kaiming", "xavier"], scale: float = 1.0, seed: int | None = None
) -> None:
    """Draw the weights of convolutions and linear layers from Gaussians, in place; biases become 0.

    The standard deviation is scale * sqrt(2 / fan_in) for kaiming and scale * sqrt(2 / (fan_in + fan_out)) for xavier.
    In the appendix network, no nonlinearity follows the linear layer and the depthwise convolution. For such layers,
    ``scale`` is not applied, and the standard deviation for kaiming is sqrt(1 / fan_in).

    >>> net = nn.Linear(3, 2); initialize_(net, "xavier", seed=0); net.bias.tolist()
    [0.0, 0.0]
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for layer in net.modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        followed = isinstance(layer, nn.Conv2d) and layer.groups == 1
        receptive = layer.weight[0, 0].numel()
        fan_in, fan_out = layer.weight.shape[1] * receptive, layer.weight.shape[0] * receptive
        if isinstance(layer, nn.Conv2d):
            fan_out //= layer.groups
        variance = (2.0 if followed else 1.0) / fan_in if init == "kaiming" else 2.0 / (fan_in + fan_out)
        nn.init.normal_(layer.weight, std=variance**0.5 * (scale if followed else 1.0), generator=generator)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


class LocalResponseNorm(nn.LocalResponseNorm):
    """Divide each value by (k + alpha * mean square over neighboring channels) ** beta.

    For an odd ``size`` n, the formula is

        y_c = x_c (k + alpha / n sum_{|c' - c| <= n/2} x_{c'}^2)^-beta

    Torch computes the sum by pooling over an additional dimension, in a memory format other than channels last. For
    channels-last tensors on a GPU, this module avoids the change of format: it computes the sum as a 1x1 convolution
    with a banded matrix.

    >>> norm, x = LocalResponseNorm(5, alpha=0.5), torch.randn(2, 8, 3, 3)
    >>> torch.allclose(norm.convolved(x), norm(x), atol=1e-5)
    True

    Paper: Sec. 4.2.1, "Remove Local Response Normalization"
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        # When compiling, use torch's implementation, which the compiler can fuse.
        return self.convolved(x) if not torch.compiler.is_compiling() and takes(x) else super().forward(x)

    def convolved(self, x: Tensor) -> Tensor:
        """Normalize images, with the sums computed by a convolution."""
        values = x.float() if x.dtype == torch.float16 else x  # 256**2 overflows in float16
        weight = _neighbors(x.shape[1], self.size, self.alpha / self.size, values.dtype, x.device)
        with torch.autocast(x.device.type, enabled=False):
            sums = F.conv2d(values * values, weight)
        # Add k in float32 or better: in bfloat16, k + sum would be rounded to k if the sum is small.
        return x * (sums.to(torch.promote_types(x.dtype, torch.float32)) + self.k).pow(-self.beta).to(x.dtype)


@cache
def _neighbors(channels: int, size: int, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the 1x1 kernel that adds up the ``size`` channels around each channel and multiplies by ``factor``."""
    with torch.inference_mode(False):  # training may need the cached tensor; autograd cannot save inference tensors
        c = torch.arange(channels)
        distance = c[None, :] - c[:, None]
        near = (distance >= -(size // 2)) & (distance <= (size - 1) // 2)
        return (factor * near).to(device, dtype)[:, :, None, None]
