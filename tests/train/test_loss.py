import pytest
import torch
import torch.nn.functional as F

from batchnorm.train.loss import MAX_CLASSES, cross_entropy, run_cross_entropy, takes


def exact(scores, labels):
    leaf = scores.double().requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.mean(), leaf)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(5, 3), (32, 1000), (1, 1), (3, 4096)])
def test_the_kernel_against_float64(device, shape, dtype):
    scores = (3 * torch.randn(shape, device=device)).to(dtype)
    scores[0, 0] = 60  # exp(60) would overflow in float16
    labels = torch.randint(shape[1], shape[:1], device=device)
    losses, gradient = run_cross_entropy(scores, labels)
    expected = exact(scores, labels)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(gradient.double(), expected[1], rtol=tolerance, atol=tolerance / shape[0])


@pytest.mark.parametrize("shift", [300.0, 1e4])
def test_the_loss_of_large_scores(device, shift):
    scores = torch.tensor([[shift, shift - 10.0, 0.0], [shift, shift - 7.0, shift - 7.0]], device=device)
    labels = torch.tensor([0, 1], device=device)
    torch.testing.assert_close(
        run_cross_entropy(scores, labels)[0].double(), exact(scores, labels)[0], rtol=1e-3, atol=0
    )


def test_a_label_that_is_no_class_is_not_ignored(device):
    labels = torch.tensor([1, 4, -100], device=device)
    losses, gradient = run_cross_entropy(torch.zeros(3, 4, device=device), labels)
    assert losses.isnan().tolist() == gradient.isnan().any(1).tolist() == [False, True, True]


def test_wrong_labels_raise_an_error_without_the_kernel():
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    with pytest.raises(ValueError, match="batch_size"):
        cross_entropy(torch.zeros(2, 4), torch.tensor([1, 2, 3]))


def test_what_the_kernel_takes():
    scores, labels = torch.zeros(2, 4), torch.zeros(2).long()
    assert takes(scores, labels)
    for wrong in (labels[:, None], labels[:1], torch.zeros(3).long(), labels.int(), torch.zeros(4).long()[::2]):
        assert not takes(scores, wrong)
    for wrong in (
        scores.double(),
        scores.t().contiguous().t(),
        scores[0],
        torch.zeros(2, MAX_CLASSES + 1),
        scores[:, :0],
    ):
        assert not takes(wrong, labels)
    assert not takes(scores[:0], labels[:0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_the_kernel(dtype):
    scores, labels = torch.randn(6, 10).to(dtype), torch.randint(10, (6,))
    losses, gradient = cross_entropy(scores, labels)
    expected = exact(scores, labels)
    assert gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=2**-7, atol=2**-10)
