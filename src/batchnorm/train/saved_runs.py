"""Saved runs: load the folded network from a run's folder, and open the data to evaluate it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..data.image_sources import has_split, training_splits
from ..errors import listed
from ..evaluate import Crops, SquareBatches, open_squares
from ..evaluate.crops import Count
from ..results import read_json
from . import checkpoint
from .distributed import Ranks
from .final_network import check_scores, folded_network
from .recipe import Recipe


class SavedRun(NamedTuple):
    """A run in a folder; :meth:`load` reads its network."""

    folder: Path
    recipe: Recipe
    trust: bool = False
    """whether the function that the recipe names may be called"""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.resolve().name

    @property
    def weights(self) -> str | None:
        """The SHA-256 of the final network's weights, from its manifest, or None if there is no final network yet."""
        return checkpoint.weights_digest(self.folder / "final")

    def load(self, classes: Sequence[str]) -> nn.Module:
        """Return the run's final network, folded.

        Args:
            classes: names of the data's classes.

        Raises:
            ValueError: if the run is unfinished or diverged, its files are damaged, its weights do not fit its recipe,
                the code of the user's network has changed, its classes do not match the data's, or loading it needs
                ``trust``, which is not set.
        """
        return folded_network(self.trained(classes)[0], self.recipe.size)

    def trained(self, classes: Sequence[str] | None = None) -> tuple[nn.Module, tuple[str, ...]]:
        """Return the final network before folding, in evaluation mode, and the names of its classes.

        Args:
            classes: names of the data's classes, to compare with the run's; None skips the comparison.

        Raises:
            ValueError: for the same reasons as :meth:`load`.
        """
        saved = self.final()
        trained, network = saved.state.get("classes"), saved.state.get("network", {})
        if not _is_names(trained) or not isinstance(network, dict):
            raise ValueError(
                f"{self.folder / 'final'} has no list of classes or no network settings: train the network again"
            )
        if classes is not None:
            check_classes(self.folder, trained, classes)
        if self.recipe.needs_trust and not self.trust:
            raise ValueError(
                f"loading {self.folder} calls {self.recipe.factory}, the function named in its recipe.json, and that"
                " function could run any code: if you trust it, add --trust (in Python, trust=True)"
            )
        net = self.recipe.network(len(trained))
        _load_weights(net, saved.model, self.folder, len(trained), self.recipe.factory)
        self._check_recipe(network)
        check_scores(net, self.recipe.size, saved.state.get("scores"), self.recipe.factory, self.folder)
        return net.eval(), tuple(trained)

    def final(self) -> checkpoint.Checkpoint:
        """Return the final network's weights and classes, without building the network.

        Raises:
            ValueError: if the run is unfinished or diverged, or its files are damaged.
        """
        saved = checkpoint.load_latest(self.folder / "final")
        result = self.folder / "result.json"
        diverged = result.exists() and read_json(result).get("diverged")
        if saved is None:
            why = "has not finished, or its subfolder 'final' was removed; run its training command again"
            if diverged:
                why = "diverged; use another run"
            raise ValueError(f"{self.folder} has no final network: its training {why}")
        if diverged:
            raise ValueError(
                f"the training of {self.folder} diverged after the network in its subfolder 'final' was saved, at step"
                f" {saved.step:,}; use another run"
            )
        return saved

    def _check_recipe(self, trained: Mapping[str, Any]) -> None:
        now = self.recipe.network_fields
        for name, value in trained.items():
            if now.get(name) != value:
                raise ValueError(
                    f"the weights in {self.folder / 'final'} were trained with {name} {value}, but"
                    f" {self.folder / 'recipe.json'} has {now.get(name)}: was the recipe edited, or do"
                    " the files come from different runs?"
                )


def open_run(folder: Path, *, trust: bool = False) -> SavedRun:
    """Open the folder of a run of ``batchnorm train``.

    Args:
        folder: the run's folder.
        trust: allow calling the function that the run's recipe names; a network of your own needs this.

    Raises:
        FileNotFoundError: if the folder is not the folder of a run.
        ValueError: if the recipe is not valid for this version of the library.
    """
    path = folder / "recipe.json"
    if not path.is_file():
        if not folder.is_dir():
            problem = "is a file" if folder.is_file() else "does not exist"
            raise FileNotFoundError(f"{folder} {problem}: give the folder of a run")
        found = listed(sorted(entry.name for entry in folder.iterdir()), 8) or "nothing"
        raise FileNotFoundError(
            f"{folder} is not the folder of a run: it holds {found}, but a run's folder holds recipe.json and final/"
        )
    return SavedRun(folder, Recipe.read(path), trust)


