"""Recommendations -> the answer in words: which one, from which length, what next; each kind of shapes once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from attnbench.analyse.advice import Kind, Pick, Recommendation
from attnbench.analyse.families import FRAMEWORKS, OVERALL

WHICH = "Which one"
GROUPS: Mapping[str, tuple[int, tuple[Kind, ...]]] = {
    WHICH: (0, ("winner", "tie", "mixed")),
    "From which length": (2, ("flash", "threshold")),
    "What to do next": (2, ("launch-bound", "memory")),
}
"""Question -> kinds of shapes that stand open (the rest is folded away), kinds of advice that answer it.

Which one to use stands in a table; its sentences are folded away."""


class Told(Struct, frozen=True):
    """A sentence about one framework, and the figures it rests on."""

    framework: str
    text: str
    basis: str


class Answer(Struct, frozen=True):
    """What is said about one kind of shapes."""

    shapes: str
    told: list[Told]


class Group(Struct, frozen=True):
    """A question, answered."""

    title: str
    open: list[Answer]
    folded: list[Answer]
    table: PickTable | None = None


class PickTable(Struct, frozen=True):
    """Kinds of shapes -> which one in each framework."""

    frameworks: list[str]
    """The winner of all first, where several ran."""
    rows: list[tuple[str, list[Pick | None]]]
    common: str = ""
    """What all kinds of shapes share, in words."""

    @property
    def short_rows(self) -> list[tuple[str, list[Pick | None]]]:
        """The same without what they share."""
        shared = self.common.split(" · ")
        told = ([word for word in shapes.split(" · ") if word not in shared] for shapes, _ in self.rows)
        return [(" · ".join(words), picks) for words, (_, picks) in zip(told, self.rows)]


def group_advice(advice: Iterable[Recommendation]) -> list[Group]:
    """The questions that there are answers to."""
    found = list(advice)
    groups: list[Group] = []
    for title, (shown, kinds) in GROUPS.items():
        answers = _answers(one for one in found if one.kind in kinds)
        table = pick_table(found) if title == WHICH else None
        groups += [Group(title, answers[:shown], answers[shown:], table)] if answers else []
    return groups


def pick_table(advice: Iterable[Recommendation]) -> PickTable:
    """Which one, for every kind of shapes."""
    rows: dict[str, dict[str, Pick]] = {}
    for one in advice:
        if one.pick is not None and one.kind in GROUPS[WHICH][1]:
            framework, _, shapes = one.family.partition(" · ")
            rows.setdefault(shapes, {})[framework] = one.pick
    names = sorted({name for row in rows.values() for name in row}, key=_place)
    told = [(shapes, [row.get(name) for name in names]) for shapes, row in rows.items()]
    return PickTable(names, told, _common([shapes.split(" · ") for shapes in rows]))


def _common(kinds: Sequence[Sequence[str]]) -> str:
    """Words of all of several kinds; one kind shares nothing."""
    first, *others = kinds or [[]]
    return " · ".join(word for word in first if others and all(word in one for one in others))


def _place(framework: str) -> int:
    return [OVERALL, *FRAMEWORKS.values(), framework].index(framework)


def _answers(advice: Iterable[Recommendation]) -> list[Answer]:
    answers: dict[str, Answer] = {}
    for one in advice:
        framework, _, shapes = one.family.partition(" · ")
        text = one.text.removeprefix(one.family).lstrip(":, ")
        answers.setdefault(shapes, Answer(shapes, [])).told.append(Told(framework, text, one.basis))
    for answer in answers.values():
        answer.told.sort(key=lambda one: _place(one.framework))
    return list(answers.values())
