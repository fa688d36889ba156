"""Test Figure 3, its related tables and the verdicts on made-up results, against numbers computed by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from batchnorm.cli import main
from batchnorm.reproduce.imagenet.claims import best_against_best, trusted, verdicts
from batchnorm.reproduce.imagenet.curves import seeds_of, tuned_baseline, unchanged_seeds_of
from batchnorm.reproduce.imagenet.fig2 import Studies, Study, claims_table, publish, sections, summary
from batchnorm.reproduce.imagenet.fig2_tables import ablation, best_rates, dropout, failures, figure3, on_the_way, rates
from batchnorm.reproduce.imagenet.plan import read_plan
from batchnorm.reproduce.imagenet.result_files import read_all

PLAN = read_plan("fig2", Path("paper-rates"))
DATA = {"train": 50000, "val": 10000, "classes": 100, "sha256": "0"}
ENVIRONMENT = {"hardware": "a CPU", "cores": 2, "gpu": "a GPU", "torch": "2.11", "commit": "abc"}


@pytest.fixture
def results(tmp_path):
    """Return an object that writes made-up results to a folder and reads them."""

    class Results:
        folder, plan = tmp_path / "results", PLAN

        def add(self, name, curve=(), final=None, training=None, diverged=False, steps=None, losses=()):
            run = next(run for run in self.plan.runs if run.name == name)
            curve = [[step, accuracy, accuracy, None, None] for step, accuracy in dict(curve).items()]
            if final is None and curve and not diverged:
                final = curve[-1][1]
            for row, loss in zip(curve, losses, strict=False):
                row.append(loss)
            last = steps or (curve[-1][0] if curve else 0)
            result = {"steps": last, "diverged": diverged, "top1": final, "train_top1": training}
            content = {
                "recipe": asdict(run.recipe),
                "evaluate_every": run.evaluate_every,
                "data": DATA,
                "result": result,
                "environment": ENVIRONMENT,
                "seconds": 10.0,
                "steps_per_second": 200.0,
                "curve": curve,
            }
            self.folder.mkdir(exist_ok=True)
            (self.folder / f"{name}.json").write_text(json.dumps(content))
            return self

        def read(self):
            return read_all(self.plan, self.folder, tmp_path)

    return Results()


def judged(results, claim):
    """Return the verdict on a claim, without the number of seeds."""
    (found,) = [v for v in verdicts(results.plan, results.read()) if v.claim.startswith(claim)]
    return found._replace(verdict=found.verdict.split(",")[0])


INCEPTION = {1000: 0.2, 2000: 0.3, 3000: 0.4, 4000: 0.4}


def test_figure3(results):
    results.add("inception-seed0", INCEPTION).add("inception-seed1", {1000: 0.2, 2000: 0.4, 3000: 0.42, 4000: 0.4})
    results.add("bn-baseline-seed0", {1000: 0.41, 2000: 0.45}, final=0.46)
    results.add("bn-baseline-seed1", {1000: 0.39, 2000: 0.47}, final=0.48)
    results.add("bn-x5-seed0", {500: 0.3, 1000: 0.35})
    results.add("inception-x5-kaiming", {1000: 0.3, 2000: 0.45})
    head, *rows = figure3(results.read()).rows
    # Inception's mean: 0.2, 0.35, 0.41, 0.4; best 0.41 at 3000. BN-Baseline's: 0.40, 0.46.
    assert head[2] == "steps to 41.0%"
    assert rows[0][:9] == [
        "inception", "2", "3,000 (never, 3,000)", "31.0M", "1.0", "1.0", "41.0% (40.0%, 42.0%)", "72.2%", "3,000",
    ]  # fmt: skip
    # The best-tuned network without BN reaches 0.45 at step 2000. BN-Baseline's mean also first reaches 0.45 at this
    # step, where it is 0.46, so the ratio of the steps is 1.
    assert rows[1] == [
        "bn-baseline", "2", "2,000 (1,000, 2,000)", "13.3M", "1.5", "2.3", "46.0% (45.0%, 47.0%)", "72.7%", "2,000",
        "47.0%", "1.0 (1.0, 1.0)",
    ]  # fmt: skip
    assert rows[2] == [
        "bn-x5", "1", "never", "2.1M", "-", "14.8", "35.0%", "73.0%", "1,000", "35.0%", "-",
    ]  # fmt: skip
    assert len(rows) == 3
    assert tuned_baseline(results.read())[0] == "inception-x5, kaiming"
    (results.folder / "inception-x5-kaiming.json").unlink()
    found = figure3(results.read())  # Inception itself is the best unnormalized network
    assert [len(row) for row in found.rows] == [10] * 4
    assert "best unnormalized" not in found.text


def test_steps_on_the_way(results):
    results.add("inception-seed0", {1000: 0.2, 2000: 0.3, 3000: 0.4, 4000: 0.39})
    assert on_the_way(results.read()).rows == []
    results.add("bn-baseline-seed0", {500: 0.05, 1000: 0.36}).add("bn-x5-seed0", {500: 0.4})
    found = on_the_way(results.read())
    assert found.text.startswith(
        "Steps until the mean accuracy over seeds reaches 25%, 50%, 75%, 90% and 100% of Inception's best accuracy"
    )
    assert found.rows == [
        ["network", "10.0%", "20.0%", "30.0%", "36.0%", "40.0%"],
        ["inception", "1,000 (1.0)", "1,000 (1.0)", "2,000 (1.0)", "3,000 (1.0)", "3,000 (1.0)"],
        ["bn-baseline", "1,000 (1.0)", "1,000 (1.0)", "1,000 (2.0)", "1,000 (3.0)", "never"],
        ["bn-x5", "500 (2.0)", "500 (2.0)", "500 (4.0)", "500 (6.0)", "500 (6.0)"],
    ]


TUNED = """
[train]
end_rate = 0.01
log_every = 1
evaluate_every = 1
checkpoint_every = 1
evaluate_batch = 1
[[group]]
name = "figures"
horizon = 1
runs = [
  { name = "plain", recipe = "inception" },
  { name = "faster", recipe = "inception", rate = 0.015, seed = 1 },
]
"""


def test_a_baseline_with_a_rate_of_its_own_is_not_the_papers(results, tmp_path):
    (tmp_path / "plan.toml").write_text(TUNED)
    results.plan = read_plan("fig2", tmp_path / "plan.toml")
    results.add("plain", {100: 0.3}).add("faster", {100: 0.5})
    (row,) = figure3(results.read()).rows[1:]
    assert row[:2] == ["inception", "1"]
    assert row[6] == "30.0%"
    name, runs = tuned_baseline(results.read())
    assert name == "inception, rate 0.015"
    assert runs.curve == [(100, 0.5)]


def test_the_slope_of_the_end_is_stated(results):
    # In the last quarter, from step 3000 to 4000, the accuracy rises by 2 points.
    results.add("inception-seed0", {1000: 0.1, 3000: 0.4, 3500: 0.41, 4000: 0.42})
    assert "rises by 2.00 points (1 or more, so the runs are too short)" in figure3(results.read()).text
    results.add("inception-seed0", {1000: 0.1, 3000: 0.4, 3500: 0.401, 4000: 0.402})
    assert "rises by 0.20 points (less than 1, so it has leveled off)" in figure3(results.read()).text
    results.add("inception-seed1", {1000: 0.1, 3000: 0.4, 3500: 0.403, 4000: 0.406})
    assert "by 0.40 points (less than 1, so it has leveled off; by seeds: 0.20, 0.60)" in figure3(results.read()).text
    results.add("inception-x10", {3000: 0.5, 3500: 0.52, 4000: 0.54})
    tuned = "inception, rate 0.015, with 54.0% at step 4,000; over the last quarter, its accuracy rises by 4.00 points."
    assert figure3(results.read()).text.endswith(tuned)


@pytest.mark.parametrize(
    ("steps", "verdict", "found"),
    [
        ((1000, 1400), "seen", "2.1 (3.0, 2.1 by seeds)"),
        ((1500, 3000), "not seen", "1.0 (2.0, 1.0 by seeds)"),
        ((1000, 2000), "not resolved", "1.5 (3.0, 1.5 by seeds)"),
        ((1000, None), "not resolved", "(3.0, never by seeds)"),
    ],
)
def test_half_the_steps(results, steps, verdict, found):
    results.add("inception-seed0", INCEPTION)  # 40% at step 3000
    assert judged(results, "BN-Baseline reaches").verdict == "not run yet"
    for seed, reached in enumerate(steps):
        curve = {step: 0.4 if reached and step >= reached else 0.1 for step in (1000, 1400, 1500, 2000, 3000)}
        results.add(f"bn-baseline-seed{seed}", curve)
    assert judged(results, "BN-Baseline reaches").verdict == verdict
    assert found in judged(results, "BN-Baseline reaches").found


@pytest.mark.parametrize(("reached", "verdict"), [(210, "seen"), (220, "not seen"), (None, "not seen")])
def test_a_fourteenth_of_the_steps(results, reached, verdict):
    results.add("inception-seed0", INCEPTION)
    curve = {step: 0.4 if reached and step >= reached else 0.1 for step in (210, 220)}
    results.add("bn-x5-seed0", curve)
    assert judged(results, "BN-x5 reaches").verdict == verdict


def test_a_baseline_at_chance_decides_nothing(results):
    results.add("inception-seed0", {1000: 0.011, 2000: 0.012}).add("bn-x5-seed0", {100: 0.4})
    found = judged(results, "BN-x5 reaches Inception's best")
    assert (found.verdict, found.found) == ("not resolved", "Inception's best accuracy is not above chance")


@pytest.mark.parametrize(
    ("x5", "x30", "verdict"),
    [
        ({100: 0.4}, {100: 0.3, 200: 0.5}, "seen"),
        ({100: 0.3, 200: 0.4}, {100: 0.45}, "not seen"),
        ({100: 0.4}, {100: 0.4}, "not seen"),
        ({100: 0.4}, {100: 0.1}, "seen"),  # BN-x30 never reaches 40%
        ({100: 0.1}, {100: 0.4}, "not seen"),
        ({100: 0.1}, {100: 0.1}, "not resolved"),  # neither network reaches 40%
    ],
)
def test_bn_x30_early(results, x5, x30, verdict):
    claim = "BN-x30 trails BN-x5 early"
    results.add("bn-x5-seed0", x5).add("bn-x30-seed0", x30)
    assert judged(results, claim).verdict == "not run yet"
    results.add("inception-seed0", INCEPTION)
    assert judged(results, claim).verdict == verdict


def test_how_long_bn_x30_trails(results):
    results.add("inception-seed0", INCEPTION).add("bn-x5-seed0", {100: 0.1, 200: 0.2, 300: 0.3, 400: 0.4})
    results.add("bn-x30-seed0", {100: 0.0, 200: 0.1, 300: 0.3, 400: 0.3})
    told = "BN-x30's mean is lower at every validation up to step 200"
    assert judged(results, "BN-x30 trails BN-x5 early").found.endswith(told)
    results.add("bn-x30-seed0", {100: 0.1, 200: 0.1})
    assert "lower" not in judged(results, "BN-x30 trails BN-x5 early").found
    results.add("bn-x30-seed0", {100: 0.0, 200: 0.1, 300: 0.2, 400: 0.3})
    assert judged(results, "BN-x30 trails BN-x5 early").found.endswith("BN-x30's mean is lower at every validation")


@pytest.mark.parametrize(
    ("x30", "verdict"), [((0.52, 0.53), "seen"), ((0.49, 0.48), "not seen"), ((0.52, 0.495), "not resolved")]
)
def test_bn_x30_in_the_end(results, x30, verdict):
    results.add("bn-x5-seed0", {100: 0.5}).add("bn-x5-seed1", {100: 0.49})
    assert judged(results, "BN-x30's best").verdict == "not run yet"
    for seed, accuracy in enumerate(x30):
        results.add(f"bn-x30-seed{seed}", {100: accuracy, 200: accuracy - 0.01})
    assert judged(results, "BN-x30's best").verdict == verdict


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.3, "seen"), (0.09, "not seen")])
def test_the_sigmoid_with_bn(results, accuracy, verdict):
    assert judged(results.add("bn-x5-sigmoid", {100: accuracy}), "BN-x5-Sigmoid").verdict == verdict


def test_ten_times_chance_is_not_asked_of_few_classes(results, monkeypatch):
    monkeypatch.setitem(DATA, "classes", 10)  # chance is 0.1, and the midpoint between chance and 1 is 0.55
    assert judged(results.add("bn-x5-sigmoid", {100: 0.56}), "BN-x5-Sigmoid").verdict == "seen"
    assert judged(results.add("bn-x5-sigmoid", {100: 0.54}), "BN-x5-Sigmoid").verdict == "not seen"


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.0139, "seen"), (0.0141, "not seen")])
def test_the_sigmoid_without_bn(results, accuracy, verdict):
    # Chance is 1%, and its standard error over 10,000 images is 0.0995%. An accuracy counts as above chance if it
    # exceeds 1% by more than four standard errors.
    results.add("inception-sigmoid-xavier", {100: 0.01, 200: accuracy})
    assert judged(results, "Inception with sigmoid fails to train (Xavier").verdict == verdict
    assert judged(results, "Inception with sigmoid fails to train (Kaiming").verdict == "not run yet"


def test_the_high_rate_without_bn(results):
    results.add("inception-x5-kaiming", {800: 0.05}, diverged=True, steps=900)
    results.add("inception-x5-xavier", {800: 0.45})
    kaiming, xavier = (
        judged(results, f"Inception at 5 times the rate fails to train ({i}") for i in ("Kaiming", "Xavier")
    )
    assert (kaiming.verdict, kaiming.found) == ("seen", "overflowed by step 900")
    assert (xavier.verdict, xavier.found) == ("not seen", "reached 45.0%")
    assert failures(results.read()).rows[1:] == [
        ["inception-x5", "kaiming", "0", "0.0075", "900", "overflowed by step 900", "diverged by step 900"],
        ["inception-x5", "xavier", "0", "0.0075", "800", "reached 45.0%", "45.0%"],
    ]
    # A network that stays at chance has also failed, although without overflow.
    results.add("inception-x5-xavier", {800: 0.012})
    found = judged(results, "Inception at 5 times the rate fails to train (Xavier")
    assert (found.verdict, found.found) == ("seen", "stayed at chance (1.2%)")


def test_nothing_is_read_from_runs_that_fail_alike_with_and_without_bn(results):
    results.add("inception-x5-kaiming", diverged=True, steps=10).add("bn-x5-seed0", diverged=True, steps=10)
    results.add("inception-seed0", INCEPTION).add("inception-x5-xavier", {800: 0.05}, diverged=True, steps=900)
    finished, untrusted = trusted(results.read())
    assert untrusted == ["bn-x5-seed0", "inception-x5-kaiming"]
    found = {v.claim: v.verdict for v in verdicts(PLAN, finished)}
    assert found["Inception at 5 times the rate fails to train (Kaiming's initialization)"] == "not run yet"
    assert found["BN-x5 reaches Inception's best in 14 times fewer steps"] == "not run yet"
    assert found["Inception at 5 times the rate fails to train (Xavier's initialization)"] == "seen, 1 seed"
    study = Study(PLAN, finished, untrusted)
    (part,) = [part for part in sections(Studies(study)) if part.heading == "Runs that do not count"]
    assert part.rows == [["run"], ["bn-x5-seed0"], ["inception-x5-kaiming"]]
    # An early failure without BN counts if no network with BN fails early.
    results.add("bn-x5-seed0", {400: 0.3})
    assert trusted(results.read()) == (results.read(), [])


WITHOUT = {"x1": 0.2, "x2": 0.3, "x5": 0.4, "x10": 0.1, "x30": None, "x100": None}
WITH = {"x1": 0.3, "x2": 0.4, "x5": 0.45, "x10": 0.5, "x30": 0.4, "x100": 0.05}


def sweep(results, without, with_bn):
    for name, accuracies in (("inception", without), ("bn-baseline", with_bn)):
        for times, accuracy in accuracies.items():
            curve = {400: 0.01} if accuracy is None else {400: accuracy / 2, 800: accuracy}
            results.add(f"rate-{times}-{name}", curve, diverged=accuracy is None)
    return results


def test_a_rate_that_fails_between_rates_that_train(results):
    swept = sweep(results, {**WITHOUT, "x5": 0.1, "x100": 0.3}, {**WITH, "x100": 0.3})
    told = rates(swept.read()).text
    assert "without BN reaches at least half of its best accuracy at the rates 0.0015, 0.003, 0.15 (tried: " in told
    assert "with BN reaches at least half of its best accuracy at every rate tried, 0.0015 to 0.15." in told
    found = judged(results, "BN trains at higher rates").found
    assert found == "rates that train: 0.0015, 0.003, 0.15 without BN and 0.0015 to 0.15 with BN"


def test_rates(results):
    found = rates(sweep(results, WITHOUT, WITH).read())
    assert found.rows[0] == ["rate", "without BN", "with BN"]
    assert found.rows[1] == ["0.0015", "20.0%", "30.0%"]
    assert found.rows[5] == ["0.045", "diverged by step 400", "40.0%"]
    tried = "(tried: 0.0015 to 0.15)."
    assert f"without BN reaches at least half of its best accuracy at the rates 0.0015 to 0.0075 {tried}" in found.text
    assert (
        "with BN reaches at least half of its best accuracy at the rates 0.0015 to 0.045 (tried: 0.0015 to 0.15)."
        in found.text
    )
    # Without BN, the best accuracy is 40%, at step 800. With BN at rate 0.015, the accuracy is 25% at step 400 and 50%
    # at step 800, so it also reaches 40% at step 800.
    assert "(0.0075 without BN, 0.015 with BN), the network with BN takes 1.0 times fewer" in found.text
    found = rates(sweep(results, WITH, WITHOUT).read())
    assert found.text.endswith("the network with BN never reaches the best accuracy of the network without BN.")


def test_the_range_of_rates(results):
    assert judged(sweep(results, WITHOUT, WITH), "BN trains at higher rates").verdict == "seen"
    assert judged(sweep(results, WITH, WITHOUT), "BN trains at higher rates").verdict == "not seen"
    found = judged(sweep(results, dict.fromkeys(WITH), WITH), "BN trains at higher rates")
    assert found.verdict == "seen"
    assert "rates that train: none without BN" in found.found
    (results.folder / "rate-x100-inception.json").unlink()
    assert judged(results, "BN trains at higher rates").verdict == "not run yet"


def drop(results, name, accuracies, gap=0.1, losses=()):
    for share, accuracy in accuracies.items():
        results.add(f"dropout-{share}-{name}", {400: 0.1, 800: 0.2}, accuracy, accuracy + gap, losses=losses)
    return results


def test_dropout(results):
    drop(results, "inception", {0: 0.3, 5: 0.31, 10: 0.32, 40: 0.35})
    found = dropout(drop(results, "bn-baseline", {0: 0.5}).read()).rows
    assert found[1] == ["0%", "40.0%", "30.0%", "60.0%", "50.0%"]
    assert found[4] == ["40%", "45.0%", "35.0%", "not run yet", "not run yet"]


def with_dropout(results, name, share, accuracies, gap=0.2, losses=(2.0, 2.2)):
    for seed, accuracy in enumerate(accuracies, 1):
        run = f"dropout-{share}-{name}-seed{seed}"
        results.add(run, {400: 0.1, 800: 0.2}, accuracy, accuracy + gap, losses=losses)
    return results


REMOVED = "with BN, removing dropout costs no accuracy"
WORTH = "dropout raises the accuracy less with BN than without"


@pytest.mark.parametrize(("without", "verdict"), [(0.5, "confirmed"), (0.46, "confirmed"), (0.44, "refuted")])
def test_less_dropout(results, without, verdict):
    results.plan = read_plan("fig2", Path("dropout"))
    for share in (0, 40):
        with_dropout(results, "inception", share, (0.3, 0.3, 0.3))
    assert judged(results, REMOVED).verdict == judged(results, WORTH).verdict == "not run yet"
    with_dropout(results, "bn-baseline", 0, (without,) * 3)
    with_dropout(results, "bn-baseline", 40, (0.49, 0.50, 0.51))
    # The noise of one run is t s sqrt(1 + 1/n), with n = 3 seeds, s = 0.01 and t = 4.30: 0.0497, which is 4.97 points.
    assert judged(results, REMOVED).verdict == verdict
    assert judged(results, REMOVED).found.endswith(" by seeds; noise of one run: 4.97)")
    assert "all runs without BN and all runs with BN overfit visibly." in dropout(results.read()).text


@pytest.mark.parametrize(
    ("with_bn", "verdict"), [((0.51,) * 3, "confirmed"), ((0.51, 0.51, 0.53), "not resolved"), ((0.53,) * 3, "refuted")]
)
def test_what_dropout_is_worth(results, with_bn, verdict):
    results.plan = read_plan("fig2", Path("dropout"))
    with_dropout(results, "inception", 0, (0.30, 0.30, 0.30))
    with_dropout(results, "inception", 40, (0.32, 0.33, 0.32))  # 2 or 3 points better
    with_dropout(results, "bn-baseline", 0, (0.50, 0.50, 0.50))
    with_dropout(results, "bn-baseline", 40, with_bn)
    assert judged(results, WORTH).verdict == verdict
    told = "without BN 30.0% to 32.3% (+2.00 to +3.00 points by seeds); with BN 50.0% to "
    assert judged(results, WORTH).found.startswith(told)


@pytest.mark.parametrize(("gap", "losses"), [(0.09, (2.0, 2.2)), (0.2, (2.0, 2.09)), (0.2, ())])
def test_dropout_is_not_tested_without_visible_overfitting(results, gap, losses):
    results.plan = read_plan("fig2", Path("dropout"))
    for name in ("inception", "bn-baseline"):
        for share in (0, 40):
            with_dropout(results, name, share, (0.5, 0.5, 0.5), gap, losses)
    found = judged(results, REMOVED)
    assert found.verdict == judged(results, WORTH).verdict == "not tested"
    assert found.found.startswith(
        "no network overfits visibly at 0% dropout (training and validation accuracy: without"
    )
    with_dropout(results, "inception", 0, (0.5, 0.5, 0.5))  # overfits, so dropout can help
    assert judged(results, REMOVED).verdict == "confirmed"


def test_ablation(results):
    results.add("ablation-seed0", final=0.49).add("ablation-seed1", final=0.51)
    results.add("ablation-rate", final=0.40)
    # The noise of one run is t s sqrt(1 + 1/n). With n = 2 seeds, s = 0.01414 and t = 12.71, it is 0.22, which is 22
    # points, so a difference of 10 points is not resolved.
    assert ablation(results.read()).rows[1] == ["increase learning rate", "40.0%", "+10.00 points", "not resolved"]
    results.add("ablation-seed2", final=0.50)
    results.add("ablation-shuffle", final=0.46).add("ablation-photometric", final=0.56)
    results.add("ablation-dropout", {400: 0.01}, diverged=True)
    found = ablation(results.read())
    assert "BN-x5 itself has a mean of 50.00% over 3 seeds; one more run would be within 4.97 points" in found.text
    assert found.rows[1:] == [
        ["increase learning rate", "40.0%", "+10.00 points", "helps"],
        ["remove dropout", "diverged by step 400", "-", "without it, the network diverges"],
        ["shuffle training examples more thoroughly", "46.0%", "+4.00 points", "not resolved"],
        ["reduce the photometric distortions", "56.0%", "-6.00 points", "harms"],
    ]


def test_ablation_without_seeds(results):
    results.add("ablation-rate", final=0.40)
    assert ablation(results.read()).rows[1][2:] == ["-", "not resolved: BN-x5 needs more seeds"]


def test_seeds_of_one_network(results):
    results.add("bn-x5-seed0", {400: 0.3}).add("ablation-seed2", {400: 0.4}).add("ablation-rate", {400: 0.2})
    found = results.read()
    assert [one.run.name for one in unchanged_seeds_of(found, "ablation", "bn-x5").runs] == ["ablation-seed2"]
    assert [one.run.name for one in seeds_of(found, "figures", "bn-x5").runs] == ["bn-x5-seed0"]


def test_nothing_is_claimed_of_nothing(results, tmp_path, capsys):
    nothing = Studies(Study(PLAN, {}, []))
    assert [section.heading for section in sections(nothing)] == ["What the paper found", "Not run yet"]
    assert {verdict.verdict for verdict in verdicts(PLAN, {})} == {"not run yet"}
    publish(nothing, tmp_path)
    summary = json.loads((tmp_path / "fig2.json").read_text())
    assert summary["networks"] == {}
    assert len(summary["not yet run"]) == len(PLAN.runs)
    assert not (tmp_path / "fig2.png").exists()
    printed = capsys.readouterr().out
    assert "not run yet: inception-seed0" in printed
    assert f" and {len(PLAN.runs) - 8} more, listed in {tmp_path / 'fig2.md'}\n" in printed


def sweeps(results, inception=0.015, baseline=0.03, x5=0.15):
    """Add results for all sweeps of the library's plan, with these rates as the best, and read the plan again."""
    results.plan = read_plan("fig2")
    tops = {"inception": inception, "bn-baseline": baseline, "bn-x5": x5}
    for run in [run for run in results.plan.runs if run.group == "rates"]:
        results.add(run.name, {400: 0.2 + 0.1 * (run.recipe.rate == tops[run.variant])})
    results.plan = read_plan("fig2", results=results.folder)
    return results


