"""MkDocs hooks: add the files outside ``docs`` that pages link to, and rewrite the links to them.

For example, a page in ``docs`` links to ``../results/fig1.json``. On the site, the path of this file is
``results/fig1.json``.
"""

import json
import re
from pathlib import Path
from runpy import run_path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)(#[^)]*)?\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]*\.png)\)")
README_RESULTS = re.compile(r"<!-- results:[^\n]*-->\n(.*?)<!-- end of results -->", re.DOTALL)
WHAT = {  # for result files that do not say what they measured
    "fig2.json": "Figures 2 and 3: steps and accuracy of Inception and its variants",
    "fig4.json": "Figure 4: errors with 1 and with 144 crops, of single networks and of ensembles",
    "kernels-h200.json": "time of the fused CUDA kernels, eager torch, torch.compile and cuDNN, on single layers",
}
# The site is built without this package and torch, so run the module's file instead of importing it.
TABLES = run_path(str(ROOT / "src/batchnorm/report/tables.py"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add CONTRIBUTING.md, CHANGELOG.md, and every file or folder outside ``docs`` that a page links to."""
    pages = [Path(file.abs_src_path).read_text() for file in files if file.src_uri.endswith(".md")]
    for source in ("CONTRIBUTING.md", "CHANGELOG.md"):
        pages.append(_from_root((ROOT / source).read_text()))
        files.append(File.generated(config, PAGES[source], content=pages[-1]))
    pages += [_readme_results(), _result_files()]
    linked = {target.rstrip("/") for page in pages for target, _ in OUTSIDE.findall(page)}
    for target in sorted(linked - set(PAGES)):
        path = ROOT / target
        if path.is_dir():
            files.append(File.generated(config, f"{target}/index.md", content=_listing(target)))
        for file in _files(path) if path.is_dir() else [path]:
            files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links to files outside ``docs``, and insert the tables into the results page.

    The links lead to the site's copies of the files. In addition, each picture becomes a link to itself, so that a
    click shows it at full size.
    """
    if page.file.src_uri == "results.md":
        markdown = markdown.replace("<!-- README's tables -->", _readme_results())
        markdown = markdown.replace("<!-- result files -->", _result_files())
    return PICTURE.sub(r"[\g<0>](\1)", OUTSIDE.sub(_inside, markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Reject a page that loads anything from the network, because the site must be readable offline."""
    if loaded := re.search(r'<(?:script|link|img)\b[^>]*(?:src|href)="(https?:[^"]*)"', output):
        raise PluginError(f"{page.file.src_uri} loads {loaded[1]}, but pages must work offline: copy it to docs/assets")
    return output


def _from_root(text: str) -> str:
    """Rewrite the links of a page in the repository's root so that they work from ``docs``."""
    return re.sub(r"\]\((?!https?:|#)(?:\./)?([^)]+)\)", r"](../\1)", text).replace("](../docs/", "](")


def _inside(link: re.Match[str]) -> str:
    target, anchor = link[1].rstrip("/"), link[2] or ""
    return f"]({PAGES.get(target, target)}{'/index.md' if (ROOT / target).is_dir() else ''}{anchor})"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".py", ".toml"))


def _listing(folder: str) -> str:
    return "\n".join([f"# {folder}", "", *(f"- [{path.name}]({path.name})" for path in _files(ROOT / folder)), ""])


def _readme_results() -> str:
    """Return the generated parts of README, each under the title of its section."""
    first, *sections = re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    parts = []
    for title, text in (("Compared with other tools", first), *(section.split("\n", 1) for section in sections)):
        if found := README_RESULTS.findall(text):
            parts += [f"### {title}", *found]
    if len(parts) < 4:
        raise PluginError("README.md has too few generated parts (<!-- results: ... -->) for the page results.md")
    return _from_root("\n\n".join(parts))


def _result_files() -> str:
    lines = ["| file | what | on | n | commit |", "|---|---|---|---|---|"]
    for path in sorted((ROOT / "results").glob("*.json")):
        result = json.loads(path.read_text())
        rows, told = TABLES["rows_of"](result), result.get("environment") or result["hardware"]
        what = next((result[key] for key in ("question", "claim", "what") if key in result), WHAT.get(path.name, ""))
        commits = {row["commit"] for row in rows if "commit" in row} or {told.get("commit", "")}
        cells = (
            f"[{path.name}](../results/{path.name})",
            what,
            TABLES["hardware"](result),
            TABLES["repetitions"](result)
            or (f"{len(rows)} {'members' if 'members' in result else 'rows'}" if rows else "1 run"),
            "per row" if len(commits) > 1 else f"`{commits.pop()[:7]}`",
        )
        if not all(cell.strip("`") for cell in cells):
            raise PluginError(f"a cell of {path.name} is blank in the table of result files: {cells}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
