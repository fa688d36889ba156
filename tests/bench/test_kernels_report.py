import json
from pathlib import Path

import pytest

from batchnorm.bench.bars import Bar
from batchnorm.bench.kernels_report import bars

FILE = Path(__file__).parents[2] / "results" / "kernels-h200.json"


def row(megabytes, ours, compiled, eager, limit, op="BN+ReLU", dtype="bfloat16", layout="NCHW"):
    return {
        "layout": layout,
        "op": op,
        "dtype": dtype,
        "megabytes": megabytes,
        "limit_us": limit,
        "us": {"batchnorm": ours, "compile": compiled, "eager": eager},
    }


def test_each_bar_by_hand():
    rows = [
        row(12.0, [6.0, 12.0], [12.0, 24.0], [36.0, 36.0], [5.0, 8.0]),  # both passes fit on chip
        row(20.0, [12.0, 40.0], [26.0, 26.0], [52.0, 52.0], [10.0, 15.0]),  # the backward pass does not fit
        row(1.0, [9.0, 9.0], [9.0, 8.0], [9.0, 9.0], [0.5, 0.8]),  # too small: the limit does not apply
        row(1.0, [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], dtype="float32"),
    ]
    mean, eager, worst, kept, streamed = bars(rows)
    assert mean.measured == pytest.approx((2.0 * 1.0 * 17 / 18) ** (1 / 3))
    assert not mean.reached
    assert eager.measured == pytest.approx((4.0 * 2.0 * 1.0) ** (1 / 3))
    assert worst.measured == pytest.approx(17 / 18)
    assert worst.reached is False
    assert (kept.measured, kept.rows) == (pytest.approx(1.5), 3)  # 6/5, 12/8, 12/10
    assert (streamed.measured, streamed.rows) == (pytest.approx(40 / 15 * 3 / 5), 1)


def test_a_residual_is_one_tensor_more_either_way():
    *_, streamed = bars([row(100.0, [40.0, 60.0], [1.0, 1.0], [1.0, 1.0], [30.0, 40.0], op="BN+add+ReLU")])
    assert streamed.measured == pytest.approx(max(40 / 30 * 3 / 4, 60 / 40 * 4 / 6))


def test_bars_that_the_bytes_forbid_are_not_set():
    times = ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [1.0, 1.0])
    found = {
        (op, layout): " ".join(bar.what for bar in bars([row(100.0, *times, op=op, layout=layout)]))
        for op in ("BN+ReLU", "BN+add+ReLU")
        for layout in ("NCHW", "NHWC")
    }
    compiled, eager = "geometric mean of torch.compile over ours", "geometric mean of eager over ours"
    assert {key for key, what in found.items() if compiled in what} == {("BN+ReLU", "NCHW"), ("BN+ReLU", "NHWC")}
    assert {key for key, what in found.items() if eager in what} == {("BN+ReLU", "NCHW"), ("BN+add+ReLU", "NCHW")}


def test_what_was_not_measured_is_neither_reached_nor_missed():
    one = Bar("x", 1.5, None, True, 0)
    assert one.reached is None
    assert one.line().endswith("not measured")
    assert "MISSED" in one._replace(measured=1.4).line()
    assert one._replace(measured=1.5).line().endswith(": reached")


def test_the_committed_file_has_its_bars():
    report = json.loads(FILE.read_text())
    assert report["bars"] == [{**bar._asdict(), "reached": bar.reached} for bar in bars(report["rows"])]
