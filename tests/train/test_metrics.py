import re

import pytest
from full_disk import no_room

from batchnorm.train.metrics import Logger, Metrics, read


def test_a_full_disk_is_told_with_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write({"step": 1})
    kept = metrics.position()
    with no_room(20), pytest.raises(OSError, match="too large") as error:
        metrics.write({"step": 2, "loss": 1.0})
    assert error.value.filename == str(path)
    metrics.close()
    assert [record["step"] for record in read(path)] == [1]
    metrics = Metrics(path, kept)
    metrics.write({"step": 2})
    metrics.close()
    assert [record["step"] for record in read(path)] == [1, 2]


@pytest.mark.parametrize(
    "line", ["nonsense", "[1]", "{}", '{"step": "1"}', '{"step": 1, "val_top1": "high"}', "[" * 9999]
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read(path)


@pytest.mark.parametrize("position", [-1, 99])
def test_a_position_outside_of_the_file(tmp_path, position):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="is shorter than when the checkpoint was written"):
        Metrics(path, position)
    assert path.read_text() == '{"step": 1}\n'


def test_validations_stay_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    logger = Logger(tmp_path, (0, 0), 10)
    logger.log({"step": 4, "loss": 1.5})
    logger.log({"step": 5, "val_top1": 0.25, "val_top5": 0.5})
    logger.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.rstrip() for line in re.split(r"[\r\n]", plain)]
    assert "step 5  val_top1 0.2500  val_top5 0.5000" in lines
    assert "step 4  loss 1.5000" not in lines
