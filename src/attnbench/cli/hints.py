"""What to type next, after a run that found wrong results."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from attnbench.cli.order import Prepared, place_words
from attnbench.cli.spelling import spell_workload
from attnbench.spec import ONLY_TIMED, Incorrect, Record


def explain_hints(records: Sequence[Record], prepared: Prepared) -> list[str]:
    """A sentence for each that is wrong: the command that shows where, or that no check of single calls can."""
    wrong: dict[str, list[Incorrect]] = {}
    for record in records:
        if isinstance(record, Incorrect):
            wrong.setdefault(record.implementation, []).append(record)
    references = {name: reference for reference, name in prepared.names.items()}
    told = (_hint(name, references.get(name, name), found, prepared) for name, found in wrong.items())
    return [hint for hint in told if hint]


def _hint(name: str, asked: str, found: Sequence[Incorrect], prepared: Prepared) -> str:
    checked = [record for record in found if not record.reason.startswith(ONLY_TIMED)]
    if not checked:
        return (
            f"{name} was right when checked and wrong when timed: `attnbench verify`, which does not time, passes it."
        )
    where = prepared.where or _where(checked[0], prepared)
    if where is None:
        return ""
    command = shlex.join(["attnbench", "verify", "--impl", asked, *where, "--explain"])
    return f"`{command}` shows where {name} is wrong."


def _where(record: Incorrect, prepared: Prepared) -> Sequence[str] | None:
    """Of a resumed run, whose options were given long ago: the shape itself, where options can make it."""
    shape = spell_workload(record.workload)
    return None if shape is None else [*shape, *place_words(prepared.request.framework, prepared.request.device)]
