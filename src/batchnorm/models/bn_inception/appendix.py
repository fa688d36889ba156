"""The paper's statements about its network's size, each beside the number computed here."""

from __future__ import annotations

from typing import NamedTuple

from ..description import Description

# Szegedy et al. (2014), Table 1: #1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection, and the map's height.
GOOGLENET = (
    (64, 96, 128, 16, 32, 32, 28),
    (128, 128, 192, 32, 96, 64, 28),
    (192, 96, 208, 16, 48, 64, 14),
    (160, 112, 224, 24, 64, 64, 14),
    (128, 128, 256, 24, 64, 64, 14),
    (112, 144, 288, 32, 64, 64, 14),
    (256, 160, 320, 32, 128, 128, 14),
    (256, 160, 320, 32, 128, 128, 7),
    (384, 192, 384, 48, 128, 128, 7),
)


class Claim(NamedTuple):
    """A statement of the paper and what it comes to here.

    Paper: Appendix; Sec. 4.2
    """

    statement: str
    computed: str


def claims(description: Description) -> tuple[Claim, ...]:
    """Set the paper's statements about the appendix network beside a description of it.

    None of the readings of the table gives the 13.6 million parameters of Section 4.2; the number is printed as it is.

    >>> from ..describe import describe
    >>> from .network import inception
    >>> for claim in claims(describe(inception(stem="plain"))): print(claim.computed)
    11.19 million
    12: 9 in nine modules, 3 in the tenth
    60% more
    28% more

    Paper: Appendix; Sec. 4.2
    """
    depth, parameters, work = googlenet()
    more = description.depth - depth
    where = "9 in nine modules, 3 in the tenth" + (", 1 in the separable stem" if more > 12 else "")
    return (
        Claim("13.6 million parameters (Sec. 4.2)", f"{description.parameters / 1e6:.2f} million"),
        Claim("9 more weight layers than GoogLeNet", f"{more}: {where}"),
        Claim("25% more parameters than GoogLeNet", f"{description.parameters / parameters - 1:.0%} more"),
        Claim("about 30% more computation than GoogLeNet", f"{description.multiply_adds / work - 1:.0%} more"),
    )


def googlenet() -> tuple[int, int, int]:
    """Return GoogLeNet's depth, parameters and multiply-adds, without its auxiliary classifiers.

    >>> googlenet()
    (22, 6998552, 1582671872)

    Beyond the paper: what its appendix compares with.
    """
    convs = [(3, 64, 7, 112), (64, 64, 1, 56), (64, 192, 3, 56)]  # inputs, outputs, kernel, map
    channels = 192
    for one, reduce3, three, reduce5, five, projection, size in GOOGLENET:
        convs += [(channels, n, 1, size) for n in (one, reduce3, reduce5, projection)]
        convs += [(reduce3, three, 3, size), (reduce5, five, 5, size)]
        channels = one + three + five + projection
    convs.append((channels, 1000, 1, 1))
    parameters = sum(i * o * k * k + o for i, o, k, _ in convs)
    return 3 + 2 * len(GOOGLENET) + 1, parameters, sum(i * o * k * k * s * s for i, o, k, s in convs)
