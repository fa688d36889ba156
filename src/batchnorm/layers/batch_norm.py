"""Drop-in replacements for ``torch.nn.BatchNorm1d``, 2d and 3d, with an optional nonlinearity, residual and mask."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from math import prod
from types import FrameType
from typing import Any, Literal

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import collectives, ops
from ..ops.activation import Activation, as_activation
from ..ops.call import Call
from ..ops.cpu import forget
from ..ops.dispatch import infer, train_
from ..ops.running import snapshot
from ..ops.torch_state import is_recomputation
from .statistics import Ghost, Statistics, Sync, count_unmasked
from .torch_tools import tool_at

# Bits of the state-dict entry "frozen".
STATISTICS, WEIGHT, BIAS = 1, 2, 4


class BatchNorm(TorchBatchNorm):
    """The base class of layers that normalize by batch statistics in training and by running averages in evaluation."""

    num_features: int | tuple[int, ...]  # type: ignore[assignment]
    num_batches_skipped: Tensor | None
    _input_dims: tuple[int, ...]

    def __init__(
        self,
        num_features: int | tuple[int, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | Activation | nn.Module | None = None,
        statistics: Statistics | None = None,
        on_single: Literal["error", "running"] = "error",
    ) -> None:
        if on_single not in ("error", "running"):
            raise ValueError(f"on_single must be 'error' or 'running', not {on_single!r}")
        if on_single == "running" and not track_running_stats:
            raise ValueError("on_single='running' needs track_running_stats=True")
        num_features = self._checked_features(num_features)
        if statistics is not None and (isinstance(statistics, type) or not hasattr(statistics, "batch_norm")):
            raise TypeError(f"statistics must be a value such as Sync(), Ghost(32) or Renorm(), not {statistics!r}")
        if eps < 0:
            raise ValueError(f"eps must not be negative, but is {eps}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)  # type: ignore[arg-type]
        if not bias:
            self.bias = None  # type: ignore[assignment]
        self.activation = as_activation(activation)
        self.statistics = statistics
        self.on_single = on_single
        self._frozen = 0
        self._ranks_checked = False
        skipped = torch.zeros((), dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("num_batches_skipped", skipped, persistent=False)
        self._keep_statistics_wide()

    def _checked_features(self, features: Any) -> int | tuple[int, ...]:
        whole = not hasattr(features, "__index__")
        try:
            numbers = [operator.index(n) for n in (features if whole else [features])]
        except TypeError:
            raise TypeError(f"num_features={features!r}: must be an integer or a shape") from None
        dims = [d - 1 for d in getattr(self, "_input_dims", ())]
        if (whole and dims and len(numbers) not in (1, *dims)) or min(numbers, default=0) < 0:
            count = f" ({' or '.join(map(str, dims))} numbers)" if dims else ""
            raise ValueError(
                f"num_features={features}: must be the number of channels or, for statistics per activation, the shape"
                f" of an example{count}"
            )
        return tuple(numbers) if whole else numbers[0]

    @property
    def features(self) -> tuple[int, ...]:
        """The shape of the statistics: (C,) or, with statistics per activation, a shape such as (C, H, W)."""
        return _as_tuple(self.num_features)

    @property
    def running_mean(self) -> Tensor | None:  # type: ignore[override]
        """The running average of the mean, or None if the layer has no running averages.

        Raises:
            RuntimeError: if the caller is a torch tool that would drop options that ``torch.nn`` layers do not have,
                such as the activation.
        """
        tool = None if torch.compiler.is_compiling() else tool_at(sys._getframe(1))
        lost = [] if tool is None else self._extras(for_inference=tool.for_inference)
        if tool is not None and lost:
            raise RuntimeError(f"{type(self).__name__}: {tool.name} would drop {', '.join(lost)}; {tool.instead}")
        return nn.Module.__getattr__(self, "running_mean")  # type: ignore[return-value]

    def _averages(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the running mean and variance, without reading the property ``running_mean`` if possible."""
        if "running_mean" in self._buffers:
            return self._buffers["running_mean"], self.running_var
        return self.running_mean, self.running_var  # the mean is not a buffer, for example if it is parametrized

    @property
    def frozen(self) -> int:
        """What is frozen, as a sum of flags: 1 for the statistics, 2 for the weight, 4 for the bias.

        torch.distributed.checkpoint needs this property, because it reads each entry of the state dict as an attribute.
        """
        return self._frozen

    @property
    def frozen_statistics(self) -> bool:
        """Whether training normalizes by the running statistics and does not update them."""
        return bool(self._frozen & STATISTICS)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the layer, in its current mode, normalizes by batch statistics instead of running averages."""
        return self._normalizes_by_batch()

    # forward() and the methods that it calls avoid properties. If compiled code reads a property of a layer, Dynamo
    # adds a guard on the layer's class, and cannot use its faster guard on the whole module.

    def _normalizes_by_batch(self) -> bool:
        return not self._frozen & STATISTICS and (self.training or any(a is None for a in self._averages()))

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        activation: str | Activation | None = None,
    ) -> Tensor:
        """Return g(BN(input) + residual).

        Args:
            input: a tensor of shape (N, C) or (N, C, L) for ``BatchNorm1d``, (N, C, H, W) for ``BatchNorm2d``, and
                (N, C, D, H, W) for ``BatchNorm3d``.
            residual: a tensor of the input's shape that is added before the activation.
            mask: a bool tensor of shape (N, *locations). Where it is False, the statistics ignore the input, and the
                output is 0.
            activation: g for this call, instead of the layer's own activation.
        """
        g = self.activation if activation is None else as_activation(activation)
        if mask is None and type(input) is Tensor and not torch.compiler.is_compiling():
            y = self._fast(input, residual, g)
            if y is not None:
                return y
        if _is_symbolic(input):
            extra = {"residual": residual, "mask": mask, "activation": activation}
            return self._as_leaf(input, extra)  # type: ignore[no-any-return]
        self._check_input_dim(input)
        self._check_input(input, residual, mask)
        options: dict[str, Any] = {
            "feature_dims": len(_as_tuple(self.num_features)),
            "activation": g,
            "residual": residual,
            "mask": mask,
        }
        normalizes_by_batch = self._normalizes_by_batch()
        falls_back = normalizes_by_batch and self._falls_back_on_running(input, mask)
        if falls_back or not normalizes_by_batch:
            mean, var = self._averages()
            if mean is None or var is None:
                raise RuntimeError(
                    f"{path_of(self)} has no running statistics to normalize by; if it is frozen, call"
                    " batchnorm.unfreeze_"
                )
            if falls_back:
                mean, var = snapshot(mean), snapshot(var)  # a later call may update them before the backward pass
            return ops.normalize(input, mean, var, self.weight, self.bias, self.eps, **options)
        running = self._running()
        if running is None:
            self._count_without_averages()
        # As in torch.nn.SyncBatchNorm, ranks do not wait for each other in evaluation mode.
        if self.statistics is not None and (self.training or not isinstance(self.statistics, Sync)):
            self._check_ranks()
            y, moments = self.statistics.batch_norm(input, self.weight, self.bias, self.eps, running, **options)
            if running is not None:
                ops.update_(running, moments, self._factor())
            return y
        if running is None:
            return ops.batch_norm(input, self.weight, self.bias, self.eps, **options)[0]
        return ops.batch_norm_(input, self.weight, self.bias, running, self._factor(), self.eps, **options)[0]

    def _fast(self, input: Tensor, residual: Tensor | None, activation: Activation) -> Tensor | None:
        """Return the output of the fast path, or None if the fast path does not support the call."""
        if self.statistics is not None or input.dim() not in self._input_dims:
            return None
        # Read the dictionaries directly: six calls of nn.Module.__getattr__, which is Python code, would be slow.
        p, b = self._parameters, self._buffers
        try:
            weight, bias = p["weight"], p["bias"]  # torch.nn.utils.parametrize removes these keys
            mean, var = b["running_mean"], b["running_var"]
            batches, skipped = b["num_batches_tracked"], b["num_batches_skipped"]
        except KeyError:
            return None
        if mean is None or var is None or batches is None or skipped is None:
            return None
        if not self.training or self._frozen & STATISTICS:
            return infer(Call(input, weight, bias, self.eps, activation, residual), mean, var)
        if not self.track_running_stats:
            return None
        running = (mean, var, batches, skipped)
        return train_(Call(input, weight, bias, self.eps, activation, residual, None, running, self.momentum))

    def _as_leaf(self, proxy: Any, extra: dict[str, Any]) -> Any:
        """Record the call as one torch.fx node; by default, torch.fx does so only for modules defined in torch.nn."""
        given = {k: v for k, v in extra.items() if v is not None}
        return proxy.tracer.create_proxy("call_module", proxy.tracer.path_of_module(self), (proxy,), given)

    def _check_ranks(self) -> None:
        """Check once that all ranks call the same layer; otherwise an all-reduce could hang or mix different layers."""
        if not isinstance(self.statistics, Sync):
            return
        if torch.compiler.is_compiling():
            # Compiled code cannot make this check. If a rank later runs this layer eagerly, it must skip the check,
            # because the other ranks would not take part.
            self._ranks_checked = True
        elif not self._ranks_checked:
            if collectives.world_size(self.statistics.group) > 1:
                collectives.check_same_features(_as_tuple(self.num_features), path_of(self), self.statistics.group)
            self._ranks_checked = True

    def _running(self) -> ops.Running | None:
        """Return the running averages to update, or None in evaluation mode or if the layer has no running averages."""
        mean, var = self._averages()
        if not (self.training and self.track_running_stats) or mean is None or var is None:
            return None
        # As in torch.nn, users may set num_batches_tracked to None; the batches are then counted in a temporary tensor.
        counts = (
            torch.zeros((), dtype=torch.long, device=mean.device) if count is None else count
            for count in (self.num_batches_tracked, self.num_batches_skipped)
        )
        return ops.Running(mean, var, *counts)

    def _count_without_averages(self) -> None:
        """Count a training batch even if the running averages were set to None, as torch.nn does."""
        again = not torch.compiler.is_compiling() and is_recomputation()
        if self.training and self.track_running_stats and self.num_batches_tracked is not None and not again:
            self.num_batches_tracked.add_(1)

    def _factor(self) -> float | None:
        """Return the momentum; as in torch.nn, return 0 if the momentum is None and batches are not counted."""
        return 0.0 if self.momentum is None and self.num_batches_tracked is None else self.momentum

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._input_dims:
            wanted = " or ".join(f"{d}D" for d in self._input_dims)
            raise ValueError(f"{path_of(self)}: expected {wanted} input (got {input.dim()}D input)")

    def _check_input(self, input: Tensor, residual: Tensor | None, mask: Tensor | None) -> None:
        if not input.is_floating_point():
            raise TypeError(
                f"{path_of(self)}: batch normalization needs real floating-point input, not {input.dtype};"
                " convert it first (for complex values, use one layer each for the real and imaginary parts)"
            )
        features = _as_tuple(self.num_features)
        if tuple(input.shape[1 : 1 + len(features)]) != features:
            raise ValueError(
                f"{path_of(self)}: expected {' x '.join(map(str, features))} features, but the input of shape"
                f" {tuple(input.shape)} has {' x '.join(map(str, input.shape[1 : 1 + len(features)]))};"
                " set num_features to match the layer before this one, or move the features to dimension 1"
            )
        if residual is not None and residual.shape != input.shape:
            raise ValueError(
                f"{path_of(self)}: a residual of shape {tuple(residual.shape)} cannot be added to an input of shape"
                f" {tuple(input.shape)}; project the residual to that shape first"
            )
        positions = (input.shape[0], *input.shape[1 + len(features) :])
        if mask is not None and (mask.dtype != torch.bool or mask.shape != positions):
            raise ValueError(
                f"{path_of(self)}: the mask must be bool of shape {positions} for an input of shape"
                f" {tuple(input.shape)}, not {mask.dtype} of shape {tuple(mask.shape)}"
            )

    def _falls_back_on_running(self, input: Tensor, mask: Tensor | None) -> bool:
        """Return whether the batch has one value per feature and must be normalized by the running statistics.

        Raises:
            ValueError: if the batch, or a group of ``Ghost``, has one value per feature and ``on_single`` is "error".
        """
        if self.training and isinstance(self.statistics, Sync) and collectives.world_size(self.statistics.group) != 1:
            return False  # the statistics are over all ranks, and other ranks may have more values
        dims = len(_as_tuple(self.num_features))
        m = input.shape[0] * prod(input.shape[1 + dims :])
        groups = self.statistics.groups(input, dims) if isinstance(self.statistics, Ghost) else 1
        counts = [] if mask is None else count_unmasked(mask, groups)
        if not (1 in counts if counts else m == 1):
            return False
        if self.on_single == "running":
            # With several groups, Ghost itself normalizes a group of one value by the running statistics, if the layer
            # has any.
            return groups == 1 or self._running() is None
        masked = " with only one unmasked value" if counts else ""
        larger = "batch"
        if groups > 1:
            larger, masked = "group", f"{masked} in a group of {self.statistics}"
        raise ValueError(
            f"{path_of(self)}: expected more than 1 value per channel when training, got input size"
            f" {tuple(input.shape)}{masked}. Use a larger {larger}, or drop or balance the loader's last batch"
            " (batchnorm.data.BalancedBatches). If the layer has running statistics, you can also freeze them"
            " (batchnorm.freeze_), or create the layer with on_single='running' to normalize such a batch by them"
        )

    def reset_running_stats(self) -> None:
        """Reset the running averages and the counts of tracked and skipped batches, unless the statistics are frozen.

        ``torch.optim.swa_utils.update_bn`` resets every layer. A frozen layer would not get new statistics afterwards,
        so it must keep its own.
        """
        if self.__dict__.get("_frozen", 0) & STATISTICS:
            return
        super().reset_running_stats()
        self._reset_skipped()

    def _reset_skipped(self) -> None:
        """Set the count of skipped batches to 0 on the device of the running averages.

        State dicts do not contain this count. So after a state dict is loaded, the count may still be on ``meta`` or,
        after ``to_empty()``, uninitialized.
        """
        mean, skipped = self._buffers.get("running_mean"), self._buffers.get("num_batches_skipped")
        if skipped is None:
            return
        if mean is not None and mean.device != skipped.device:
            self._buffers["num_batches_skipped"] = torch.zeros_like(skipped, device=mean.device)
        else:
            skipped.zero_()

    def extra_repr(self) -> str:
        """Return ``torch.nn``'s ``extra_repr``, followed by this library's options that are not at their defaults."""
        return ", ".join([super().extra_repr(), *self._extras()])  # type: ignore[no-untyped-call]

    def _extras(self, *, for_inference: bool = False) -> list[str]:
        """List options that ``torch.nn`` does not have and that are not at their defaults."""
        found = []
        if self.activation.name != "identity":
            slope = f"({self.activation.slope})" if self.activation.name == "leaky_relu" else ""
            found.append(f"activation={self.activation.name}{slope}")
        if for_inference:
            return found
        if self.statistics is not None:
            found.append(f"statistics={self.statistics}")
        if self.on_single != "error":
            found.append(f"on_single={self.on_single}")
        if self._frozen:
            names = {STATISTICS: "statistics", WEIGHT: "weight", BIAS: "bias"}
            found.append(f"frozen={'+'.join(name for bit, name in names.items() if self._frozen & bit)}")
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm:
        kept = {k: v for k in ("running_mean", "running_var") if (v := self._buffers.get(k)) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for key, old in kept.items():
            new = self._buffers[key]
            if new is not None and new.dtype.itemsize < 4:
                # Convert the old tensor instead of `new`, whose values are already rounded to half precision.
                wide = torch.empty_like(new, dtype=torch.float32) if old.is_meta else old.to(new.device, torch.float32)
                self._buffers[key] = wide
        return self

    def _keep_statistics_wide(self) -> None:
        for key in ("running_mean", "running_var"):
            buffer = self._buffers.get(key)
            if buffer is not None and buffer.dtype.itemsize < 4:
                self._buffers[key] = buffer.float()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._frozen:
            destination[prefix + "frozen"] = torch.tensor(self._frozen, dtype=torch.uint8, device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # If the checkpoint has no "frozen" entry, a frozen layer stays frozen.
        frozen = state_dict.pop(prefix + "frozen", None)
        mean = self._buffers.get("running_mean")
        if mean is not None:
            forget(mean)  # load_state_dict may call torch.utils.swap_tensors, which rejects weakly referenced tensors
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._keep_statistics_wide()  # load_state_dict(assign=True) may assign half-precision tensors
        self._reset_skipped()
        if frozen is not None:
            before, self._frozen = self._frozen, int(frozen)
            for bit, parameter in ((WEIGHT, self.weight), (BIAS, self.bias)):
                # A parameter that is frozen in the layer but not in the checkpoint becomes trainable again.
                if parameter is not None and (before | self._frozen) & bit:
                    parameter.requires_grad_(not self._frozen & bit)


def _as_tuple(num_features: int | tuple[int, ...]) -> tuple[int, ...]:
    return num_features if isinstance(num_features, tuple) else (num_features,)


def _is_symbolic(value: object) -> bool:
    return isinstance(value, torch.fx.Proxy)


class BatchNorm1d(BatchNorm, nn.BatchNorm1d):
    """Normalize (N, C) or (N, C, L) input; a drop-in replacement for ``torch.nn.BatchNorm1d``.

    y = g(gamma * (x - E[x]) / sqrt(Var[x] + eps) + beta + residual)

    Args:
        num_features: C, or (C, L) for statistics and parameters per activation.
        eps: added to the variance.
        momentum: the weight of the new batch in the running averages; None weights all batches equally.
        affine: learn gamma (``weight``) and beta (``bias``).
        track_running_stats: keep running averages for evaluation.
        device: the device of the parameters.
        dtype: the dtype of the parameters; running statistics are kept in at least float32.
        bias: learn beta; ignored if ``affine`` is False.
        activation: the nonlinearity g, as a name (relu, relu6, leaky_relu, sigmoid, tanh, silu or hardswish) or as a
            ``torch.nn`` module for one of these nonlinearities.
        statistics: how to compute training statistics, if not over the batch: ``Sync()``, ``Ghost(size)`` or
            ``Renorm()``.
        on_single: what to do with a training batch that has one value per feature. "error" raises ValueError, and
            "running" normalizes the batch by the running statistics. With several ranks, a layer with ``Sync`` ignores
            this option.

    >>> layer = BatchNorm1d(2, activation="sigmoid")
    >>> layer(torch.tensor([[0.0, 1.0], [0.0, 3.0]])).shape
    torch.Size([2, 2])

    Paper: Alg. 1
    """

    _input_dims = (2, 3)


class BatchNorm2d(BatchNorm, nn.BatchNorm2d):
    """Normalize (N, C, H, W) input; a drop-in replacement for ``torch.nn.BatchNorm2d``.

    The arguments are those of :class:`BatchNorm1d`. With ``num_features=C``, each feature map has one gamma and one
    beta, and its statistics are over the batch and all locations. With ``num_features=(C, H, W)``, each activation has
    its own gamma, beta and statistics.

    >>> block = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), BatchNorm2d(8, activation="relu"))
    >>> bool((block(torch.randn(4, 3, 9, 9)) >= 0).all())
    True

    Paper: Sec. 3.2; Sec. 4.2.3 (per activation)
    """

    _input_dims = (4,)


class BatchNorm3d(BatchNorm, nn.BatchNorm3d):
    """Normalize (N, C, D, H, W) input; a drop-in replacement for ``torch.nn.BatchNorm3d``.

    The arguments are those of :class:`BatchNorm1d`.

    >>> BatchNorm3d(2)(torch.randn(2, 2, 3, 3, 3)).shape
    torch.Size([2, 2, 3, 3, 3])

    Paper: Sec. 3.2
    """

    _input_dims = (5,)


def path_of(layer: nn.Module) -> str:
    """Describe the layer for error messages: its class and, if its network is on the call stack, its path."""
    kind = type(layer).__name__
    if torch.compiler.is_compiling():
        return kind
    frame: FrameType | None = sys._getframe(1)
    path = ""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner is not layer:
            path = next((name for name, m in owner.named_modules() if m is layer), path)
        frame = frame.f_back
    return f"layer '{path}' ({kind})" if path else kind
