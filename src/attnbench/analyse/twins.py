"""Two names of one kernel: a framework that picks for itself and the one it picked, two packages around one library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnbench.analyse.fronts import Front
from attnbench.analyse.kernels import same_kernel
from attnbench.analyse.ranking import RANK_LEVEL, sign
from attnbench.analyse.ratios import paired_ratio
from attnbench.analyse.settle import MOST_DIFFERENCE
from attnbench.spec import Ok


def alike(a: Ok, b: Ok) -> bool:
    """Whether both launched the same kernels and neither is faster for certain."""
    return same_kernel(a, b) and sign(paired_ratio(a, b, RANK_LEVEL)) == 0


def stands_in(leader: Ok, twin: Ok, again: Ok) -> bool:
    """Whether a twin, measured `again` in a newer run, speaks for a leader that only the older run has: all three
    launched the same kernels, and in the older run the twin was for certain no more than 5 % slower."""
    one_kernel = same_kernel(leader, twin) and same_kernel(leader, again)
    return one_kernel and paired_ratio(leader, twin, RANK_LEVEL).high <= MOST_DIFFERENCE


def twins_of(name: str, front: Front) -> list[str]:
    """The others that launched its kernels wherever both ran, and are nowhere faster or slower for certain."""
    found = ((other, front.pairs(name, other)) for other in sorted(front.names - {name}))
    return [other for other, pairs in found if pairs and all(alike(*pair) for pair in pairs)]


def plainest(names: Iterable[str], front: Front) -> str:
    """Of names of one kernel the one that ran most often, then the shortest: a rule that noise does not move."""
    counts = {name: sum(name in one for one in front.field.values()) for name in names}
    return min(counts, key=lambda name: (-counts[name], len(name), name))


def named(name: str, twins: Sequence[str]) -> str:
    """The name, and what else the same kernel is called."""
    return f"{name} (the same kernel as {', '.join(twins)})" if twins else name
