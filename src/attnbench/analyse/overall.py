"""Fronts of all families -> the headline: a sentence for each framework and pass, true for all of its shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attnbench.analyse.advice import Figure, Pick, Recommendation
from attnbench.analyse.families import FRAMEWORKS, Family
from attnbench.analyse.fronts import Front
from attnbench.analyse.twins import named, plainest, twins_of
from attnbench.analyse.winners import against_rival, champion_of, host_words, over_plain
from attnbench.analyse.wording import all_of
from attnbench.spec import PASSES

MOST_OTHERS = 3
Key = tuple[str, str, str]
"""Device, framework, pass."""


def overall_of(fronts: Mapping[Family, Front], against: Sequence[str] = ()) -> list[Recommendation]:
    """The frameworks in their order, each with its passes; nothing where there is nowhere a choice."""
    groups: dict[Key, list[Front]] = {}
    for family, front in fronts.items():
        if front.field:
            groups.setdefault((family.device, family.framework, family.pass_), []).append(front)
    merged = {key: _merged(groups[key]) for key in sorted(groups, key=_order)}
    if all(len(front.names) < 2 for front in merged.values()):
        return []
    return [_sentence(key, front, against) for key, front in merged.items()]


def _order(key: Key) -> tuple[str, int, int]:
    device, framework, pass_ = key
    return device, [*FRAMEWORKS, framework].index(framework), [*PASSES, pass_].index(pass_)


def _merged(fronts: Sequence[Front]) -> Front:
    """Families share no workload."""
    leaders = {key: names for front in fronts for key, names in front.leaders.items()}
    return Front(leaders, {key: one for front in fronts for key, one in front.field.items()})


def _sentence(key: Key, front: Front, against: Sequence[str]) -> Recommendation:
    device, framework, pass_ = key
    champion, twins = champion_of(front)
    names, every = (champion, *twins), len(front.field)
    led = front.led(names)
    alone = len(front.names) == 1
    told = f"{named(champion, twins)}{_alone(every) if alone else _lead(front.won(names), led, every)}"
    gain = over_plain(front, champion, twins, against) or against_rival(front, champion, twins)
    figures = [Figure(name=f"shapes of {every} on which nobody is faster than {champion}", value=led)]
    if gain is not None:
        figures += gain[1]
        told += f", {gain[0]}"
    told += host_words(front, champion)
    title = f"{FRAMEWORKS.get(framework, framework)}, {pass_}"
    return Recommendation(
        kind="overall",
        family=title,
        device=device,
        text=f"{title}: {told}{_others(front, names)}.",
        workloads=tuple(front.field),
        figures=tuple(figures),
        pick=Pick(name=champion, same=tuple(twins), gain="" if gain is None else gain[0], led=led, of=every),
    )


def _alone(every: int) -> str:
    return f" is the only one that was timed, on {all_of(every, 'shape')}"


def _lead(won: int, led: int, every: int) -> str:
    """To lead is to be faster than all others for certain; a tie is told as one."""
    if not won:
        return f": on {_shapes(led, every)} nobody is faster for certain"
    more = f", and on {led - won} more nobody is faster for certain" if led > won else ""
    return f" leads on {_shapes(won, every)}{more}"


def _shapes(count: int, every: int) -> str:
    return all_of(every, "shape") if count == every else f"{count} of {every} shapes"


def _others(front: Front, champions: Sequence[str]) -> str:
    """Who is first on the rest, most often."""
    counts = Counter(names[0] for names in front.leaders.values() if set(champions).isdisjoint(names))
    by_kernel: Counter[str] = Counter()
    for name, count in counts.items():
        by_kernel[plainest({name, *twins_of(name, front)}, front)] += count
    told = [f"{name} on {count}" for name, count in by_kernel.most_common(MOST_OTHERS)]
    left = sum(by_kernel.values()) - sum(count for _, count in by_kernel.most_common(MOST_OTHERS))
    return f"; first elsewhere: {', '.join([*told, *([f'others on {left}'] if left else [])])}" if told else ""
