"""Test Figures 2 and 3 with networks that are trained for a few steps, in parallel and over several sessions."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from training import environment, lines_in, run_without_tyro_or_rich

from batchnorm.cli import main
from batchnorm.reproduce.imagenet.fig2 import Fig2, _missing, fig2
from batchnorm.reproduce.imagenet.plan import read_plan
from batchnorm.train import RECIPES

PLAN = """
[recipe]
size = 32
width = 0.04
batch_size = 8
[train]
end_rate = 0.02
log_every = 1
evaluate_every = 3
checkpoint_every = 1000
evaluate_batch = 6
[[group]]
name = "figures"
horizon = 3
runs = [
  { name = "plain", recipe = "inception", seed = 0 },
  { name = "normalized", recipe = "bn-baseline", seed = 0 },
  { name = "other", recipe = "bn-baseline", seed = 1 },
]
[[group]]
name = "rates"
horizon = 1
runs = [{ name = "far", recipe = "inception", rate = 1e9, evaluate_every = 1 }]
"""


def run(data, plan, out, **options):
    return fig2(Fig2(data, out, plan=plan, device="cpu", workers=0, **options))


@pytest.fixture(scope="module")
def session(data, plan, tmp_path_factory):
    """Train two runs in parallel, and a third that diverges."""
    out = tmp_path_factory.mktemp("fig2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHNORM_COMMIT", "1234abc")
        run(data, plan, out, jobs=2, only=("plain", "normalized", "far"))
    return out


def read(out, name):
    return json.loads((out / "results" / f"{name}.json").read_text())


def test_what_a_run_leaves(session):
    result = read(session, "normalized")
    assert [row[0] for row in result["curve"]] == [3, 6, 9, 12]
    assert result["recipe"]["epochs"] == 3
    assert 0.96 ** (3 / result["recipe"]["decay_epochs"]) == pytest.approx(0.02)
    assert (result["data"]["train"], result["data"]["val"], result["data"]["classes"]) == (30, 12, 3)
    assert (result["result"]["steps"], result["result"]["diverged"]) == (12, False)
    assert 0 <= result["result"]["top1"] <= 1
    assert 0 <= result["result"]["train_top1"] <= 1
    assert result["environment"]["commit"] == "1234abc"
    assert result["seconds"] > 0
    # Each training loss is the mean over the steps since the previous validation.
    lines = [json.loads(line) for line in (session / "runs/normalized/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert result["columns"][-1] == "val_loss"
    assert all(row[-1] > 0 for row in result["curve"])
    assert result["curve"][1][3] == pytest.approx(sum(losses[3:6]) / 3, abs=1e-5)


def test_divergence_is_a_result(session):
    assert read(session, "far")["result"]["diverged"] is True
    assert "diverged by step" in (session / "fig2.md").read_text()


def test_what_a_session_publishes(session):
    table, summary = (session / "fig2.md").read_text(), json.loads((session / "fig2.json").read_text())
    assert summary["not yet run"] == ["other"]
    assert "| other | not run yet |" in table
    assert "| inception | 1 |" in table
    assert "31.0M" in table
    for name in ("fig2.png", "fig2.svg", "fig2-unnormalized.png", "fig2-rates.png"):
        assert (session / name).stat().st_size > 1000
    assert "Figure 3" in (session / "report.html").read_text()
    verdicts = {verdict["claim"]: verdict["verdict"] for verdict in summary["verdicts"]}
    assert verdicts["BN-x5-Sigmoid trains"] == "not run yet"


def test_figures_are_made_of_the_files_alone(plan, session, tmp_path, capsys):
    shutil.copytree(session / "results", tmp_path / "results")
    words = ["--plan", str(plan), "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out")]
    decoded = tmp_path / "out" / "decoded" / "train-8px-0.safetensors"  # as if from a session that is training now
    decoded.parent.mkdir(parents=True)
    decoded.touch()
    assert main(["reproduce", "fig2", *words]) == 0
    assert decoded.exists()
    assert "not run yet: other" in capsys.readouterr().out
    assert (tmp_path / "out/fig2.md").read_text() == (session / "fig2.md").read_text()
    assert (tmp_path / "out/fig2.svg").read_bytes() == (session / "fig2.svg").read_bytes()


def test_a_folder_of_results_that_is_not_there(tmp_path, capsys):
    assert main(["reproduce", "fig2", "--results", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "no has no result files: to train the networks, add --data DIR; to use existing results, give their" in error
    assert main(["reproduce", "fig2", "--out", str(tmp_path / "out")]) == 2  # no results, either
    assert "out/results has no result files" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_jobs_are_too_few(data, plan, tmp_path, capsys):
    words = ["--data", str(data), "--plan", str(plan), "--out", str(tmp_path)]
    assert main(["reproduce", "fig2", *words, "--jobs", "0"]) == 2
    assert "jobs=0: must be 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(data, plan, session, tmp_path):
    words = ["--data", str(data), "--plan", str(plan), "--out", str(tmp_path), "--device", "cpu", "--workers", "0"]
    command = [sys.executable, "-m", "batchnorm", "reproduce", "fig2", *words, "--jobs", "2", "--group", "figures"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    runs = [tmp_path / "runs" / name for name in ("plain", "normalized")]
    while process.poll() is None and min(map(lines_in, runs)) <= 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, missing = process.wait(), json.loads((tmp_path / "fig2.json").read_text())["not yet run"]
    assert code == 130 or missing == ["far"]  # on a busy machine, the runs may finish before the signal
    assert missing[-1] == "far"
    assert all(list((folder / "checkpoints").glob("step-*")) for folder in runs)
    # With two jobs again, each has as many threads as before, so the results are equal bit for bit.
    run(data, plan, tmp_path, only=("plain", "normalized"), jobs=2)
    for name in ("plain", "normalized"):
        assert read(tmp_path, name)["curve"] == read(session, name)["curve"]
        assert read(tmp_path, name)["result"]["top1"] == read(session, name)["result"]["top1"]


def test_the_time_limit(data, plan, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(data, plan, tmp_path, minutes=0.0)
    assert "not run yet: plain, normalized, other, far" in capsys.readouterr().out


def test_results_of_another_plan_are_refused(data, plan, session, tmp_path, capsys):
    other = tmp_path / "plan.toml"
    other.write_text(plan.read_text().replace("horizon = 3", "horizon = 4"))
    assert main(["reproduce", "fig2", "--plan", str(other), "--out", str(session)]) == 2
    error = capsys.readouterr().err
    assert "plain.json belongs to another plan" in error
    assert "epochs is 3.0 instead of 4.0" in error
    other.write_text(plan.read_text().replace("evaluate_every = 3", "evaluate_every = 4"))
    with pytest.raises(ValueError, match="evaluate_every is 3 instead of 4"):
        run(data, other, session)


def test_other_data_is_refused(data, plan, session, tmp_path):
    other = shutil.copytree(data, tmp_path / "data")
    (other / "train/class0/0.png").unlink()
    with pytest.raises(ValueError, match="use different data"):
        run(other, plan, session)


def test_a_run_that_fails_says_why(data, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("size = 32", "size = 16"))
    with pytest.raises(RuntimeError, match=r"plain failed: exit status 1(.|\n)*32 px or more"):
        run(data, plan, tmp_path / "out", only=("plain",), jobs=2)
    assert "plain" in json.loads((tmp_path / "out/fig2.json").read_text())["not yet run"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("horizon = 3", 'horizon = 3\nname = "x"', "Cannot overwrite"),
        ('name = "figures"', 'name = "figure"', "unknown group 'figure'; choose from"),
        ('recipe = "inception"', 'recipe = "bn-x7"', "unknown recipe 'bn-x7'"),
        ("rate = 1e9", "rates = 1e9", "unknown fields in the recipe: rates"),
        ("end_rate = 0.02", "end_rate = 1.5", "end_rate=1.5 must be between 0 and 1"),
        ("rate = 1e9", "decay_epochs = 3", "computed from horizon and end_rate"),
        ('name = "normalized"', 'name = "plain"', "two runs are called plain"),
        ("horizon = 3", "horizon = nan", "horizon=nan must be above 0"),
        ("horizon = 3", "horizon = 3\nrate = 0.1", "group figures: unknown key rate; known keys are"),
        ("log_every", "log_evry", "train: unknown key log_evry; known keys are"),
        ("checkpoint_every = 1000", "checkpoint_every = 0", "checkpoint_every=0: must be a positive integer"),
        ('name = "plain"', 'name = "../plain"', "cannot be the name of a run"),
        ("rate = 1e9", "decay = 1.0", "decay=1.0: must be between 0 and 1"),
        ("rate = 1e9", "rate = 1e9, times = 5", "'times' is only for rates from a sweep"),
        ("rate = 1e9", "times = 5", "'times' is only for rates from a sweep"),
        (
            "seed = 1",
            'rate = "best"',
            "other: the rate comes from a sweep of bn-baseline, but the group 'rates' has no runs of bn-baseline",
        ),
    ],
)
def test_a_plan_that_is_none(tmp_path, old, new, says):
    assert old in PLAN
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace(old, new, 1))
    with pytest.raises(ValueError, match=says):
        read_plan("fig2", path)


def test_an_unknown_name(data, plan, tmp_path):
    with pytest.raises(ValueError, match="no run named nobody; its runs are plain"):
        run(data, plan, tmp_path, only=("nobody",))


PAPER_RATES = Path("paper-rates")


def test_the_committed_plan_is_complete(tmp_path):
    plan = read_plan("fig2")
    assert {run.group for run in plan.runs} == {"rates"}
    assert set(plan.waiting.values()) == {"the sweep of inception", "the sweep of bn-baseline", "the sweep of bn-x5"}
    with pytest.raises(ValueError, match="bn-x5-seed1 cannot run yet, because the sweep of inception is not finished"):
        plan.chosen((), ("bn-x5-seed1",))
    with pytest.raises(ValueError, match=r"no run named bn-x5-seed9; did you mean .*bn-x5-seed1"):
        plan.chosen((), ("bn-x5-seed1", "bn-x5-seed9"))
    with pytest.raises(FileNotFoundError, match="paperrates: no such file; the library's plans are fig2, paper-rates"):
        read_plan("fig2", Path("paperrates"))
    for run in plan.runs:  # the third rate of each variant is the best
        third = sorted(one.recipe.rate for one in plan.runs if one.variant == run.variant)[2]
        result = {"top1": 0.3 if run.recipe.rate == third else None}
        (tmp_path / f"{run.name}.json").write_text(json.dumps({"result": result}))
    plan = read_plan("fig2", results=tmp_path)
    assert plan.waiting == {}
    assert plan.best == {"inception": 0.01, "bn-baseline": 0.03, "bn-x5": 0.075}
    networks = {}
    for run in plan.runs:
        if run.group != "rates":
            key = (run.group, run.variant, run.recipe.init, run.recipe.rate)
            networks.setdefault(key, set()).add(run.recipe.seed)
        recipe = run.recipe
        assert (recipe.size, recipe.batch_size, recipe.width) == (64, 32, 1.0)
        assert recipe.decay ** (recipe.epochs / recipe.decay_epochs) == pytest.approx(0.001)
        assert recipe.epochs == (8 if run.variant == "inception-sigmoid" else 16)
        assert run.evaluate_every == 400
    assert networks == {
        key: {1, 2, 3}
        for key in [
            ("figures", "inception", "kaiming", 0.01),
            ("figures", "bn-baseline", "kaiming", 0.01),
            ("figures", "bn-x5", "kaiming", 0.05),
            ("figures", "bn-x30", "kaiming", 0.3),
            ("figures", "bn-x5-sigmoid", "kaiming", 0.05),
            ("figures", "bn-baseline", "kaiming", 0.05),
            ("figures", "inception-x5", "kaiming", 0.05),
            ("figures", "inception-x5", "xavier", 0.05),
            ("figures", "inception-sigmoid", "kaiming", 0.01),
            ("figures", "inception-sigmoid", "xavier", 0.01),
            ("best", "bn-baseline", "kaiming", 0.03),
            ("best", "bn-x5", "kaiming", 0.075),
        ]
    }


def test_the_librarys_other_plans_have_folders_of_their_own(data, tmp_path):
    named = Fig2(data, tmp_path, plan=PAPER_RATES, device="cpu")
    assert named.result_files == tmp_path / "results/paper-rates"
    (old,) = [job for job in _missing(named, read_plan("fig2", PAPER_RATES)) if job.name == "rate-x10-inception"]
    assert old.folder == tmp_path / "paper-rates/runs/rate-x10-inception"
    new = _missing(Fig2(data, tmp_path, device="cpu"), read_plan("fig2"))[0]
    assert (new.folder.parent, new.files.results) == (tmp_path / "runs", tmp_path / "results")


def test_the_plan_of_dropout_changes_nothing_else():
    runs = read_plan("fig2", Path("dropout")).runs
    kinds = {(run.variant, run.recipe.dropout, run.recipe.seed) for run in runs}
    assert kinds == {(v, d, s) for v in ("inception", "bn-baseline") for d in (0.0, 0.4) for s in (1, 2, 3)}
    assert len({replace(r.recipe, name="", batch_norm=False, dropout=0.0, seed=0) for r in runs}) == 1


SWEEP = (
    PLAN[: PLAN.index("[[group]]")]
    + """
