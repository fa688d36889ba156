"""Test the queries on reports, and the text of reports."""

import pickle

import pytest

from batchnorm.change_report import Site, VerbReport

REPORT = VerbReport("fold", (Site("a", "folded into 'b'"), Site("", "kept", "why")), 1e-7, ("mind this",))


def test_queries():
    assert REPORT["a"].action == "folded into 'b'"
    assert REPORT.paths("folded") == ["a"]
    assert len(REPORT) == 2
    assert [site.path for site in REPORT] == ["a", ""]
    with pytest.raises(KeyError, match="this report of fold has no entry 'c'"):
        REPORT["c"]


def test_text_counts_first_and_lists_only_what_was_not_done():
    assert str(REPORT).splitlines() == [
        "fold: 1 of 2 batch norms folded, relative error 1.0e-07, 1 left: why",
        "  (the network): kept (why)",
        "  note: mind this",
    ]


def sites(**actions):
    return tuple(
        Site(f"{i}", a.replace("_", " "), "why" * (a != "folded")) for a, n in actions.items() for i in range(n)
    )


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        (VerbReport("fold", sites(folded=53), 1.23e-7), "fold: 53 of 53 batch norms folded, relative error 1.2e-07"),
        (
            VerbReport("fold", sites(folded=50, fixed_affine_map=3)),
            "fold: 50 of 53 batch norms folded into weights, 3 as fixed affine maps",
        ),
        (
            VerbReport("fold", (*sites(folded=1, kept=1), Site("x", "kept", "another"))),
            "fold: 1 of 3 batch norms folded, 2 left: the reasons differ",
        ),
        (VerbReport("fold", ()), "fold: no batch norms found"),
        (
            VerbReport(
                "convert", (Site("a", "converted with ReLU"), Site("b", "refused", "why")), fusion="1 of 1 is fused"
            ),
            "convert: 1 of 1 is fused; 1 of 2 batch norms converted, 1 refused: why",
        ),
        (
            VerbReport("insert", (Site("a", "inserted BatchNorm1d(3)"), Site("b", "skipped", "last"))),
            "insert: 1 of 2 layers normalized, 1 skipped: last",
        ),
        (VerbReport("revert", (Site("a", "reverted"),)), "revert: 1 of 1 batch norm reverted"),
    ],
)
def test_first_line(report, summary):
    assert report.summary == summary
    assert str(report).partition("\n")[0] == summary
    assert repr(report) == str(report)  # so that a notebook shows the report


def test_long_lists_are_cut_and_what_is_left_comes_first():
    lines = str(VerbReport("fold", sites(fixed_affine_map=120, kept=1))).splitlines()
    assert lines[1] == "  0: kept (why)"
    assert lines[-1] == "  and 111 more; iterate over the report to see all"


def test_reports_travel_with_their_network():
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT
