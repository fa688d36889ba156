"""Test that every example runs and is short."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example(path, tmp_path):
    assert len(path.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if path.name == "residual.py":
        assert "before: " in done.stdout
        assert "after: " in done.stdout
    if path.name == "monitor.py":
        assert (tmp_path / done.stdout.split()[-1]).is_file(), done.stdout
    if path.name == "digits.py":
        accuracy = done.stdout.partition("accuracy: ")[2].rstrip("%\n")
        assert float(accuracy) > 90
        assert "BatchNorm" not in done.stdout