[[group]]
name = "rates"
horizon = 1
runs = [{ name = "low", recipe = "inception", rate = 0.003 }]
[[group]]
name = "figures"
base = "inception"
horizon = 1
runs = [{ name = "faster", recipe = "bn-x5" }]
"""
)


@pytest.mark.slow
def test_a_sitting_needs_only_the_result_files_of_the_ones_before(data, tmp_path):
    """A finished sweep sets the rates of other runs, also in a later session that has only the sweep's result files."""
    plan = tmp_path / "plan.toml"
    plan.write_text(SWEEP)
    run(data, plan, tmp_path / "whole", jobs=2)
    whole = json.loads((tmp_path / "whole/fig2.json").read_text())
    assert whole["not yet run"] == []
    assert whole["best rates"] == {"inception": 0.003}
    assert read(tmp_path / "whole", "faster")["recipe"]["rate"] == pytest.approx(0.015)
    run(data, plan, tmp_path / "first", jobs=2, only=("low",))
    shutil.copytree(tmp_path / "first/results", tmp_path / "second/results")  # nothing else is copied
    run(data, plan, tmp_path / "second", jobs=2)
    for name in ("low", "faster"):
        for key in ("recipe", "curve", "data"):
            assert read(tmp_path / "second", name)[key] == read(tmp_path / "whole", name)[key]


