import json

import pytest
import torch

from batchnorm.monitor import Percentiles, Record
from batchnorm.monitor.sinks import as_json
from batchnorm.report.claims import paper_versus_here, steps_to
from batchnorm.report.command import Report, report
from batchnorm.report.page import render
from batchnorm.report.runs import read_runs


def test_the_baseline_comes_first(folder):
    assert [run.name for run in read_runs([folder])] == ["without-bn", "with-bn"]
    assert [run.name for run in read_runs([folder / "with-bn", folder / "without-bn"])] == ["with-bn", "without-bn"]


def test_runs_of_the_same_name_are_told_apart(folder, tmp_path):
    for part in ("a", "b"):
        (tmp_path / part / "x").mkdir(parents=True)
        (tmp_path / part / "x" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert [run.name for run in read_runs([tmp_path])] == ["a/x", "b/x"]


def test_any_metrics_file_is_a_run(tmp_path):
    lines = [{"step": 1, "lr": 0.1, "note": "text"}, {"step": 2, "val_top1": 0.5}, {"epoch": 1}]
    lines.append({"step": 2, "final": True, "val_top1": 0.6})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "l')
    (run,) = read_runs([tmp_path])
    assert run.curves == {"val_top1": [(2, 0.5)], "lr": [(1, 0.1)]}
    assert run.accuracy == [(2, 0.5)]
    assert run.steps == 2
    assert "val_top1" in render([run])


def test_a_run_of_train_is_read_whole(tmp_path):
    record = Record(6, {"relu": Percentiles(torch.rand(3, 4), torch.rand(3, 4))})
    lines = [{"step": 4, "loss": 1.0, "train_top1": 0.9}, {"step": 8, "val_top1": 0.5, "val_top5": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "monitor.jsonl").write_text(json.dumps(as_json(record)))
    (tmp_path / "recipe.json").write_text(json.dumps({"batch_norm": True, "width": 0.5}))
    (tmp_path / "result.json").write_text(json.dumps({"running_top1": 0.5, "top1": 0.6}))
    (run,) = read_runs([tmp_path])
    assert run.accuracy == [(8, 0.5)], "of validation, though training's was written first"
    assert run.layers == ["relu"]
    assert run.line() == f"{tmp_path.name}: step 8, accuracy 50.00% (running), accuracy 60.00% (folded)"
    assert "width" in render([run])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl in it or below it"):
        read_runs([tmp_path])


def test_the_command_writes_one_page(folder, tmp_path, capsys):
    path = report(Report((folder / "with-bn", folder / "without-bn"), tmp_path / "both.html"))
    assert path.read_text().startswith("<!doctype html>")
    assert "with-bn: step 200, accuracy" in capsys.readouterr().out


def test_the_page_needs_no_network(page):
    text = page.read_text()
    for reference in ("http://", "https://", "src=", "@import", "url(//"):
        # The SVG namespace is a name, not an address that is fetched.
        assert reference not in text.replace("http://www.w3.org/2000/svg", "")


def test_text_from_a_run_cannot_become_markup(tmp_path):
    evil = tmp_path / "<img onerror=x>"
    evil.mkdir()
    (evil / "metrics.jsonl").write_text(json.dumps({"step": 1, "</script><b>": 1.0}))
    (evil / "config.json").write_text(json.dumps({"</script>": "<script>alert(1)</script>"}))
    text = render(read_runs([tmp_path]))
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "<script>alert" not in text


def test_tables(folder):
    plain, bn = read_runs([folder])
    claims = paper_versus_here([plain, bn])
    assert claims[1][0] == "test accuracy at step 200"
    assert claims[1][2:] == [f"{r.accuracy[-1][1]:.2%}" for r in (plain, bn)]
    assert paper_versus_here([bn]) == []
    table = steps_to([plain, bn])
    assert table[0] == ["test accuracy", "without-bn", "with-bn"]
    assert table[1][1] == "not reached"
    assert table[1][2] == f"{bn.steps_to(0.8):,}"


def test_the_typical_unit_is_the_same_rule_for_both(folder):
    for run in read_runs([folder]):
        total = torch.stack([torch.tensor(v) for v in _totals(run)])
        assert (total < total[run.typical("sigmoid3")]).sum() <= 49


def _totals(run):
    from batchnorm.monitor import drift

    return drift(run.percentiles, "sigmoid3").sum(0).tolist()


def test_a_missing_matplotlib_is_named(folder, tmp_path, monkeypatch):
    import sys

    from batchnorm.extras import MissingExtraError
    from batchnorm.report.figure1 import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'batchnorm\[report\]'"):
        draw(read_runs([folder]), tmp_path)
