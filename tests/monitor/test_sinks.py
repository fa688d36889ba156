import builtins
import json
import sys

import pytest
import torch

from batchnorm.models import perceptron
from batchnorm.monitor import Change, JSONLines, Monitor, Percentiles, Record, TensorBoard
from batchnorm.optional_packages import MissingExtraError


def test_json_lines_hold_what_memory_holds(tmp_path):
    net = perceptron(inputs=6, widths=(5, 4), classes=3)
    with Monitor(net, every=2, sinks=[JSONLines(tmp_path / "m.jsonl")]) as monitor:
        for _ in range(5):
            net(torch.randn(8, 6))
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4]
    for line, record in zip(lines, monitor.records, strict=True):
        for layer, found in record.percentiles.items():
            torch.testing.assert_close(torch.tensor(line["percentiles"][layer]["z"]), found.z, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.tensor(line["percentiles"][layer]["x"]), found.x, rtol=1e-4, atol=1e-6)


def test_only_records_from_the_first_new_step_on_are_removed(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (0, 100, 50, 60)) + '{"step": 70')
    with JSONLines(path) as sink:
        for step in (80, 90):
            sink.write(Record(step))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 50, 60, 80, 90]


def test_x_is_written_only_where_something_is_normalized(tmp_path):
    net = perceptron(batch_norm=False, inputs=6, widths=(5,), classes=3)
    with Monitor(net, sinks=[JSONLines(tmp_path / "m.jsonl")]):
        net(torch.randn(8, 6))
    assert set(json.loads((tmp_path / "m.jsonl").read_text())["percentiles"]["sigmoid1"]) == {"z"}


@pytest.mark.filterwarnings("ignore")  # tensorboard's own code gives warnings
def test_tensorboard_gets_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = perceptron(inputs=6, widths=(5,), classes=3)
    with Monitor(net, every=1, sinks=[TensorBoard(tmp_path)]) as monitor:
        for _ in range(3):
            net(torch.randn(8, 6))
        monitor.record_gradient_change(3, lambda y, _: y.square().mean(), torch.randn(8, 6), rate=0.1)
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("z sigmoid1/p50")
    assert [s.step for s in scalars] == [0, 1, 2]
    assert scalars[0].value == pytest.approx(monitor.records[0].percentiles["sigmoid1"].z[1].mean().item(), rel=1e-6)
    assert [s.step for s in events.Scalars("gradient change/output")] == [3]


def test_a_missing_tensorboard_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install tensorboard"):
        TensorBoard(tmp_path)


def test_a_run_that_starts_again_replaces_its_records(tmp_path):
    path = tmp_path / "not there yet" / "m.jsonl"
    for steps in ((0, 10, 20), (0, 10), (5, 15)):
        with JSONLines(path) as sink:
            for step in steps:
                sink.write(Record(step))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 5, 15]


def test_a_file_has_null_in_place_of_nan(tmp_path):
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    with JSONLines(tmp_path / "m.jsonl") as sink:
        sink.write(Record(1, {"relu": Percentiles(values, values)}, {"fc": Change(torch.nan, 0.5)}))
    text = (tmp_path / "m.jsonl").read_text()
    assert text == (
        '{"step": 1, "percentiles": {"relu": {"z": [[1.0, null], [null, 2.0]]}},'
        ' "gradient_change": {"fc": {"relative": null, "cosine": 0.5}}}\n'
    )


def test_a_line_that_a_killed_run_did_not_finish_is_removed(tmp_path):
    path, link = tmp_path / "m.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    with JSONLines(link) as sink:
        sink.write(Record(5))
    assert link.is_symlink()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 5]
