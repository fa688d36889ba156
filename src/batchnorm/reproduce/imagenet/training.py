"""The jobs of a session: train a run, or resume it, and evaluate the members of Figure 4's ensemble."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...evaluate import Predictions, predict, score
from ...results import environment, write_json
from ...train import Options, Result, train
from ...train.distributed import ranks
from ...train.saved_runs import SavedRun, loaders, open_for, open_run
from .plan import Plan
from .result_files import CROPS, MemberFiles, RunFiles
from .session import Session


@dataclass(frozen=True)
class Training:
    """Train a run to its end, or resume it, and write its result file."""

    files: RunFiles
    plan: Plan
    session: Session
    data: dict[str, Any]  # what `describe_data` returns

    @property
    def name(self) -> str:
        """The run's name."""
        return self.files.run.name

    @property
    def folder(self) -> Path:
        """The folder of the run's checkpoints and metrics."""
        return self.files.folder

    @property
    def steps(self) -> int:
        """The number of training steps."""
        recipe, examples = self.files.run.recipe, int(self.data["train"])
        return recipe.steps(-(-examples // recipe.batch_size))

    def finished(self) -> bool:
        """Return whether the result file exists."""
        return self.files.result.is_file()

    def __call__(self) -> None:
        """Train and write the result file."""
        self.files.write(self.train(), self.data)

    def train(self) -> Result:
        """Train to the end; if a run has reached its end, only compute and score its final network again."""
        torch.set_num_threads(self.session.threads)
        options = Options(
            self.session.images,
            self.folder,
            device=self.session.device,
            precision=self.session.precision,
            workers=self.session.workers,
            cache=self.session.cache,
            decoded=self.session.decoded,
            log_every=self.plan.log_every,
            evaluate_every=self.files.run.evaluate_every,
            checkpoint_every=self.plan.checkpoint_every,
            evaluate_batch=self.plan.evaluate_batch,
            score_training=True,
        )
        return train(self.files.run.recipe, options)


class TrainedMember(Training):
    """Train a member of the plan's ensemble, or resume it, then evaluate it."""

    @property
    def member(self) -> MemberFiles:
        """The member's files."""
        return MemberFiles(self.name, self.files.results)

    def finished(self) -> bool:
        """Return whether the member has been evaluated, or diverged in training."""
        return self.member.finished()

    def __call__(self) -> None:
        """Train and evaluate the member, and write its result file last; a member that diverged has no scores."""
        self.member.result.unlink(missing_ok=True)
        result = self.train()
        found: dict[str, Any] = {"weights": None, "crops": {}}
        if not result.diverged:
            found = evaluate(open_run(self.folder), self.member, self.session, self.plan.evaluate_batch)
        self.files.write(result, self.data, **found)


@dataclass(frozen=True)
class TakenMember:
    """Evaluate a finished run that was given with --runs."""

    saved: SavedRun
    member: MemberFiles
    session: Session
    data: dict[str, Any]  # what `describe_data` returns
    batch_size: int  # crops per forward pass
    folder: Path  # folder of the job's log file
    steps: int = 0

    @property
    def name(self) -> str:
        """The member's name."""
        return self.member.name

    def finished(self) -> bool:
        """Return whether the member's result file is complete and comes from this run's weights."""
        return self.member.finished() and self.member.read()["weights"] == self.saved.weights

    def __call__(self) -> None:
        """Evaluate the run, write its class probabilities, and write its result file last."""
        torch.set_num_threads(self.session.threads)
        self.member.result.unlink(missing_ok=True)
        found = evaluate(self.saved, self.member, self.session, self.batch_size)
        content = {"run": self.name, "recipe": asdict(self.saved.recipe), "data": self.data}
        write_json(self.member.result, {**content, "environment": environment(), **found})


def evaluate(saved: SavedRun, member: MemberFiles, session: Session, batch_size: int) -> dict[str, Any]:
    """Evaluate a run's folded network with 1 crop and with 144 crops, write the probabilities and return the scores."""
    runs, found, scores = {member.name: saved}, dict[int, Predictions](), dict[str, Any]()
    with ranks(session.device) as here:
        for crops in CROPS:
            batches = open_for(runs, session.images, crops, "val", here, batch_size, session.workers)
            net = loaders(runs, batches)[member.name]()
            found[crops] = one = predict(net, batches, batch_size=batch_size, name=member.name)
            scored = score(one.probabilities, one.labels, member.name)._asdict()
            scores[str(crops)] = {**scored, "enlarged": one.enlarged, "corrupt": [file.name for file in one.corrupt]}
    member.write_probabilities(found)
    return {"weights": saved.weights, "crops": scores}
