"""What the page's script draws: curves, percentiles and shift measures of each run."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from .runs import ACCURACIES, Curve, Run

# Floats of percentiles that one run may put into the page: 125 records of three layers of 100 units.
BUDGET = 125 * 3 * 3 * 100

MEASURES = (
    {
        "key": "z",
        "name": "drift of the nonlinearity's inputs",
        "text": "How far a unit's input distribution moved since the record before, in units of its own width; median"
        " over the layer's units. Batch normalization fixes the mean and variance that this looks at.",
    },
    {
        "key": "x",
        "name": "drift of x = Wu, before normalization",
        "text": "The same for x = Wu, which batch normalization takes and does not itself hold in place.",
    },
    {
        "key": "gradient",
        "name": "change of a layer's gradient",
        "text": "||g' - g|| / ||g||, with g a layer's gradient on a mini-batch and g' its gradient on the same"
        " mini-batch after only the layers below took their step: Section 2's definition, as the layer feels it.",
    },
)


def payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the page's script needs, fit for JSON.

    Beyond the paper: ``batchnorm report``.
    """
    accuracies = sorted({key for run in runs for key in run.curves if key.endswith(ACCURACIES)})
    return {"measures": MEASURES, "accuracies": accuracies, "runs": [_run(run) for run in runs]}


def _run(run: Run) -> dict[str, Any]:
    shift: dict[str, Any] = {}
    if len(run.percentiles) > 1 and run.layers:
        shift["z"] = {layer: _curve(run.drift_curve(layer, "z")) for layer in run.layers}
        shift["x"] = {layer: _curve(run.drift_curve(layer, "x")) for layer in run.layers}
    if run.gradient_changes:
        shift["gradient"] = {
            layer: _curve([(r.step, c.relative) for r in run.gradient_changes if (c := r.gradient_change.get(layer))])
            for layer in run.gradient_changes[0].gradient_change
        }
    return {
        "name": run.name,
        "curves": {key: _curve(curve) for key, curve in run.curves.items()},
        "percentiles": _percentiles(run),
        "shift": shift,
    }


def _curve(curve: Curve) -> dict[str, list[float | None]]:
    finite = [(s, v) for s, v in _thin(curve, 1000) if abs(v) < float("inf")]
    return {"steps": [s for s, _ in finite], "values": [float(f"{v:.5g}") for _, v in finite]}


def _thin(items: Sequence[Any], limit: int) -> list[Any]:
    """Keep at most about ``limit`` items, evenly spaced, the last among them."""
    every = max(-(-len(items) // limit), 1)
    return [item for k, item in enumerate(items) if (len(items) - 1 - k) % every == 0]


def _percentiles(run: Run) -> dict[str, Any] | None:
    if not run.layers:
        return None
    size = sum(run.percentiles[0].percentiles[layer].z.numel() for layer in run.layers)
    records = _thin(run.percentiles, max(BUDGET // size, 10))
    layers = []
    for name in run.layers:
        values = torch.stack([r.percentiles[name].z for r in records])
        layers.append(
            {
                "name": name,
                "count": values.shape[1],
                "units": values.shape[2],
                "typical": run.typical(name),
                "data": base64.b64encode(values.numpy().astype("<f4").tobytes()).decode(),
            }
        )
    return {"steps": [r.step for r in records], "layers": layers}
