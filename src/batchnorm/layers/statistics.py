"""Values for a layer's ``statistics=``: alternatives to normalizing a training batch by its own statistics."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from .. import collectives, ops
from ..ops import Moments, Running
from ..ops.call import Features
from ..ops.composite import finish, per_channel, scale_and_shift
from ..ops.moments import batch_moments
from ..ops.running import snapshot
from ..ops.torch_state import is_transformed


class Statistics(Protocol):
    """The interface of alternatives to Algorithm 1 for training batches."""

    def batch_norm(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, running: Running | None, **options: Any
    ) -> tuple[Tensor, Moments]:
        """Return the output, and the moments that update the running averages."""
        ...


@dataclass(frozen=True)
class Sync:
    """Compute exact statistics over the samples of all ranks, even if ranks have different numbers of samples.

    The forward pass merges the ranks' counts, means and variances with one all-reduce. The backward pass sums the
    gradients of these moments with another all-reduce. ``Sync`` works on CPU (gloo) and CUDA (nccl), also under
    DistributedDataParallel. In a single process, ``Sync`` computes Algorithm 1. In evaluation mode, ranks do not
    exchange statistics, even if the layer has no running averages.

    Args:
        group: the process group whose ranks share statistics; None means the default group.

    >>> import batchnorm as bn
    >>> bn.BatchNorm2d(8, statistics=bn.Sync()).statistics
    Sync(group=None)

    Beyond the paper: a mini-batch that is distributed over several machines.
    """

    group: distributed.ProcessGroup | None = None

    def batch_norm(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, running: Running | None, **options: Any
    ) -> tuple[Tensor, Moments]:
        """Normalize by the moments of all ranks' samples."""
        if collectives.world_size(self.group) == 1:
            return ops.batch_norm(x, gamma, beta, eps, **options)
        features = Features(x, options.pop("feature_dims"))
        call = features.call(x, gamma, beta, eps, **options)
        # Compute the means in float64, so that the difference of two large means is precise.
        local, centered = batch_moments(call.x, call.reduced_dims, call.mask, mean_dtype=torch.float64)
        own = Moments(local.count.double(), local.mean.flatten(), local.var.double().flatten())
        # Merge moments of the features' shape: ranks whose inputs have other strides flatten them in another order.
        merged = ops.merge(collectives.gather_moments(features.restore_moments(own), self.group))
        mean, var = (per_channel(features.flat_vector(v), call.x) for v in (merged.mean, merged.var))
        centered = centered + (local.mean - mean).to(centered.dtype)
        y = finish(call, scale_and_shift(call, centered, var.to(centered.dtype)))
        return features.restore(y), Moments(*(v.to(centered.dtype) for v in merged))


