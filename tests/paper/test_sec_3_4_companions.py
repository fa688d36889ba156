"""Section 3.4: an example's output depends on the other examples of its batch in training, but not in evaluation."""

import torch

import batchnorm as bn


def spread(layer, example, population, m, draws=400):
    """Return the standard deviation of one example's output over random batches, averaged over features."""
    generator = torch.Generator().manual_seed(m)
    outputs = []
    for _ in range(draws):
        others = population[torch.randint(len(population), (m - 1,), generator=generator)]
        outputs.append(layer(torch.cat([example, others]))[0])
    return torch.stack(outputs).std(0).mean().item()


def test_training_output_depends_on_companions_less_and_less_with_m():
    population, layer = torch.randn(2000, 8), bn.BatchNorm1d(8, affine=False)
    spreads = {m: spread(layer, population[:1], population, m) for m in (4, 16, 64, 256)}
    # The standard deviation of a mean of m values is proportional to 1/sqrt(m): four times the batch, half the spread.
    for m in (4, 16, 64):
        assert 0.3 < spreads[4 * m] / spreads[m] < 0.75, spreads
    assert spreads[4] > 0.2


def test_evaluation_output_depends_on_itself_alone():
    population, layer = torch.randn(2000, 8), bn.BatchNorm1d(8, affine=False)
    layer(population)
    layer.eval()
    alone = layer(population[:1])
    for m in (2, 60):
        together = layer(population[:m])
        torch.testing.assert_close(together[:1], alone, rtol=0, atol=0)
