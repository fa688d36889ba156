"""README's first screen is a program; links of README and the documentation point at files; tables are current."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_blocks(path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), scope)
    return scope


def test_readme_session_ends_in_a_network_that_reads_digits():
    assert run_blocks(ROOT / "README.md")["accuracy"] > 0.9


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_point_at_files(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_tables_are_what_the_result_files_say():
    from batchnorm.report.summary import pages

    for page, text in pages(ROOT).items():
        assert text == page.read_text(), f"{page.name}: run python -m batchnorm.report.summary"
