"""Fronts of all families -> the headline: a sentence for each framework and pass, true for all of its shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from attnbench.analyse.advice import Figure, Pick, Recommendation
from attnbench.analyse.families import FRAMEWORKS, Family
from attnbench.analyse.fronts import Front
from attnbench.analyse.twins import named, plainest, twins_of
from attnbench.analyse.winners import against_rival, champion_of, over_plain
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
    every, led = len(front.field), front.led((champion, *twins))
    told = f"{named(champion, twins)} {_lead(led, every, alone=len(front.names) == 1)}"
    gain = over_plain(front, champion, twins, against) or against_rival(front, champion, twins)
    figures = [Figure(name=f"shapes of {every} on which nobody is faster than {champion}", value=led)]
    if gain is not None:
        figures += gain[1]
        told += f", {gain[0]}"
    title = f"{FRAMEWORKS.get(framework, framework)}, {pass_}"
    return Recommendation(
        kind="overall",
        family=title,
        device=device,
        text=f"{title}: {told}{_others(front, (champion, *twins))}.",
        workloads=tuple(front.field),
        figures=tuple(figures),
        pick=Pick(name=champion, same=tuple(twins), gain="" if gain is None else gain[0], led=led, of=every),
    )


def _lead(led: int, every: int, alone: bool) -> str:
    shapes = all_of(every, "shape") if every == 1 or led == every else f"{led} of {every} shapes"
    return f"is the only one that was timed, on {shapes}" if alone else f"leads on {shapes}"


def _others(front: Front, champions: Sequence[str]) -> str:
    """Who leads on the rest, most often first."""
    counts = Counter(names[0] for names in front.leaders.values() if set(champions).isdisjoint(names))
    by_kernel: Counter[str] = Counter()
    for name, count in counts.items():
        by_kernel[plainest({name, *twins_of(name, front)}, front)] += count
    told = [f"{name} on {count}" for name, count in by_kernel.most_common(MOST_OTHERS)]
    left = sum(by_kernel.values()) - sum(count for _, count in by_kernel.most_common(MOST_OTHERS))
    return f"; {', '.join([*told, *([f'others on {left}'] if left else [])])}" if told else ""
