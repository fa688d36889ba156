"""Stochastic gradient descent on the perceptron of Section 4.1, written out: Algorithm 1, its gradients, no autograd.

At 60 examples and 100 activations a layer's arithmetic takes microseconds, and much of an eager training step is
bookkeeping: autograd's graph, temporaries, gradient buffers that the optimizer reads back. Here every result goes to
a buffer made once, W <- W - rate dl/dW is one matrix product that accumulates into W, and the network's own tensors
are updated, so that the module is always current. The tests hold it against autograd and torch.optim.SGD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...data import Digits
from ...layers import BatchNorm1d

aten = torch.ops.aten


class Affine:
    """Compute x = uW^T + b into a buffer, and step against the gradient d = m dl/dx that the buffer ``d`` holds.

    Paper: Sec. 3.2, x = Wu + b
    """

    def __init__(self, linear: nn.Linear, m: int) -> None:
        # Detached views share the module's memory and skip its attribute lookups and autograd's checks.
        self.weight = linear.weight.detach()
        self.weight_t = self.weight.t()
        bias: Tensor | None = linear.bias
        self.bias = None if bias is None else bias.detach()
        self.x = self.weight.new_empty(m, linear.out_features)
        self.d = torch.empty_like(self.x)
        self.d_t = self.d.t()
        self.ones = self.weight.new_ones(m)

    def forward(self, u: Tensor) -> Tensor:
        """Return x."""
        if self.bias is None:
            return torch.mm(u, self.weight_t, out=self.x)
        return torch.addmm(self.bias, u, self.weight_t, out=self.x)

    def update_(self, u: Tensor, size: float) -> None:
        """Add ``size`` times the gradients d^T u and d^T 1 to W and b."""
        self.weight.addmm_(self.d_t, u, alpha=size)
        if self.bias is not None:
            self.bias.addmv_(self.d_t, self.ones, alpha=size)


class Normalization:
    """Compute y = BN(x) into a buffer with ATen's kernel for Algorithm 1, and its gradients with theirs.

    Paper: Alg. 1; Sec. 3, gradients
    """

    def __init__(self, bn: BatchNorm1d, m: int) -> None:
        self.bn = bn
        self.gamma, self.beta = bn.weight.detach(), bn.bias.detach()
        self.running = (bn.running_mean, bn.running_var)
        if bn.momentum is None:
            raise TypeError("a cumulative average (momentum=None) is not written out here; give momentum a number")
        self.momentum, self.eps = bn.momentum, bn.eps
        self.y = self.gamma.new_empty(m, len(self.gamma))
        self.mu, self.inv_std, self.dgamma, self.dbeta = (torch.empty_like(self.gamma) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return y; the running averages move."""
        out = (self.y, self.mu, self.inv_std)
        torch.native_batch_norm(x, self.gamma, self.beta, *self.running, True, self.momentum, self.eps, out=out)
        return self.y

    def backward_and_update_(self, dy: Tensor, x: Tensor, dx: Tensor, size: float) -> None:
        """Write dl/dx to ``dx`` and add ``size`` times their gradients to gamma and beta."""
        aten.native_batch_norm_backward.out(
            dy,
            x,
            self.gamma,
            *self.running,
            self.mu,
            self.inv_std,
            True,
            self.eps,
            (True, True, True),
            out0=dx,
            out1=self.dgamma,
            out2=self.dbeta,
        )
        self.gamma.add_(self.dgamma, alpha=size)
        self.beta.add_(self.dbeta, alpha=size)


class Hidden:
    """Compute z = g(BN(Wu)), or g(Wu + b), into buffers, forward and back.

    Paper: Sec. 3.2
    """

    def __init__(self, linear: nn.Linear, bn: BatchNorm1d | None, m: int) -> None:
        self.affine = Affine(linear, m)
        self.norm = None if bn is None else Normalization(bn, m)
        self.z, self.dz = torch.empty_like(self.affine.x), torch.empty_like(self.affine.x)

    def forward(self, u: Tensor) -> Tensor:
        """Return z."""
        y = self.affine.forward(u)
        if self.norm is not None:
            y = self.norm.forward(y)
        return torch.sigmoid(y, out=self.z)

    def backward(self, size: float) -> None:
        """Turn dl/dz, in ``self.dz``, into dl/dx, in ``self.affine.d``; gamma and beta take their step."""
        if self.norm is None:
            aten.sigmoid_backward.grad_input(self.dz, self.z, grad_input=self.affine.d)
            return
        dy = aten.sigmoid_backward.grad_input(self.dz, self.z, grad_input=self.dz)
        self.norm.backward_and_update_(dy, self.affine.x, self.affine.d, size)


