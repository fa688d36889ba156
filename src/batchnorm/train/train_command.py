"""The commands ``batchnorm train`` and ``batchnorm describe``."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table

from ..arguments import OmitArgPrefixes, Suppress, arg
from ..data.image_sources import check_complete, open_source, small_images_note, training_splits
from ..errors import between
from ..evaluate.accuracy import TOP5_CLASSES
from ..jobs import Stopped
from ..models import describe as describe_network
from ..models.bn_inception.network import early_strides_note
from ..models.description import claims
from ..network_factory import check_function
from ..optional_packages import check_installed
from ..report.train_runs import PAPERS_FIELDS, STATISTICS
from .distributed import find_device
from .loop import train as train_recipe
from .metrics import Result
from .options import Options
from .recipe import RECIPES, Recipe
from .resume import has_checkpoints

RecipeName = Literal[
    "inception", "bn-baseline", "bn-x5", "bn-x30", "bn-x5-sigmoid", "inception-x5", "inception-sigmoid",
    "bn-x30-large-init", "bn-x30-dropout-5", "bn-x30-dropout-10", "bn-x30-per-activation",
    "bn-x30-large-init-dropout-5", "bn-x30-per-activation-dropout-10",
]  # fmt: skip


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    return {bool: "{True,False}", float: "FLOAT", int: "INT", str: "STR"}.get(kind, "[STR ...]")


def _defaults(name: str) -> str:
    """Describe a field's default: its most common value, then each other value with the recipes that have it."""
    of_value: dict[str, list[str]] = {}
    for recipe in RECIPES.values():
        of_value.setdefault(_shown(getattr(recipe, name)), []).append(recipe.name)
    usual, *others = sorted(of_value, key=lambda value: -len(of_value[value]))
    exceptions = [f"{value} in {', '.join(of_value[value])}" for value in others]
    return f"({'by recipe' if exceptions else 'default'}: {'; '.join([usual, *exceptions])})"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _field(name: str, kind: Any) -> tuple[str, Any, Any]:
    if name == "freeze_statistics":  # a flag, because no recipe sets this field to True
        return name, kind, False
    if name == "factory":
        shown = arg(name="network", metavar="FILE.py:FUNCTION", help_behavior_hint="(default: the paper's)")
    elif name == "start":
        shown = arg(name="from", metavar="RUN|FILE", help_behavior_hint="(default: new weights)")
    else:
        hint = "(default: the recipe's)" if name in ("name", "seed") else _defaults(name)
        shown = arg(metavar=_metavar(kind), help_behavior_hint=hint)
    return name, Annotated[Optional[kind], shown], None  # noqa: UP045


def make_overrides(*hidden: str) -> type[Recipe]:
    """Return a dataclass with the fields of a recipe; a field that is None keeps the recipe's value.

    The class is a subclass of Recipe, so that it inherits the descriptions of the fields, which --help shows. The
    command line has no options for the fields in ``hidden``.
    """
    fields = [_field(name, kind) for name, kind in get_type_hints(Recipe).items()]
    shown = [(name, Annotated[kind, Suppress] if name in hidden else kind, default) for name, kind, default in fields]
    return make_dataclass("Overrides", shown, bases=(Recipe,), frozen=True)


if TYPE_CHECKING:
    Overrides = Recipe
else:
    Overrides = make_overrides()


def train(
    options: Annotated[Options, OmitArgPrefixes, arg(name="run")],
    recipe: RecipeName | None = None,
    overrides: Annotated[Overrides, OmitArgPrefixes] = Overrides(),  # noqa: B008 - frozen
) -> None:
    """Train the paper's network, a variant of it, or your own network, on your own images.

    For the paper's network, use batchnorm train --recipe bn-x30 --data images. For your own network, write a function
    build(classes) in mynet.py that returns the network, and use batchnorm train --network mynet.py:build --data images.
    To insert batch normalization into your network, add --normalize insert; to remove it, add --normalize remove.

    After an interruption, run the same command again to resume from the last checkpoint. Under torchrun
    (torchrun --nproc-per-node 8 -m batchnorm train ...), each batch is divided among the processes. The exit status is
    0 if the run finished, 1 if it diverged, 2 if an option, the data or the folder is wrong, and 130 if it was stopped.

    Args:
        recipe: one of the paper's runs; with --network, the run that sets the learning rate, augmentation and all other
            training settings, by default bn-x5
        options: data, folder, device and how often to report.
        overrides: fields of the recipe to change; --batch-norm to --averaging apply only to the paper's network.
    """
    if recipe is None and not overrides.factory:
        raise ValueError("nothing to train: add --recipe, such as bn-x30, or --network for your own network")
    chosen = resolve(RECIPES[recipe or "bn-x5"], overrides)
    silent = os.environ.get("RANK", "0") != "0"
    _, note = check_before_training(chosen, options)
    if note is not None and not silent:
        print(note)
    try:
        result = train_recipe(chosen, options)
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped
    if not silent:
        folder, trust = options.folder(chosen), " --trust" if chosen.needs_trust else ""
        print(_summary(result, folder))
        if not result.diverged:
            run = shlex.quote(str(folder))
            print(f"next: batchnorm predict {run} IMAGE...{trust}\n      batchnorm fold {run} -o net.onnx{trust}")
    if result.diverged:
        raise SystemExit(1)


