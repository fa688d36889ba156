"""vmap and other functional transforms fail on torch.nn's in-place update of the averages (functorch 384, 986)."""

import pytest
import torch
from torch import func, nn

import batchnorm as bn


def test_an_ensemble_by_vmap_with_the_pure_form():
    gammas, betas, x = torch.rand(5, 3), torch.randn(5, 3), torch.randn(8, 3)

    def member(gamma, beta):
        return bn.ops.batch_norm(x, gamma, beta, activation="relu")

    y, moments = func.vmap(member)(gammas, betas)
    for i in range(5):
        torch.testing.assert_close(y[i], member(gammas[i], betas[i])[0])
    assert moments.mean.shape == (5, 3)


@pytest.mark.parametrize("track", [False, True])
def test_functional_call_under_grad(track):
    net = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3, track_running_stats=track), nn.Linear(3, 1))
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    x = torch.randn(8, 4)

    def loss(params, buffers):
        out = func.functional_call(net, (params, buffers), (x,))
        return out.square().mean()

    grads = func.grad(loss)(params, {k: v.clone() for k, v in buffers.items()})
    net(x).square().mean().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def test_functional_call_under_grad_with_the_buffers_of_a_state_dict():
    net = nn.Sequential(nn.Linear(4, 3), bn.BatchNorm1d(3))
    params = dict(net.named_parameters())
    buffers = {k: v.clone() for k, v in net.state_dict().items() if k not in params}  # without num_batches_skipped
    x = torch.randn(8, 4)

    def loss(params, buffers):
        return func.functional_call(net, (params, buffers), (x,)).square().sum(), buffers

    grads, buffers = func.grad(loss, has_aux=True)(params, buffers)
    net(x).square().sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)
    torch.testing.assert_close({**params, **buffers}, dict(net.state_dict()))


def test_an_ensemble_with_the_buffers_of_state_dicts_under_vmap():
    layers = [bn.BatchNorm1d(3) for _ in range(2)]
    x = torch.randn(2, 8, 3)
    states = [{k: v.detach().clone() for k, v in layer.state_dict().items()} for layer in layers]
    stacked = {k: torch.stack([state[k] for state in states]) for k in states[0]}
    y = func.vmap(lambda state, x: func.functional_call(layers[0], state, (x,)))(stacked, x)
    torch.testing.assert_close(y, torch.stack([layer(v) for layer, v in zip(layers, x, strict=True)]))
    torch.testing.assert_close(stacked["running_mean"][1], layers[1].running_mean)


def test_a_layer_without_running_statistics_under_vmap():
    layer = bn.BatchNorm1d(3, track_running_stats=False)
    x = torch.randn(5, 8, 3)
    torch.testing.assert_close(func.vmap(layer)(x), torch.stack([layer(v) for v in x]))


def test_forward_mode_is_not_silently_zero():
    layer = bn.BatchNorm1d(3, track_running_stats=False).double()
    x, t = torch.randn(8, 3).double(), torch.randn(8, 3).double()
    _, got = func.jvp(layer, (x,), (t,))
    want = (layer(x + 1e-6 * t) - layer(x - 1e-6 * t)) / 2e-6
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    assert got.abs().max() > 0.1
