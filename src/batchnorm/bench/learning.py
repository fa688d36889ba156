"""Does a converted network learn as well as the stock one?

    python -m batchnorm bench learning --data DIR --out runs/bench/learning.json

For each seed, the stock and the converted network start from the same weights and train on the same crops in the same
order. They train with SGD, Nesterov momentum and a one-cycle learning rate. On a GPU, they use bf16 autocast and
channels_last.

A network's range is the difference between its highest and lowest accuracy over seeds. The two mean accuracies count as
the same if they differ by no more than the wider range.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ..data import Augment, ImageBatches, Normalize, open_images
from ..data.image_sources import open_source
from ..errors import SEED_MAX, above, at_least, between
from ..evaluate.accuracy import Accuracy, count_correct
from ..network_factory import make_network
from ..processes import workers as worker_processes
from ..results import check_writable, write_result
from ..surgery import convert
from ..train.distributed import find_device
from .network_steps import network_to_convert

QUESTION = "validation accuracy of a stock network and of its converted copy after the same training"
FORMS = ("stock", "converted")
CROP_AREA = (0.25, 1.0)  # range of a crop's area as a fraction of the image's; smaller crops show too little


@dataclass(frozen=True)
class LearningRecipe:
    """The training settings, which all runs share."""

    data: Path
    network: str
    size: int
    batch: int
    epochs: int
    rate: float
    device: str
    workers: int


@dataclass(frozen=True)
class LearningRun:
    """The result of one run: each epoch's mean training loss, and the validation accuracy after each epoch."""

    form: str
    seed: int
    accuracy: float
    losses: list[float]
    accuracies: list[float]
    seconds: float


