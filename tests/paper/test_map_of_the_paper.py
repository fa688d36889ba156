"""Compare the map of the paper in docs/paper_map.py with the paper's numbering and, if present, with its TeX."""

import re
import runpy
from pathlib import Path

import pytest
from pictures import shared_file

MAP = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "paper_map.py"))
SECTIONS, TAGGED = MAP["SECTIONS"], MAP["TAGGED"]
SAYS = [(section, row.says) for section, rows in SECTIONS.items() for row in rows]
NUMBERS = ["1", "2", "3", "3.1", "3.2", "3.3", "3.4", "4", "4.1", "4.2", "4.2.1", "4.2.2", "4.2.3", "5"]
HEADING = re.compile(r"^\\((?:sub)*)section(\*?)\{(.*)\}\s*$", re.MULTILINE)
FLOAT = re.compile(r"\\begin\{(algorithm|figure)(\*?)\}.*?\\end\{\1\2\}", re.DOTALL)


def quotes(text):
    return [plain(quote) for quote in re.findall(r'"([^"]+)"', text)]


def plain(tex):
    """Return text without its TeX commands, braces, dollar signs and quotation marks."""
    tex = re.sub(
        r"\\(?:cite|label|ref|begin|end)\{[^}]*\}", "", tex.replace("~", " ").replace(r"\mils", r" \cdot 10^6")
    )
    tex = re.sub(r"\\(E|Var|Cov)\b|\\v([xyzbu])\b", r"\1\2", re.sub(r"\{?\\times\s*\}?", "x", tex).replace(r"\%", "%"))
    return re.sub(r" (?=[.,])", "", " ".join(re.sub(r"\\[a-zA-Z]+|\\.|[{}$\"]|``|''", "", tex).split()))


@pytest.fixture(scope="module")
def paper():
    """Return the paper's TeX, from its abstract on, without its references."""
    text = shared_file("paper/batch-normalization.tex").read_text()
    text = text[text.index(r"\begin{abstract}") :]
    return re.sub(r"\\begin\{thebibliography\}.*?\\end\{thebibliography\}", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def texts(paper):
    """Return the TeX of each section, under the section's number and title."""
    cuts, numbers, name = list(HEADING.finditer(paper)), [0, 0, 0], "Abstract"
    found = {name: paper[: cuts[0].start()]}
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        depth, title = len(cut[1]) // 3, plain(cut[3])
        if cut[2]:  # the appendix, which has no numbers
            name = f"{name}. {title}" if depth else title
        else:
            numbers = [*numbers[:depth], numbers[depth] + 1, *[0] * (2 - depth)]
            name = f"{'.'.join(str(n) for n in numbers if n)}. {title}"
        found[name] = paper[cut.end() : following.start() if following else None]
    del found["Appendix"]  # it has no text before its only subsection
    return found


def test_the_map_has_every_numbered_part():
    assert [name.split()[0].rstrip(".") for name in SECTIONS if name[0].isdigit()] == NUMBERS
    bold = [name for _, says in SAYS for name in re.findall(r"\*\*(.*?)\*\*", says)]
    assert {name[:8] for name in bold if name.startswith("Figure")} == {f"Figure {k}" for k in range(1, 6)}
    assert {name[:11] for name in bold if name.startswith("Algorithm")} == {"Algorithm 1", "Algorithm 2"}
    lines = [re.findall(r"\d+", name)[1:] for name in bold if name.startswith("Algorithm 2, ")]
    assert [k for ends in lines for k in range(int(ends[0]), int(ends[-1]) + 1)] == list(range(1, 13))


def test_sections_have_the_papers_titles(texts):
    assert list(SECTIONS) == list(texts)


def test_rows_quote_their_section_word_for_word(texts):
    plains = {name: plain(text) for name, text in texts.items()}
    assert not [(name, quote) for name, says in SAYS for quote in quotes(says) if quote not in plains[name]]


def test_docstrings_quote_the_paper_word_for_word(paper):
    text = plain(paper)
    assert not [(name, quote) for name, line in TAGGED.items() for quote in quotes(line) if quote not in text]


def test_every_paragraph_is_quoted(texts):
    count = 0
    for name, text in texts.items():
        own = [quote for section, says in SAYS for quote in quotes(says) if section == name]
        for part in re.split(r"\n\s*\n|\\item", FLOAT.sub("\n\n", text)):
            if len((paragraph := plain(part)).split()) > 3:
                assert any(quote in paragraph for quote in own), paragraph
                count += 1
    assert count > 50


@pytest.mark.parametrize("kind", ["Algorithm", "Figure"])
def test_every_caption_is_quoted(paper, kind):
    floats = [found[0] for found in FLOAT.finditer(paper) if found[1] == kind.lower()]
    captions = [
        plain(caption) for text in floats for caption in re.findall(r"\\caption(\{.*?\})\s*\\", text, re.DOTALL)
    ]
    assert len(captions) == {"Algorithm": 2, "Figure": 5}[kind]
    for number, caption in enumerate(captions, 1):
        says = " ".join(says for _, says in SAYS if says.startswith(f"**{kind} {number}"))
        assert any(quote in caption for quote in quotes(says)), caption


def test_algorithm_2_has_12_lines(paper):
    (text,) = (found[0] for found in FLOAT.finditer(paper) if "alg-train" in found[0])
    assert len(re.findall(r"\\(?:STATE|FOR|ENDFOR)\b", text)) == 12
