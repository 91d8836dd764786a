"""Recommendations -> the answer in words: which one, from which length, what next; each kind of shapes once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from attnbench.analyse.advice import Kind, Recommendation
from attnbench.analyse.families import FRAMEWORKS

GROUPS: Mapping[str, tuple[int, tuple[Kind, ...]]] = {
    "Which one": (4, ("winner", "tie", "mixed")),
    "From which length": (2, ("flash", "threshold")),
    "What to do next": (2, ("launch-bound", "memory")),
}
"""Question -> kinds of shapes that stand open (the rest is folded away), kinds of advice that answer it."""


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


def group_advice(advice: Iterable[Recommendation]) -> list[Group]:
    """The questions that there are answers to."""
    found = list(advice)
    groups: list[Group] = []
    for title, (shown, kinds) in GROUPS.items():
        answers = _answers(one for one in found if one.kind in kinds)
        groups += [Group(title, answers[:shown], answers[shown:])] if answers else []
    return groups


def _answers(advice: Iterable[Recommendation]) -> list[Answer]:
    answers: dict[str, Answer] = {}
    for one in advice:
        framework, _, shapes = one.family.partition(" · ")
        text = one.text.removeprefix(one.family).lstrip(":, ")
        answers.setdefault(shapes, Answer(shapes, [])).told.append(Told(framework, text, one.basis))
    for answer in answers.values():
        answer.told.sort(key=lambda one: [*FRAMEWORKS.values(), one.framework].index(one.framework))
    return list(answers.values())
