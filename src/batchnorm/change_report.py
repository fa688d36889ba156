"""Reports on what ``convert``, ``fold``, ``revert``, ``insert`` and ``estimate_`` did at each module of a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, isfinite

from torch import nn

# For each function: the noun for the modules that it changes, the first word of `Site.action` for a changed module, and
# the word for a changed module in the summary.
WORDS = {
    "fold": ("batch norm", "folded", "folded"),
    "convert": ("batch norm", "converted", "converted"),
    "revert": ("batch norm", "reverted", "reverted"),
    "insert": ("layer", "inserted", "normalized"),
}
LISTED = 10


@dataclass(frozen=True)
class Site:
    """One place in a network: its path, what was done there and the reason."""

    path: str
    action: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.path or '(the network)'}: {self.action}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, repr=False)
class VerbReport:
    """What a function such as ``convert`` did at each site of a network. ``print`` shows the report."""

    verb: str
    sites: tuple[Site, ...]
    relative_error: float | None = None
    """max |new - old| / max |old| for the example, the largest over all output tensors; None if not compared."""
    notes: tuple[str, ...] = field(default=())
    fusion: str = ""
    """A phrase that says how many layers are fused with the sums and activations after them."""

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, path: str) -> Site:
        """Return the site at ``path``."""
        for site in self.sites:
            if site.path == path:
                return site
        raise KeyError(f"this report of {self.verb} has no entry {path!r}; it has {[s.path for s in self.sites]}")

    def paths(self, action: str) -> list[str]:
        """Return the paths of the sites whose action starts with ``action``."""
        return [site.path for site in self.sites if site.action.startswith(action)]

    @property
    def summary(self) -> str:
        """One line that says how many sites were changed, and why the others were not, if they share a reason."""
        noun, action, done = WORDS.get(self.verb, ("site", "done", "done"))
        words = Counter(site.action.partition(" ")[0] for site in self.sites)
        count, maps = words.pop(action, 0), words.pop("fixed", 0)
        if not self.sites:
            return f"{self.verb}: no {noun}s found"
        parts = [f"{count} of {len(self.sites)} {noun}{'s' * (len(self.sites) != 1)} {done}"]
        if maps:
            parts = [f"{parts[0]} into weights", f"{maps} as {'a ' * (maps == 1)}fixed affine map{'s' * (maps > 1)}"]
        if self.relative_error is not None:
            parts.append(f"relative error {self.relative_error:.1e}")
        parts += [f"{n} {'left' if word == 'kept' else word}{self._why(word)}" for word, n in words.items()]
        return f"{self.verb}: {f'{self.fusion}; ' if self.fusion else ''}{', '.join(parts)}"

    def _why(self, word: str) -> str:
        """Return the reason that all sites with this action share, or say that their reasons differ."""
        (first, *others) = dict.fromkeys(site.reason for site in self.sites if site.action.startswith(word))
        return f": {first}" if first and not others else ": the reasons differ" if others else ""

    def __str__(self) -> str:
        """Return the summary, the sites that were not changed or have a reason (at most LISTED), and the notes."""
        _, action, _ = WORDS.get(self.verb, ("", "done", ""))
        listed, rest = list(self.sites), 0
        if self.verb != "insert":  # list all of insert's sites: each says whether a layer was normalized
            listed = [site for site in self.sites if site.reason or not site.action.startswith(action)]
            listed.sort(key=lambda site: site.action.startswith((action, "fixed")))
            listed, rest = listed[:LISTED], len(listed[LISTED:])
        more = [f"  and {rest} more; iterate over the report to see all"] if rest else []
        return "\n".join(
            [self.summary, *(f"  {s}" for s in listed), *more, *(f"  note: {note}" for note in self.notes)]
        )

    __repr__ = __str__


@dataclass(frozen=True)
class LayerStatistics:
    """How far a layer's running averages were from its population statistics, and how exact these statistics are.

    Each gap and each standard error is the largest over the layer's features. The unit is sqrt(Var[x] + eps) for the
    mean and Var[x] + eps for the variance.
    """

    path: str
    batches: int
    count: float
    mean_gap: float
    var_gap: float
    mean_error: float
    """The standard error of the mean, from the spread of the batches' means."""
    var_error: float
    """The standard error of the variance, from the spread of the batches' variances."""

    @property
    def m(self) -> float:
        """The paper's m: how many values a feature has in a mini-batch, averaged over the mini-batches.

        A mini-batch is the input of one forward pass, even if gradients are accumulated over several passes.
        """
        return self.count / self.batches


@dataclass(frozen=True, repr=False)
class Population:
    """The results of :func:`batchnorm.estimate_`, layer by layer. ``print`` shows them as a table."""

    layers: tuple[LayerStatistics, ...]
    left_alone: tuple[Site, ...]

    def more_batches(self, tolerance: float = 0.05) -> int:
        """Return how many more batches would bring every standard error down to ``tolerance``, or 0 if none are needed.

        This assumes that errors fall as 1 / sqrt(number of batches). A layer that has seen only one batch has no error
        estimate, so it counts as needing one more batch.
        """
        more = 0
        for layer in self.layers:
            factor = (max(layer.mean_error, layer.var_error) / tolerance) ** 2
            more = max(more, ceil(layer.batches * (factor - 1)) if isfinite(factor) else 1)
        return more

    def __str__(self) -> str:
        width = max([5, *(len(layer.path) for layer in self.layers)])
        lines = [f"{'layer':{width}}  batches        m  mean gap (error)     var gap (error)"]
        lines += [
            f"{s.path:{width}}  {s.batches:7d}  {s.m:7.0f}"
            f"  {s.mean_gap:8.3f} ({_error(s.mean_error)})  {s.var_gap:10.3f} ({_error(s.var_error)})"
            for s in self.layers
        ]
        return "\n".join([*lines, *map(str, self.left_alone)])

    __repr__ = __str__


def _error(error: float) -> str:
    return f"{error:.3f}" if isfinite(error) else "unknown"


def attach(net: nn.Module, report: VerbReport | Population) -> nn.Module:
    """Set ``net.report`` to the report, unless the network uses that name for something else."""
    if isinstance(getattr(net, "report", report), VerbReport | Population):
        net.__dict__["report"] = report
    return net
