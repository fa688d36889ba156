"""Does multi-crop evaluation keep the device busy? Compare its speed with that of the forward pass alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import above, at_least
from ..evaluate import Crops, SquareBatches, open_squares, predict
from ..evaluate.crops import Count
from ..evaluate.predictions import MeanProbabilities
from ..evaluate.square_crops import Squares
from ..inference import fold
from ..models import inception
from ..results import check_writable, environment, write_json
from ..train.distributed import find_device
from .input import photographs


def crops(
    crops: Count = 144,
    size: int = 224,
    width: float = 1.0,
    images: int = 176,
    batch_size: int = 256,
    workers: int = 8,
    rounds: int = 5,
    device: str = "auto",
    out: Path = Path("runs/bench/crops.json"),
) -> dict[str, Any]:
    """Compare the crops per second of multi-crop evaluation and of the network's forward pass alone.

    "forward" times the folded network of the paper's appendix on a batch that is already on the device. "crops" starts
    from decoded square images in host memory: it also copies, crops, mirrors and normalizes them, and averages the
    outputs. "files" starts from JPEG files.

    Args:
        crops: crops per image.
        size: height and width of a crop.
        width: factor by which the network's numbers of filters are multiplied.
        images: number of generated images, of about 500 x 375 px.
        batch_size: crops per forward pass.
        workers: number of processes that decode images.
        rounds: number of rounds, each of which times "forward", "crops" and "files"; the medians are compared.
        device: cpu, cuda, or auto.
        out: the result file; published result files are in results/.
    """
    options = {key: value for key, value in locals().items() if key != "out"}
    above(0, width=width)
    at_least(1, size=size, images=images, batch_size=batch_size, rounds=rounds)
    at_least(0, workers=workers)
    device = str(find_device(device))
    check_writable(out)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        batches = open_squares(
            photographs(Path(folder), "val", images),
            crops=Crops.of(crops, size),
            batch_size=batch_size,
            workers=workers,
            device=device,
        )
        net = _network(size, width, device)
        contenders = _contenders(net, batches, list(batches), batch_size)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            for name, contender in contenders.items():
                rate = _crops_per_second(contender, device)
                if turn:
                    rates[name].append(rate)
    median = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "what": "crops per second; forward: the network alone; crops: from decoded images; files: from JPEG files",
        "options": {**options, "device": device},
        "environment": environment(),
        "crops per second": rates,
        "share of forward": {name: round(median[name] / median["forward"], 3) for name in ("crops", "files")},
    }
    write_json(out, result)
    for name, value in median.items():
        print(f"{name:8} {value:10,.0f} crops/s  {value / median['forward']:.2f} times the rate of forward")
    return result


def _network(size: int, width: float, device: str) -> nn.Module:
    net = inception(classes=1, size=size, width=width, seed=0).eval()
    folded: Any = fold(net, torch.randn(2, 3, size, size))
    folded = folded.to(device)
    return folded.to(memory_format=torch.channels_last) if device == "cuda" else folded  # type: ignore[no-any-return]


def _contenders(
    net: nn.Module, batches: SquareBatches, decoded: list[Squares], batch_size: int
) -> dict[str, Callable[[], int]]:
    """Return the functions to time; each returns the number of crops that it processed."""
    mean = MeanProbabilities(net, batches.crops, batch_size).to(batches.device)
    x = torch.randn(batch_size, 3, batches.crops.size, batches.crops.size, device=batches.device)
    x = x.contiguous(memory_format=torch.channels_last)
    total = batches.num_examples * batches.crops.count

    def forward() -> int:
        passes = max(1, round(total / batch_size))
        for _ in range(passes):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
                net(x)
        return passes * batch_size

    def from_decoded() -> int:
        for squares in decoded:
            mean(squares)
        return total

    def from_files() -> int:
        predict(net, batches, batch_size=batch_size, name="bench")
        return total

    return {"forward": forward, "crops": from_decoded, "files": from_files}


def _crops_per_second(contender: Callable[[], int], device: str) -> float:
    began = time.perf_counter()
    count = contender()
    if device == "cuda":
        torch.cuda.synchronize(device)
    return count / (time.perf_counter() - began)
