import json

import pytest

from batchnorm.processes import torch_threads
from batchnorm.report.page import write_report
from batchnorm.report.runs import read_runs
from batchnorm.reproduce.mnist.network_run import NetworkRun
from batchnorm.reproduce.mnist.training import Setting


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Train a network with BN and one without for a few steps, and return the folder of the two runs."""
    out = tmp_path_factory.mktemp("runs")
    with torch_threads(1):
        for name, batch_norm in (("with-bn", True), ("without-bn", False)):
            NetworkRun(out / name, Setting(batch_norm, steps=200)).train()
    return out


@pytest.fixture(scope="session")
def page(folder):
    return write_report(read_runs([folder]), folder / "report.html")


MARKUP = "</script></title><script>hacked=1</script><img src=x onerror=hacked=1>\"' onload=hacked=1 $title \u2028"


@pytest.fixture
def hostile(tmp_path):
    """Write two runs whose texts include HTML markup and names of properties that all JavaScript objects have."""
    out = tmp_path / "hostile"
    for name, batch_norm in (("<script>hacked=1<", True), ("<img src=x onerror=hacked=1>", False)):
        folder = out / name
        folder.mkdir(parents=True)
        layers = (MARKUP, "__proto__", "constructor") if batch_norm else (MARKUP, "toString", "layer")
        records = [
            {
                "step": step,
                f"{MARKUP} accuracy": 0.5 + step / 100,
                layers[1]: 1.0,
                layers[2]: float("nan"),
                "percentiles": {layer: {"z": [[-1.0 - step, 0.0], [0.0, 1.0], [1.0, 2.0]]} for layer in layers},
                "gradient_change": {layer: {"relative": 0.5, "cosine": 0.5} for layer in layers},
            }
            for step in (1, 2, 3)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        config = {"batch_norm": batch_norm, MARKUP: [MARKUP], "environment": {MARKUP: MARKUP}, "surrogate": "\ud800"}
        (folder / "config.json").write_text(json.dumps({**config, "percentiles": [15, 50, 85]}))
        (folder / "summary.json").write_text(
            json.dumps({"accuracy": {MARKUP: 0.5, "folded" if batch_norm else f"top-1 {MARKUP}": 0.5}})
        )
    return out
