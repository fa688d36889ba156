import json

import pytest

from batchnorm.bench import cpu

SMALL = [
    cpu.Case("rows", (6, 4)),
    cpu.Case("few channels", (2, 3, 4, 4), cpu.LAST),
    cpu.Case("volume", (2, 3, 2, 4, 4), cpu.LAST),
    cpu.Case("half", (2, 3, 4, 4), dtype="bfloat16"),
]


def test_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "CASES", SMALL)
    rows = cpu.cpu(out=tmp_path / "results" / "cpu.json", rounds=1, seconds=0.0)
    written = json.loads((tmp_path / "results" / "cpu.json").read_text())
    assert len(written["rows"]) == len(rows) == 4 * len(SMALL)
    assert {row["level"] for row in written["rows"]} == {"layers", "functions"}
    assert written["environment"]["threads"] == 2
    shown = capsys.readouterr().out
    assert shown.count(f"of {len(rows) // 2} ratios below their bar") == 2
    for row in rows:
        assert f"{row.ratio:.2f}" in shown


def test_relu_is_compared_with_the_stronger_of_torchs_two_forms():
    row = cpu.measure(SMALL[0], "relu", "functions", rounds=3, seconds=0.0)
    assert set(row.ratios) == {"relu", "relu in place"}
    assert row.ratio == max(row.ratios.values())


def test_bars():
    few, one, many = cpu.Case("", (8, 3, 4, 4), cpu.LAST), cpu.Case("", (8, 1, 4, 4), cpu.LAST), cpu.Case("", (8, 64))
    assert few.bar("none") == few.bar("relu") == pytest.approx(1 / 3)
    assert one.bar("none") == many.bar("none") == 1.25  # one channel lies the same in both layouts
    assert many.bar("relu") == 1.0