def check_before_training(recipe: Recipe, options: Options) -> tuple[int, str | None]:
    """Check the options and the images; return the number of classes, and a note if the images are small."""
    if options.graph and find_device(options.device).type != "cuda":
        raise ValueError("--graph True captures CUDA graphs, but this run is on the CPU: remove that option")
    if options.tensorboard:
        check_installed("tensorboard")
    # Listing the images may take a long time, so check everything else first.
    splits = training_splits(options.data, recipe.validate)
    begins = recipe.start and not has_checkpoints(options.folder(recipe))
    if begins and not Path(recipe.start).expanduser().exists():
        raise FileNotFoundError(f"--from {recipe.start}: there is no such run or file")
    if recipe.factory:
        check_function(recipe.factory)
    sources = {split: open_source(options.data, split) for split in splits}
    for split, source in sources.items():
        check_complete(source, options.data, split)
    images = next(iter(sources.values()))
    return len(images.classes), small_images_note(images, recipe.size)


def describe(
    network: Literal["inception"],
    /,
    recipe: RecipeName = "bn-x30",
    classes: int = 1000,
    size: int = 224,
    stem: Literal["separable", "plain"] = "separable",
    projection: Literal[96, 128] = 96,
) -> None:
    """Print the layers, parameters and multiply-adds of the paper's network.

    For 1000 classes and images of 224 x 224, also compare them with what the paper says.

    Args:
        network: the network to describe; inception is the only choice.
        recipe: the paper's run whose network is printed.
        classes: number of classes.
        size: height and width of the images.
        stem: kind of the first convolution.
        projection: number of filters of the pool projection in modules 4c and 4d, where the paper's table contradicts
            itself.
    """
    between(1, 1_000_000, classes=classes)
    chosen = replace(RECIPES[recipe], size=size, stem=stem, projection=projection)
    description = describe_network(chosen.network(classes), size)
    console = Console()
    console.print(str(description), highlight=False, soft_wrap=True)
    note = early_strides_note(size)
    if note:
        console.print(note, highlight=False, soft_wrap=True)
    if (classes, size) == (1000, 224):
        table = Table("the paper says", "computed here")
        for claim in claims(description):
            table.add_row(*claim)
        console.print(table)


def resolve(recipe: Recipe, overrides: Recipe) -> Recipe:
    """Return the recipe with the overridden fields replaced.

    >>> resolve(RECIPES["bn-x30"], Overrides(batch_size=64)).batch_size
    64
    """
    values: dict[str, Any] = {field.name: getattr(overrides, field.name) for field in fields(Recipe)}
    given = {name: value for name, value in values.items() if value is not None}
    chosen = replace(recipe, **given)
    papers = [name for name in PAPERS_FIELDS if name in given]
    if chosen.factory and papers:
        raise ValueError(
            f"--network cannot be combined with options of the paper's network: remove {', '.join(papers)}"
        )
    if chosen.factory and "name" not in given:
        return replace(chosen, name=_name(chosen))
    path = Path(chosen.name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        problem = f"name={chosen.name!r}: must be the name of a folder in runs/" if chosen.name else "name is empty"
        raise ValueError(f"{problem}: give the run another name")
    return chosen


def _name(own: Recipe) -> str:
    """Return a run's default name: its network's file or module, the function, and ``normalize``, joined by hyphens.

    ``normalize`` is left out if it is "as-is".

    >>> _name(Recipe(factory="nets/small.py:build", normalize="insert")), _name(Recipe(factory="timm:resnet50"))
    ('small-build-insert', 'timm-resnet50')
    """
    source, _, function = own.factory.rpartition(":")
    parts = (Path(source).name.removesuffix(".py"), function.replace("/", "-"), own.normalize)
    return "-".join(part for part in parts if part not in ("", "as-is"))


def _summary(result: Result, out: Path) -> str:
    if result.diverged:
        return (
            f"{result.recipe}: diverged by step {result.steps:,}; see {out / 'metrics.jsonl'}, and try a lower --rate"
        )
    assert result.top1 is not None
    by, folded = (f" {how}" if how else "" for how in STATISTICS[result.statistics])
    accuracies = f"top-1 accuracy {result.top1:.2%}"
    if result.top5 is not None and result.classes >= TOP5_CLASSES:
        accuracies += f", top-5 {result.top5:.2%}"
    lines = [f"{result.recipe}: {accuracies} after {result.steps:,} steps{folded}"]
    if result.best_top1 is not None:
        lines.append(f"best top-1 accuracy{by}: {result.best_top1:.2%} at step {result.best_step:,}")
    lines += [
        f"steps to {float(k):.1%}: {'not reached' if v is None else f'{v:,}'}" for k, v in result.steps_to.items()
    ]
    if result.corrupt:
        listed = "".join(f"\n  {file}" for file in result.corrupt_files[:5])
        lines.append(f"{result.corrupt} file(s) could not be read and were skipped:{listed}")
    return "\n".join([*lines, f"in {out}"])
