"""The paper's training runs as recipes: five that succeeded, two that failed, and six for the ensemble."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..errors import SEED_MAX, above, at_least, between
from ..layers import BatchNorm, Sync, freeze_
from ..models import inception as inception_network
from ..network_factory import is_of_library
from .own_network import Change, own_network

MOST_STEPS = 10**10  # more than a run can take; Python cannot print the time left for much larger numbers


@dataclass(frozen=True)
class Recipe:
    """The network, optimizer, data order and augmentation of a run; the defaults are those of the paper's Inception.

    Comments mark what the paper does not say. The seven modifications in Section 4.2.1 change ``rate``, ``dropout``,
    ``weight_decay``, ``decay_epochs``, ``local_response``, ``shuffle`` and ``photometric``.

    >>> from dataclasses import replace
    >>> replace(BN_X5, dropout=0.1).rate
    0.0075

    Paper: Sec. 4.2, 4.2.1, 4.2.2
    """

    name: str = "inception"
    """name of the run; with --network, the default is made from that option and --normalize"""

    factory: str = ""  # set by the option --network; the name `network` is already used by a method
    """train torchvision:NAME, timm:NAME, or the network that FILE.py:FUNCTION or MODULE:FUNCTION returns;
    if your function has a parameter named classes, it gets the number of classes"""
    normalize: Change = "as-is"
    """insert batch normalization into your network, convert its batch normalization to this library's, or remove it"""

    start: str = ""  # set by the option --from; `from` is a keyword in Python
    """start with the weights of a finished run, or of a state dict in a .safetensors or .pt file;
    if your data has another number of classes, the last layer gets new weights"""
    freeze_statistics: bool = False
    """during training, normalize by the statistics loaded with --from, and do not update them"""

    batch_norm: bool = False
    """apply batch normalization before each nonlinearity"""
    activation: Literal["relu", "sigmoid"] = "relu"
    """the nonlinearity"""
    dropout: float = 0.4  # the paper gives no value; this is GoogLeNet's
    """dropout probability before the classifier"""
    local_response: bool = True  # the paper does not say where these layers are, and gives no constants
    """local response normalization"""
    per_activation: tuple[str, ...] = ()  # the paper does not say which layers are its "last hidden layers"
    """names of Inception modules, such as 5b, whose layers are normalized per activation"""
    stem: Literal["separable", "plain"] = "separable"
    """kind of the first convolution"""
    projection: Literal[96, 128] = 96  # the paper's table contradicts itself
    """number of filters of the pool projection in modules 4c and 4d"""
    width: float = 1.0
    """factor by which every layer's number of filters is multiplied"""
    init: Literal["kaiming", "xavier"] = "kaiming"  # the paper does not name its initialization
    """initialization of the weights"""
    init_scale: float = 1.0
    """factor by which the initial weights of all convolutions except the depthwise one are multiplied"""
    eps: float = 1e-3  # the paper gives no value; this is TF-slim's
    """number added to the variance"""
    averaging: float = 0.1  # the paper gives no value
    """weight of each new batch in the running averages"""
    statistics: Literal["batch", "sync"] = "batch"  # the paper does not say which one it used
    """batch: each rank uses the statistics of its part of the batch; sync: all ranks use those of the whole batch"""

    rate: float = 0.0015
    """initial learning rate"""
    momentum: float = 0.9  # the paper gives no value
    """momentum of SGD"""
    weight_decay: float = 2e-4  # the paper gives no value; this is five times TF-slim's
    """L2 weight decay of all parameters except gamma and beta"""
    decay: float = 0.96  # the paper gives no value; this is GoogLeNet's
    """factor by which the learning rate is multiplied every --decay-epochs epochs"""
    decay_epochs: float = 8.0  # the paper gives no value; this is GoogLeNet's
    """epochs between decays of the learning rate"""
    batch_size: int = 32
    """examples per step, over all ranks"""
    epochs: float = 775.0
    """length of the run; on ImageNet, 775 epochs are about the paper's 31 million steps of 32 images"""

    size: int = 224
    """height and width of the crops"""
    validate: float = 0.0
    """fraction of each class's training images to hold out for validation, if the data has no validation set;
    the choice depends only on the file names, so every seed holds out the same images"""
    shuffle: Literal["fixed", "epoch"] = "fixed"
    """fixed: one random order for all epochs; epoch: a new order each epoch"""
    photometric: Literal["none", "reduced", "full"] = "full"  # the paper gives no strengths
    """strength of the color distortions"""

    seed: int = 0
    """seed of the initial weights, order, crops, distortions and dropout"""

    def __post_init__(self) -> None:
        above(0, width=self.width, init_scale=self.init_scale, decay=self.decay)
        above(0, decay_epochs=self.decay_epochs, epochs=self.epochs)
        at_least(0, rate=self.rate, eps=self.eps, weight_decay=self.weight_decay)
        at_least(1, batch_size=self.batch_size, size=self.size)
        between(0, 1, dropout=self.dropout, averaging=self.averaging, momentum=self.momentum)
        between(0, 0.9, validate=self.validate)
        between(0, SEED_MAX, seed=self.seed)
        # In the command line's subclass Overrides, a field is None if its option was not given.
        if self.factory == "" and self.normalize not in (None, "as-is"):
            raise ValueError(f"normalize={self.normalize} applies only to a network of your own: add --network")
        if self.freeze_statistics and self.start == "":
            raise ValueError(
                "--freeze-statistics needs the statistics of a trained network: add --from RUN or --from FILE"
            )

    def network(self, classes: int) -> nn.Module:
        """Build the recipe's network with its initial weights.

        Raises:
            ValueError: if the network cannot be built, does not fit the images or the classes, or does not support
                ``statistics`` or ``freeze_statistics``.
        """
        if self.factory:
            net = own_network(self.factory, self.normalize, classes=classes, size=self.size, seed=self.seed)
        else:
            net = self._papers_network(classes)
        sync = self.statistics == "sync"
        if sync or self.freeze_statistics:
            for name, layer in net.named_modules():
                if isinstance(layer, BatchNorm):
                    layer.statistics = Sync() if sync else layer.statistics
                elif isinstance(layer, TorchBatchNorm) and not (sync and isinstance(layer, nn.SyncBatchNorm)):
                    field = "statistics=sync" if sync else "freeze_statistics"
                    raise ValueError(
                        f"{field} needs this library's layers, but layer {name} is not one: add --normalize convert; if"
                        " that does not convert the layer, replace it in the network's code"
                    )
        if self.freeze_statistics:
            freeze_(net, affine=False)
        return net

    def _papers_network(self, classes: int) -> nn.Module:
        return inception_network(
            classes=classes,
            size=self.size,
            norm="batch" if self.batch_norm else None,
            activation=self.activation,
            stem=self.stem,
            projection=self.projection,
            local_response=self.local_response,
            dropout=self.dropout,
            per_activation=self.per_activation,
            width=self.width,
            init=self.init,
            init_scale=self.init_scale,
            eps=self.eps,
            momentum=self.averaging,
            seed=self.seed,
        )

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the run.

        Raises:
            ValueError: if the number is 0 or larger than MOST_STEPS.

        >>> Recipe(epochs=2.5).steps(10)
        25
        """
        steps = round(self.epochs * steps_per_epoch)
        if not 1 <= steps <= MOST_STEPS:
            bound = "less than one step" if steps < 1 else f"more than {MOST_STEPS:,} steps"
            raise ValueError(f"epochs={self.epochs:g} is {bound} (steps per epoch: {steps_per_epoch:,})")
        return steps

    def rate_at(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate at a step: rate * decay^floor(step / (decay_epochs * steps_per_epoch)).

        The paper says only that the learning rate decays "exponentially". This staircase is GoogLeNet's schedule
        (x 0.96 every 8 epochs).

        >>> recipe = Recipe(rate=1.0, decay=0.5, decay_epochs=10)
        >>> [recipe.rate_at(step, steps_per_epoch=1) for step in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]

        Paper: Sec. 4.2.1, "learning rate was decayed exponentially"
        """
        return self.rate * self.decay ** math.floor(step / (self.decay_epochs * steps_per_epoch))

    @property
    def needs_trust(self) -> bool:
        """Whether building the network calls a user's function, which could run any code.

        >>> Recipe(factory="mynet.py:build").needs_trust, Recipe(factory="timm:resnet50").needs_trust
        (True, False)
        """
        return bool(self.factory) and not is_of_library(self.factory)

    @property
    def network_fields(self) -> dict[str, Any]:
        """The fields that, together with the weights, determine the network's output, as JSON values.

        >>> BN_X30.network_fields["activation"]
        'relu'
        """
        own, papers = (
            "factory normalize",
            "batch_norm activation local_response per_activation stem projection width eps",
        )
        values = json.loads(self.to_json())
        return {name: values[name] for name in (*(own if self.factory else papers).split(), "size")}

    def to_json(self) -> str:
        """Return the recipe as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read a recipe that :meth:`to_json` wrote.

        >>> Recipe.from_json(BN_X30.to_json()) == BN_X30
        True
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a recipe must be a JSON object, not {type(values).__name__}")
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown fields in the recipe: {', '.join(sorted(unknown))}")
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        _check_types(values)
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Recipe:
        """Read a run's recipe.json.

        Raises:
            ValueError: if the file is not a valid recipe for this version of the library.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not a valid recipe for this version of batchnorm: {error}") from error