def test_the_plan_of_the_papers_rates_is_complete():
    runs = read_plan("fig2", PAPER_RATES).runs
    by_group = {group: [run for run in runs if run.group == group] for group in ("figures", "rates", "dropout")}
    variants = [run.variant for run in by_group["figures"]]
    assert [variants.count(name) for name in ("inception", "bn-baseline", "bn-x5", "bn-x30")] == [3, 2, 2, 2]
    for failure in ("inception-x5", "inception-sigmoid"):
        inits = {run.recipe.init for run in by_group["figures"] if run.variant == failure}
        assert inits == {"kaiming", "xavier"}
    times = {round(run.recipe.rate / 0.0015) for run in by_group["rates"]}
    assert times == {1, 2, 5, 10, 30, 100}
    shares = [(run.recipe.batch_norm, run.recipe.dropout) for run in by_group["dropout"]]
    assert sorted(shares) == [(bn, share) for bn in (False, True) for share in (0.0, 0.05, 0.1, 0.4)]
    for run in runs:
        recipe = run.recipe
        assert (recipe.size, recipe.batch_size, recipe.width) == (64, 32, 1.0)
        if run.group == "figures" and run.name != "inception-x10":
            assert recipe.rate == RECIPES[run.variant].rate
        if run.name != "ablation-decay":
            left = 0.003 if run.group == "figures" else 0.01
            assert recipe.decay ** (recipe.epochs / recipe.decay_epochs) == pytest.approx(left)


