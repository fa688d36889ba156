"""Test the kernel for SGD with momentum against ``torch.optim.SGD``."""

import copy

import pytest
import torch

from batchnorm.train.fused_update import FusedUpdate, Trained

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
ALIGNED = [(16, 8, 3, 3), (64,), (80, 40), (4096,), (24, 16, 1, 1)]
ODD = [(5, 3, 3, 3), (7,), (33, 71), (4099,), (1,)]


def optimizer_of(weights, momentum=0.9, **options):
    matrices, vectors = ([w for w in weights if (w.dim() > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=torch.tensor(0.05, device=weights[0].device), momentum=momentum, **options)


def drawn(shapes, device):
    weights = [torch.randn(shape, device=device) for shape in shapes]
    weights = [w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
    return [torch.nn.Parameter(w) for w in weights]


@pytest.mark.parametrize("shapes", [ALIGNED, ODD])
def test_it_takes_the_steps_of_torch(shapes, device):
    weights = drawn(shapes, device)
    expected = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    copies = [w.detach().bfloat16() if w.dim() > 1 else None for w in weights]
    ours, theirs = optimizer_of(weights), optimizer_of(expected)
    update = FusedUpdate(ours)
    for _ in range(3):
        gradients = [torch.randn_like(w) for w in weights]
        gradients = [g if c is None else g.bfloat16() for g, c in zip(gradients, copies, strict=True)]
        rows = [Trained(*row) for row in zip(weights, gradients, copies, strict=True)]
        assert all(row.fits() for row in rows)
        update(rows)
        for w, g in zip(expected, gradients, strict=True):
            w.grad = g.float()
        theirs.step()
    for w, e, c in zip(weights, expected, copies, strict=True):
        torch.testing.assert_close(w, e, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            ours.state[w]["momentum_buffer"], theirs.state[e]["momentum_buffer"], rtol=1e-6, atol=1e-6
        )
        if c is not None:  # on a CPU, Triton's interpreter truncates instead of rounding
            tolerance = {"rtol": 0, "atol": 0} if c.is_cuda else {"rtol": 2**-7, "atol": 0}
            torch.testing.assert_close(c, w.detach().bfloat16(), **tolerance)


def test_it_goes_on_from_a_saved_state(device):
    weights = drawn(ALIGNED, device)
    expected = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    gradients = [torch.randn_like(w) for w in weights]
    first, second = optimizer_of(weights), optimizer_of(expected)
    for w, g in zip(weights, gradients, strict=True):
        w.grad = g
    first.step()
    FusedUpdate(second)([Trained(w, g, None) for w, g in zip(expected, gradients, strict=True)])
    loaded = optimizer_of(weights)
    loaded.load_state_dict(copy.deepcopy(second.state_dict()))
    assert FusedUpdate(loaded).can_update(weights)
    rows = [Trained(w, g, None) for w, g in zip(weights, gradients, strict=True)]
    FusedUpdate(loaded)(rows)
    for w, g in zip(expected, gradients, strict=True):
        w.grad = g
    second.step()
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


def test_a_state_that_a_run_on_a_cpu_saved_has_another_layout(device):
    weights = drawn(ALIGNED, device)
    expected = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    gradients = [torch.randn_like(w) for w in weights]
    ours, theirs = optimizer_of(weights), optimizer_of(expected)
    for w, e, g in zip(weights, expected, gradients, strict=True):
        velocity = torch.randn(w.shape, device=device)  # contiguous, unlike the channels-last weights
        ours.state[w]["momentum_buffer"], theirs.state[e]["momentum_buffer"] = velocity, velocity.clone()
        e.grad = g
    FusedUpdate(ours)([Trained(w, g, None) for w, g in zip(weights, gradients, strict=True)])
    theirs.step()
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    for w, e in zip(weights, expected, strict=True):
        velocity, wanted = ours.state[w]["momentum_buffer"], theirs.state[e]["momentum_buffer"]
        assert velocity.stride() == w.stride()
        torch.testing.assert_close(velocity, wanted, rtol=1e-6, atol=1e-6)


def test_autograd_refuses_a_graph_that_saved_the_old_weights(device):
    (weight,) = drawn([(8, 8)], device)
    copy = weight.detach().bfloat16().requires_grad_()
    losses = [(weight**2).sum(), (copy**2).sum()]
    FusedUpdate(torch.optim.SGD([weight], torch.tensor(0.1, device=device), 0.9))(
        [Trained(weight, torch.randn_like(copy), copy)]
    )
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.triton
def test_no_tensors_need_no_update():
    # If only the stem is trained, the first parts of the backward pass compute no weight gradients.
    FusedUpdate(optimizer_of(drawn(ALIGNED, "cpu")))([])


@pytest.mark.triton
def test_what_the_kernel_cannot_update_is_left_to_torch():
    weights = drawn(ALIGNED, "cpu")
    assert FusedUpdate(optimizer_of(weights)).can_update(weights)
    assert not FusedUpdate(optimizer_of(weights)).can_update(drawn(ODD, "cpu"))
    for optimizer in (
        optimizer_of(weights, momentum=0.0),
        optimizer_of(weights, nesterov=True),
        optimizer_of(weights, maximize=True),
        optimizer_of(weights, dampening=0.1),
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        torch.optim.AdamW(weights),
    ):
        assert not FusedUpdate(optimizer).can_update(weights)
    elsewhere = optimizer_of(weights)
    elsewhere.param_groups[0]["lr"] = torch.empty((), device="meta")  # a rate on another device
    assert not FusedUpdate(elsewhere).can_update(weights)
    w, g = weights[0].detach(), torch.randn_like(weights[0])
    assert Trained(w, g, None).fits()
    assert Trained(w, g.bfloat16(), w.bfloat16()).fits()
    assert not Trained(w, g, w.bfloat16()).fits()  # wrong type of gradient
    assert not Trained(w, g.contiguous(), None).fits()  # wrong layout of gradient
    assert not Trained(w.double(), g.double(), None).fits()
    assert not Trained(w[:, ::2], g[:, ::2], None).fits()  # not dense
