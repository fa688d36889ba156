"""Test that fold and convert keep the results of timm's and torchvision's networks, and that fold counts all BNs.

Run this file as a script for a table: ``python tests/zoo.py --jobs 16 --json zoo.json [NAME ...]``.
"""

import argparse
import copy
import json
import os
import sys
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

import batchnorm as bn

# The largest relative difference to accept in float64. Rounding causes at most 6e-9, except in networks that amplify it
# in training mode; for them, `sensitivity` widens the tolerance.
EXACT = 1e-7
# Names of networks, with the height and width of their inputs. tv: means torchvision; video networks get clips.
NETWORKS = {
    **dict.fromkeys(
        """cspdarknet53 cspresnet50 cs3darknet_s densenet121 dla34 dla60_res2net dpn48b
        dpn68b eca_resnext26ts ecaresnet26t efficientnet_b0 efficientnet_es efficientnet_lite0
        ese_vovnet19b_dw fasternet_t0 fastvit_t8 fbnetc_100 fbnetv3_b gcresnet33ts ghostnet_100 ghostnetv2_100
        hardcorenas_a hgnet_tiny hgnetv2_b0 hrnet_w18_small inception_next_atto lambda_resnet26t lcnet_050 mixnet_s
        mnasnet_100 mobilenetv2_100 mobilenetv3_large_100 mobilenetv4_conv_small mobileone_s0 mobilevit_xxs
        mobilevitv2_050 regnetx_004 regnety_004 regnetz_b16 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_26w_4s
        resnest14d resnet18 resnet26t resnet33ts resnet50 resnetaa50 resnetblur50 resnetrs50 resnetv2_50
        resnext50_32x4d rexnet_100 selecsls42b semnasnet_100 seresnet50 skresnet18 spnasnet_100 starnet_s1
        swiftformer_xs tf_efficientnet_b0 tf_efficientnetv2_b0 tf_mixnet_s tinynet_e tresnet_m vovnet39a
        tv:densenet121 tv:efficientnet_b0 tv:efficientnet_v2_s tv:googlenet tv:mnasnet1_0
        tv:mobilenet_v2 tv:mobilenet_v3_small tv:regnet_x_400mf tv:regnet_y_400mf tv:resnet18 tv:resnext50_32x4d
        tv:shufflenet_v2_x1_0 tv:deeplabv3_mobilenet_v3_large tv:fcn_resnet50
        tv:lraspp_mobilenet_v3_large tv:r3d_18 tv:mc3_18""".split(),  # noqa: SIM905
        64,
    ),
    **dict.fromkeys(
        """efficientvit_b0 inception_resnet_v2 inception_v3 inception_v4 xception41
        tv:inception_v3""".split(),  # noqa: SIM905
        96,
    ),
    "shvit_s1": 128,  # at 64 pixels it normalizes two values, and float64 rounding moves its output by 5%
    **dict.fromkeys("efficientformer_l1 efficientvit_m0 levit_128s visformer_tiny".split(), 224),  # noqa: SIM905
    **dict.fromkeys("bat_resnext26ts botnet26t_256 halonet26t sebotnet33ts_256".split(), 256),  # noqa: SIM905
}
OPTIONS = {
    "tv:googlenet": {"init_weights": True},
    "tv:inception_v3": {"init_weights": True, "aux_logits": False},  # auxiliary outputs need 299 pixels
    "tv:deeplabv3_mobilenet_v3_large": {"weights_backbone": None},
    "tv:fcn_resnet50": {"weights_backbone": None},
    "tv:lraspp_mobilenet_v3_large": {"weights_backbone": None},
}
_libraries = []


def import_torchvision():
    """Import torchvision, even if its compiled operators do not match the installed torch."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)  # deleting it would delete its operators
        import torchvision
    return torchvision


def make(name):
    """Return a network in evaluation mode, and two batches for it."""
    torch.manual_seed(0)
    size = NETWORKS.get(name, 64)
    shape = (2, 3, 4, size, size) if name in ("tv:r3d_18", "tv:mc3_18") else (2, 3, size, size)
    if name.startswith("tv:"):
        net = import_torchvision().models.get_model(name[3:], weights=None, **OPTIONS.get(name, {}))
    else:
        import_torchvision()  # which timm imports
        import timm

        net = timm.create_model(name, pretrained=False)
    batches = [torch.randn(shape), torch.randn(shape)]
    return randomize_(net, batches[0]).eval(), batches


def randomize_(net, batch):
    """Give every batch norm random parameters, and statistics near those of a batch, so that no layer overflows."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        for parameter, low, high in ((norm.weight, 0.5, 1.5), (norm.bias, -0.5, 0.5)):
            if parameter is not None:
                nn.init.uniform_(parameter, low, high)
    with torch.no_grad():
        net.train()(batch)
    for norm in norms:
        norm.momentum = 0.1
        norm.running_var.mul_(torch.empty_like(norm.running_var).uniform_(0.5, 2.0)).add_(1e-2)
        norm.running_mean.add_(0.3 * torch.randn_like(norm.running_mean) * norm.running_var.sqrt())
    return net