def _check_types(values: Mapping[str, Any]) -> None:
    kinds = get_type_hints(Recipe)
    for name, value in values.items():
        kind = kinds[name]
        if get_origin(kind) is Literal:
            fits = value in get_args(kind)
        elif get_origin(kind) is tuple:
            fits = isinstance(value, tuple) and all(isinstance(part, str) for part in value)
        else:  # accept 1 for a float, but not True for a number
            fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (
                kind is bool
            )
        if not fits:
            raise ValueError(f"{name} cannot be {value!r:.60}")


# The quotations are from Section 4.2.2 of the paper.
INCEPTION = Recipe()
# "Same as Inception with Batch Normalization before each nonlinearity."
BN_BASELINE = replace(INCEPTION, name="bn-baseline", batch_norm=True)
# "Inception with Batch Normalization and the modifications in Sec. 4.2.1. The initial learning rate was increased by a
# factor of 5, to 0.0075."
BN_X5 = replace(
    BN_BASELINE,
    name="bn-x5",
    rate=5 * INCEPTION.rate,
    dropout=0.0,
    weight_decay=INCEPTION.weight_decay / 5,
    decay_epochs=INCEPTION.decay_epochs / 6,
    local_response=False,
    shuffle="epoch",
    photometric="reduced",
    epochs=150.0,  # 6 million steps of 32 images on ImageNet, as many as BN-x30 took in the paper
)
# "Like BN-x5, but with the initial learning rate 0.045 (30 times that of Inception)."
BN_X30 = replace(BN_X5, name="bn-x30", rate=30 * INCEPTION.rate)
# "Like BN-x5, but with sigmoid nonlinearity [...] instead of ReLU."
BN_X5_SIGMOID = replace(BN_X5, name="bn-x5-sigmoid", activation="sigmoid")
# "The same learning rate increase with original Inception caused the model parameters to reach machine infinity."
INCEPTION_X5 = replace(INCEPTION, name="inception-x5", rate=5 * INCEPTION.rate)
# "We also attempted to train the original Inception with sigmoid, but the model remained at [...] chance."
INCEPTION_SIGMOID = replace(INCEPTION, name="inception-sigmoid", activation="sigmoid")

