import json
import re
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from batchnorm.cli import main
from batchnorm.monitor import Percentiles, Record, drift
from batchnorm.monitor.sinks import as_json
from batchnorm.optional_packages import MissingExtraError
from batchnorm.report.figure1 import _figure1, draw, paper_versus_here, steps_to
from batchnorm.report.page import Report, render, report
from batchnorm.report.runs import Run, read_runs
from batchnorm.train import Recipe


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


NAMES = ("top-1 with running averages:", "top-1 (folded, population statistics):")


def test_a_run_of_train_is_read_whole(tmp_path):
    record = Record(6, {"relu": Percentiles(torch.rand(3, 4), torch.rand(3, 4))})
    lines = [{"step": 4, "loss": 1.0, "train_top1": 0.9}, {"step": 8, "val_top1": 0.5, "val_top5": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "monitor.jsonl").write_text(json.dumps(as_json(record)))
    (tmp_path / "recipe.json").write_text(json.dumps({"batch_norm": True, "width": 0.5}))
    (tmp_path / "result.json").write_text(json.dumps({"running_top1": 0.5, "top1": 0.6}))
    (run,) = read_runs([tmp_path])
    assert run.accuracy == [(8, 0.5)], "must be the validation accuracy, not the training accuracy"
    assert run.layers == ["relu"]
    assert run.line() == f"{tmp_path.name}: step 8, {' 50.00%, '.join(NAMES)} 60.00%"
    page = render([run])
    assert "width" in page
    assert f"<td>{NAMES[0][:-1]}</td><td>50.00%</td>" in page
    assert f"<b>60.00%</b><span>{NAMES[1][:-1]}</span>" in page


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("frozen", "top-1 with frozen statistics: 50.00%, top-1 (folded, frozen statistics): 60.00%"),
        ("none", "top-1: 60.00%"),
        ([1], "top-1 with running averages: 50.00%, top-1 (folded, population statistics): 60.00%"),
    ],
)
def test_accuracies_are_named_as_train_names_them(tmp_path, kind, names):
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "val_top1": 0.5}')
    assert read_runs([tmp_path])[0].line().endswith(": step 8, top-1 50.00%")
    (tmp_path / "result.json").write_text(json.dumps({"running_top1": 0.5, "top1": 0.6, "statistics": kind}))
    assert read_runs([tmp_path])[0].line().endswith(f": step 8, {names}")


PAPERS = {"batch_norm", "activation", "dropout", "local_response", "stem", "projection", "width", "init", "init_scale"}
OF_BN = {"eps", "averaging", "statistics"}


@pytest.mark.parametrize(
    ("changes", "more", "fewer"),
    [
        ({}, set(), OF_BN),
        ({"batch_norm": True, "per_activation": ("5b",)}, {"per_activation"}, set()),
        ({"factory": "own.py:build"}, {"factory", "normalize"}, PAPERS | {"eps", "averaging"}),
        ({"start": "runs/old", "validate": 0.1}, {"start", "freeze_statistics", "validate"}, OF_BN),
    ],
    ids=["without BN", "with BN", "own network", "more settings"],
)
def test_the_page_lists_the_settings_that_a_run_uses(tmp_path, changes, more, fewer):
    recipe = Recipe(**changes)
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "val_top1": 0.5}')
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    always = {"name", "rate", "momentum", "weight_decay", "decay", "decay_epochs", "batch_size", "epochs", "size"}
    expected = always | {"shuffle", "photometric", "seed"} | PAPERS | OF_BN | more
    (run,) = read_runs([tmp_path])
    assert set(run.config) == {name.replace("_", " ") for name in expected - fewer}


@pytest.fixture
def plt():
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def made_up(batch_norm, ends, steps):
    """Return a run with these percentiles in both of its records, and with an accuracy of 96% at the end."""
    table = Percentiles(z := torch.tensor(ends)[:, None], z)
    records = [Record(step, {"sigmoid3": table}) for step in (0, steps)]
    return Run("made up", {"batch_norm": batch_norm}, {}, {"accuracy": [(0, 0.1), (steps, 0.96)]}, records, [])


