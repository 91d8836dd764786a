"""A family of workloads -> which implementation to use for it, or why there is no one answer."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from attnbench.analyse.advice import Figure, Pick, Recommendation, listed, ratio_figure, workloads
from attnbench.analyse.families import Family
from attnbench.analyse.fronts import Front
from attnbench.analyse.ranking import BASELINES, RANK_LEVEL, matches, sign
from attnbench.analyse.ratios import Ratio
from attnbench.analyse.twins import named, plainest, twins_of
from attnbench.analyse.verdicts import Verdict, judge
from attnbench.analyse.wording import format_ratio, format_span, slightly_apart, vague
from attnbench.measuring.host_limit import told_host_limit
from attnbench.spec import Ok

LEAST_SAVING = 1.01
"""Peaks closer than 1 % are equal."""
MOST_PLACES = 3


def winner_of(family: Family, front: Front) -> Recommendation | None:
    """The one that is unbeaten most often, against the next and the plain one; None where there is no choice."""
    if len(front.names) < 2:
        return None
    champion, twins = champion_of(front)
    rival = front.rival(champion, twins)
    if rival is None:
        return _one_kernel(family, front, champion, twins) if twins else None
    rival = plainest({rival, *twins_of(rival, front)} - {champion}, front)
    pairs, name = front.pairs(champion, rival), named(champion, twins)
    verdict = judge(pairs)
    figures = rests_on(champion, rival, pairs, verdict)
    gain = over_plain(front, champion, (rival, *twins))
    if verdict.sign > 0:
        kind, told = "winner", f"use {name}, {_gain(verdict)} as fast as {rival}, the next"
    elif verdict.apart and verdict.never_behind:
        ahead = sum(sign(ratio) > 0 for ratio in verdict.each)
        told = f"{name} is nowhere behind {rival}, the next, and ahead on {ahead} of {workloads(len(pairs))}"
        kind = "mixed"
    elif verdict.sign < 0 or verdict.apart:
        kind, told = "mixed", f"no one is fastest everywhere, choose by shape: {name} is unbeaten most often"
    else:
        kind, (told, saving) = "tie", _tie(champion, name, rival, verdict.ratio, pairs)
        figures += saving
    if gain is not None:
        figures += gain[1]
        told += f"; {champion} is {gain[0]}"
    told += host_words(front, champion)
    return Recommendation(
        kind=kind,
        family=family.title,
        device=family.device,
        text=f"{family.title}: {told} ({_extent(front, champion, twins, len(pairs))})"
        f"{_exceptions(front, (champion, *twins))}.",
        workloads=tuple(front.field),
        figures=tuple(figures),
        pick=Pick(
            name=champion,
            same=tuple(twins),
            equal=rival if kind == "tie" else "",
            mixed=kind == "mixed" and not verdict.never_behind,
            over_next="" if kind == "tie" else f"{_gain(verdict)} as fast as {rival}",
            certain=kind == "tie" or verdict.certain,
            gain="" if gain is None else gain[0],
            led=front.led((champion, *twins)),
            of=len(front.field),
        ),
    )


def champion_of(front: Front) -> tuple[str, list[str]]:
    """The one that is unbeaten most often, by the plainest name of its kernel, and the other names."""
    first = front.champion()
    names = {first, *twins_of(first, front)}
    champion = plainest(names, front)
    return champion, sorted(names & {champion, *twins_of(champion, front)} - {champion})


def rests_on(a: str, b: str, pairs: Sequence[tuple[Ok, Ok]], verdict: Verdict) -> list[Figure]:
    """The mean where that decided; else every workload, and where nothing is certain both."""
    name = f"time of {b} / {a}"
    mean = [] if verdict.from_each else [ratio_figure(name, verdict.ratio)]
    if (verdict.sign and not verdict.from_each) or len(pairs) == 1:
        return mean or [ratio_figure(name, verdict.each[0])]
    percent = f"{100 * RANK_LEVEL:.0f} %"
    return mean + [ratio_figure(f"{name} at {_place(one)}, {percent}", r) for (one, _), r in zip(pairs, verdict.each)]


def over_plain(
    front: Front, champion: str, but: Sequence[str] = (), against: Sequence[str] = ()
) -> tuple[str, list[Figure]] | None:
    """Against what was asked for or the framework's plain implementation, where that is none of those named already."""
    known = front.names - {champion, *but}
    asked = sorted(name for name in known if any(matches(name, one) for one in against))
    base = next((name for name in (*asked, *BASELINES) if name in known), None)
    return None if base is None else _against(front, champion, base)


