"""What :func:`batchnorm.diagnose` returns: findings, each with the layer, the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill

LISTED = 3
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One problem: the rule that found it, the layer's path ("" for the whole network), the reason and the fix."""

    rule: str
    path: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path or '(the network)'}: {self.why}"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The findings of :func:`batchnorm.diagnose`, grouped by rule, the most serious rule first. ``print`` shows them.

    Iterate over a diagnosis to get its findings; ``len`` counts them.
    """

    findings: tuple[Finding, ...]
    layers: int
    """The number of batch normalization layers."""
    batches: int
    """The number of batches that the network ran on."""
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and why."""

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def of(self, rule: str) -> tuple[Finding, ...]:
        """Return the findings of one rule, such as "stale_averages"."""
        return tuple(finding for finding in self.findings if finding.rule == rule)

    @property
    def summary(self) -> str:
        """One line that says how many rules found a problem."""
        rules = len({finding.rule for finding in self.findings})
        found = f"{rules} problem{'s' * (rules != 1)}" if rules else "no problem found"
        layers = f"{self.layers} batch normalization layer{'s' * (self.layers != 1)}"
        return f"diagnose: {found} in {layers}, on {self.batches} batch{'es' * (self.batches != 1)}"

    def __str__(self) -> str:
        """Return the summary, the first findings of each rule with its fixes, and what was not checked."""
        lines = [self.summary]
        for rule in dict.fromkeys(finding.rule for finding in self.findings):
            found = self.of(rule)
            layers = sum(finding.path != "" for finding in found)  # other findings are about the whole network
            count = f" ({layers} layers)" if layers > 1 else ""
            lines.append(f"\n{rule.replace('_', ' ')}{count}")
            lines += [_wrapped(str(finding)) for finding in found[:LISTED]]
            if len(found) > LISTED:
                lines.append(f"  and {len(found) - LISTED} more")
            lines += [_wrapped(f"fix: {fix}") for fix in dict.fromkeys(finding.fix for finding in found)]
        if self.unchecked:
            lines += ["\nnot checked", *map(_wrapped, self.unchecked)]
        return "\n".join(lines)

    __repr__ = __str__


def _wrapped(text: str) -> str:
    return fill(
        text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
