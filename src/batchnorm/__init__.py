"""Batch Normalization (Ioffe & Szegedy, 2015) for PyTorch: faster, with exact statistics, and easy to ship.

    import batchnorm as bn

    net = bn.convert(net, example)           # torch.nn's layers become faster ones, fused with activations and sums
    ...                                      # train as before
    bn.estimate_(net, batches)               # exact population statistics instead of running averages
    bn.export(net.eval(), example, "net.onnx")  # the inference network, without batch normalization

Functions such as ``convert`` return a new network and do not change their argument; a trailing underscore, as in
``estimate_``, means that the network is changed in place. The ``report`` attribute of a new network says what was
changed and what was not. ``example`` is a batch that the network accepts.

To change a network:

- ``convert(net, example)``: make a network with ``torch.nn`` batch norms faster.
- ``revert(net)``: go back to ``torch.nn``'s layers, to share the network with code that needs them.
- ``insert(net, example)``: put batch normalization into a network that has none.

To train a network:

- ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d``: drop-in replacements for the layers of ``torch.nn``, for networks
  that you write. The constructors also take ``activation="relu"``, and calls also take ``residual=`` and ``mask=``.
- ``Sync()``, ``Ghost(32)``, ``Renorm()``: pass one to a layer as ``statistics=``. Use ``Sync`` with several GPUs,
  ``Ghost`` for large batches that should behave like small ones, and ``Renorm`` for small batches.
- ``freeze_(net)``: fix the running statistics, gamma and beta, and normalize by these statistics in training too, for
  example to fine-tune with small batches. ``unfreeze_(net)`` undoes this.
- ``param_groups(net, weight_decay)``: parameter groups for an optimizer, without weight decay on gamma and beta.
- ``recompute()``: to save memory, run the forward pass inside ``with bn.recompute():``.
- ``Monitor(net)``: record percentiles of the nonlinearities' inputs during training.
- ``diagnose(net, batches)``: find out what is wrong with the batch normalization, and how to fix it.

To ship a network:

- ``estimate_(net, batches)``: set the population statistics after training, or after averaging weights.
- ``adapt(net, batches)``: get the network with the population statistics of a new domain.
- ``fold(net, example)``: get a network for inference, with its batch normalization folded into the weights.
- ``export(net, example, path)``: fold the network and write it as an ONNX or ``torch.export`` file.
- ``load(run)``: open a run of ``batchnorm train``, with its network, its classes and a ``predict`` method.

Modules: ``ops`` (batch normalization as functions; ``ops.explain`` says which implementation runs and why), ``models``
(the paper's networks) and ``data`` (embedded MNIST, image loaders). ``torch.compile(net, backend="batchnorm")`` fuses
the batch norms of ``torch.nn`` without converting the network. In a shell, ``batchnorm`` lists the commands, and
``batchnorm COMMAND --help`` explains a command.
"""

from typing import TYPE_CHECKING, Any

from . import data, models, ops
from .adaptation import adapt
from .diagnosis import diagnose
from .inference import export, fold
from .layers import BatchNorm1d, BatchNorm2d, BatchNorm3d, Ghost, Renorm, Sync, freeze_, param_groups, unfreeze_
from .monitor import Monitor
from .ops import recompute
from .population import estimate_
from .surgery import convert, insert, revert

if TYPE_CHECKING:
    from .train.trained_run import load

__version__ = "0.2.0"

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Ghost",
    "Monitor",
    "Renorm",
    "Sync",
    "adapt",
    "convert",
    "data",
    "diagnose",
    "estimate_",
    "export",
    "fold",
    "freeze_",
    "insert",
    "load",
    "models",
    "ops",
    "param_groups",
    "recompute",
    "revert",
    "unfreeze_",
]


# These names are imported on first use, because their modules import many others that most users do not need.
_LAZY = {"load": "batchnorm.train.trained_run"}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