class LeanSGD:
    """Train a :func:`batchnorm.models.perceptron` in place by gradient descent on the mean cross-entropy.

    Args:
        net: the network, on the CPU; its parameters and running averages are changed in place.
        data: what it is trained on.
        rate: the learning rate.
        batch_size: m.

    Raises:
        TypeError: where the network is not Section 4.1's.

    >>> from batchnorm.data import mnist
    >>> from batchnorm.models import perceptron
    >>> sgd = LeanSGD(perceptron(seed=0), mnist().train, rate=0.1)
    >>> losses = [sgd.run_(torch.arange(600).reshape(10, 60)) for _ in range(9)]
    >>> losses[-1] < losses[0]
    True

    Paper: Sec. 3, gradients; Sec. 4.1
    """

    def __init__(self, net: nn.Sequential, data: Digits, rate: float, batch_size: int = 60) -> None:
        *hidden, output = net
        if not isinstance(output, nn.Linear):
            raise TypeError(f"the network must end in a linear layer, not {output}; make it with models.perceptron")
        self.rate = rate
        self.hidden = [Hidden(linear, bn, batch_size) for linear, bn in _hidden_layers(hidden)]
        self.output = Affine(output, batch_size)
        # One byte a pixel: gathering a batch and widening it is faster than gathering floats.
        self.images = data.images.to(torch.uint8)
        self.targets = nn.functional.one_hot(data.labels, output.out_features).to(output.weight.dtype)
        self.pixels = torch.empty(batch_size, self.images.shape[1], dtype=torch.uint8)
        self.u = torch.empty(batch_size, self.images.shape[1], dtype=output.weight.dtype)
        self.target = torch.empty_like(self.output.x)

    @torch.no_grad()
    def run_(self, batches: Tensor) -> float:
        """Take one step for each row of ``batches`` (steps, m), indices of examples; return the last batch's loss."""
        for indices in batches.unbind():
            torch.index_select(self.images, 0, indices, out=self.pixels)
            torch.index_select(self.targets, 0, indices, out=self.target)
            self._step_(self.u.copy_(self.pixels))
        for layer in self.hidden:
            if layer.norm is not None:
                layer.norm.bn.num_batches_tracked.add_(len(batches))  # type: ignore[union-attr]
        return float(nn.functional.cross_entropy(self.output.x, self.target))

    def _step_(self, u: Tensor) -> None:
        inputs = [u]
        for layer in self.hidden:
            inputs.append(layer.forward(inputs[-1]))
        logits = self.output.forward(inputs[-1])
        # d is m dl/dx: the mean's 1/m is in the step's size, as everything below is linear in it.
        size = -self.rate / len(u)
        above = self.output
        torch.softmax(logits, 1, out=above.d).sub_(self.target)
        for layer in reversed(self.hidden):
            torch.mm(above.d, above.weight, out=layer.dz)  # before W moves
            above.update_(inputs.pop(), size)
            layer.backward(size)
            above = layer.affine
        above.update_(inputs.pop(), size)


def _hidden_layers(modules: Sequence[nn.Module]) -> list[tuple[nn.Linear, BatchNorm1d | None]]:
    """Read the (linear, bn or None) of each hidden layer, and refuse what is not Section 4.1's network."""
    found: list[tuple[nn.Linear, BatchNorm1d | None]] = []
    queue = list(modules)
    while queue:
        linear = queue.pop(0)
        bn = queue.pop(0) if queue and isinstance(queue[0], BatchNorm1d) else None
        sigmoid = queue.pop(0) if queue else None
        if not isinstance(linear, nn.Linear) or type(sigmoid) is not nn.Sigmoid:
            raise TypeError(
                f"a hidden layer must be Linear, BatchNorm1d or nothing, Sigmoid; found {linear} before {sigmoid}:"
                " make the network with models.perceptron"
            )
        if isinstance(bn, BatchNorm1d) and (bn.activation.name != "identity" or not bn.affine):
            raise TypeError(f"{bn} must have gamma, beta and no fused activation: make it with models.perceptron")
        found.append((linear, bn))  # type: ignore[arg-type]
    return found