def of_three(results, name, *curves):
    for seed, curve in enumerate(curves if len(curves) == 3 else curves * 3, 1):
        results.add(f"{name}-seed{seed}", curve)
    return results


def test_the_claims_at_every_choice_of_rates(results, tmp_path):
    of_three(sweeps(results), "inception", INCEPTION)  # 40% at step 3000
    reached = ({step: 0.4 if step >= first else 0.1 for step in (1000, 1200, 1400)} for first in (1000, 1200, 1400))
    of_three(results, "bn-baseline", *reached)
    of_three(results, "bn-x5", {200: 0.4})
    of_three(results, "best-bn-baseline", {2000: 0.4})
    assert [v.verdict for v in best_against_best(results.read())] == ["refuted", "not run yet"]
    assert best_rates(results.read()).rows == [
        ["network", "rate", "seeds", "steps to 40.0%", "times fewer", "maximum accuracy", "at the end"],
        ["inception", "0.015", "3", "3,000 (3,000, 3,000, 3,000)", "1.0", "40.0% (40.0%, 40.0%, 40.0%)", "40.0%"],
        ["bn-baseline", "0.03", "3", "2,000 (2,000, 2,000, 2,000)", "1.5", "40.0% (40.0%, 40.0%, 40.0%)", "40.0%"],
    ]
    assert "With each network at its best rate" not in rates(results.read()).text
    old = Study(PLAN, {}, [])
    table = claims_table(Studies(Study(results.plan, results.read(), []), old, None)).rows
    assert table[0] == ["claim", "paper", "at r = 0.015, 5 r, 30 r", "the paper's rates", "each at its best rate"]
    assert [row[2].split(":")[0] for row in table[1:4]] == ["confirmed", "confirmed", "not run yet"]
    assert table[1][2] == "confirmed: 2.1 (2.1 to 3.0 by seeds)"
    assert [row[3] for row in table[1:4]] == ["not run yet"] * 3
    assert [row[4].split(":")[0] for row in table[1:4]] == ["refuted", "not run yet", "-"]


