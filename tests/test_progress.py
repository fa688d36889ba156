"""Test progress output: nothing for short loops and calls, rich's bar on a terminal, and plain lines elsewhere."""

from threading import Event, Timer
from types import SimpleNamespace

import pytest

from batchnorm import progress as module
from batchnorm.progress import Steps, progress


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch):
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_short_passes_show_nothing(capfd):
    assert list(progress(range(5), "pass")) == list(range(5))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("items", "shown"),
    [([1, 2, 3], "pass: 2 of 3\npass: 3 of 3\n"), ((n for n in (1, 2, 3)), "pass: 2\npass: 3\n")],
)
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


def take(*doing):
    with Steps("verb", total=2) as step:
        for text in doing:
            step(text)


def test_short_calls_show_no_steps(capfd):
    take("one", "two")
    assert capfd.readouterr() == ("", "")


def test_long_calls_print_their_step_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    take("one", "two")
    assert capsys.readouterr() == ("", "verb: 0 of 2, one\nverb: 2 of 2\n")  # the second step came too early for a line


def test_the_last_line_is_the_complete_one_even_if_a_call_takes_fewer_steps(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    take("one")
    assert capsys.readouterr().err == "verb: 0 of 2, one\nverb: 1 of 1\n"


def test_a_call_that_fails_is_not_shown_as_complete(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)

    def fail():
        with Steps("verb", total=2) as step:
            step("one")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert capsys.readouterr().err == "verb: 0 of 2, one\n"


def test_long_calls_have_a_bar_on_a_terminal_even_if_they_take_more_steps(monkeypatch, capsys):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    take("one", "two", "three")
    assert capsys.readouterr().out == ""


def test_a_bar_appears_during_a_long_step(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = Event()
    monkeypatch.setattr(module, "Timer", lambda seconds, show: Timer(0, lambda: (show(), shown.set())))
    with Steps("verb", total=1) as step:
        step("one")
        assert shown.wait(60)
        assert step._display is not None
    assert capsys.readouterr().out == ""


def test_a_bar_of_the_caller_is_no_error(monkeypatch, capsys):
    def start():
        raise pytest.importorskip("rich.errors").LiveError("Only one live display may be active at once")

    monkeypatch.setattr(module, "PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(module, "_rich_bars", lambda transient: SimpleNamespace(start=start))
    assert list(progress([1, 2, 3], "pass")) == [1, 2, 3]
    assert capsys.readouterr() == ("", "pass: 2 of 3\npass: 3 of 3\n")


def test_hidden_steps_show_nothing(monkeypatch, capfd):
    monkeypatch.setattr(module, "PATIENCE", -1.0)
    with Steps("verb", total=1, hidden=True) as step:
        step("one")
    assert capfd.readouterr() == ("", "")
