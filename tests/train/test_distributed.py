"""Test training with several processes over gloo: compared with one process, and restarted after a rank is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from training import assert_same_outcome, environment, lines_in, small, torchrun

import batchnorm as bn
from batchnorm.data import Augment
from batchnorm.train.distributed import Ranks
from batchnorm.train.metrics import read
from batchnorm.train.step import TrainStep, make_optimizer

pytestmark = pytest.mark.dist
STEPS, BATCH = 2, 14


def train_steps(rank, world_size, statistics, parts):
    """Take steps in float64 on this rank's part of a batch; return parameters, buffers and sums."""
    torch.manual_seed(0)
    recipe = small(statistics=statistics, rate=0.02)
    net = recipe.network(3).double()
    optimizer = make_optimizer(net, recipe, torch.device("cpu"))
    augment = Augment("none", dtype=torch.float64)  # color distortions would compute in float32
    step = TrainStep(net, optimizer, augment, Ranks(rank, world_size))
    first, last = sum(parts[:rank]), sum(parts[: rank + 1])
    for k in range(STEPS):
        generator = torch.Generator().manual_seed(k)
        images = torch.randint(0, 256, (BATCH, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 3, (BATCH,), generator=generator)
        draws = augment.draw(BATCH, generator)
        step(images[first:last], labels[first:last], draws[first:last], 0.02)
    return {k: v.clone() for k, v in net.state_dict().items()}, Ranks(rank, world_size).sum_(step.sums.clone())


@pytest.mark.parametrize(
    "parts", [(9, 3, 2), *(pytest.param(p, marks=pytest.mark.slow) for p in ((7, 7), (5, 5, 4)))], ids=str
)
def test_split_batch_with_sync_equals_one_process(parts):
    expected = train_steps(0, 1, "sync", (BATCH,))
    for result in on_ranks(len(parts), train_steps, "sync", parts):
        assert not isinstance(result, str), result
        torch.testing.assert_close(result, expected)


def test_without_sync_all_ranks_have_the_same_averaged_statistics():
    a, b = on_ranks(2, train_steps, "batch", (7, 7))
    assert not isinstance(a, str), a
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    synced = train_steps(0, 1, "sync", (BATCH,))
    assert not torch.allclose(a[0]["stem.bn.running_var"], synced[0]["stem.bn.running_var"])


def running_averages(rank, world_size):
    torchs = (torch.nn.BatchNorm1d(2), torch.nn.SyncBatchNorm(2))
    own = (bn.Sync(), bn.Ghost(2), bn.Renorm())
    net = torch.nn.Sequential(bn.BatchNorm1d(2), *(bn.BatchNorm1d(2, statistics=s) for s in own), *torchs)
    for layer in net:
        layer.running_mean.fill_(rank)
    Ranks(rank, world_size).average_statistics_(net)
    return [layer.running_mean for layer in net]


def test_running_averages_are_averaged_but_for_sync():
    for rank, result in enumerate(on_ranks(2, running_averages)):
        averaged, own = torch.full((2,), 0.5), torch.full((2,), float(rank))
        torch.testing.assert_close(result, [averaged, own, averaged, averaged, averaged, own])


def workers_of(launcher):
    """Return the ids of the processes that torchrun has started."""
    try:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [int(c) for c in children if b"batchnorm" in Path(f"/proc/{c}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find the ranks")
def test_a_killed_rank_under_torchrun(data, tmp_path):
    done = subprocess.run(
        torchrun(2, data, tmp_path / "whole"), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    launcher = subprocess.Popen(
        torchrun(2, data, tmp_path / "parts", "--max-restarts=1"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while launcher.poll() is None and lines_in(tmp_path / "parts") < 4:
        time.sleep(0.01)
    os.kill(workers_of(launcher)[-1], signal.SIGKILL)
    output, _ = launcher.communicate()
    assert launcher.returncode == 0, output
    assert "resuming from step" in output
    assert [line["step"] for line in read(tmp_path / "parts" / "metrics.jsonl") if "loss" in line] == list(range(1, 13))
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