def test_bn_trains_where_inception_fails(results):
    claim = "BN trains at higher rates"
    sweeps(results)  # the sweeps do not decide the claim, because their highest rates differ
    assert judged(results, claim).verdict == "not run yet"
    of_three(results, "bn-baseline-x5", {400: 0.3})
    assert judged(results, claim).verdict == "not run yet"
    of_three(results, "inception-x5-kaiming", {400: 0.01})
    assert judged(results, claim).verdict == "confirmed"
    told = "at rate 0.075, without BN stayed at chance (1.0%, 1.0%, 1.0%); with BN reached 30.0%, 30.0%, 30.0%"
    assert judged(results, claim).found == told
    assert failures(results.read()).rows[-1][:6] == ["bn-baseline", "kaiming", "3", "0.075", "400", "reached 30.0%"]
    of_three(results, "inception-x5-kaiming", {400: 0.3})
    assert judged(results, claim).verdict == "refuted"


def test_a_best_rate_at_the_end_of_its_sweep_is_told(results):
    assert "an end of its sweep" not in rates(sweeps(results).read()).text
    text = rates(sweeps(results, inception=0.03).read()).text
    assert "The best rate without BN is at an end of its sweep, so a rate outside the sweep may be better." in text


ROOT = Path(__file__).parents[2]


