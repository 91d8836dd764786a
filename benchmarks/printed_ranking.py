"""The table of one workload as the terminal prints it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console

from attnbench.report.terminal import print_rankings
from attnbench.results.records import by_workload, is_timed
from attnbench.spec import Ok, Record

COLUMNS = 120


def fullest(records: Iterable[Record]) -> list[Ok]:
    """The timed records of the forward workload with most of them, of such workloads the largest."""
    timed = by_workload(record for record in records if is_timed(record))
    groups = [[one for one in group if is_timed(one)] for group in timed.values()]
    forward = [group for group in groups if group[0].workload.pass_ == "forward"]
    return max(forward, key=lambda group: (len(group), group[0].workload.batch * group[0].workload.q_len))


def printed(records: Sequence[Record], columns: int = COLUMNS) -> str:
    text = io.StringIO()
    print_rankings(Console(file=text, width=columns), records)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
