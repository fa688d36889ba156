"""Run the BatchNorm samples of PyTorch's module database on this library's layers and on torch's."""

import warnings

import pytest
import torch
from torch import nn

import batchnorm as bn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db

OURS = {nn.BatchNorm1d: bn.BatchNorm1d, nn.BatchNorm2d: bn.BatchNorm2d, nn.BatchNorm3d: bn.BatchNorm3d}
ENTRIES = {info.module_cls: info for info in module_db if info.module_cls in OURS}


def samples(training, dtype):
    for kind, info in ENTRIES.items():
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for i, sample in enumerate(inputs):
            yield pytest.param(kind, sample, id=f"{kind.__name__}-{i}-{sample.desc}")


def make(kind, sample, training, dtype):
    built = sample.constructor_input
    torch.manual_seed(0)
    return kind(*built.args, **built.kwargs).to(dtype).train(training)


def run(module, sample):
    args = [a.detach().clone().requires_grad_() for a in sample.forward_input.args]
    y = module(*args, **sample.forward_input.kwargs)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=y.dtype))
    grads = {n: p.grad for n, p in module.named_parameters()}
    return y.detach(), [a.grad for a in args], grads, dict(module.state_dict())


def test_the_database_has_all_three():
    assert set(ENTRIES) == set(OURS)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_as_torch(training, dtype):
    count = 0
    for parameter in samples(training, dtype):
        kind, sample = parameter.values
        theirs = make(kind, sample, training, dtype)
        ours = make(OURS[kind], sample, training, dtype)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        got, want = run(ours, sample), run(theirs, sample)
        if training and sample.forward_input.args[0].numel() == 0:
            # This difference is intended: torch counts an empty batch, but this library's layers do not.
            assert [state.pop("num_batches_tracked") for *_, state in (got, want)] == [0, 1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=parameter.id)
        count += 1
    assert count >= 12


@pytest.mark.parametrize("training", [True, False])
def test_derivatives(training):
    for parameter in samples(training, torch.float64):
        kind, sample = parameter.values
        (x,) = sample.forward_input.args
        if x.numel() > 300:
            continue
        layer = make(OURS[kind], sample, training, torch.float64)
        layer.track_running_stats = False  # gradcheck needs calls without side effects
        x = x.detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(layer, (x,)), parameter.id
        assert torch.autograd.gradgradcheck(layer, (x,)), parameter.id