def test_the_picture_of_a_short_run_shows_all_curves_and_readable_labels(folder, plt):
    plain, normalized = read_runs([folder])
    figure = _figure1({False: plain, True: normalized}, plt)
    figure.canvas.draw()
    accuracy, *bands = figure.axes
    assert accuracy.get_ylim() == (0, 1), "the network without BN does not reach 70%"
    for axis in figure.axes:
        assert not any("K" in tick.get_text() or "." in tick.get_text() for tick in axis.get_xticklabels())
        boxes = sorted((text.get_window_extent() for text in axis.texts), key=lambda box: box.y0)
        assert all(above.y0 > below.y0 + 0.7 * below.height for below, above in pairwise(boxes))
    assert [len(axis.texts) for axis in bands] == [3, 3]


def test_the_picture_of_a_run_with_one_record_has_points(plt):
    run = made_up(False, [-1.0, 0.0, 1.0], 1)
    figure = _figure1({False: replace(run, percentiles=run.percentiles[:1]), True: None}, plt)
    assert figure.axes[1].get_xlim() == (0, 1)
    assert {line.get_marker() for line in figure.axes[1].lines} == {"o"}


def test_the_picture_of_a_long_run_starts_at_70_percent(plt):
    figure = _figure1({kind: made_up(kind, [-1.0, 0.0, 1.0], 50_000) for kind in (False, True)}, plt)
    figure.canvas.draw()
    assert figure.axes[0].get_ylim() == (0.7, 1)
    assert figure.axes[0].get_xticklabels()[1].get_text().endswith("0K")
    assert {text.xyann for axis in figure.axes[1:] for text in axis.texts} == {(3, -2)}


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither this folder nor a folder below it has a metrics\.jsonl"):
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


RECORD = {"step": 1, "percentiles": {"relu": {"z": [[0.0], [1.0], [2.0]]}}}


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n', "line 2 is not valid JSON"),
        ("metrics.jsonl", "[1]\n", "line 1 is not a JSON object"),
        ("metrics.jsonl", "[" * 5000 + "\n", "line 1 is not valid JSON"),
        ("metrics.jsonl", '{"step": "1"}\n', "line 1: step is '1', but must be a whole number"),
        ("metrics.jsonl", '{"step": -1}\n', "must be a whole number"),
        ("metrics.jsonl", '{"step": 1e999}\n', "must be a whole number"),
        ("monitor.jsonl", '{"step": 1, "percentiles": 3}\n', "percentiles is 3, but must be an object"),
        ("monitor.jsonl", '{"step": 1, "percentiles": {"a": [1]}}\n', "of layer 'a' cannot be read"),
        ("monitor.jsonl", '{"step": 1, "percentiles": {"a": {"z": [[1], [2, 3]]}}}\n', "of layer 'a' cannot be read"),
        ("monitor.jsonl", '{"step": 1, "percentiles": {"a": {"z": []}}}\n', "of layer 'a' cannot be read"),
        ("monitor.jsonl", '{"step": 1, "gradient_change": {"a": {"relative": "x"}}}\n', "of layer 'a' cannot be read"),
        ("monitor.jsonl", json.dumps(RECORD) + '\n{"step": 2, "percentiles": {"relu": {"z": [[1], [2]]}}}\n', "shape"),
        ("config.json", "", "is not valid JSON"),
        ("config.json", "[1, 2]", "is not a JSON object"),
        ("config.json", '{"a": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 levels"),
        ("config.json", '{"percentiles": ["<script>alert(1)</script>"]}', "percentiles is"),
        ("config.json", '{"percentiles": "<script>alert(1)</script>"}', "percentiles is"),
        ("config.json", '{"percentiles": [15, 50]}', r"percentiles is \[15, 50\], but must list the 3 percentiles"),
        ("summary.json", '{"accuracy": {"running": "high"}}', "running is 'high', but must be a finite number"),
        ("summary.json", f'{{"seconds": 1{"0" * 400}}}', "seconds is 1000"),
        ("recipe.json", "nonsense", "is not valid JSON"),
        ("result.json", '{"top1": [1]}', r"statistics\) is \[1\], but must be a finite number"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_in_one_sentence(tmp_path, capsys, file, content, says):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        (tmp_path / name / "monitor.jsonl").write_text(json.dumps(RECORD) + "\n")
    (tmp_path / "bad" / file).write_text(content)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "good"), str(tmp_path / "bad"), "--out", str(page)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "bad") in error
    assert file in error or says == "shape"
    assert re.search(says, error)
    assert not page.exists()