def check_classes(folder: Path, trained: Sequence[str], found: Sequence[str]) -> None:
    """Check that a run's classes match those of the data.

    Shards without classes.txt name their classes "0", "1" and so on. If one side has these names and the other has
    different names, only the number of classes is compared. Otherwise, the names and their order must be the same:
    folders named 0 to 10, for example, are sorted as text (0, 1, 10, 2), but the classes of shards by number.

    Raises:
        ValueError: if the classes differ.

    >>> check_classes(Path("run"), ["cat", "dog"], ["0", "1"])
    >>> check_classes(Path("run"), ["cat", "dog"], ["cat", "eel"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: run was trained on other classes: class 1 is 'dog' in the run, but 'eel' in the data; give data ...
    """
    if len(trained) != len(found):
        raise ValueError(
            f"{folder} was trained on {len(trained)} classes, but the data has {len(found)}: give data with the same"
            " classes"
        )
    if (_numbers(trained) or _numbers(found)) and sorted(trained) != sorted(found):
        return
    for k, (mine, theirs) in enumerate(zip(trained, found, strict=True)):
        if mine != theirs:
            raise ValueError(
                f"{folder} was trained on other classes: class {k} is {mine!r} in the run, but {theirs!r} in the data;"
                " give data with the same classes"
            )


def _is_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _numbers(names: Sequence[str]) -> bool:
    return all(name == str(k) for k, name in enumerate(names))


def _load_weights(net: nn.Module, model: dict[str, Tensor], folder: Path, classes: int, factory: str) -> None:
    expected = net.state_dict()
    outputs = {
        w.shape[0] if w.dim() and k in expected and expected[k].shape == (classes, *w.shape[1:]) else None
        for k, w in model.items()
        if k not in expected or w.shape != expected[k].shape
    }
    if len(outputs) == 1 and None not in outputs and expected.keys() <= model.keys():
        raise ValueError(
            f"{folder / 'final'} names {classes} classes, but its weights are for {outputs.pop()}: do the files come"
            " from different runs?"
        )
    if problems := checkpoint.difference(expected, model):
        raise ValueError(
            f"the weights in {folder / 'final'} do not fit the network of {folder / 'recipe.json'}: {problems}. Either"
            f" {f'{factory} or ' if factory else ''}the recipe was edited, or the files come from different runs"
        )
    net.load_state_dict(model)


def open_runs(folders: Sequence[Path], *, trust: bool = False) -> dict[str, SavedRun]:
    """Open runs, check that their predictions can be averaged, and return a dict from unique names to runs.

    See :func:`open_run` for ``trust``.

    Raises:
        FileNotFoundError: if a folder is not the folder of a run.
        ValueError: if there are no runs, if a recipe is not valid for this version of the library, if the runs take
            images of different sizes, or if a run is given twice.
    """
    if not folders:
        raise ValueError("give at least one run: a folder written by batchnorm train")
    opened = [open_run(folder, trust=trust) for folder in folders]
    sizes = {run.recipe.size: run.folder for run in opened}
    if len(sizes) > 1:
        (a, first), (b, second), *_ = sizes.items()
        raise ValueError(
            f"{first} takes images of {a} px, but {second} takes images of {b} px: evaluate each run separately"
        )
    if len({run.folder.resolve() for run in opened}) < len(opened):
        raise ValueError("a run is given twice and would count twice in the mean: give each run once")
    unique = len({run.name for run in opened}) == len(opened)
    return {run.name if unique else str(run.folder): run for run in opened}


def open_for(
    runs: dict[str, SavedRun], data: Path, crops: Count, split: str, here: Ranks, batch_size: int, workers: int
) -> SquareBatches:
    """Open a split of the data, with crops of the runs' image size.

    If ``split`` is "val" and the data has no such split, open the images that the runs held out for validation.

    Raises:
        FileNotFoundError: if the data is not found.
        ValueError: if the runs held out different images, or for the same reasons as
            :func:`~batchnorm.evaluate.open_squares`.
    """
    size = next(iter(runs.values())).recipe.size
    shares = {run.recipe.validate for run in runs.values()}
    if split == "val" and shares != {0.0} and not has_split(data, "val"):
        if len(shares) > 1:
            raise ValueError("the runs held out different images (--validate differs): evaluate each run separately")
        _, split = training_splits(data, shares.pop())
    return open_squares(
        data,
        split,
        crops=Crops.of(crops, size),
        batch_size=batch_size,
        workers=workers,
        rank=here.rank,
        world_size=here.world_size,
        device=here.device,
    )


def loaders(runs: dict[str, SavedRun], batches: SquareBatches) -> dict[str, Callable[[], nn.Module]]:
    """Return a dict from each run's name to a function that loads the run's network.

    The network is in the channels-last layout if the batches are on a GPU.
    """
    return {name: partial(_load, run, batches) for name, run in runs.items()}


def _load(run: SavedRun, batches: SquareBatches) -> nn.Module:
    net: Any = run.load(batches.classes)
    cuda = batches.device.type == "cuda"
    return net.to(memory_format=torch.channels_last) if cuda else net  # type: ignore[no-any-return]
