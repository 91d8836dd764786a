"""What functions given by reference are called: by their own name, and by their file too where that is another's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from attnbench.registry import is_reference


def name_references(implementations: Iterable[Any], taken: Collection[str] = ()) -> dict[str, str]:
    """Reference -> name: `a.py:f` is f; beside `b.py:f` it is a:f; beside `old/a.py:f` it is new/a:f."""
    references = list(dict.fromkeys(what for what in implementations if is_reference(what)))
    names: dict[str, str] = {}
    for reference in references:
        rivals = [other for other in references if other != reference and _function(other) == _function(reference)]
        names[reference] = free_name(_apart(reference, rivals), {*taken, *names.values()})
    return names


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number behind it when it is taken."""
    if name not in taken:
        return name
    return next(f"{name}-{n}" for n in range(2, len(taken) + 3) if f"{name}-{n}" not in taken)


def _apart(reference: str, rivals: Collection[str]) -> str:
    """The shortest name that no rival has, as far as their places tell them apart."""
    others = {_place(rival) for rival in rivals} - {_place(reference)}
    shared = [_common_tail(_place(reference), other) for other in others]
    return _called(reference, max(shared) + 1) if shared else _function(reference)


def _called(reference: str, length: int) -> str:
    between = "/" if _is_file(reference) else "."
    return f"{between.join(_place(reference)[-length:])}:{_function(reference)}"


def _common_tail(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    same = [a == b for a, b in zip(reversed(one), reversed(other))]
    return same.index(False) if False in same else len(same)


def _place(reference: str) -> tuple[str, ...]:
    where = reference.rpartition(":")[0]
    return Path(where).resolve().with_suffix("").parts if _is_file(reference) else tuple(where.split("."))


def _is_file(reference: str) -> bool:
    return reference.rpartition(":")[0].endswith(".py")


def _function(reference: str) -> str:
    return reference.rpartition(":")[2]
