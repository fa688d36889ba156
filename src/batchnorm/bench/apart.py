"""A contender in a process of its own: contenders then compile side by side, and one at a time is asked to run."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from .contenders import Contender, Timed


class Apart:
    """A contender in a process of its own; it has the GPU to itself while the others wait for their turn.

    Beyond the paper: speed.
    """

    def __init__(self, contender: Contender, batch: int, size: int) -> None:
        self.contender, self.batch = contender, batch
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, contender, batch, size), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> float:
        """Wait until it is compiled; return the loss of its first step."""
        return self._answer()  # type: ignore[no-any-return]

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the :class:`Timed` in the other process."""
        self._pipe.send((method, args))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def _answer(self) -> Any:
        try:
            failed, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.contender.name}, batch {self.batch}: its process died") from None
        if failed:
            raise RuntimeError(f"{self.contender.name}, batch {self.batch}: {answer}")
        return answer


def _serve(pipe: Connection, contender: Contender, batch: int, size: int) -> None:
    torch.backends.cudnn.benchmark = True
    try:
        timed = Timed(contender, batch, size, torch.device("cuda"))
        timed.take(20)
        torch.cuda.synchronize()
        pipe.send((False, timed.first_loss))
        while True:
            method, args = pipe.recv()
            pipe.send((False, getattr(timed, method)(*args)))
    except EOFError:
        return
    except Exception as error:  # whatever it was: the parent says so
        pipe.send((True, repr(error)))
