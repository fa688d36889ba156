"""What a verb did at each place of a network, and what it did not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True)
class Site:
    """Hold one place of a network: its path, what was done there and the reason.

    Beyond the paper: an account of Alg. 2 on a user's network.
    """

    path: str
    action: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.path or '(the network)'}: {self.action}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Report:
    """Hold the sites a verb looked at, in the order in which the network calls them; print it or query it.

    Beyond the paper: an account of Alg. 2 on a user's network.
    """

    verb: str
    sites: tuple[Site, ...]
    relative_error: float | None = None
    """max |new - old| / max |old| over the outputs for the example, where outputs were compared."""
    notes: tuple[str, ...] = field(default=())

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, path: str) -> Site:
        """Return the site of a path."""
        for site in self.sites:
            if site.path == path:
                return site
        raise KeyError(f"{self.verb} looked at no site {path!r}; it looked at {[s.path for s in self.sites]}")

    def paths(self, action: str) -> list[str]:
        """Return the paths at which this was done; ``action`` may be its first words."""
        return [site.path for site in self.sites if site.action.startswith(action)]

    def __str__(self) -> str:
        lines = [f"{self.verb}: {len(self.sites)} site{'s' * (len(self.sites) != 1)}"]
        if self.relative_error is not None:
            lines[0] += f", relative error {self.relative_error:.1e}"
        return "\n".join([*lines, *(f"  {site}" for site in self.sites), *(f"  note: {note}" for note in self.notes)])


def attach(net: nn.Module, report: Report) -> nn.Module:
    """Give a returned network its report as ``net.report``, unless the user's class has that name for itself."""
    if isinstance(getattr(net, "report", report), Report):
        net.__dict__["report"] = report
    return net
