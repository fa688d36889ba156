import json
import platform

import pytest

from batchnorm.bench import cpu

SMALL = [
    cpu.Case("rows", (6, 4)),
    cpu.Case("few channels", (2, 3, 132, 132), cpu.LAST),
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
    assert shown.count(f"of {len(rows) // 2} ratios are below their limits") == 2
    for row in rows:
        assert f"{row.ratio:.2f}" in shown


def test_relu_is_compared_with_both_of_torchs_forms_and_judged_by_the_plain_one():
    row = cpu.measure(SMALL[0], "relu", "functions", rounds=3, seconds=0.0)
    assert list(row.ratios) == ["relu", "relu in place"]
    assert row.ratio == row.ratios["relu"]


def test_says_which_bars_are_reached(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "CASES", SMALL)
    cpu.cpu(out=tmp_path / "cpu.json", rounds=1, seconds=0.0, levels=("layers",))
    written = json.loads((tmp_path / "cpu.json").read_text())
    assert [(bar["below"], bar["cases"]) for bar in written["bars"]] == [
        (1.0, 2), (1.0, 2), (1.25, 4), (pytest.approx(1 / 3), 4), (None, 4),
    ]  # fmt: skip
    shown = capsys.readouterr().out
    for bar in written["bars"]:
        assert f"{bar['what']}: worst {bar['worst']:.3f}" in shown
        judged = [row for row in written["rows"] if bar["what"].startswith("BN alone") and row["activation"] == "none"]
        assert not judged or bar["met"] == sum(row["ratio"] < 1.25 for row in judged)


def test_shows_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "CASES", SMALL)
    monkeypatch.setattr("batchnorm.progress.PATIENCE", -1.0)
    cpu.cpu(out=None, rounds=1, seconds=0.0, levels=("layers",))
    assert "cases timed: 2 of 8" in capsys.readouterr().err


def test_bars():
    few, one, many = cpu.Case("", (8, 3, 8, 8), cpu.LAST), cpu.Case("", (8, 1, 4, 4), cpu.LAST), cpu.Case("", (8, 64))
    assert few.bar("none") == few.bar("relu") == pytest.approx(1 / 3)
    assert one.bar("none") == many.bar("none") == 1.25  # one channel: both layouts are the same
    assert many.bar("relu") == 1.0


def test_memory_is_kept_where_the_allocator_can_be_told():
    assert cpu.keep_freed_memory() is (platform.libc_ver()[0] == "glibc")


def test_every_shape_is_judged_by_its_layout():
    def row(shape, ratio, layout=cpu.CONTIGUOUS):
        case = {"name": "", "shape": shape, "layout": layout, "dtype": "float32"}
        return {
            "level": "layers",
            "activation": "relu",
            "case": case,
            "ratios": {"relu": ratio, "relu in place": ratio},
        }

    image, vector = (32, 64, 14, 14), (8, 64)
    first, other = cpu.bars([row(image, 0.9), row(vector, 1.1), row(image, 0.8, cpu.LAST)])[:2]
    assert (first.worst, first.met, first.cases, first.reached) == (1.1, 1, 2, False)
    assert (other.worst, other.met, other.cases, other.reached) == (0.8, 1, 1, True)