class NormCalls(TorchDispatchMode):
    """Count all calls of torch's batch norm operators that normalize by given statistics."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # The sixth argument is training. Ignore calls in training mode, such as those of weight standardization.
        if "batch_norm" in func.__name__ and "backward" not in func.__name__:
            self.count += not (len(args) > 5 and args[5] is True)
        return func(*args, **(kwargs or {}))


def run(net, batch):
    """Return the tensors in the output of a copy of the network; the random seed is fixed."""
    torch.manual_seed(0)
    with torch.no_grad():
        return bn.network_call.tensors_in(copy.deepcopy(net)(batch))


def difference(new, old, batches):
    """Return max |new - old| / max |old| over batches."""
    return farthest(pair for batch in batches for pair in zip(run(new, batch), run(old, batch), strict=True))


def farthest(pairs):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def sensitivity(net, batches):
    """Return how far a network's outputs in training move if its inputs change by a few float64 rounding errors.

    Some networks normalize batches that hardly vary, and amplify rounding errors a billion times.
    """
    generator = torch.Generator().manual_seed(0)
    nudged = [b * (1 + 1e-15 * torch.randn(b.shape, generator=generator, dtype=b.dtype)) for b in batches]
    net.train()
    found = farthest(
        p for b, c in zip(batches, nudged, strict=True) for p in zip(run(net, c), run(net, b), strict=True)
    )
    net.eval()
    return found


def check(name):
    """Fold and convert one network in float32 and float64, and return a report; its "problems" should be empty."""
    row = {"name": name, "problems": []}
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net, batches = make(name)
        wide, wide_batches = copy.deepcopy(net).double(), [batch.double() for batch in batches]
        for verb in (bn.fold, bn.convert):
            try:
                report = verb(net, batches[0]).report
                row[verb.__name__] = report.summary
                row[f"{verb.__name__}_error"] = _check_exactly(verb, wide, wide_batches, row)
            except Exception as error:
                row["problems"].append(f"{verb.__name__}: {type(error).__name__}: {error}")
                row.setdefault("traceback", traceback.format_exc())
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _check_exactly(verb, net, batches, row):
    done = verb(net, batches[0])
    error = difference(done.eval(), net.eval(), batches)
    excess = error / EXACT
    if verb is bn.fold:
        _check_count(done, net, batches[0], row)
    else:
        in_training = difference(done.train(), net.train(), batches)
        error, excess = max(error, in_training), max(excess, in_training / max(EXACT, 20 * sensitivity(net, batches)))
    if not excess <= 1:
        row["problems"].append(f"{verb.__name__}: differs by {error:.1e} in float64")
    return error


def _check_count(folded, net, batch, row):
    left = len(folded.report.paths("kept"))
    found = sum(isinstance(m, _BatchNorm) for m in net.modules())
    row |= {"norms": found, "left": left}
    with NormCalls() as calls:
        run(folded, batch)
    still = max(calls.count, sum(isinstance(m, _BatchNorm) for m in folded.modules()))
    if still > left or f"of {found} batch" not in folded.report.summary:
        row["problems"].append(f"fold: {found} batch norms, {still} left, but its report says: {folded.report.summary}")


def _prepare():
    torch.set_num_threads(1)


def main():
    """Print one line per network and a summary; with ``--json``, also write the reports to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread (default: 1)")
    parser.add_argument("--json", type=Path, help="file for the reports")
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), _prepare) as pool:
        for row in pool.map(check, options.names):
            rows.append(row)
            errors = " ".join(f"{row[key]:.0e}" for key in ("fold_error", "convert_error") if key in row)
            says = "; ".join(row["problems"]) or f"{errors}  {row['fold']}  {row['convert']}"
            print(
                f"{'FAILED' if row['problems'] else 'ok':6} {row['name']:32} {row['seconds']:5} s  {says}", flush=True
            )
    failed = [row["name"] for row in rows if row["problems"]]
    left = sum(row.get("left", 0) for row in rows)
    print(
        f"{len(rows) - len(failed)} of {len(rows)} networks passed;"
        f" fold left {left} of {sum(row.get('norms', 0) for row in rows)} batch norms; failed: {failed}"
    )
    if options.json:
        versions = {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}
        options.json.write_text(json.dumps({**versions, "networks": rows}, indent=1))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
