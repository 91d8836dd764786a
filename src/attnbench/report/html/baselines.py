"""Which implementations a reader may choose as the baseline of speed-ups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from attnbench.analyse.ranking import baseline, is_timed
from attnbench.spec import Record

MOST_BASELINES = 6
MOST_RATIOS = 10_000
"""Bootstraps that a choice of baselines may cost, about 4 s; a long run gets fewer to choose from."""


def choose_baselines(records: Sequence[Record], against: Sequence[str] = ()) -> list[str]:
    """The one that the terminal takes first, then those measured on most shapes."""
    timed = [record for record in records if is_timed(record) and not record.approximate]
    first = baseline(records, against)
    if first is None:
        return []
    counts = Counter(record.implementation for record in timed)
    allowed = max(1, min(MOST_BASELINES, MOST_RATIOS // max(1, len(timed))))
    others = [name for name, _ in counts.most_common() if name != first]
    return [first, *others[: allowed - 1]]
