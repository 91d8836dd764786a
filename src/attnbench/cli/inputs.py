"""What a reading command was given: run files that it must leave alone, and names that must be in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attnbench.errors import UnknownName, UsageError
from attnbench.spec import Record


def spare_runs(targets: Iterable[Path], runs: Iterable[Path], option: str) -> None:
    """Refuse to write over what is read; `option` is how to name another place."""
    read = {path.resolve() for path in runs}
    for target in targets:
        if target.resolve() in read:
            raise UsageError(f"{target} is the run itself: name another place with {option}.")


def check_against(against: Sequence[str], records: Iterable[Record]) -> None:
    """Every name must be of something in these runs that others can be compared with."""
    from attnbench.results.records import ANCHOR, is_timed, matches

    known = [record for record in records if not record.implementation.startswith(ANCHOR)]
    for wanted in against:
        mine = [record for record in known if matches(record.implementation, wanted)]
        if not mine:
            raise UnknownName("implementation in these runs", wanted, sorted({r.implementation for r in known}), "")
        if not any(is_timed(record) and not record.approximate for record in mine):
            why = "it is approximate" if any(map(is_timed, mine)) else "it was timed on no shape"
            raise UsageError(f"nothing can be compared with {wanted}: {why} in these runs.")