def against_rival(front: Front, champion: str, twins: Sequence[str] = ()) -> tuple[str, list[Figure]] | None:
    """Against the best of the others."""
    rival = front.rival(champion, twins)
    return None if rival is None else _against(front, champion, rival)


def _against(front: Front, champion: str, other: str) -> tuple[str, list[Figure]] | None:
    pairs = front.pairs(champion, other)
    if not pairs:
        return None
    verdict = judge(pairs)
    figures = rests_on(champion, other, pairs, verdict)
    told = f"{_gain(verdict)} as fast as {other}"
    if near := "" if verdict.sign else slightly_apart(verdict.ratio):
        told = f"{near} from {other}: {format_ratio(verdict.ratio)}"
    elif verdict.sign <= 0:
        why = "times vary too much to tell" if vague(verdict.ratio) else format_ratio(verdict.ratio)
        told = f"not certainly faster than {other}: {why}"
    return told if len(pairs) == len(front.field) else f"{told} (both ran on {len(pairs)})", figures


def _one_kernel(family: Family, front: Front, champion: str, twins: Sequence[str]) -> Recommendation:
    pairs = front.pairs(champion, twins[0])
    every = (champion, *twins)
    return Recommendation(
        kind="tie",
        family=family.title,
        device=family.device,
        text=f"{family.title}: take {named(champion, twins)}: nothing else was timed{host_words(front, champion)} "
        f"({_extent(front, champion, twins, len(pairs))}).",
        workloads=tuple(front.field),
        figures=tuple(rests_on(champion, twins[0], pairs, judge(pairs))),
        pick=Pick(name=champion, same=tuple(twins), led=front.led(every), of=len(front.field)),
    )


def host_words(front: Front, name: str) -> str:
    """Return what must be added if the one recommended waits for its host, so that its kernel time is not its time."""
    told = told_host_limit(one[name] for one in front.field.values() if name in one)
    return f"; {name} is {told}" if told else ""


def _gain(verdict: Verdict) -> str:
    """The mean where it is certain; else from least to most, which is certain only where the verdict is."""
    least, most = verdict.span
    return format_ratio(verdict.ratio) if verdict.on_average else format_span(least, most)


def _tie(champion: str, name: str, rival: str, against: Ratio, pairs: list[tuple[Ok, Ok]]) -> tuple[str, list[Figure]]:
    """Of two that are as fast, the one with less memory; `name` is the champion with its other names."""
    told = f"no significant difference between {name} and {rival} ({format_ratio(against)})"
    if near := slightly_apart(against):
        told = f"{name} and {rival} are {near} ({format_ratio(against)})"
    elif vague(against):
        told = f"{name} and {rival} cannot be told apart, their times vary too much"
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


def _extent(front: Front, champion: str, twins: Sequence[str], shared: int) -> str:
    every, led = len(front.field), front.led((champion, *twins))
    told = f"unbeaten on {led} of {workloads(every)}" if every > 1 else workloads(every)
    return told if shared == every else f"{told}, both ran on {shared}"


def _exceptions(front: Front, champions: Sequence[str]) -> str:
    """Where others are first, most often."""
    where: dict[str, list[str]] = {}
    for key, names in front.leaders.items():
        if set(champions).isdisjoint(names):
            where.setdefault(names[0], []).append(_place(front.field[key][names[0]]))
    told = sorted(where.items(), key=lambda item: -len(item[1]))[:MOST_PLACES]
    return "".join(f"; {name} is first at {_places(places)}" for name, places in told)


def _places(places: list[str]) -> str:
    return listed(places) if len(places) <= MOST_PLACES else f"{len(places)} of them"


def _place(record: Ok) -> str:
    w = record.workload
    return f"{w.batch} x {w.q_len}" if w.q_len == w.kv_len else f"{w.batch} x {w.q_len} x {w.kv_len}"
