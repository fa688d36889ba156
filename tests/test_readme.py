"""README's first screen is a program: run it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_python_session_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    assert "plain" in scope


def test_links_point_at_files():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / target).exists(), target
