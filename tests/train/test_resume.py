"""Test which commands may resume a run, and resuming from a checkpoint of another type of device."""

import pytest
import torch
from torch import nn

from batchnorm.train.distributed import Ranks
from batchnorm.train.recipe import Recipe
from batchnorm.train.resume import RunState, claim_folder, resume_, save_state


def test_fewer_images_are_not_blamed_on_the_number_of_epochs(tmp_path):
    claim_folder(tmp_path, Recipe(), {"train": 64}, planned_steps=8)
    (tmp_path / "checkpoints" / "step-000000008").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"use different data \(train 64 and 32\)"):
        claim_folder(tmp_path, Recipe(), {"train": 32}, planned_steps=4)


@pytest.mark.parametrize("begun_on", ["cpu", "gpu"])
def test_momentum_goes_with_its_weights_in_the_layout_of_another_device(begun_on, tmp_path):
    gradient = torch.randn(8, 4, 3, 3)

    def started(on):
        net = nn.Conv2d(4, 8, 3, bias=False)
        net.to(memory_format=torch.channels_last if on == "gpu" else torch.contiguous_format)
        # Fused kernels read the momentum in memory order, on the CPU as on a GPU, so the CPU can stand in for a GPU.
        return net, torch.optim.SGD(net.parameters(), 0.1, 0.9, fused=on == "gpu" or None)

    def step(net, optimizer):
        net.weight.grad = torch.empty_like(net.weight).copy_(gradient)
        optimizer.step()

    net, optimizer = started(begun_on)
    step(net, optimizer)
    here = Ranks(device=torch.device("cpu"))
    save_state(tmp_path, RunState(1, sums=torch.zeros(3)), net, optimizer, here)
    other, resumed = started("cpu" if begun_on == "gpu" else "gpu")
    fused = resumed.param_groups[0]["fused"]
    assert resume_(tmp_path, other, resumed, here, 1, Recipe()).step == 1
    assert resumed.param_groups[0]["fused"] is fused
    assert resumed.state[other.weight]["momentum_buffer"].stride() == other.weight.stride()
    step(net, optimizer)
    step(other, resumed)
    torch.testing.assert_close(other.weight, net.weight)
