import pytest
from full_disk import no_room

from batchnorm.train.metrics import Metrics, read


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
    with pytest.raises(ValueError, match="lines are missing"):
        Metrics(path, position)
    assert path.read_text() == '{"step": 1}\n'
