"""What each member of an ensemble leaves: a small result file, and its probabilities, from which the rest is made.

A member is evaluated once, wherever its checkpoint is; the ensemble only needs these files, in any later sitting.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..evaluate import predict, score
from ..evaluate.crops import Count
from ..results import environment, write_json
from ..train.distributed import Ranks, ranks
from ..train.evaluation import loaders, open_for
from ..train.run import Options
from ..train.saved import SavedRun

CROPS: tuple[Count, ...] = (1, 144)


class MemberFiles(NamedTuple):
    """Stand for the files of one member: ``NAME.json`` and ``runs/NAME/probabilities-CROPS.npz``.

    Paper: Sec. 4.2.3
    """

    out: Path
    name: str

    @property
    def run(self) -> Path:
        """The folder of the member's training."""
        return self.out / "runs" / self.name

    @property
    def result(self) -> Path:
        """The member's result file."""
        return self.out / f"{self.name}.json"

    def complete(self, weights: str | None = None) -> bool:
        """Say whether all files are there, and are of these weights where they are known."""
        files = (self.result, *(self._probabilities(crops) for crops in CROPS))
        return all(path.is_file() for path in files) and weights in (None, self.read()["weights"])

    def read(self) -> dict[str, Any]:
        """Return what the result file holds."""
        return dict(json.loads(self.result.read_text()))

    def predictions(self, crops: int) -> tuple[Tensor, Tensor]:
        """Return class probabilities and labels of all images."""
        with np.load(self._probabilities(crops), allow_pickle=False) as arrays:
            return torch.from_numpy(arrays["probabilities"]), torch.from_numpy(arrays["labels"])

    def evaluate(self, saved: SavedRun, options: Options) -> None:
        """Evaluate the run's network with one crop and with 144, and write the files."""
        with ranks(options.device) as here:
            found = {str(crops): self._predict(saved, options, crops, here) for crops in CROPS}
        training = saved.folder / "result.json"
        result = {
            "member": self.name,
            "recipe": asdict(saved.recipe),
            "training": json.loads(training.read_text()) if training.exists() else None,
            "weights": saved.weights,
            "crops": found,
            "environment": environment(),
        }
        # Last: where it is, all else is complete.
        write_json(self.result, result)

    def _predict(self, saved: SavedRun, options: Options, crops: Count, here: Ranks) -> dict[str, Any]:
        runs = {self.name: saved}
        batches = open_for(runs, options.data, crops, "val", here, options.evaluate_batch, options.workers)
        net = loaders(runs, batches)[self.name]()
        found = predict(net, batches, batch_size=options.evaluate_batch, name=self.name)
        scored = score(found.probabilities, found.labels, self.name)
        path = self._probabilities(crops)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The rename makes the file whole or absent.
        temporary = path.with_name(f".writing-{path.name}")
        arrays = {"probabilities": found.probabilities.cpu().numpy(), "labels": found.labels.cpu().numpy()}
        np.savez_compressed(temporary, allow_pickle=False, **arrays)
        temporary.replace(path)
        return {**scored._asdict(), "enlarged": found.enlarged, "corrupt": [file.name for file in found.corrupt]}

    def _probabilities(self, crops: int) -> Path:
        return self.run / f"probabilities-{crops}.npz"
