"""``batchnorm fold``: write the inference network of a run, or of your own network, to a file."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor, nn

from ..arguments import Positional, arg
from ..data.crop_boxes import CENTER_SHARE
from ..inference import export
from ..network_copy import outputs
from ..network_factory import make_network
from ..optional_packages import check_installed
from .checkpoint import difference
from .final_network import example_images
from .state_dicts import read_state_dict, unwrapped
from .trained_run import TrainedRun, load


def fold(
    network: Annotated[str, Positional, arg(metavar="RUN|MODULE:FUNCTION")],
    output: Annotated[Path, arg(aliases=["-o"])],
    weights: Path | None = None,
    input: tuple[int, ...] = (),
    fixed_batch: bool = False,
    trust: bool = False,
) -> None:
    """Fold a network's batch normalization into its weights and write the result as an ONNX or torch.export file.

    The file is then run, and its outputs are compared with the network's. For a run, the file also holds the class
    names and the preprocessing as JSON: classes, size, mean, std and crop. To preprocess an image, first cut out its
    center square, then resize the square to size x size with Pillow's BILINEAR filter. The square's side is
    max(round(crop * short), min(short, size)), where short is the image's short side. The square's left edge is at
    (width - side) // 2, and its top edge is at (height - side) // 2. The network's input has the shape
    (n, 3, size, size) and holds (x / 255 - mean) / std for each RGB value x. The network's output is the class scores
    before softmax.

    Args:
        network: the folder of a finished run, torchvision:NAME, timm:NAME, or a function that builds the network,
            written MODULE:FUNCTION or FILE.py:FUNCTION. The module may be in the current folder. The function is called
            without arguments and returns the network, or the network and an example batch.
        output: the file to write, NAME.onnx or NAME.pt2.
        weights: a file with a state dict to load, .safetensors or .pt (read with weights_only); not for a run, which
            has its own weights.
        input: the shape of an example batch, such as 1 3 224 224; not for a run, and not needed if the function
            returns a batch.
        fixed_batch: write a network that takes only batches with as many examples as the example batch (2 for a run).
        trust: allow calling the function named in the run's recipe.json; a run that trained a network of your own
            needs this.
    """
    if output.suffix == ".onnx":
        check_installed("onnx", "onnxscript", "onnxruntime")
    is_run = Path(network).is_dir()
    if not is_run and ":" not in network:
        raise ValueError(
            f"'{network}' is neither the folder of a run nor a function: give MODULE:FUNCTION, such as mynets:resnet,"
            " or a run's folder"
        )
    if is_run or (weights is not None and weights.suffix == ".safetensors"):
        check_installed("safetensors")
    metadata: dict[str, str] = {}
    if is_run:
        if weights is not None or input:
            raise ValueError(
                f"{network} is a folder, so it must be a run, which has its own weights and image size: remove"
                " --weights and --input, or give MODULE:FUNCTION instead of the folder"
            )
        run = load(network, trust=trust)
        net, example, metadata = run.trained, example_images(run.preprocessing.size), _metadata(run)
    else:
        net, example = make_network(network)
        if weights is not None:
            state = unwrapped(read_state_dict(weights), net)
            try:
                net.load_state_dict(state)
            except RuntimeError as error:
                problem = difference(net.state_dict(), state) or error
                raise ValueError(f"{weights} does not fit {network}: {problem}") from error
        elif _never_trained(net):
            print(
                f"warning: the batch normalization layers of {network} have counted no training batches: if the network"
                " is not trained, add --weights FILE",
                file=sys.stderr,
            )
        if input:
            example = _example(net, input)
    if example is None:
        raise ValueError(
            f"{network} returned a network without an example batch: add the shape of a batch, such as"
            " --input 1 3 224 224"
        )
    # Call eval(), because export() would warn about a network in training mode. Print other warnings on one line each,
    # without the source line that Python would add.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = export(net.eval(), example, output, dynamic_batch=not fixed_batch, metadata=metadata)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    print(done)


def _never_trained(net: nn.Module) -> bool:
    """Return whether the network has counters of training batches, and all of them are 0."""
    counters = [b for name, b in net.named_buffers() if name.rpartition(".")[2] == "num_batches_tracked"]
    return bool(counters) and not any(bool(b) for b in counters)


def _metadata(run: TrainedRun) -> dict[str, str]:
    values = {"classes": run.classes, **asdict(run.preprocessing), "crop": CENTER_SHARE}
    return {name: _json(value) for name, value in values.items()}


def _json(value: object) -> str:
    """Return JSON in which non-ASCII characters are escaped only if the value cannot be encoded as UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text == text.encode(errors="replace").decode() else json.dumps(value)


def _example(net: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Draw a random batch of this shape and check that the network accepts it."""
    dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    if min(shape) < 1:
        raise ValueError(f"--input {' '.join(map(str, shape))} is not a batch shape: all sizes must be 1 or more")
    try:
        example = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        outputs(net, example, training=False)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"the network fails on --input {' '.join(map(str, shape))}: {why}") from error
    return example