# Section 4.2.3: six networks. "Each was based on BN-x30, modified via some of the following: increased initial weights
# in the convolutional layers; using Dropout (with the Dropout probability of 5% or 10%[...]); and using
# non-convolutional, per-activation Batch Normalization with last hidden layers of the model." The paper does not say
# which network has which modification, by how much the weights are increased, or which layers are "last hidden layers".
LARGE_INIT, LAST_LAYERS = 2.0, ("5b",)
MEMBERS: dict[str, Recipe] = {
    f"bn-x30-{name}": replace(BN_X30, name=f"bn-x30-{name}", seed=seed, **changes)  # type: ignore[arg-type]
    for seed, (name, changes) in enumerate(
        {
            "large-init": {"init_scale": LARGE_INIT},
            "dropout-5": {"dropout": 0.05},
            "dropout-10": {"dropout": 0.1},
            "per-activation": {"per_activation": LAST_LAYERS},
            "large-init-dropout-5": {"init_scale": LARGE_INIT, "dropout": 0.05},
            "per-activation-dropout-10": {"per_activation": LAST_LAYERS, "dropout": 0.1},
        }.items(),
        start=1,
    )
}

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (INCEPTION, BN_BASELINE, BN_X5, BN_X30, BN_X5_SIGMOID, INCEPTION_X5, INCEPTION_SIGMOID)
} | MEMBERS