def train(form: str, seed: int, recipe: LearningRecipe) -> LearningRun:
    """Train the stock or the converted network with one seed."""
    device, cuda = torch.device(recipe.device), recipe.device == "cuda"
    images, held_out = _open(recipe, "train", seed), _open(recipe, "val", seed)
    torch.manual_seed(seed)
    net: Any = make_network(recipe.network)[0].train().to(device)
    if cuda:
        net = net.to(memory_format=torch.channels_last)
    if form == "converted":
        example = torch.randn(8, 3, recipe.size, recipe.size, generator=torch.Generator().manual_seed(seed))
        net = convert(net, example.to(device))
    steps = recipe.epochs * len(images)
    optimizer = torch.optim.SGD(net.parameters(), recipe.rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=steps, pct_start=0.2)
    augment, normalize = Augment("none").to(device), Normalize().to(device)
    draws = torch.Generator().manual_seed(seed)
    losses, accuracies = [], []
    torch.manual_seed(seed)  # seed again, because `convert` may have drawn random numbers
    began = time.monotonic()
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=device)
        net.train()
        for batch, labels in images.epoch(epoch):
            x = augment(batch, augment.draw(len(batch), draws).to(device))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = F.cross_entropy(net(x).float(), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        losses.append(float(total) / len(images))
        counted = count_correct(net.eval(), held_out.epoch(0), normalize, device, bf16=cuda)
        accuracies.append(Accuracy.of(counted).top1)
    return LearningRun(form, seed, accuracies[-1], losses, accuracies, time.monotonic() - began)


def _open(recipe: LearningRecipe, split: Literal["train", "val"], seed: int) -> ImageBatches:
    return open_images(
        recipe.data,
        split,
        size=recipe.size,
        batch_size=recipe.batch,
        train=split == "train",
        seed=seed,
        workers=recipe.workers,
        cache="device",
        device=recipe.device,
        crop_area=CROP_AREA,
    )


def compare(runs: Sequence[LearningRun]) -> dict[str, Any]:
    """Return both networks' mean accuracies and ranges over seeds, and whether the means count as the same.

    >>> def run(form, accuracy):
    ...     return LearningRun(form, 0, accuracy, [], [], 0.0)
    >>> compare([run("stock", 0.50), run("stock", 0.54), run("converted", 0.51), run("converted", 0.55)])["same"]
    True
    """
    found: dict[str, Any] = {}
    for form in FORMS:
        if ends := [run.accuracy for run in runs if run.form == form]:
            found[form] = {"mean": statistics.mean(ends), "lowest": min(ends), "highest": max(ends), "runs": len(ends)}
    if len(found) == len(FORMS):
        stock, converted = (found[form] for form in FORMS)
        found["difference of means"] = converted["mean"] - stock["mean"]
        found["wider range"] = max(form["highest"] - form["lowest"] for form in (stock, converted))
        if stock["runs"] > 1 and converted["runs"] > 1:
            found["same"] = abs(found["difference of means"]) <= found["wider range"]
    return found


def learning(
    data: Path,
    network: str = "torchvision:resnet18",
    seeds: tuple[int, ...] = (0, 1, 2),
    size: int = 64,
    batch: int = 256,
    epochs: int = 20,
    rate: float = 0.2,
    device: str = "auto",
    workers: int = 2,
    jobs: int = 6,
    out: Path = Path("runs/bench/learning.json"),
) -> list[LearningRun]:
    """Train a stock network and its converted copy with the same recipe, and compare their validation accuracies.

    Args:
        data: an image folder or tar shards, with the splits train and val.
        network: torchvision:NAME, timm:NAME or MODULE:FUNCTION, with at least as many outputs as there are classes.
        seeds: each seed determines the initial weights, the crops and the order of the images; the comparison needs
            several seeds, such as 0 1 2.
        size: height and width of the crops.
        batch: images per step.
        epochs: number of epochs of each run.
        rate: the highest learning rate of the cycle.
        device: cpu, cuda, or auto.
        workers: processes per run that decode the images; each image is decoded once, at the start.
        jobs: number of runs in parallel, each in its own process; 0 runs them one after the other in this process.
        out: the result file; the published one is results/same-learning-h200.json.
    """
    at_least(1, size=size, epochs=epochs)
    at_least(2, batch=batch)
    at_least(0, workers=workers, jobs=jobs)
    above(0, rate=rate)
    between(0, SEED_MAX, seeds=seeds)
    check_writable(out)
    # Before any training, raise an error if the network cannot be built or has no batch normalization.
    network_to_convert(network)
    recipe = LearningRecipe(data, network, size, batch, epochs, rate, find_device(device).type, workers)
    sources = {split: open_source(data, split) for split in ("train", "val")}
    images = {split: {"images": len(s.labels), "classes": len(s.classes)} for split, s in sources.items()}
    runs: list[LearningRun] = []
    todo = [(form, seed, recipe) for seed in seeds for form in FORMS]
    told = {**asdict(recipe), "data": None, "seeds": len(seeds), "cycle": "one, warm-up 20%", "crops": CROP_AREA}
    with worker_processes(min(jobs, len(todo))) as train_all:
        for outcome in train_all(train, todo, math.inf):
            run: LearningRun = outcome.value()
            print(f"{run.form:<9} seed {run.seed}: {run.accuracy:.2%} after {run.seconds:.0f} s", flush=True)
            runs = sorted([*runs, run], key=lambda run: (FORMS.index(run.form), run.seed))
            write_result(out, QUESTION, options=told, data=images, **compare(runs), runs=[asdict(run) for run in runs])
    found = compare(runs)
    if "same" in found:
        verdict = "which is within the range" if found["same"] else "which is MORE than the range"
        verdict += f" over seeds ({found['wider range']:.2%})"
    else:
        verdict = "but one seed is not enough to compare them: give several, such as --seeds 0 1 2"
    print(
        f"stock {found['stock']['mean']:.2%}, converted {found['converted']['mean']:.2%}: they differ by"
        f" {found['difference of means']:+.2%}, {verdict}"
    )
    return runs
