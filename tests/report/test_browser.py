"""Test the page in a headless browser: it loads without errors, its menus work, and its figures are drawn."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from batchnorm.report.page import write_report
from batchnorm.report.runs import read_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium was found; apt-get install chromium")

# This script runs before the page's content security policy applies. When the page has loaded, the script runs the
# question, and adds the answer to the page.
ASK = """<script>
window.problems = [];
addEventListener("error", (e) => problems.push(String(e.message || e.target.outerHTML)), true);
addEventListener("securitypolicyviolation", (e) => problems.push("blocked: " + e.blockedURI));
console.error = (...a) => problems.push(a.join(" "));
addEventListener("load", () => {
  let found;
  try { found = (() => { %s })(); } catch (e) { problems.push(String(e)); }
  const pre = document.createElement("pre");
  pre.id = "answer";
  pre.textContent = JSON.stringify({ problems, found });
  document.body.append(pre);
});
</script>"""


def ask(page, tmp_path, question, *options, width=1100):
    """Load the page, run the JavaScript ``question`` and return its result; the browser must report no problems."""
    text = page.read_text()
    text = text.replace("<head>", "<head>" + ASK % question, 1)
    asked = tmp_path / "asked.html"
    asked.write_text(text)
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", "--virtual-time-budget=5000",
        *options, "--dump-dom", asked.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(unescape(answer.group(1)))
    assert result["problems"] == []
    return result["found"]


def test_it_loads_without_errors_and_draws(page, tmp_path):
    found = ask(
        page,
        tmp_path,
        """
        const size = (s) => s.getBoundingClientRect(), all = (s) => document.querySelectorAll(s);
        return {
          ready: document.documentElement.dataset.ready,
          charts: [...all("svg")].map((s) => [size(s).width, s.querySelectorAll("path.line").length]),
          bands: all("#bands path.band").length,
          broken: [...all("svg path")].filter((p) => /NaN|Infinity/.test(p.getAttribute("d"))).length,
          tables: [...all("section h2")].map((h) => h.textContent),
        };""",
    )
    assert found["ready"] == "true"
    # the chart of the accuracy, two charts with bands, and a chart of the shift for each of three layers
    assert [lines for _, lines in found["charts"]] == [2, 1, 1, 2, 2, 2]
    assert all(width > 200 for width, _ in found["charts"])
    assert found["bands"] == 2
    assert found["broken"] == 0
    assert found["tables"][-4:] == ["Paper versus here", "Steps to given accuracies", "At the end", "Configuration"]


def test_menus_change_what_is_shown(page, tmp_path):
    found = ask(
        page,
        tmp_path,
        """
        const choose = (id, value) => {
          const menu = document.getElementById(id);
          if (![...menu.options].some((o) => o.value === value)) throw new Error(id + " has no " + value);
          menu.value = value;
          menu.dispatchEvent(new Event("change"));
        };
        const all = (selector) => [...document.querySelectorAll(selector)];
        const shape = (box) => all(box + " path.line").map((p) => p.getAttribute("d"));
        const seen = {};
        for (const [id, value, box] of [
          ["curve", "loss", "#curves"], ["layer", "sigmoid1", "#bands"], ["unit", "7", "#bands"],
          ["unit", "all", "#bands"],
          ["scale", "own", "#bands"], ["measure", "x", "#shift"], ["measure", "gradient", "#shift"],
        ]) {
          const before = shape(box);
          choose(id, value);
          const after = shape(box);
          seen[id + " " + value] = [after.length, after.every((d, k) => d !== before[k])];
        }
        seen.units = document.getElementById("unit").options.length;
        seen.headings = [...document.querySelectorAll("#shift h3")].map((h) => h.textContent);
        return seen;""",
    )
    assert found.pop("units") == 102  # typical, all, and each of the 100 units
    assert found.pop("headings") == ["linear2", "linear3", "output"]
    assert found["curve loss"] == [2, True]
    for key in ("layer sigmoid1", "unit 7", "unit all", "scale own"):
        assert found[key] == [2, True], key
    assert found["measure gradient"] == [6, True]
    assert found["measure x"][0] == 6


def test_values_appear_under_the_pointer(page, tmp_path):
    found = ask(
        page,
        tmp_path,
        """
        const svg = document.querySelector("#curves svg"), box = svg.getBoundingClientRect();
        const middle = { clientX: box.left + box.width / 2, clientY: box.top + 90 };
        svg.dispatchEvent(new PointerEvent("pointermove", middle));
        const tip = document.querySelector("#curves .tip");
        return [tip.hidden, tip.textContent];""",
    )
    assert found[0] is False
    assert re.fullmatch(r"step \d+[\d.]+% without-bn[\d.]+% with-bn", found[1])


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_light_and_dark(page, tmp_path, scheme, dark):
    found = ask(
        page,
        tmp_path,
        """
        const light = (color) => {
          const [r, g, b] = color.match(/[\\d.]+/g).map(Number);
          return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
        };
        const style = (s, key) => light(getComputedStyle(document.querySelector(s))[key]);
        return {
          page: style("body", "backgroundColor"), card: style("section", "backgroundColor"), ink: style("h1", "color"),
          label: style("svg text", "fill"), line: style("path.line", "stroke"),
        };""",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    )
    assert (found["page"] < 0.2) == dark
    for ink in ("ink", "label", "line"):
        assert abs(found[ink] - found["card"]) > 0.25, ink


def test_it_fits_a_phone(page, tmp_path):
    # The browser's window is at least 500 pixels wide, so simulate a phone by a narrower frame.
    inner = tmp_path / "inner.html"
    inner.write_text(page.read_text())
    outer = tmp_path / "phone.html"
    outer.write_text(
        f'<html><head></head><body><iframe id="f" width="390" height="800" src="{inner.name}"></iframe></body></html>'
    )
    found = ask(
        outer,
        tmp_path,
        """
        const inside = document.getElementById("f").contentDocument;
        const wide = [...inside.querySelectorAll("svg")].map((s) => s.getBoundingClientRect().right);
        const { clientWidth, scrollWidth } = inside.documentElement;
        return { width: clientWidth, scroll: scrollWidth, right: Math.max(...wide), count: wide.length };""",
        "--allow-file-access-from-files",
    )
    assert found["count"] == 6
    assert found["scroll"] <= found["width"] <= 390  # no horizontal scrolling
    assert found["right"] <= 390


def test_nothing_in_a_run_folder_runs(hostile, tmp_path):
    page = write_report(read_runs([hostile]), tmp_path / "hostile.html")
    found = ask(
        page,
        tmp_path,
        """
        for (const menu of document.querySelectorAll("select")) {
          for (const option of menu.options) {
            menu.value = option.value;
            menu.dispatchEvent(new Event("change"));
          }
        }
        for (const svg of document.querySelectorAll("svg")) {
          const box = svg.getBoundingClientRect();
          svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 60, clientY: box.top + 60 }));
        }
        return {
          ready: document.documentElement.dataset.ready,
          hacked: window.hacked,
          foreign: document.querySelectorAll("main :is(img, iframe, script, a, form, base)").length,
          tips: [...document.querySelectorAll(".tip")].filter((tip) => !tip.hidden).length,
        };""",
    )
    assert found == {"ready": "true", "foreign": 0, "tips": 6}


def test_the_policy_stops_a_script_that_the_page_did_not_write(page, tmp_path):
    planted = tmp_path / "planted.html"
    planted.write_text(
        page.read_text().replace("<footer>", "<footer><script>hacked = 1</script><img onerror=hacked=1 src=x>")
    )
    with pytest.raises(AssertionError, match="blocked: inline"):
        ask(planted, tmp_path, "return window.hacked;")
