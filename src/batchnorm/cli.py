"""The ``batchnorm`` command: a table of words and the functions they call."""

from __future__ import annotations

import sys
from importlib import import_module

import tyro

from .extras import MissingExtraError

# word(s) -> (module:function, what it does). Modules are imported only when their word is used.
COMMANDS: dict[str, tuple[str, str]] = {
    "fold": ("batchnorm.inference.command:fold", "fold a network's BN into its weights and write ONNX or torch.export"),
    "bench cpu": ("batchnorm.bench.cpu:cpu", "time the CPU path against torch, side by side"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 2 for wrong usage, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((c for n in (2, 1) if (c := " ".join(words[:n])) in COMMANDS), None)
    if command is None:
        return _usage(words)
    module, _, function = COMMANDS[command][0].partition(":")
    try:
        tyro.cli(
            getattr(import_module(module), function),
            prog=f"batchnorm {command}",
            args=words[len(command.split()) :],
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (MissingExtraError, FileNotFoundError, ValueError) as error:
        # What a user can put right gets one sentence; anything else keeps its traceback.
        print(f"batchnorm {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _usage(words: list[str]) -> int:
    prefix = [w for w in words if not w.startswith("-")]
    shown = {c: text for c, (_, text) in COMMANDS.items() if c.split()[: len(prefix)] == prefix}
    unknown = not shown
    if unknown:
        print(f"batchnorm: there is no command '{' '.join(prefix)}'", file=sys.stderr)
        shown = {c: text for c, (_, text) in COMMANDS.items()}
    asked = not unknown and (not words or {"-h", "--help"} & set(words))
    stream = sys.stdout if asked else sys.stderr
    print("usage: batchnorm COMMAND [OPTIONS]; batchnorm COMMAND --help explains one\n", file=stream)
    width = max(map(len, shown))
    for command, text in shown.items():
        print(f"  {command:<{width}}  {text}", file=stream)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
