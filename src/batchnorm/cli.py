"""The ``batchnorm`` command: a table of subcommands, and the code that parses and runs them."""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from . import __version__
from .arguments import call_with
from .errors import JobsFailedError, sentence
from .network_factory import UserCodeError
from .optional_packages import MissingExtraError, check_installed


class Command(NamedTuple):
    """Describe a subcommand: the function that runs it, what the command does, and example options."""

    function: str  # module:function; the module is imported only for this command
    does: str
    example: str
    needs: tuple[str, ...] = ()
    """The modules of optional packages that the command needs, whatever its options are. The function itself checks for
    a GPU, and for modules that only some options need."""


IMAGES, RUNS, PLOTS = ("PIL",), ("PIL", "safetensors"), ("matplotlib",)


COMMANDS = {
    "train": Command(
        "batchnorm.train.train_command:train",
        "train the paper's network, or your own, on your images",
        "--network mynet.py:build --normalize insert --data images --validate 0.1 --size 64 --epochs 20",
        RUNS,
    ),
    "compare": Command(
        "batchnorm.reproduce.compare:compare",
        "train your network without and with batch normalization, and compare both at their best learning rates",
        "--network mynet.py:build --data images --validate 0.1 --size 64 --epochs 20",
        RUNS,
    ),
    "evaluate": Command(
        "batchnorm.train.evaluate_command:evaluate",
        "print the top-1 and top-5 error of runs and of their ensemble, with 1, 10 or 144 crops",
        "runs/one runs/two --data images --crops 144",
        RUNS,
    ),
    "predict": Command(
        "batchnorm.train.predict_command:predict",
        "classify images with a finished run",
        "runs/mine photo.jpg more-photos --top 3 --csv predictions.csv",
        RUNS,
    ),
    "fold": Command(
        "batchnorm.train.fold_command:fold",
        "fold the BN of a run or of any network into its weights, and write an ONNX or torch.export file",
        "runs/mine -o net.onnx",
    ),
    "diagnose": Command(
        "batchnorm.train.diagnose_command:diagnose",
        "say what is wrong with the batch normalization of a run, and how to fix it",
        "runs/mine --data images",
        RUNS,
    ),
    "describe": Command(
        "batchnorm.train.train_command:describe",
        "print the layers, parameters and multiply-adds of the paper's network",
        "inception --size 224 --classes 1000",
    ),
    "shard": Command(
        "batchnorm.data.sharding:shard",
        "pack an image folder, or ImageNet's tar files, into tar shards",
        "images shards --per-shard 5000 --short-side 256",
    ),
    "report": Command(
        "batchnorm.report.page:report", "compare runs on one HTML page", "runs/one runs/two --out report.html"
    ),
    "reproduce fig1": Command(
        "batchnorm.reproduce.mnist.fig1:fig1",
        "Figure 1: MNIST with and without batch normalization",
        "--steps 5000 --out runs/fig1-short",
        PLOTS,
    ),
    "reproduce comparison": Command(
        "batchnorm.reproduce.mnist.comparison:comparison",
        "Figure 1 with three seeds, and each network at its best learning rate",
        "--marks 1000 5000 --seeds 2",
        PLOTS,
    ),
    "reproduce fig2": Command(
        "batchnorm.reproduce.imagenet.fig2:fig2",
        "Figures 2 and 3: Inception and its variants on images",
        "--data shards --jobs 8 --minutes 50",
    ),
    "reproduce fig4": Command(
        "batchnorm.reproduce.imagenet.fig4:fig4",
        "Figure 4: errors with many crops and many networks",
        "--data shards --jobs 6",
    ),
    "reproduce section2": Command(
        "batchnorm.reproduce.mnist.section2:section2",
        "Section 2: gradient steps that ignore the normalization",
        "--steps 200 --rates 0.01 0.1",
        PLOTS,
    ),
    "reproduce optimizers": Command(
        "batchnorm.reproduce.mnist.optimizers:optimizers",
        "Section 3.1: optimizers from batch gradient descent to Adagrad",
        "--steps 500 --out runs/optimizers-short",
        PLOTS,
    ),
    "reproduce placement": Command(
        "batchnorm.reproduce.mnist.placement:placement",
        "Section 3.2: BN before or after the nonlinearity",
        "--steps 500 --seeds 2",
        PLOTS,
    ),
    "reproduce scale": Command(
        "batchnorm.reproduce.mnist.scale:scale",
        "Section 3.3: the scale of the weights, and how they grow",
        "--factors 0.1 10 1000",
        PLOTS,
    ),
    "reproduce jacobian": Command(
        "batchnorm.reproduce.mnist.jacobian:jacobian",
        "Section 3.3: singular values of the Jacobians between layers",
        "--steps 500 --examples 50",
        PLOTS,
    ),
    "reproduce saturation": Command(
        "batchnorm.reproduce.mnist.saturation:saturation",
        "Section 1: saturated sigmoids during training",
        "--steps 1000 --points 20",
        PLOTS,
    ),
    "reproduce init": Command(
        "batchnorm.reproduce.mnist.initialization:init",
        "Abstract: accuracy against the standard deviation of the initial weights",
        "--stds 0.01 0.1 1 --seeds 2",
        PLOTS,
    ),
    "bench cpu": Command("batchnorm.bench.cpu:cpu", "time batch normalization on a CPU against torch", "--threads 1"),
    "bench kernels": Command(
        "batchnorm.bench.kernels:kernels",
        "time the fused CUDA kernels against eager torch and torch.compile",
        "--dtypes bfloat16 --jobs 8",
    ),
    "bench algorithm2": Command(
        "batchnorm.bench.algorithm2:algorithm2",
        "time estimate_ and fold against plain torch",
        "--batch 32 --size 64 --device cpu",
    ),
    "bench fig1": Command(
        "batchnorm.bench.fig1:fig1",
        "time Figure 1's experiment against plain eager PyTorch",
        "--steps 5000 --rounds 3",
        PLOTS,
    ),
    "bench monitor": Command(
        "batchnorm.bench.monitor:monitor", "time a training loop with and without a Monitor", "--steps 500 --rounds 5"
    ),
    "bench counters": Command(
        "batchnorm.bench.counters:counters",
        "read hardware counters with ncu, to see what limits the CUDA kernels",
        "--out runs/bench/counters.json",
    ),
    "bench train": Command(
        "batchnorm.bench.train:train",
        "time BN-Inception's training step, with this library's layers and with torch.nn's",
        "--batches 32 256 --out runs/bench/train.json",
    ),
    "bench host": Command(
        "batchnorm.bench.host:host",
        "time the CPU overhead of eager CUDA layers against torch.nn",
        "--out runs/bench/host.json",
    ),
    "bench networks": Command(
        "batchnorm.bench.networks:networks",
        "time training steps of real networks before and after conversion",
        "--networks torchvision:resnet50 mynet:build --modes eager graph --batches 64",
    ),
    "bench learning": Command(
        "batchnorm.bench.learning:learning",
        "train a network and its converted copy, and compare their accuracies",
        "--data images --epochs 10 --seeds 0 1 2",
        IMAGES,
    ),
    "bench fine-tuning": Command(
        "batchnorm.bench.fine_tuning:fine_tuning",
        "fine-tune with small batches, and compare batch statistics with frozen statistics",
        "--data images --batches 2 8 32",
        RUNS,
    ),
    "bench memory": Command(
        "batchnorm.bench.memory:memory",
        "measure BN-Inception's peak memory, with this library's layers and with torch.nn's",
        "--batch 64 --size 224",
    ),
    "bench input": Command(
        "batchnorm.bench.input:input_rate",
        "time the decoding and cropping of images against a plain loader",
        "images --workers 4",
        IMAGES,
    ),
    "bench crops": Command(
        "batchnorm.bench.crops:crops",
        "time multi-crop evaluation against the bare forward pass",
        "--crops 144 --images 64",
        IMAGES,
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit status.

    The status is 0 on success, 1 if a part of the work failed or the output was closed, 2 for wrong usage or another
    error that the user can fix, and 130 if the command was stopped, for example with Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A character that the output's encoding lacks, for example in a file name, must not end a command before all
        # its results are printed.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the program that reads the output, such as `head`, has closed the pipe
        # Python flushes stdout again at exit. Redirect stdout to devnull, so that this flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        print(f"batchnorm {__version__}")
        return 0
    command = next((c for n in (2, 1) if (c := " ".join(words[:n])) in COMMANDS), None)
    if command is None:
        return _usage(words)
    module, _, function = COMMANDS[command].function.partition(":")
    given = words[len(command.split()) :]
    called: Callable[..., object] | None = None
    try:
        if not {"-h", "--help"} & set(given):
            check_installed(*COMMANDS[command].needs)
        called = getattr(import_module(module), function)
        _call(called, command, given)
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "stopped", file=sys.stderr)
        return 130
    except UserCodeError as error:
        _print_users_part(error)
        print(f"batchnorm {command}: {error}; no results were written", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except (MissingExtraError, OSError, ValueError) as error:
        # The user can fix these errors, so print one sentence instead of a traceback.
        message = sentence(error) if called is None else _with_dashes(sentence(error), called, given)
        print(f"batchnorm {command}: {message}", file=sys.stderr)
        return 2
    except JobsFailedError as error:
        print(f"batchnorm {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _call(function: Callable[..., object], command: str, words: list[str]) -> None:
    """Parse ``words`` into the arguments of a function, and call it.

    If the only argument of the function is a dataclass, parse ``words`` into the fields of the dataclass.
    """
    kinds: list[Any] = [kind for name, kind in get_type_hints(function).items() if name != "return"]
    settings = kinds[0] if len(kinds) == 1 and is_dataclass(kinds[0]) else None
    given: Any = settings or function
    help_text = f"{_description(given)}\n\nExample: batchnorm {command} {COMMANDS[command].example}"
    made = call_with(words, given, f"batchnorm {command}", help_text)
    if settings is not None:
        function(made)


def _with_dashes(message: str, function: Callable[..., object], words: list[str]) -> str:
    """In a message, write the names of the function's options as on the command line.

    Paths, and what the user typed (``words``), are left as they are.

    >>> def train(rate: float, batch_size: int) -> None: ...
    >>> _with_dashes("batch_size=1: must be 2 or more", train, [])
    '--batch-size=1: must be 2 or more'
    >>> _with_dashes("rate=1/data and /runs/rate=1 are not folders", train, ["rate=1/data"])
    'rate=1/data and /runs/rate=1 are not folders'
    """
    hints = get_type_hints(function)
    options = {*hints, *(f.name for kind in hints.values() if is_dataclass(kind) for f in fields(kind))}
    values = (word.partition("=")[2] if word.startswith("--") else word for word in words)
    typed = [re.escape(value.rstrip("/\\")) for value in values if "=" in value]
    option = r"(?<![\w./\\-])(?<!in Python, )(\w+)=(?=\S)"
    return re.sub(
        "|".join([*typed, option]),
        lambda found: f"--{found[1].replace('_', '-')}=" if found[1] in options else found[0],
        message,
    )


def _print_users_part(error: UserCodeError) -> None:
    """Print the traceback of an error in the user's code, without the frames of this library and importlib."""
    cause = error.__cause__
    if cause is None:  # the error came from another process, which put the traceback into a note
        print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return
    package = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not frame.filename.startswith((package, "<frozen importlib"))
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(cause)
    print("Traceback (most recent call last):\n" + "".join(lines), end="", file=sys.stderr)


def _description(given: object) -> str:
    """Return the paragraphs of a docstring that belong in a help text, without markup."""
    paragraphs = (getdoc(given) or "").replace("``", "'").split("\n\n")
    ends = ("Args:", "Raises:", ">>>", "Paper:", "Beyond the paper:")
    return "\n\n".join(" ".join(p.split()) for p in takewhile(lambda p: not p.startswith(ends), paragraphs))


def _usage(words: list[str]) -> int:
    prefix = [w for w in words if not w.startswith("-")]
    found = {word: command for word, command in COMMANDS.items() if word.split()[: len(prefix)] == prefix}
    if not found:
        print(f"batchnorm: there is no command {_unknown(*prefix[:2])}", file=sys.stderr)
        return 2
    asked = not words or {"-h", "--help"} & set(words)
    stream = sys.stdout if asked else sys.stderr
    print("usage: batchnorm COMMAND [OPTIONS]; batchnorm COMMAND --help explains a command\n", file=stream)
    width = max(map(len, found))
    for word, command in found.items():
        print(f"  {word:<{width}}  {command.does}", file=stream)
    return 0 if asked else 2


def _unknown(word: str, second: str = "") -> str:
    """Return the unknown command that was typed, and the commands that it resembles.

    >>> print(_unknown("trian", "runs/mine"))
    'trian'; did you mean 'train'?
    """
    groups: dict[str, list[str]] = {}
    for command in COMMANDS:
        group, _, member = command.partition(" ")
        groups.setdefault(group, []).append(member)
    (group,) = get_close_matches(word, groups, n=1) or [""]
    if (word, second) == ("reproduce", "fig3"):
        return "'reproduce fig3'; 'reproduce fig2' makes Figure 3"
    if not group or group in COMMANDS or not second:
        return f"'{word}'; " + (f"did you mean '{group}'?" if group else "'batchnorm' lists all commands")
    members = [second] if second in groups[group] else sorted(get_close_matches(second, groups[group]))
    near = " or ".join(f"'{group} {member}'" for member in members)
    meant = f"did you mean {near}?" if near else f"'batchnorm {group}' lists its commands"
    return f"'{word} {second}'; {meant}"


if __name__ == "__main__":
    sys.exit(main())
