"""Test the benchmark of training steps, stock against converted: rows, intervals, failures and resuming."""

import json
import math
from pathlib import Path

import networks as shapes
import pytest
import torch
from torch import nn

import batchnorm as bn
from batchnorm.bench import network_steps
from batchnorm.bench.network_steps import (
    Measurement,
    NetworkJob,
    Pair,
    Settings,
    loss_problem,
    measure,
    median_interval,
    results_of,
)
from batchnorm.bench.networks import bars, draw, in_turns, networks, plan
from batchnorm.cli import main
from batchnorm.errors import JobsFailedError

SETTINGS = Settings("cpu", size=8, seconds=0.0)


def tiny():
    return nn.Sequential(
        shapes.BasicBlock(3, 4), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


def with_example():
    return tiny(), torch.randn(4, 3, 6, 7)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.auxiliary = nn.BatchNorm1d(6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.body(x).relu()
        return self.head(h), self.auxiliary(h)


def two_heads():
    return TwoHeads(), torch.randn(4, 6)


class Greedy(nn.Sequential):
    """Run out of memory on more than eight examples."""

    def forward(self, x):
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(x)


def greedy():
    return Greedy(*tiny())


def insatiable():
    class Insatiable(Greedy):
        def forward(self, x):
            if self.training and torch.is_grad_enabled() and len(x) != 8:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    return Insatiable(*tiny())


def not_convertible():
    class Fussy(nn.Sequential):
        def forward(self, x):
            raise RuntimeError("no such luck\nat all")

    return Fussy(*tiny())


def raises():
    raise RuntimeError("no such luck")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(network_steps, "GROUP_SECONDS", 0.0)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # to find test_networks:tiny


def run(out, *names, **options):
    names = [f"test_networks:{name}" for name in names]
    return networks(tuple(names), size=8, device="cpu", seconds_per_row=1e-9, out=out, **options)


def test_writes_rows_bars_and_a_picture(tmp_path, capsys):
    out = tmp_path / "results" / "networks.json"
    rows = run(out, "with_example", "two_heads", batches=(4, 2))
    written = json.loads(out.read_text())
    assert written["rows"] == rows
    assert [(row["network"][14:], row["batch"]) for row in rows] == [
        (name, batch) for name in ("with_example", "two_heads") for batch in (4, 2)
    ]
    assert written["environment"]["torch"] == written["machine"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    for row in rows:
        low, high = row["interval"]
        assert low <= row["speedup"] <= high
        assert row["pairs"] == network_steps.MIN_PAIRS
        assert row["stock_losses"] == pytest.approx(row["ours_losses"], rel=1e-3)
        assert row["convert_seconds"] > 0
        assert f"{row['speedup']:.3f} times as fast" in shown
    assert rows[0]["fused"].startswith("convert: 2 of 2 BN layers") or print(rows[0]["fused"])
    assert [bar["what"] for bar in written["bars"]] == [bar.what for bar in bars(rows, "cpu")]
    assert out.with_suffix(".png").stat().st_size > 1000


def test_an_eager_row_of_a_cpu_has_the_limit(tmp_path, capsys):
    row, other = run(tmp_path / "networks.json", "tiny", batches=(2,), modes=("eager", "evaluation"))
    assert row["without_bn"] > 0
    assert "without_bn" not in other  # the limit is measured for training steps only
    assert "stock without BN" in capsys.readouterr().out


def test_goes_on_with_the_rows_that_are_missing_or_of_other_code(tmp_path, capsys):
    out = tmp_path / "networks.json"
    (first,) = run(out, "tiny", batches=(2,))
    rows = run(out, "tiny", batches=(2, 4))
    assert "1 rows are already measured, 1 are not" in capsys.readouterr().out
    assert rows[0] == first
    report = json.loads(out.read_text())
    report["rows"][0]["code"] = "another"
    out.write_text(json.dumps(report))
    assert [row["code"] for row in run(out, "tiny", batches=(2, 4), keep=True)] == ["another", first["code"]]
    assert [row["batch"] for row in run(out, "tiny", batches=(2, 4))] == [4, 2]
    report["rows"] = [{**first, "failed": "the network was down"}]
    out.write_text(json.dumps(report))
    assert "failed" not in run(out, "tiny", batches=(2,))[0]
    with pytest.raises(ValueError, match=r"other settings \(size is 8 instead of 9\): choose another --out"):
        networks(("test_networks:tiny",), size=9, device="cpu", out=out)


def test_a_network_from_a_file_in_a_folder(tmp_path):
    code = "from torch import nn, randn\ndef build():\n    return nn.Sequential(nn.BatchNorm1d(4)), randn(8, 4)\n"
    (tmp_path / "nets.py").write_text(code)
    out = tmp_path / "networks.json"
    (row,) = networks((f"{tmp_path}/nets.py:build",), batches=(2,), device="cpu", seconds_per_row=0.01, out=out)
    assert row["speedup"] > 0
    assert "without_bn" not in row  # without BN, the network has no parameters


def test_stops_in_time_and_says_what_is_left(tmp_path, capsys):
    rows = run(tmp_path / "networks.json", "tiny", "two_heads", batches=(2,), minutes=1e-9)
    assert len(rows) == 1
    assert "1 rows are not measured yet: run the same command again" in capsys.readouterr().out


def test_a_form_with_another_loss_is_not_timed():
    torch.manual_seed(0)
    net, example = tiny(), torch.randn(4, 3, 8, 8)
    wrong = bn.convert(net, example)
    with torch.no_grad():
        wrong[0].bn1.weight.mul_(-1)
        wrong[4].bias.add_(torch.arange(5.0))
    pair = Pair(net, wrong, example, 5, 0.0, "")
    turns = measure(pair, Measurement(4, ("eager",)), SETTINGS)
    with pytest.raises(StopIteration) as end:
        next(turns)  # nothing is timed, so measure() ends before it yields TURN
    (row,) = end.value.value
    assert "speedup" not in row
    assert "of step 1 is" in row["failed"]
    assert row["ours_losses"] != row["stock_losses"]
    assert loss_problem([1.0], [math.nan])
    assert loss_problem([1.0], [1.01])
    assert loss_problem([1.0, 1.0], [1.0, 1.01]) is loss_problem([1.0], [1.01], compiled=True) is None


def test_batches_are_halved_until_they_fit(tmp_path, capsys):
    (row,) = run(tmp_path / "networks.json", "greedy", batches=(32,))
    assert (row["batch"], row["examples"]) == (32, 8)
    assert "only 8 examples fit" in capsys.readouterr().out
    with pytest.raises(JobsFailedError):
        run(tmp_path / "others.json", "insatiable", batches=(4,))
    assert "out of memory at batch size 2" in capsys.readouterr().out


def test_a_network_that_fails_leaves_rows_that_say_so(tmp_path, capsys):
    out = tmp_path / "networks.json"
    words = ["--networks", "test_networks:not_convertible", "test_networks:tiny", "--batches", "2", "--size", "8"]
    words += ["--device", "cpu", "--seconds-per-row", "1e-9", "--out", str(out)]
    assert main(["bench", "networks", *words]) == 1
    assert "1 of 2 rows failed" in capsys.readouterr().err
    first, second = json.loads(out.read_text())["rows"]
    assert "no such luck" in first["failed"]
    assert "failed" not in second


def test_intervals_hold_the_median_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    for n in (6, 9, 20):
        held = 0
        for _ in range(1000):
            _, low, high = median_interval(torch.randn(n, generator=generator).tolist())
            held += low <= 0 <= high
        assert held >= 940
    assert median_interval([1.0, 3.0]) == (2.0, 1.0, 3.0)
    # The bounds are the sixth values from both ends: P(Binomial(20, 1/2) < 6) is 2.07%, but P(... < 7) is 5.8%.
    assert median_interval(range(20)) == (9.5, 5, 14)


def row(network="torchvision:resnet50", mode="eager", batch=256, speedup=1.0, **changed):
    return {
        "network": network, "mode": mode, "batch": batch, "examples": batch, "speedup": speedup,
        "interval": [speedup - 0.01, speedup + 0.01], "stock_peak_bytes": 100, "ours_peak_bytes": 101,
        "stock_ms": 10.0, "ours_ms": 10 / speedup,
        "stock_first_step_seconds": 10.0, "ours_first_step_seconds": 11.0, **changed,
    }  # fmt: skip


def test_bars():
    rows = [
        row(speedup=1.5),
        row("timm:resnet50", speedup=1.2, ours_peak_bytes=110),
        row(batch=32, speedup=0.9),
        row(mode="compiled", speedup=1.2),
        row(mode="graph", failed="no"),
    ]
    judged = {bar.what: (bar.measured and round(bar.measured, 3), bar.reached) for bar in bars(rows, "cuda")}
    assert judged == {
        "smallest upper end of the speedups' 95% intervals": (0.91, False),
        "eager, batch 256: speedup, geometric mean": (round(math.sqrt(1.8), 3), True),
        "eager, batch 32: speedup, geometric mean": (0.9, False),
        "torch.compile: speedup, geometric mean": (1.2, True),
        "torch.compile(backend='batchnorm'): speedup, geometric mean": (None, None),
        "CUDA graph: speedup, geometric mean": (None, None),
        "torchvision:resnet50, eager, batch 256: time relative to stock's": (0.667, True),
        "torchvision:resnet50, torch.compile, batch 256: speedup, geometric mean": (1.2, True),
        "eager: peak memory relative to stock's, worst": (1.1, False),
        "torch.compile: peak memory relative to stock's, worst": (1.01, True),
        "torch.compile: CPU time to compile relative to stock's, worst": (1.1, True),
    }


def test_the_picture_has_a_panel_for_each_of_the_four_main_modes_only():
    plt = pytest.importorskip("matplotlib.pyplot")
    report = {
        "machine": {"device": "H200", "torch": "2.11", "steps": "bf16"},
        "rows": [row(interval=[0.9, 1.1]), row(mode="nchw", interval=[0.9, 1.1])],
    }
    figure = draw(report, plt)
    assert [axes.get_title() for axes in figure.axes] == ["eager"]
    plt.close(figure)


def test_rows_that_compile_come_last_and_share_the_stock_network():
    modes, done = ("eager", "graph", "compiled", "backend"), {("b", "eager", 256): {}, ("a", "backend", 32): {}}
    assert plan(("a", "b"), modes, (256, 32), done) == [
        NetworkJob(
            "a",
            (
                Measurement(256, ("eager",)),
                Measurement(256, ("graph",)),
                Measurement(32, ("eager",)),
                Measurement(32, ("graph",)),
            ),
        ),
        NetworkJob("b", (Measurement(256, ("graph",)), Measurement(32, ("eager",)), Measurement(32, ("graph",)))),
        NetworkJob("a", (Measurement(256, ("compiled", "backend")),)),
        NetworkJob("b", (Measurement(256, ("compiled", "backend")),)),
        NetworkJob("a", (Measurement(32, ("compiled",)),)),
        NetworkJob("b", (Measurement(32, ("compiled", "backend")),)),
    ]
    assert plan(("a",), ("dynamic", "compiled", "reduce-overhead"), (32,), {}) == [
        NetworkJob("a", (Measurement(32, (mode,)),)) for mode in ("compiled", "dynamic", "reduce-overhead")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--networks", "resnet18"], "give torchvision:NAME, timm:NAME or MODULE:FUNCTION"),
        (["--networks", "test_networks:tiny", "test_networks:absent"], "test_networks has no function absent"),
        (["--networks", "nosuch:build"], "cannot make a network from nosuch:build: No module named 'nosuch'"),
        (["--networks", "test_networks:raises"], "test_networks:raises raised RuntimeError; no results were written"),
        (["--networks", "torch.nn:Identity"], "torch.nn:Identity has no batch normalization layers"),
        (["--modes", "graph"], "the mode 'graph' needs a CUDA device"),
        (["--batches", "0"], "batches=0: must be 1 or more"),
        (["--minutes", "0"], "minutes=0.0: must be above 0"),
    ],
)
def test_options_that_cannot_be_used(words, said, capsys, tmp_path):
    given = words if "--networks" in words else [*words, "--networks", "torch.nn:Identity"]
    out = tmp_path / "networks.json"
    assert main(["bench", "networks", "--device", "cpu", "--out", str(out), *given]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "dynamic"])
def test_compiled_forms_are_measured_against_the_compiled_stock_network(mode):
    job = NetworkJob("test_networks:two_heads", (Measurement(4, (mode,)),))
    turn, (_, (row,)) = results_of(job, SETTINGS)
    assert turn == network_steps.TURN
    assert row["speedup"] > 0
    assert row["stock_losses"] == pytest.approx(row["ours_losses"], rel=1e-3)


def dies():
    import os

    os._exit(7)


@pytest.mark.dist
def test_processes_prepare_side_by_side_and_a_death_fails_one_unit_only():
    units = (Measurement(2, ("eager",)), Measurement(4, ("eager",)))
    jobs = [NetworkJob("test_networks:tiny", units), NetworkJob("test_networks:dies", units[:1])]
    results = in_turns(jobs, SETTINGS, 2, math.inf)
    found = [(name, row["batch"], row.get("failed")) for name, rows in results for row in rows]
    assert sorted(found, key=str) == [
        ("test_networks:dies", 2, "the process died with exit status 7"),
        ("test_networks:tiny", 2, None),
        ("test_networks:tiny", 4, None),
    ]


USES = ("evaluation", "nchw", "float32", "bf16-weights", "checkpoint", "accumulate", "ddp", "fsdp2")


@pytest.mark.dist
def test_networks_are_used_in_every_way_that_users_do():
    def build():
        torch.manual_seed(0)
        stage = nn.Sequential(shapes.BasicBlock(8, 8), shapes.BasicBlock(8, 8))
        return nn.Sequential(nn.Conv2d(3, 8, 3), stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    images, labels = torch.randn(8, 3, 9, 9), torch.arange(8) % 5
    try:
        for mode in USES:
            forms = (build(), bn.convert(build(), images))
            stock, ours = (network_steps.Step(net, mode, images, labels) for net in forms)
            losses = [[float(step()) for _ in range(3)] for step in (stock, ours)]
            assert loss_problem(*losses) is None, (mode, losses)
            assert len(set(losses[0])) == (1 if mode == "evaluation" else 3)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
