"""Train and evaluate one member, or evaluate a run that is taken as one: jobs to be done side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...evaluate import Predictions, predict, score
from ...results import environment, write_json
from ...train.distributed import ranks
from ...train.saved_runs import SavedRun, loaders, open_for, open_run
from .member_files import CROPS, MemberFiles
from .training import Machine, Training


class TrainedMember(Training):
    """Train a member of the plan, or go on with it, then evaluate it.

    Paper: Sec. 4.2.3
    """

    @property
    def member(self) -> MemberFiles:
        """The member's files."""
        return MemberFiles(self.name, self.files.results)

    def finished(self) -> bool:
        """Say whether the member's files are there."""
        return self.member.finished()

    def __call__(self) -> None:
        """Train, evaluate and write the files, the result file last; one that diverged has no crops to tell of."""
        self.member.result.unlink(missing_ok=True)
        result = self.train()
        found: dict[str, Any] = {"weights": None, "crops": {}}
        if not result.diverged:
            found = evaluate(open_run(self.folder), self.member, self.machine, self.plan.evaluate_batch)
        self.files.write(result, self.data, self.machine.commit, **found)


@dataclass(frozen=True)
class TakenMember:
    """Evaluate a finished run.

    Args:
        saved: the run.
        member: where its files go.
        machine: on what.
        data: what :func:`describe_data` says of it.
        batch_size: crops that the network takes at a time.
        folder: for the log.

    Paper: Sec. 4.2.3
    """

    saved: SavedRun
    member: MemberFiles
    machine: Machine
    data: dict[str, Any]
    batch_size: int
    folder: Path
    steps: int = 0

    @property
    def name(self) -> str:
        """The member's name."""
        return self.member.name

    def finished(self) -> bool:
        """Say whether the member's files are there, and are of these weights."""
        return self.member.finished() and self.member.read()["weights"] == self.saved.weights

    def __call__(self) -> None:
        """Evaluate and write the files, the result file last."""
        torch.set_num_threads(self.machine.threads)
        self.member.result.unlink(missing_ok=True)
        found = evaluate(self.saved, self.member, self.machine, self.batch_size)
        content = {"run": self.name, "recipe": asdict(self.saved.recipe), "data": self.data}
        write_json(self.member.result, {**content, "environment": environment(self.machine.commit), **found})


def evaluate(saved: SavedRun, member: MemberFiles, machine: Machine, batch_size: int) -> dict[str, Any]:
    """Evaluate a run's folded network with one crop and with 144, write the probabilities and return the scores.

    Raises:
        ValueError: where the run and the data do not fit, or the run has not ended.

    Paper: Sec. 4.2.3
    """
    runs, found, scores = {member.name: saved}, dict[int, Predictions](), dict[str, Any]()
    with ranks(machine.device) as here:
        for crops in CROPS:
            batches = open_for(runs, machine.data, crops, "val", here, batch_size, machine.workers)
            net = loaders(runs, batches)[member.name]()
            found[crops] = one = predict(net, batches, batch_size=batch_size, name=member.name)
            scored = score(one.probabilities, one.labels, member.name)._asdict()
            scores[str(crops)] = {**scored, "enlarged": one.enlarged, "corrupt": [file.name for file in one.corrupt]}
    member.write_probabilities(found)
    return {"weights": saved.weights, "crops": scores}
