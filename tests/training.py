"""Small training runs for the tests of ``batchnorm.train``."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from ranks import PRELOAD

import batchnorm
from batchnorm.train import RECIPES, Options, train
from batchnorm.train.checkpoint import load_latest
from batchnorm.train.metrics import read

SOURCE = os.path.dirname(os.path.dirname(batchnorm.__file__))


def stripes(rng, label):
    """Return an image of waves along x, y or the diagonal, so that the classes differ by shape, not by color."""
    y, x = np.mgrid[:36, :36]
    wave = np.sin(rng.uniform(0.3, 0.9) * (x, y, x + y)[label] + rng.uniform(0, 6))
    image = 128 + wave[..., None] * rng.uniform(30, 90, 3) + rng.normal(0, 20, (36, 36, 3))
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def striped_folder(root):
    """Save striped images of three classes, each with ten for training and four for validation; return the path."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for label in range(3):
            (root / split / f"class{label}").mkdir(parents=True)
            for k in range(count):
                stripes(rng, label).save(root / split / f"class{label}" / f"{k}.png")
    return root


def small(**fields):
    """Return a recipe that trains in seconds, with four steps per epoch."""
    return replace(RECIPES["bn-x5"], **{"width": 0.04, "size": 32, "batch_size": 8, "epochs": 3, **fields})


OPTIONS = {
    "device": "cpu",
    "workers": 0,
    "log_every": 1,
    "checkpoint_every": 1,
    "evaluate_every": 5,
    "estimate_batches": 3,
}


def train_small(data, out, recipe=None, **options):
    torch.set_num_threads(1)
    return train(recipe or small(), Options(data, out, **{**OPTIONS, **options}))


def start(*args, **options):
    """Train in a new process, forked from one that has already imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=train_small, args=args, kwargs=options)
    process.start()
    return process


def lines_in(out):
    """Return the number of lines in a run's metrics file."""
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def start_and_kill(lines, data, out, recipe=None, **options):
    """Train in a new process, and kill the process when the metrics file has this many lines."""
    process = start(data, out, recipe, **options)
    while process.is_alive() and lines_in(out) < lines:
        time.sleep(0.005)
    process.kill()
    process.join()


def run_without_tyro_or_rich(*words):
    """Run a command in a process that can import neither of the two packages."""
    code = (
        "import sys; sys.modules.update(tyro=None, rich=None)\n"
        "from batchnorm.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True, env=environment(), capture_output=True)


def outcome(out):
    """Return what must not depend on interruptions: step, weights, momentum, lines of metrics and final network."""
    last, final = (load_latest(out / folder) for folder in ("checkpoints", "final"))
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read(out / "metrics.jsonl")]
    momentum = {k: v["momentum_buffer"] for k, v in last.state["optimizer"]["state"].items()}
    return last.step, last.model, momentum, lines, final.model


def assert_same_outcome(a, b):
    """Compare two runs bit for bit."""
    (step_a, *tensors_a, lines_a, final_a), (step_b, *tensors_b, lines_b, final_b) = outcome(a), outcome(b)
    assert step_a == step_b
    assert lines_a == lines_b
    torch.testing.assert_close([*tensors_a, final_a], [*tensors_b, final_b], rtol=0, atol=0)


def torchrun(ranks, data, out, *extra):
    """Return the command line of a small run on several ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    recipe = ["--recipe", "bn-x5", "--width", "0.04", "--size", "32", "--batch-size", "8", "--epochs", "3"]
    options = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items()]
    return [*launcher, *extra, "-m", "batchnorm", "train", *recipe, "--data", str(data), "--out", str(out), *options]


def environment():
    return {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
