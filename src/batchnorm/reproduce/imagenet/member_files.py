"""What each member of an ensemble leaves: a small result file, and its probabilities, from which the rest is made.

A member is evaluated once, wherever its checkpoint is; the ensemble only needs these files, in any later sitting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...evaluate import Predictions
from ...evaluate.crops import Count
from .result_files import read_result

CROPS: tuple[Count, ...] = (1, 144)


class MemberFiles(NamedTuple):
    """Stand for the files of one member: ``NAME.json`` and ``NAME.npz``.

    Paper: Sec. 4.2.3
    """

    name: str
    results: Path

    @property
    def result(self) -> Path:
        """The member's result file."""
        return self.results / f"{self.name}.json"

    @property
    def probabilities(self) -> Path:
        """The member's class probabilities for each number of crops, and the labels."""
        return self.results / f"{self.name}.npz"

    def missing(self) -> str | None:
        """Say why the member cannot be counted; None where it can."""
        if not self.result.is_file():
            return "not yet run"
        if not self.read()["crops"]:
            return "diverged in training"
        if self.probabilities.is_file():
            return None
        return f"{self.probabilities.name}, of which ensembles are made, is not there: left out; --data makes it"

    def finished(self) -> bool:
        """Say whether there is nothing left to do."""
        return self.missing() in (None, "diverged in training")

    def read(self) -> dict[str, Any]:
        """Return what the result file holds."""
        return read_result(self.result, ("crops", "data", "recipe", "weights", "environment"))

    def predictions(self, crops: int) -> tuple[Tensor, Tensor]:
        """Return class probabilities and labels of all images."""
        with np.load(self.probabilities, allow_pickle=False) as arrays:
            return torch.from_numpy(arrays[f"crops{crops}"]), torch.from_numpy(arrays["labels"])

    def write_probabilities(self, found: Mapping[int, Predictions]) -> None:
        """Write the probabilities, so that the file is whole or absent.

        They stay float32: in float16 the small ones would become equal, and with them the first five choices.
        """
        self.results.mkdir(parents=True, exist_ok=True)
        arrays = {f"crops{crops}": one.probabilities.cpu().numpy() for crops, one in found.items()}
        arrays["labels"] = found[CROPS[0]].labels.cpu().numpy()
        temporary = self.results / f".{os.getpid()}-{self.probabilities.name}"
        np.savez_compressed(temporary, allow_pickle=False, **arrays)
        temporary.replace(self.probabilities)
