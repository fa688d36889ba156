"""The settings of runs of ``batchnorm train``, and the names of their accuracies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAPERS_FIELDS = (
    *("batch_norm", "activation", "dropout", "local_response", "per_activation", "stem", "projection", "width"),
    *("init", "init_scale", "eps", "averaging"),
)
"""The fields of a recipe that apply only to the paper's network."""

STATISTICS = {
    "population": ("with running averages", "(folded, population statistics)"),
    "frozen": ("with frozen statistics", "(folded, frozen statistics)"),
    "none": ("", ""),
}
"""For each kind of final statistics, how accuracies are measured during training and at the end."""


def used(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that the run uses.

    >>> used({"factory": "mynet.py:build", "normalize": "insert", "width": 1.0, "start": "", "rate": 0.1})
    {'factory': 'mynet.py:build', 'normalize': 'insert', 'rate': 0.1}
    """
    unused = {name for name, value in recipe.items() if value in ("", [], ())}
    if recipe.get("factory"):
        unused.update(PAPERS_FIELDS)
    else:
        unused.add("normalize")
        if not recipe.get("batch_norm", True):
            unused.update(("per_activation", "eps", "averaging", "statistics"))
    if not recipe.get("start"):
        unused.add("freeze_statistics")
    if not recipe.get("validate"):
        unused.add("validate")
    return {name: value for name, value in recipe.items() if name not in unused}