@dataclass(frozen=True)
class Ghost:
    """Split a batch into groups of about ``size`` examples, and normalize each group by its own statistics.

    ``Ghost`` is ghost batch normalization (Hoffer et al., 2017). A batch of N examples is split into ceil(N / size)
    groups whose sizes differ by at most one. If a group would have only one value per feature, there is one group
    fewer: ``Ghost(2)`` splits 5 examples of shape (C,) into groups of 3 and 2. If a mask leaves a group only one value
    per feature, the layer's ``on_single`` applies to that group. In compiled code, under torch.func transforms, or if
    the mask is on a GPU, the library does not look for such groups.

    The running variance is updated with sum(m_b var_b) / sum(m_b - 1), where m_b is the number of values per feature in
    group b, and var_b is their biased variance. This is the average of the groups' unbiased variances, weighted by
    m_b - 1. It leaves out groups of fewer than two values per feature.

    Args:
        size: the number of examples in a group, at least 2.

    >>> import batchnorm as bn
    >>> layer = bn.BatchNorm1d(4, statistics=bn.Ghost(32))
    >>> layer(torch.randn(256, 4)).shape
    torch.Size([256, 4])

    Beyond the paper: large mini-batches with the noise of small ones (Sec. 3.4).
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:
            raise ValueError(f"the size of a ghost batch must be an integer of at least 2, not {self.size!r}")

    def batch_norm(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, running: Running | None, **options: Any
    ) -> tuple[Tensor, Moments]:
        """Normalize each group by its own statistics."""
        groups = self.groups(x, options["feature_dims"])
        tensors = (x, options.pop("residual"), options.pop("mask"))
        pieces = ([None] * groups if v is None else v.tensor_split(groups) for v in tensors)
        outputs, moments = [], []
        for piece, residual, mask in zip(*pieces, strict=True):
            given = {"residual": residual, "mask": mask, **options}
            y, m = ops.batch_norm(piece, gamma, beta, eps, **given)
            if running is not None and mask is not None and count_unmasked(mask) == [1]:
                y = ops.normalize(piece, running.mean, running.var, gamma, beta, eps, **given)
            outputs.append(y)
            moments.append(m)
        kind = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
        with torch.autocast(kind, enabled=False):  # on a CPU, bf16 autocast rejects float16 tensors in cat
            return torch.cat(outputs), _average(moments)

    def groups(self, x: Tensor, feature_dims: int) -> int:
        """Return the number of groups that ``x`` is split into."""
        examples = x.shape[0]
        groups = max(1, -(-examples // self.size))
        smallest = examples // groups * prod(x.shape[1 + feature_dims :])
        return groups - 1 if groups > 1 and smallest == 1 else groups


@dataclass(frozen=True)
class Renorm:
    """Correct the batch's statistics toward the running statistics, within bounds (Ioffe, 2017).

    x_hat = (x - mu_B) / sigma_B * r + d, where r = sigma_B / sigma is clipped to [1/r_max, r_max], and
    d = (mu_B - mu) / sigma is clipped to [-d_max, d_max]. Here, mu_B and sigma_B are the mean and standard deviation of
    the batch, and mu and sigma are the running mean and standard deviation. No gradient flows through r and d.
    ``Renorm(1, 0)`` equals Algorithm 1. Ioffe starts training with r_max=1 and d_max=0, and widens these bounds later.
    To change the bounds, assign a new ``Renorm`` to ``layer.statistics``.

    Args:
        r_max: bound on the correction of the scale, at least 1.
        d_max: bound on the correction of the mean, in units of sigma, at least 0.

    >>> import batchnorm as bn
    >>> bn.BatchNorm1d(4, statistics=bn.Renorm())(torch.randn(8, 4)).shape
    torch.Size([8, 4])

    Beyond the paper: a later method by its first author, for small mini-batches or dependent examples.
    """

    r_max: float = 3.0
    d_max: float = 5.0

    def __post_init__(self) -> None:
        if self.r_max < 1 or self.d_max < 0:
            raise ValueError(f"Renorm needs r_max >= 1 and d_max >= 0, not r_max={self.r_max} and d_max={self.d_max}")

    def batch_norm(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, running: Running | None, **options: Any
    ) -> tuple[Tensor, Moments]:
        """Normalize by the batch's statistics, corrected toward the running statistics."""
        if running is None:
            raise ValueError("Renorm needs running statistics; create the layer with track_running_stats=True")
        old_mean, old_var = (snapshot(v, once=(self.r_max, self.d_max) != (1, 0)) for v in (running.mean, running.var))
        features = Features(x, options["feature_dims"])
        x_hat, moments = ops.batch_norm(
            x, None, None, eps, feature_dims=options.pop("feature_dims"), mask=options["mask"]
        )
        call = features.call(x, None, None, eps, **options)
        sigma = torch.sqrt(old_var + eps)
        r = (torch.sqrt(moments.var.detach() + eps) / sigma).clamp(1 / self.r_max, self.r_max)
        d = ((moments.mean.detach() - old_mean) / sigma).clamp(-self.d_max, self.d_max)
        scale, shift = (r, d) if gamma is None else (gamma * r, gamma * d)
        if beta is not None:
            shift = shift + beta
        z = features.flat(x_hat).to(r.dtype) * per_channel(features.flat_vector(scale), call.x)
        z = z + per_channel(features.flat_vector(shift), call.x)
        return features.restore(finish(call, z)), moments


def count_unmasked(mask: Tensor, groups: int = 1) -> list[int]:
    """Return the number of unmasked positions in each group, or [] if reading the mask would be slow or impossible."""
    if mask.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return []
    return [int(part.sum()) for part in mask.tensor_split(groups)]


def _average(parts: list[Moments]) -> Moments:
    """Return moments whose mean and unbiased variance are weighted averages over groups, as in Alg. 2, l. 10."""
    count, mean, var = (torch.stack(list(v)) for v in zip(*parts, strict=True))
    count = torch.where(count > 1, count, 0)  # a group of one value has no unbiased variance
    total = count.sum()
    weight = (count / total.clamp(min=1)).reshape(-1, *[1] * (mean.dim() - 1))
    # `unbiased_var` multiplies the variance by m/(m-1), where m is the count. If m is the average group size, the
    # product is sum(m_b var_b) / sum(m_b - 1).
    m = total / count.count_nonzero().clamp(min=1)
    return Moments(m, (weight * mean).sum(0), (weight * var).sum(0))
