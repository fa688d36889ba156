"""Resuming a run: check its recipe and data, and load its newest checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.image_sources import check_same_data
from ..errors import differences
from ..results import read_json, write_atomically
from . import checkpoint
from .distributed import Ranks
from .final_network import check_scores
from .recipe import Recipe


def has_checkpoints(folder: Path) -> bool:
    """Return whether the run in a folder has checkpoints, intact or not."""
    return checkpoint.newest_step(folder / "checkpoints") is not None


def claim_folder(
    out: Path, recipe: Recipe, data: dict[str, Any] | None = None, *, planned_steps: int | None = None
) -> None:
    """Write the recipe and a description of the data to a run's folder, or check that they match those already there.

    ``epochs`` may differ, so that a finished run can be trained for longer. A run that has already taken more than
    ``planned_steps`` is rejected.

    Raises:
        ValueError: if the run in the folder has another recipe or other data, or has already taken more steps than
            planned; the message names what differs.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()); claim_folder(folder, Recipe()); claim_folder(folder, Recipe(epochs=3))
    >>> claim_folder(folder, Recipe(rate=1.0))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: ... belongs to another run: rate is 0.0015 instead of 1.0; choose another --out, or remove the folder
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "recipe.json"
    if path.exists():
        fixed = {name: value for name, value in asdict(recipe).items() if name != "epochs"}
        if other := differences(asdict(Recipe.read(path)), fixed):
            raise ValueError(
                f"{out} belongs to another run: {'; '.join(other)}; choose another --out, or remove the folder"
            )
    # With other data, the number of steps usually differs, so check the data first.
    known = out / "data.json"
    if data is not None and known.exists():
        check_same_data({f"the run in {out}": read_json(known), "this command": data})
    taken = checkpoint.newest_step(out / "checkpoints") or 0
    if planned_steps is not None and taken > planned_steps:
        raise ValueError(
            f"the run in {out} has already trained for {taken:,} steps, but this command plans only {planned_steps:,}:"
            " increase --epochs (and --max-steps, if set), or choose another --out"
        )
    if data is not None and not known.exists():
        write_atomically(known, json.dumps(data).encode())
    write_atomically(path, recipe.to_json().encode())


class RunState(NamedTuple):
    """A run's progress, apart from its network and optimizer."""

    step: int = 0
    evaluated: int = 0
    """the last step after which the network was validated"""
    positions: tuple[int, int] = (0, 0)
    """lengths of metrics.jsonl and monitor.jsonl, in bytes"""
    sums: Tensor | None = None
    """this rank's total loss, correct predictions and examples since the last record of the training loss"""


def save_state(
    folder: Path,
    state: RunState,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    here: Ranks,
    scores: Tensor | None = None,
) -> None:
    """Write a checkpoint that :func:`resume_` reads. Every rank must call this function; only rank 0 writes."""
    assert state.sums is not None
    # Gather the sums, because each rank has its own; the network and the optimizer are the same on every rank.
    sums = state.sums.new_zeros(here.world_size, 3)
    sums[here.rank] = state.sums
    here.sum_(sums)
    if here.main:
        values = {
            "optimizer": optimizer.state_dict(),
            "sums": sums.cpu(),
            "evaluated": state.evaluated,
            "positions": state.positions,
            "threads": torch.get_num_threads(),
            "scores": scores,
        }
        checkpoint.save(folder / "checkpoints", state.step, net.state_dict(), values)
    here.wait()


def resume_(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, here: Ranks, total_steps: int, recipe: Recipe
) -> RunState:
    """Load the newest intact checkpoint into the network and its optimizer, and return the run's progress.

    If there is no checkpoint, nothing changes and the run starts at step 0.

    Raises:
        ValueError: if there are checkpoints but none can be read, if the newest intact one does not fit the network, or
            if the code of the user's network has changed.
    """
    found = checkpoint.load_latest(folder / "checkpoints")
    if found is None:
        return RunState()
    for problem in found.passed_over if here.main else ():
        print(f"skipped a checkpoint: {problem}")
    state = found.state
    try:
        net.load_state_dict(found.model)
        mine = [{key: group[key] for key in ("lr", "fused")} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.param_groups, mine, strict=True):
            # Keep this process's `lr` and `fused`, because the checkpoint may come from another type of device: on a
            # GPU, `lr` is a tensor and `fused` is True. The next step sets the value of `lr`.
            group.update(own)
        for parameter, values in optimizer.state.items():
            # Fused kernels need the momentum in the layout of the weights, which are channels last on GPUs only.
            values.update({key: torch.empty_like(parameter).copy_(value) for key, value in values.items()})
        evaluated = int(state["evaluated"])
        metrics, monitor = map(int, state["positions"])
        sums, threads = state["sums"].view(-1, 3), int(state["threads"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the checkpoint in {folder} does not fit the network: {error!r}; undo changes to the network's code, or"
            " choose another --out"
        ) from error
    check_scores(net, recipe.size, state.get("scores"), recipe.factory, folder)
    same = len(sums) == here.world_size and threads == torch.get_num_threads()
    if here.main and found.step < total_steps:
        note = "" if same else "; the number of ranks or threads changed, so results differ from an uninterrupted run's"
        print(f"resuming from step {found.step:,}{note}", flush=True)
    elif here.main and (folder / "result.json").exists():
        print(
            "this run is finished, so only its final network is computed and scored again. To train longer, increase"
            f" --epochs (or --max-steps); to start over, choose another --out or remove {folder}",
            flush=True,
        )
    mine = sums[here.rank] if same else sums.sum(0) / here.world_size
    return RunState(found.step, evaluated, (metrics, monitor), mine)
