"""Reports answer questions and print what they hold."""

import pickle

import pytest

from batchnorm.sites import Report, Site

REPORT = Report("fold", (Site("a", "folded into 'b'"), Site("", "kept", "why")), 1e-7, ("mind this",))


def test_queries():
    assert REPORT["a"].action == "folded into 'b'"
    assert REPORT.paths("folded") == ["a"]
    assert len(REPORT) == 2
    assert [site.path for site in REPORT] == ["a", ""]
    with pytest.raises(KeyError, match="fold looked at no site 'c'"):
        REPORT["c"]


def test_text():
    lines = str(REPORT).splitlines()
    assert lines[0] == "fold: 2 sites, relative error 1.0e-07"
    assert lines[1:] == ["  a: folded into 'b'", "  (the network): kept (why)", "  note: mind this"]


def test_reports_travel_with_their_network():
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
