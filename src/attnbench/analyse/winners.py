"""A family of workloads -> which implementation to use for it, or why there is no one answer."""

from __future__ import annotations

from math import exp, log

from attnbench.analyse.advice import Figure, Pick, Recommendation, listed, ratio_figure, workloads
from attnbench.analyse.families import Family
from attnbench.analyse.fronts import Front
from attnbench.analyse.ranking import BASELINES, sign
from attnbench.analyse.ratios import Ratio
from attnbench.analyse.summary import format_ratio
from attnbench.analyse.verdicts import Verdict, judge
from attnbench.spec import Ok

LEAST_SAVING = 1.01
"""Peaks closer than 1 % are equal."""
MOST_PLACES = 3


def winner_of(family: Family, front: Front) -> Recommendation | None:
    """The one that leads most workloads, against the next and the plain one; None where there is no choice."""
    champion = front.champion() if len(front.names) > 1 else None
    rival = None if champion is None else front.rival(champion)
    if champion is None or rival is None:
        return None
    pairs = front.pairs(champion, rival)
    verdict = judge(pairs)
    against = verdict.ratio
    figures = [ratio_figure(f"time of {rival} / {champion}", against)]
    gain = _over_plain(front, champion, rival)
    if verdict.sign > 0:
        kind, told = "winner", f"use {champion}, {_gain(verdict)} as fast as {rival}, the next"
    elif verdict.apart and verdict.never_behind:
        ahead = sum(sign(ratio) > 0 for ratio in verdict.each)
        told = f"{champion} is nowhere behind {rival}, the next, and ahead on {ahead} of {workloads(len(pairs))}"
        kind = "mixed"
    elif verdict.sign < 0 or verdict.apart:
        kind, told = "mixed", f"no one is fastest everywhere, choose by shape: {champion} leads most often"
    else:
        kind, (told, saving) = "tie", _tie(champion, rival, against, pairs)
        figures += saving
    if gain is not None:
        figures.append(gain[1])
        told += f"; {champion} is {gain[0]}"
    return Recommendation(
        kind=kind,
        family=family.title,
        device=family.device,
        text=f"{family.title}: {told} ({_extent(champion, len(pairs), front)}){_exceptions(champion, front)}.",
        workloads=tuple(front.field),
        figures=tuple(figures),
        pick=Pick(
            name=champion,
            equal=rival if kind == "tie" else "",
            mixed=kind == "mixed" and not verdict.never_behind,
            over_next="" if kind == "tie" else f"{_gain(verdict)} as fast as {rival}",
            gain="" if gain is None else gain[0],
            led=_led(champion, front),
            of=len(front.field),
        ),
    )


def _led(champion: str, front: Front) -> int:
    return sum(champion in names for names in front.leaders.values())


def _over_plain(front: Front, champion: str, rival: str) -> tuple[str, Figure] | None:
    """Against the framework's plain implementation, where that is neither of the two."""
    base = next((name for name in BASELINES if name in front.names - {champion, rival}), None)
    pairs = [] if base is None else front.pairs(champion, base)
    if not pairs:
        return None
    verdict = judge(pairs)
    figure = ratio_figure(f"time of {base} / {champion}", verdict.ratio)
    if verdict.sign > 0:
        return f"{_gain(verdict)} as fast as {base}", figure
    return f"{format_ratio(verdict.ratio)} as fast as {base}, which is not certain", figure


def _gain(verdict: Verdict) -> str:
    """The mean where it is certain; else, of few workloads with the same winner, from least to most."""
    least, most = verdict.span
    return format_ratio(verdict.ratio) if verdict.on_average else f"{least:.2f}x to {most:.2f}x"


def _tie(champion: str, rival: str, against: Ratio, pairs: list[tuple[Ok, Ok]]) -> tuple[str, list[Figure]]:
    """Of two that are as fast, the one with less memory."""
    told = f"no significant difference between {champion} and {rival} ({format_ratio(against)})"
    peaks = [(a.memory.peak_bytes, b.memory.peak_bytes) for a, b in pairs]
    known = [(a, b) for a, b in peaks if a and b]
    if not known:
        return f"{told}: take either", []
    share = exp(sum(log(b / a) for a, b in known) / len(known))
    saving = [Figure(name=f"peak memory of {rival} / {champion}", value=share, unit="x")]
    if max(share, 1 / share) < LEAST_SAVING:
        return f"{told}: take either, they need the same memory", saving
    less, more = (champion, rival) if share > 1 else (rival, champion)
    return f"{told}: take {less}, which needs less memory ({more} {max(share, 1 / share):.2f}x as much)", saving


def _extent(champion: str, shared: int, front: Front) -> str:
    every, led = len(front.field), _led(champion, front)
    told = f"in front on {led} of {workloads(every)}" if every > 1 else workloads(every)
    return told if shared == every else f"{told}, both ran on {shared}"


def _exceptions(champion: str, front: Front) -> str:
    """Where others lead, most often first."""
    where: dict[str, list[str]] = {}
    for key, names in front.leaders.items():
        if champion not in names:
            where.setdefault(names[0], []).append(_place(front.field[key][names[0]]))
    told = sorted(where.items(), key=lambda item: -len(item[1]))[:MOST_PLACES]
    return "".join(f"; {name} leads at {_places(places)}" for name, places in told)


def _places(places: list[str]) -> str:
    return listed(places) if len(places) <= MOST_PLACES else f"{len(places)} of them"


def _place(record: Ok) -> str:
    w = record.workload
    return f"{w.batch} x {w.q_len}" if w.q_len == w.kv_len else f"{w.batch} x {w.q_len} x {w.kv_len}"