def test_the_ablation_takes_back_one_modification_each():
    group = [run for run in read_plan("fig2", PAPER_RATES).runs if run.group == "ablation"]
    seeds = [run for run in group if set(run.changed) == {"seed"}]
    assert len({run.recipe.seed for run in seeds}) == 3
    runs, x5 = group[3:], seeds[0].recipe
    base = next(run.recipe for run in read_plan("fig2", PAPER_RATES).runs if run.variant == "bn-baseline")
    fields = ("rate", "dropout", "weight_decay", "decay_epochs", "local_response", "shuffle", "photometric")
    assert [list(run.changed) for run in runs] == [[field] for field in fields]
    for run, field in zip(runs, fields, strict=True):
        taken_back = 6 * x5.decay_epochs if field == "decay_epochs" else getattr(base, field)
        assert getattr(run.recipe, field) == (
            taken_back if isinstance(taken_back, str) else pytest.approx(taken_back, rel=1e-3)
        )
        assert getattr(run.recipe, field) != getattr(x5, field)
        assert run.recipe.epochs == x5.epochs


def test_it_needs_neither_tyro_nor_rich(plan, session, tmp_path):
    words = ["--plan", plan, "--results", session / "results", "--out", tmp_path]
    run_without_tyro_or_rich("reproduce", "fig2", *words)
    assert (tmp_path / "fig2.md").exists()


def test_the_steps_in_the_documentation_are_the_whole_plan():
    text = (Path(__file__).parents[2] / "docs" / "fig2.md").read_text()
    steps = re.findall(r"^fig2 --only (.*)$", text, flags=re.MULTILINE)
    names = [subprocess.check_output(["bash", "-c", f"echo {step}"], text=True).split() for step in steps]
    assert [len(step) for step in names] == [12, 12, 12, 12, 6]
    plan = read_plan("fig2")
    assert sorted(name for step in names for name in step) == sorted([*(run.name for run in plan.runs), *plan.waiting])
    # The rates of each step's runs come from sweeps that earlier steps have finished.
    swept = [{name.split("-", 2)[2] for name in step if name.startswith("rate-")} for step in names]
    assert swept[:2] == [{"inception", "bn-baseline"}, {"bn-x5"}]
    assert {plan.waiting[name] for name in names[1] if name in plan.waiting} == {"the sweep of inception"}


def test_the_plan_in_the_documentation_is_one(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "fig2.md").read_text()
    (plan,) = [block for block in re.findall(r"```\n(.*?)```", text, flags=re.DOTALL) if "[train]" in block]
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    assert [run.recipe.epochs for run in read_plan("fig2", path).runs] == [10, 10]
