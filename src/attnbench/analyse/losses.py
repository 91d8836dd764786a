"""Records -> what must be told beside every answer: who is wrong, and how much did not run and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from textwrap import shorten

from attnbench.analyse.ranking import label
from attnbench.analyse.wording import counted
from attnbench.spec import Incorrect, Ok, Record

MOST_REASONS = 3
LONGEST_REASON = 110


def wrong_counts(records: Iterable[Record]) -> Counter[str]:
    """Name -> shapes on which it computed something else."""
    return Counter(label(record) for record in records if isinstance(record, Incorrect))


def name_wrong(records: Iterable[Record]) -> str:
    """All of them in few words: mine (2 shapes), yours (1 shape)."""
    return ", ".join(f"{name} ({counted(n, 'shape')})" for name, n in wrong_counts(records).most_common())


def tell_not_run(records: Sequence[Record]) -> str:
    """How many cells have no result for another reason than a wrong one, and the most frequent reasons."""
    lost = [record for record in records if not isinstance(record, Ok | Incorrect)]
    if not lost:
        return ""
    reasons = Counter(_reason(record) for record in lost)
    shown = reasons.most_common(MOST_REASONS)
    told = [f"{reason} ({n})" for reason, n in shown]
    left = len(lost) - sum(n for _, n in shown)
    more = [f"other reasons ({left})"] if left else []
    return f"{len(lost):,} of {counted(len(records), 'cell')} did not run: {'; '.join([*told, *more])}"


def _reason(record: Record) -> str:
    status = "" if record.status == "unsupported" else f"{record.status.replace('_', ' ')}: "
    return shorten(f"{status}{record.reason}", LONGEST_REASON, placeholder=" …").rstrip(".")
