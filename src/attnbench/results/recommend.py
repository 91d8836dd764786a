"""Advice that the standings support: a headline, which implementation to use for each family, and from which length.

Nothing is said that the records do not carry: without wall times nothing about launches, from one length nothing about
growth. Approximate and wrong implementations are never recommended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import exp, log

from msgspec import structs

from attnbench.results.advice import Figure, Kind, Pick, Recommendation, advise_family, listed, ratio_figure
from attnbench.results.by_length import flash_of, launch_bound_of, threshold_of
from attnbench.results.families import FRAMEWORKS, OVERALL, Family, Tracks, family_of, length_text, tracks, tracks_of
from attnbench.results.growth import fitting_of
from attnbench.results.ratios import LEAST_DIFFERENCE, RANK_LEVEL, Ratio
from attnbench.results.records import BASELINES, framework_of, matches
from attnbench.results.sentences import all_of, counted, format_ratio, format_span, slightly_apart, vague
from attnbench.results.standings import Standing, Standings
from attnbench.results.tally import Tally, Verdict
from attnbench.spec import PASSES, Ok

MOST_PLACES = 3
MOST_OTHERS = 3


def advise(standings: Standings) -> list[Recommendation]:
    """Return the headline, the winner of each family, the lengths from which flash pays and the lead changes, and which
    calls are launch-bound or run out of memory."""
    families = compared_families(standings)
    tallies = {family: Tally(members) for family, members in families.items()}
    across: dict[Family, dict[str, Standing]] = {}  # workloads on which one run decides for several frameworks
    for key, standing in standings.overall.items():
        if len({framework_of(record) for record in standing.ranked.values()}) > 1:
            kind = structs.replace(family_of(standing.compared[0]), framework=OVERALL)
            across.setdefault(kind, {})[key] = standing
    lines = compared_tracks(families)
    within: dict[Family, Tracks] = {}
    for track, names in lines.items():
        within.setdefault(track.family, {})[track] = names
    advice = [
        *overall_of(tallies, standings.against),
        *(winner_of(kind, Tally(members)) for kind, members in across.items()),
        *(winner_of(family, tally) for family, tally in tallies.items()),
        *(flash_of(family, members, tallies[family]) for family, members in within.items()),
        *(threshold_of(track, names, tallies[track.family]) for track, names in lines.items()),
        *(launch_bound_of(family, members, tallies[family]) for family, members in within.items()),
        *(fitting_of(track, names) for track, names in tracks(standings.records).items()),
    ]
    return [one for one in advice if one is not None]


def compared_families(standings: Standings) -> dict[Family, dict[str, Standing]]:
    """Return family -> workload id -> its standing, by the run that decides for the framework of the family."""
    found: dict[Family, dict[str, Standing]] = {}
    for key in standings.overall:
        for standing in (members[key] for members in standings.frameworks.values() if key in members):
            found.setdefault(family_of(standing.compared[0]), {})[key] = standing
    return found


def compared_tracks(families: Mapping[Family, Mapping[str, Standing]]) -> Tracks:
    """Return the tracks of families, of the records that took turns with each other."""
    return tracks_of(
        {family: [r for one in found.values() for r in one.compared] for family, found in families.items()}
    )


def winner_of(family: Family, tally: Tally) -> Recommendation | None:
    """Return which one to use for a family, against the next best and the plain one; None if there is no choice."""
    if len(tally.names) < 2:
        return None
    best = tally.recommended
    other = tally.next_best() or next(iter(best.same), None)
    if other is None:
        return None
    pairs, verdict = tally.pairs(best.name, other), tally.verdict(best.name, other)
    figures = _rests_on(best.name, other, pairs, verdict)
    gain, more = ("", []) if other in best.same else _over_plain(tally, (other,))
    kind: Kind = "mixed"
    if other in best.same:
        kind, text = "tie", f"take {best}: nothing else was timed"
    elif verdict.sign > 0:
        kind, text = "winner", f"use {best}, {_gain(verdict)} as fast as {other}, the next"
    elif verdict.apart and verdict.never_behind:
        ahead = sum(ratio.sign > 0 for ratio in verdict.each)
        text = f"{best} is nowhere behind {other}, the next, and ahead on {ahead} of {counted(len(pairs), 'workload')}"
    elif verdict.sign < 0 or verdict.apart:
        text = f"no one is fastest everywhere, choose by shape: {best} is unbeaten most often"
    else:
        kind, (text, saving) = "tie", _tie(best.name, str(best), other, verdict.ratio, pairs)
        figures += saving
    text += (f"; {best.name} is {gain}" if gain else "") + _host_words(tally)
    every, led = len(tally.standings), tally.led(best.names)
    extent = f"unbeaten on {led} of {counted(every, 'workload')}" if every > 1 else "1 workload"
    if len(pairs) < every:
        extent += f", both ran on {len(pairs)}"
    elsewhere = "" if other in best.same else _first_elsewhere(tally, best.names)
    equal = other if kind == "tie" and other not in best.same else ""
    pick = Pick(
        name=best.name,
        same=best.same,
        equal=equal,
        mixed=kind == "mixed" and not verdict.never_behind,
        over_next="" if kind == "tie" else f"{_gain(verdict)} as fast as {other}",
        certain=kind == "tie" or verdict.certain,
        gain=gain,
        led=led,
        of=every,
    )
    return advise_family(kind, family, f": {text} ({extent}){elsewhere}", tally.standings, [*figures, *more], pick)


def overall_of(tallies: Mapping[Family, Tally], against: Sequence[str] = ()) -> list[Recommendation]:
    """Return the headline: a sentence for each framework and pass over all of its families, the frameworks in their
    order; empty if there is no choice at all. `against` names what to compare with."""
    groups: dict[tuple[str, str, str], dict[str, Standing]] = {}
    for family, tally in tallies.items():
        if tally.standings:
            groups.setdefault((family.device, family.framework, family.pass_), {}).update(tally.standings)

    def order(key: tuple[str, str, str]) -> tuple[str, int, int]:
        device, framework, pass_ = key
        return device, [*FRAMEWORKS, framework].index(framework), [*PASSES, pass_].index(pass_)

    merged = {key: Tally(groups[key]) for key in sorted(groups, key=order)}
    if all(len(tally.names) < 2 for tally in merged.values()):
        return []
    return [_headline(key, tally, against) for key, tally in merged.items()]


def _headline(key: tuple[str, str, str], tally: Tally, against: Sequence[str]) -> Recommendation:
    device, framework, pass_ = key
    best, every = tally.recommended, len(tally.standings)
    won, led = tally.won(best.names), tally.led(best.names)

    def shapes(count: int) -> str:
        return all_of(every, "shape") if count == every else f"{count} of {every} shapes"

    if len(tally.names) == 1:
        text = f"{best} is the only one that was timed, on {all_of(every, 'shape')}"
    elif not won:
        text = f"{best}: on {shapes(led)} no other is significantly faster"
    else:
        text = f"{best} leads on {shapes(won)}"
        text += f", and on {led - won} more no other is significantly faster" if led > won else ""
    gain, more = _over_plain(tally, against=against)
    if not gain and (other := tally.next_best()) is not None:
        gain, more = _against(tally, other)
    leads = Figure(name=f"shapes of {every} on which none is significantly faster than {best.name}", value=led)
    text += (f", {gain}" if gain else "") + _host_words(tally)
    title = f"{FRAMEWORKS.get(framework, framework)}, {pass_}"
    return Recommendation(
        kind="overall",
        family=title,
        device=device,
        text=f"{title}: {text}{_others(tally, best.names)}.",
        workloads=tuple(tally.standings),
        figures=(leads, *more),
        pick=Pick(name=best.name, same=best.same, gain=gain, led=led, of=every),
    )


def _rests_on(a: str, b: str, pairs: Sequence[tuple[Ok, Ok]], verdict: Verdict) -> list[Figure]:
    """Return the mean if that decided, else every workload; if nothing is certain, both."""
    name = f"time of {b} / {a}"
    mean = [] if verdict.from_each else [ratio_figure(name, verdict.ratio)]
    if (verdict.sign and not verdict.from_each) or len(pairs) == 1:
        return mean or [ratio_figure(name, verdict.each[0])]
    percent = f"{100 * RANK_LEVEL:.0f} %"
    return mean + [ratio_figure(f"{name} at {_place(one)}, {percent}", r) for (one, _), r in zip(pairs, verdict.each)]


def _over_plain(tally: Tally, but: Sequence[str] = (), against: Sequence[str] = ()) -> tuple[str, list[Figure]]:
    """Return words and figures of the recommended one against what was asked for, or the framework's plain one; empty
    if that is one of its own names or was named already."""
    known = tally.names - {*tally.recommended.names, *but}
    asked = sorted(name for name in known if any(matches(name, one) for one in against))
    base = next((name for name in (*asked, *BASELINES) if name in known), None)
    return ("", []) if base is None else _against(tally, base)


def _against(tally: Tally, other: str) -> tuple[str, list[Figure]]:
    """Return words and figures of the recommended one against another; empty if they share no workload."""
    name = tally.recommended.name
    pairs = tally.pairs(name, other)
    if not pairs:
        return "", []
    verdict = tally.verdict(name, other)
    text = f"{_gain(verdict)} as fast as {other}"
    if near := "" if verdict.sign else slightly_apart(verdict.ratio):
        text = f"{near} from {other}: {format_ratio(verdict.ratio)}"
    elif verdict.sign <= 0:
        why = "times vary too much to tell" if vague(verdict.ratio) else format_ratio(verdict.ratio)
        if verdict.mixed and vague(verdict.ratio):
            why = f"each is faster on some shapes, {format_span(*verdict.span)}"
        text = f"not certainly faster than {other}: {why}"
    where = "" if len(pairs) == len(tally.standings) else f" (both ran on {len(pairs)})"
    return f"{text}{where}", _rests_on(name, other, pairs, verdict)


def _host_words(tally: Tally) -> str:
    """Return what must be added if the one recommended waits for its host."""
    limit = tally.host_limit(tally.recommended.name)
    return f"; {tally.recommended.name} is {limit}" if limit else ""


def _gain(verdict: Verdict) -> str:
    """Return the mean if it is certain; else from least to most, which is certain only if the verdict is."""
    least, most = verdict.span
    return format_ratio(verdict.ratio) if verdict.on_average else format_span(least, most)


def _tie(name: str, called: str, other: str, ratio: Ratio, pairs: list[tuple[Ok, Ok]]) -> tuple[str, list[Figure]]:
    """Return words and figures of two that are as fast: take the implementation with less memory."""
    text = f"no significant difference between {called} and {other} ({format_ratio(ratio)})"
    if near := slightly_apart(ratio):
        text = f"{called} and {other} are {near} ({format_ratio(ratio)})"
    elif vague(ratio):
        text = f"{called} and {other} cannot be told apart, their times vary too much"
    elif not ratio.low <= 1 <= ratio.high:
        text = f"{called} and {other} cannot be told apart ({format_ratio(ratio)})"
    peaks = [(a.memory.peak_bytes, b.memory.peak_bytes) for a, b in pairs]
    known = [(a, b) for a, b in peaks if a and b]
    if not known:
        return f"{text}: take either", []
    share = exp(sum(log(b / a) for a, b in known) / len(known))
    saving = [Figure(name=f"peak memory of {other} / {name}", value=share, unit="x")]
    if max(share, 1 / share) < LEAST_DIFFERENCE:
        return f"{text}: take either, they need the same memory", saving
    less, more = (name, other) if share > 1 else (other, name)
    return f"{text}: take {less}, which needs less memory ({more} {max(share, 1 / share):.2f}x as much)", saving


def _first_elsewhere(tally: Tally, names: Sequence[str]) -> str:
    """Return who is first on the workloads on which none of these names is unbeaten, most often first."""
    places_of: dict[str, list[str]] = {}
    for name, standing in tally.first_elsewhere(names):
        places_of.setdefault(name, []).append(_place(standing.ranked[name]))
    most_often = sorted(places_of.items(), key=lambda item: -len(item[1]))[:MOST_PLACES]
    return "".join(
        f"; {name} is first at {listed(places) if len(places) <= MOST_PLACES else f'{len(places)} of them'}"
        for name, places in most_often
    )


def _others(tally: Tally, names: Sequence[str]) -> str:
    """Return who is first on the workloads on which none of these names is unbeaten, with how many, by kernel."""
    firsts = [name for name, _ in tally.first_elsewhere(names)]
    counts = Counter(tally.plainest({name, *tally.same_kernel(name)}) for name in firsts)
    parts = [f"{name} on {count}" for name, count in counts.most_common(MOST_OTHERS)]
    more = counts.total() - sum(count for _, count in counts.most_common(MOST_OTHERS))
    return f"; first elsewhere: {', '.join([*parts, *([f'others on {more}'] if more else [])])}" if parts else ""


def _place(record: Ok) -> str:
    return f"{record.workload.batch} x {length_text(record.workload)}"