def test_fields_of_any_other_type_are_shown_as_they_are(tmp_path):
    for name, config in (("a", {"batch_norm": [1], "environment": 3}), ("b", {"batch_norm": {}, "percentiles": "<b>"})):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": 1, "loss": 1{"0" * 400}}}', '{"step": 2, "loss": NaN, "note": {"a": null}}', ""]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "summary.json").write_text('{"accuracy": 0.5}')
    text = render(read_runs([tmp_path]))
    assert "&lt;b&gt;" in text
    assert "<b>" not in text


def test_layers_that_come_and_go_are_left_out(tmp_path):
    z = {"z": [[0.0], [1.0]]}
    lines = [{"step": k, "percentiles": {"always": z, f"only {k}": z}} for k in range(3)]
    lines += [
        {"step": 3, "gradient_change": {"a": {"relative": 0.5, "cosine": 1}, "b": {"relative": 0.5, "cosine": 1}}}
    ]
    lines += [{"step": 4, "gradient_change": {"b": {"relative": 0.5, "cosine": 1}}}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run,) = read_runs([tmp_path])
    assert run.layers == ["always"]
    assert "always" in render([run])


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a\u2028\x85": 2.0}\n', encoding="utf-8")
    assert read_runs([tmp_path])[0].steps == 1


def test_runs_validated_at_different_steps_are_compared(tmp_path):
    for name, steps in (("a", (1, 2)), ("b", (2, 3)), ("c", (5,))):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": {step}, "accuracy": 0.{step}}}\n' for step in steps]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        (tmp_path / name / "config.json").write_text(json.dumps({"batch_norm": name != "a"}))
    a, b, c = read_runs([tmp_path])
    assert paper_versus_here([a, b])[1][0] == "test accuracy at step 2"
    assert paper_versus_here([a, c])[1][0] == "steps to 95% test accuracy"


def test_text_from_a_run_cannot_become_markup(hostile):
    text = render(read_runs([hostile]))
    assert "<img" not in text
    assert text.count("</script>") == text.count("<script") == 2
    assert "hacked=1<" not in text
    assert "'unsafe" not in text
    assert " style=" not in text, "the content security policy would block it"


def test_names_that_have_no_utf8_or_control_a_terminal(tmp_path, capsys):
    folder = tmp_path / "a\x1b[2J\udcff"
    try:
        folder.mkdir()
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system does not allow such names")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    page = report(Report((folder,), tmp_path / "report.html"))
    assert "a\ufffd[2J\ufffd" in page.read_text(encoding="utf-8")
    assert "\x1b" not in capsys.readouterr().out


def test_tables(folder):
    plain, bn = read_runs([folder])
    claims = paper_versus_here([plain, bn])
    assert claims[1][0] == "test accuracy at step 200"
    assert claims[1][2:] == [f"{r.accuracy[-1][1]:.2%}" for r in (plain, bn)]
    assert paper_versus_here([bn]) == []
    table = steps_to([plain, bn])
    assert table[0] == ["test accuracy", "without-bn", "with-bn"]
    assert ["80%", "not reached", f"{bn.steps_to(0.8):,}"] in table


def test_steps_to_validation_accuracies_that_were_reached(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "val_top1": 0.05}\n{"step": 8, "val_top1": 0.15}\n')
    (run,) = read_runs([tmp_path])
    assert steps_to([run]) == [["top-1 validation accuracy", run.name], ["10%", "8"]]


def test_the_typical_unit_is_the_same_rule_for_both(folder):
    for run in read_runs([folder]):
        total = drift(run.percentiles, "sigmoid3").sum(0)
        assert (total < total[run.typical("sigmoid3")]).sum() <= 49


def test_a_missing_matplotlib_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install matplotlib"):
        draw(read_runs([folder]), tmp_path)
