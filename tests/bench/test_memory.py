import gc
import json

import pytest
import torch
from torch.nn import BatchNorm2d

from batchnorm.bench import memory as bench
from batchnorm.bench.contenders import OURS, STOCK, STOCK_WITHOUT_BN
from batchnorm.bench.memory import PeakMemory, memory, peak, peak_of_tensors, report
from batchnorm.models.bn_inception.pooling import AvgPool2d, MaxPool2d


def test_peak_sees_what_is_allocated_meanwhile():
    def call():
        a = torch.ones(1000)
        b = torch.ones(3000)
        del a
        return b.add_(torch.ones(3000))

    assert peak(call, torch.device("cpu")) == (24000, 12000)


def test_small_networks_on_this_machine(tmp_path, capsys):
    rows = memory(4, 32, tmp_path / "memory.json", only=["ours", "ours, recompute"])
    names = ["stock", "ours", "ours, recompute"]
    assert [row.name for row in rows] == names
    # Do not check the size of the peaks: it depends on the workspaces that the CPU's kernels allocate.
    assert [row.over_stock for row in rows] == [row.peak / rows[0].peak for row in rows]
    assert min(row.peak for row in rows) > 0
    if not torch.cuda.is_available():  # on a CPU, workspaces count as tensors
        assert [row.tensors for row in rows] == [row.peak for row in rows]
    written = json.loads((tmp_path / "memory.json").read_text())
    assert [row["name"] for row in written["rows"]] == names
    assert "commit" in written["environment"]  # its value is None outside a git checkout
    assert "ours, recompute" in capsys.readouterr().out


def test_forms_are_made_of_the_parts_they_name():
    cpu = torch.device("cpu")
    for contender in (STOCK, STOCK_WITHOUT_BN):
        parts = list(contender.network(32, cpu).modules())
        assert not any(type(m).__module__.startswith("batchnorm.layers") for m in parts)
        assert not any(isinstance(m, MaxPool2d | AvgPool2d) for m in parts)
        assert any(isinstance(m, BatchNorm2d) for m in parts) == contender.norm
    assert any(isinstance(m, MaxPool2d) for m in OURS.network(32, cpu).modules())


def test_the_table_says_whether_the_bars_are_reached():
    rows = [PeakMemory("stock", 100, 95, 90, 7.0), PeakMemory("ours", 74, 57, 70, 7.0, 0.74, 0.6)]
    assert "ours: the goal of at most 0.6 times stock's tensor memory is reached" in report(rows, rows[1:])
    over = PeakMemory("ours, recompute", 44, 44, 40, 7.0, 0.44, 0.46)
    assert "NOT reached" in report([rows[0], over], [over])
    assert "reached" not in report(rows)


def test_another_loss_is_refused(monkeypatch):
    losses = iter([7.0, 8.0])
    monkeypatch.setattr(bench, "measure", lambda form, *_: PeakMemory(form.name, 1, 1, 1, next(losses)))
    with pytest.raises(RuntimeError, match=r"ours computes a loss of 8\.0, but stock computes a loss of 7\.0"):
        memory(only=["ours"])


def test_a_wrong_name_lists_the_right_ones():
    with pytest.raises(
        ValueError, match="unknown variant 'our': choose from 'stock, no BN', 'ours', 'ours, recompute'"
    ):
        memory(only=["our"])


@pytest.mark.gpu
def test_workspaces_are_not_tensors():
    device = torch.device("cuda")

    def call():
        a = torch.empty(1 << 20, dtype=torch.uint8, device=device)
        torch.empty(1 << 23, dtype=torch.uint8, device=device)  # freed at once
        b = torch.empty(1 << 21, dtype=torch.uint8, device=device)
        return a, b, torch.empty(1 << 20, dtype=torch.uint8, device=device)  # counts as a workspace: it is freed first

    gc.collect()  # otherwise, garbage of other tests could be freed during the call
    before = torch.cuda.memory_allocated()
    assert peak_of_tensors(call, device) - before == (1 << 20) + (1 << 21)
    assert peak(call, device)[0] - before == (1 << 20) + (1 << 23)