def test_the_published_tables_are_made_again_from_the_result_files(tmp_path, monkeypatch):
    # Do not draw the figures. They are not compared, because their bytes depend on matplotlib's version.
    monkeypatch.setattr("batchnorm.reproduce.imagenet.fig2.pictures", lambda *_: [])
    assert main(["reproduce", "fig2", "--results", str(ROOT / "results/fig2"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "fig2.md").read_bytes() == (ROOT / "results/fig2/fig2.md").read_bytes()
    assert (tmp_path / "fig2.json").read_bytes() == (ROOT / "results/fig2.json").read_bytes()


def test_the_verdict_on_dropout_is_that_of_its_own_plan(results):
    main = Study(read_plan("fig2"), {}, [])
    results.plan = read_plan("fig2", Path("dropout"))
    for name in ("inception", "bn-baseline"):
        for share in (0, 40):
            with_dropout(results, name, share, (0.5, 0.5, 0.5))
    studies = Studies(main, None, Study(results.plan, results.read(), []))
    assert {v["claim"]: v["verdict"] for v in summary(studies)["verdicts"]}[REMOVED] == "confirmed"
    assert {row[0]: row[2].split(":")[0] for row in claims_table(studies).rows}[REMOVED] == "confirmed"


def test_the_runs_at_the_papers_rates_are_shown_until_others_are_finished(results):
    old = Study(PLAN, results.add("inception-seed0", INCEPTION).read(), [])
    main = Study(read_plan("fig2"), {}, [])
    found = summary(Studies(main, old))
    assert (found["rates"], found["networks"]["inception"]["maximum"]) == ("the paper's rates", 0.4)
    assert "rate-0.015-inception" not in found["not yet run"]
    assert "rate-0.015-inception" in found["planned"]
    of_three(sweeps(results), "inception", {1000: 0.5})
    found = summary(Studies(Study(results.plan, results.read(), []), old))
    assert (found["rates"], found["networks"]["inception"]["maximum"]) == ("best of the sweep", 0.5)
    assert found["networks"]["inception"]["rate"] == 0.015


def test_different_data_is_not_mixed(results):
    results.add("bn-x5-seed0", {400: 0.3}).add("bn-x5-seed1", {400: 0.3})
    path = results.folder / "bn-x5-seed1.json"
    path.write_text(path.read_text().replace('"val": 10000', '"val": 5000'))
    with pytest.raises(ValueError, match="bn-x5-seed0 and bn-x5-seed1 use different data"):
        results.read()
