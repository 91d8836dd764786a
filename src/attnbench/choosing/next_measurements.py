"""Cells whose measurement would improve a policy most: what `attnbench tune` runs next.

First come lengths halfway (in log space) between neighbours with different choices, the most expensive mistake first;
if those are near enough, lengths between neighbours that no entry reaches; then other configs of the leaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import log

from msgspec import Struct, structs

from attnbench.choosing.candidates import Ground
from attnbench.choosing.choose import Chosen
from attnbench.errors import InvalidWorkload
from attnbench.policy import REACH, Place, shape_of
from attnbench.results.families import Track, length
from attnbench.results.ratios import LEAST_STEP
from attnbench.results.standings import Standing, contenders
from attnbench.spec import Workload

NEAR_ENOUGH = 1.3
"""Ratio of neighbouring lengths up to which no length between them is proposed."""
LEAST_STAKE = log(LEAST_STEP)
"""Log of the ratio by which two choices must differ at both ends; below it the crossing counts as found."""
STEPS = (64, 16, 4, 1)
"""Steps of new lengths, the first that fits between the neighbours: kernels prefer large powers of two."""
RESIZABLE = {"full", "causal", "window", "prefix"}
"""Kinds of masks without arrays, whose workloads may be resized."""

Variants = Callable[[str, Workload], Sequence[str]]
"""Name of an implementation and a workload -> labels of its other configs."""


class Proposal(Struct, frozen=True, kw_only=True):
    """Cells of one workload, to be measured together."""

    workload: Workload
    labels: tuple[str, ...]
    gain: float
    """Log of the time ratio at stake, times the log of the ratio of lengths; the latter alone if the former is not
    known."""
    why: str


def proposals(chosen: Chosen, variants: Variants) -> list[Proposal]:
    """Return what to measure next, the largest gain first; frameworks share a workload's proposal."""
    pairs = chosen.placed
    found = [one for pair in pairs for one in _between(*pair)] or [one for pair in pairs for one in _unreached(*pair)]
    found = found or [one for _, ground in pairs for one in _configs(ground, variants)]
    merged: dict[str, Proposal] = {}
    for one in found:
        before = merged.get(one.workload.id)
        if before is not None:
            labels = tuple(dict.fromkeys((*before.labels, *one.labels)))
            one = structs.replace(before, labels=labels, gain=before.gain + one.gain)
        merged[one.workload.id] = one
    return sorted(merged.values(), key=lambda one: (-one.gain, one.workload.id))


def batch(found: Sequence[Proposal]) -> list[Proposal]:
    """Return the first proposal and those with the same implementations, which one launch can measure."""
    return [one for one in found if set(one.labels) == set(found[0].labels)]


def _between(place: Place, ground: Ground) -> Iterator[Proposal]:
    """Yield lengths halfway between neighbours with different choices."""
    picks = {entry.at: entry.use.label for entry in place.entries}
    for first, second, made in _neighbours(ground):
        low, high = length(first), length(second)
        below, above = picks.get(shape_of(first)), picks.get(shape_of(second))
        if below is None or above is None or below == above or high <= NEAR_ENOUGH * low:
            continue
        ends = ground.standings[first.id], ground.standings[second.id]
        # At each end, the log ratio of the two choices is the cost of a wrong choice there.
        both = [one.times for one in ends if below in one.times and above in one.times]
        stakes = [abs(log(times[below] / times[above])) for times in both]
        if min(stakes, default=0.0) > LEAST_STAKE:
            yield Proposal(
                workload=made,
                labels=_leaders(ends),
                gain=sum(stakes) * log(high / low),
                why=f"{below} at {low:,} tokens, {above} at {high:,}",
            )


def _unreached(place: Place, ground: Ground) -> Iterator[Proposal]:
    """Yield lengths halfway between neighbours so far apart that no entry covers them."""
    for first, second, made in _neighbours(ground):
        nearest = place.nearest(shape_of(made))
        if nearest is not None and nearest[0] > REACH:
            low, high = length(first), length(second)
            yield Proposal(
                workload=made,
                labels=_leaders((ground.standings[first.id], ground.standings[second.id])),
                gain=log(high / low),
                why=f"no entry reaches all lengths from {low:,} to {high:,} tokens",
            )


def _neighbours(ground: Ground) -> Iterator[tuple[Workload, Workload, Workload]]:
    """Yield pairs of workloads of neighbouring lengths, equal otherwise, each with a workload between them."""
    for track, _, workloads in ground.lines:
        for low, high in pairwise(sorted(workloads)):
            middle = (low * high) ** 0.5
            rounded = (round(middle / step) * step for step in STEPS)
            tokens = next((n for n in rounded if low * 1.05 < n < high / 1.05), None)
            made = None if tokens is None else _resized(workloads[low], track, tokens)
            if made is not None:
                yield workloads[low], workloads[high], made


def _leaders(standings: Sequence[Standing]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for one in standings for name in contenders(one)))


def _resized(workload: Workload, track: Track, tokens: int) -> Workload | None:
    if not set(workload.visible_mask.kinds) <= RESIZABLE:
        return None
    sizes = {"kv_len": tokens, "source": ""} | ({"q_len": tokens} if track.q_len is None else {})
    try:
        return structs.replace(workload, **sizes)
    except InvalidWorkload:
        return None


def _configs(ground: Ground, variants: Variants) -> Iterator[Proposal]:
    for standing in ground.standings.values():
        leaders, workload = contenders(standing), standing.workload
        bases = dict.fromkeys(standing.ranked[name].implementation for name in leaders)
        others = [label for name in bases for label in variants(name, workload) if label not in standing.ranked]
        if others:
            yield Proposal(
                workload=workload,
                labels=tuple(dict.fromkeys((*leaders, *others))),
                gain=float(len(others)),
                why=f"configs of {', '.join(name for name in bases if any(o.startswith(f'{name}[') for o in others))}",
            )
