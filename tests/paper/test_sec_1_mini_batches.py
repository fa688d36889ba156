"""Section 1: a mini-batch estimates the gradient, and the upper part of a network learns like a stand-alone network."""

import copy

import torch
import torch.nn.functional as F

from batchnorm.models import perceptron


def problem(batch_norm=False, n=240):
    generator = torch.Generator().manual_seed(0)
    net = perceptron(batch_norm=batch_norm, inputs=6, widths=(8, 5), classes=3, std=0.7, seed=0).double()
    return net, torch.randn(n, 6, dtype=torch.float64, generator=generator), torch.randint(3, (n,), generator=generator)


def gradient(net, x, labels):
    gradients = torch.autograd.grad(F.cross_entropy(net(x), labels), list(net.parameters()))
    return torch.cat([g.flatten() for g in gradients])


def test_the_mean_of_mini_batch_gradients_is_the_gradient_over_the_training_set():
    net, x, labels = problem()
    parts = [gradient(net, *part) for part in zip(x.split(20), labels.split(20), strict=True)]
    whole = gradient(net, x, labels)
    torch.testing.assert_close(torch.stack(parts).mean(0), whole)
    assert (parts[0] - whole).norm() > 0.1 * whole.norm()


def test_the_estimate_improves_as_the_batch_size_grows():
    net, x, labels = problem()
    whole, errors = gradient(net, x, labels), {}
    for m in (4, 16, 64):
        draws = [torch.randint(len(x), (m,), generator=torch.Generator().manual_seed(seed)) for seed in range(100)]
        squares = [(gradient(net, x[rows], labels[rows]) - whole).square().sum() for rows in draws]
        errors[m] = torch.stack(squares).mean().sqrt().item()
    # The standard deviation of a mean of m values is proportional to 1/sqrt(m): four times the batch, half the error.
    assert 0.4 < errors[16] / errors[4] < 0.6
    assert 0.4 < errors[64] / errors[16] < 0.6


def test_a_gradient_step_of_the_upper_part_is_that_of_a_network_on_its_own():
    """With l = F_2(F_1(u)), the gradient of F_2's parameters is that of F_2 with the input x = F_1(u)."""
    net, u, labels = problem(batch_norm=True)
    first, second = net[:3], net[3:]
    alone = copy.deepcopy(second)
    x = first(u).detach()
    found = torch.autograd.grad(F.cross_entropy(net(u), labels), list(second.parameters()))
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), gradient(alone, x, labels))
