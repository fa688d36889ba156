"""What a verb did at each place of a network, and what it did not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

# What each verb works on, the first word of its action, and what to say of the places where it did that.
WORDS = {
    "fold": ("batch norm", "folded", "folded"),
    "convert": ("batch norm", "converted", "converted"),
    "revert": ("batch norm", "reverted", "reverted"),
    "insert": ("layer", "inserted", "normalized"),
}
LISTED = 10


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
    fusion: str = ""
    """How many layers take in what follows them, in words."""

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

    @property
    def summary(self) -> str:
        """How much was done and what is left, in one line."""
        noun, action, done = WORDS.get(self.verb, ("site", "done", "done"))
        words = Counter(site.action.partition(" ")[0] for site in self.sites)
        count, maps = words.pop(action, 0), words.pop("fixed", 0)
        if not self.sites:
            return f"{self.verb}: no {noun}s found"
        parts = [f"{count} of {_counted(len(self.sites), noun)} {done}"]
        if maps:
            parts = [f"{parts[0]} into weights", f"{maps} as {'a ' * (maps == 1)}fixed affine map{'s' * (maps > 1)}"]
        if self.relative_error is not None:
            parts.append(f"relative error {self.relative_error:.1e}")
        parts += [f"{n} {'left' if word == 'kept' else word}{self._why(word)}" for word, n in words.items()]
        return f"{self.verb}: {f'{self.fusion}; ' if self.fusion else ''}{', '.join(parts)}"

    def _why(self, word: str) -> str:
        """Give the reason for an action, if there is one."""
        (first, *others) = dict.fromkeys(site.reason for site in self.sites if site.action.startswith(word))
        return f": {first}" if first and not others else " for different reasons" if others else ""

    def __str__(self) -> str:
        """Say how much was done, and list the places with something else to say than success."""
        _, action, _ = WORDS.get(self.verb, ("", "done", ""))
        listed, rest = list(self.sites), 0
        if self.verb != "insert":  # which chooses the places itself
            listed = [site for site in self.sites if site.reason or not site.action.startswith(action)]
            listed.sort(key=lambda site: site.action.startswith((action, "fixed")))
            listed, rest = listed[:LISTED], len(listed[LISTED:])
        more = [f"  and {rest} more; iterate over the report to see all"] if rest else []
        return "\n".join(
            [self.summary, *(f"  {s}" for s in listed), *more, *(f"  note: {note}" for note in self.notes)]
        )


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def attach(net: nn.Module, report: Report) -> nn.Module:
    """Give a returned network its report as ``net.report``, unless the user's class has that name for itself."""
    if isinstance(getattr(net, "report", report), Report):
        net.__dict__["report"] = report
    return net
