"""A run on disk: ``config.json``, ``metrics.jsonl``, ``checkpoint.pt`` and, at the end, ``summary.json``."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...results import environment, write_atomically, write_json


class RunFolder:
    """Write and read the files of one training run.

    Args:
        path: the folder; it is made where it does not exist.

    Beyond the paper: how a run is kept, stopped and resumed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"
        path.mkdir(parents=True, exist_ok=True)

    def start(self, config: Mapping[str, Any]) -> tuple[int, float]:
        """Begin a new run at step 0, after 0 seconds; an earlier run of the same configuration is done again.

        Raises:
            ValueError: where the folder holds a run with another configuration, which would be lost.
        """
        self.check_same(config)
        for old in (self.metrics, self.checkpoint, self.path / "summary.json"):
            old.unlink(missing_ok=True)
        write_json(self.path / "config.json", {**config, "environment": environment()})
        self.metrics.touch()
        return 0, 0.0

    def resume(self, net: nn.Module, config: Mapping[str, Any]) -> tuple[int, float]:
        """Load the checkpoint into ``net``, cut off metrics written after it, and return its step and seconds.

        Without a checkpoint the run starts anew.

        Raises:
            ValueError: where the folder holds a run with another configuration.
        """
        if not self.checkpoint.exists():
            return self.start(config)
        written = self.check_same({k: v for k, v in config.items() if k != "steps"})
        write_json(self.path / "config.json", {**written, **config})
        (self.path / "summary.json").unlink(missing_ok=True)
        try:
            state = torch.load(self.checkpoint, weights_only=True)
            net.load_state_dict(state["net"])
            size, step, seconds = int(state["metrics_size"]), int(state["step"]), float(state["seconds"])
        except Exception as error:  # torch.load has errors of many kinds
            why = str(error).partition("\n")[0]
            raise ValueError(f"{self.checkpoint} cannot be read ({why}): remove it to train anew") from error
        with self.metrics.open("r+b") as file:
            file.truncate(size)
        return step, seconds

    def check_same(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration of the run in the folder, if there is one; refuse if it is another."""
        if not self.checkpoint.exists():
            return {}
        path = self.path / "config.json"
        try:
            written: dict[str, Any] = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): use another --out, or remove {self.path}") from error
        differs = {k: (written.get(k), v) for k, v in config.items() if written.get(k) != v}
        if differs:
            what = ", ".join(f"{k} is {old} there and {new} here" for k, (old, new) in differs.items())
            raise ValueError(f"{self.path} holds another run ({what}); use the same options, or another --out")
        return written

    def log(self, **values: Any) -> None:
        """Append one line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def save(self, net: nn.Module, step: int, seconds: float) -> None:
        """Replace the checkpoint by one of this step, ``seconds`` into the run, atomically."""
        size = self.metrics.stat().st_size
        content = io.BytesIO()
        torch.save({"net": net.state_dict(), "step": step, "seconds": seconds, "metrics_size": size}, content)
        write_atomically(self.checkpoint, content.getvalue())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write what the run came to."""
        write_json(self.path / "summary.json", summary)
