"""Nothing for short passes, rich's bar on a terminal, plain lines elsewhere."""

from types import SimpleNamespace

import pytest

from batchnorm import progress as module
from batchnorm.progress import progress


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_short_passes_show_nothing(capfd):
    assert list(progress(range(5), "pass")) == list(range(5))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("items", "shown"), [([1, 2, 3], "pass: 2 of 3\n"), (iter([1, 2, 3]), "pass: 2\n")])
def test_long_passes_print_lines_where_there_is_no_terminal(monkeypatch, capsys, items, shown):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    assert list(progress(items, "pass")) == [1, 2, 3]
    out, err = capsys.readouterr()
    assert (out, err) == ("", shown)


def test_long_passes_have_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(progress([1, 2, 3], "pass")) == [1, 2, 3]
    assert capsys.readouterr().out == ""


def test_an_exception_inside_the_loop_is_the_callers(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", -1.0)

    def run():
        for _ in progress([1, 2, 3], "pass"):
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        run()
