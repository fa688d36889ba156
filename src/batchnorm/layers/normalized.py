"""The container that ``insert`` creates: a module and the batch normalization of the module's output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# The attributes of the container itself, even if the module has attributes of these names.
OWN = frozenset(("affine", "norm", "features_last", "report", *dir(nn.Module)))


class Normalized(nn.Module):
    """Call a module and normalize its output; this container takes the module's place in the network.

    The module's state-dict entries move one level down: ``conv1.weight`` becomes ``conv1.affine.weight``, and the new
    entries are ``conv1.norm.*``. Public attributes that the container does not have are read from the module, and set
    on it, so that code that uses ``self.conv1.stride`` keeps working.

    Args:
        affine: a Linear, a convolution or, if BN goes after the nonlinearity, an activation module.
        norm: the batch normalization.
        features_last: whether the last dimension is the feature dimension, as in Linear; all other dimensions then
            belong to the mini-batch.

    >>> layer = Normalized(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), features_last=True)
    >>> layer.out_features
    5

    Paper: Sec. 3.2, z = g(BN(Wu))
    """

    def __init__(self, affine: nn.Module, norm: nn.Module, *, features_last: bool = False) -> None:
        super().__init__()
        self.affine = affine
        self.norm = norm
        self.features_last = features_last

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the normalized output of the module."""
        x: Tensor = self.affine(*args, **kwargs)
        if self.features_last:
            y: Tensor = self.norm(x.flatten(0, -2))
            return y.reshape(x.shape)
        return self.norm(x)  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        affine = self.__dict__.get("_modules", {}).get("affine")
        if affine is None or name.startswith("_") or name in self.__dict__ or name in OWN or not hasattr(affine, name):
            super().__setattr__(name, value)
        else:
            setattr(affine, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Copying and pickling must use the container's own methods, so do not look up private names on `affine`.
            # If the container has no `affine` yet, looking it up here would recurse forever.
            if name.startswith("_") or name in ("affine", "norm"):
                raise
            return getattr(self.affine, name)
