"""What `attnbench verify` found: a line per implementation, then what is wrong, then one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.analyse.wording import counted
from attnbench.printable import shortened
from attnbench.report import units
from attnbench.report.detail import detail_lines
from attnbench.report.tables import print_not_run
from attnbench.results.records import ANCHOR, label
from attnbench.spec import Ok, Record, Unsupported

STATUSES = ("ok", "incorrect", "failed", "timeout", "out_of_memory", "unsupported")


def summarise(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Implementation, as configured -> how many cells ended how."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        if not record.implementation.startswith(ANCHOR):
            counts.setdefault(label(record), Counter())[record.status] += 1
    return {name: {status: found[status] for status in STATUSES} for name, found in counts.items()}


def print_verification(console: Console, records: Sequence[Record], explain: bool = False) -> None:
    """The table, the reasons, the verdict; `explain` adds everything a wrong record knows."""
    tried = {label(record) for record in records if not isinstance(record, Unsupported)}
    console.print(_table([record for record in records if label(record) in tried]))
    print_not_run(console, [record for record in records if label(record) not in tried])
    wrong = [r for r in records if not isinstance(r, Ok | Unsupported)]
    for record in wrong:
        title = f"{label(record)} · {record.workload.id}"
        told = f"{shortened(title)}: {shortened(record.reason)}"
        console.print(f"  [red]{record.status.replace('_', ' ')}[/red]  {escape(told)}", highlight=False)
        if explain:
            _explain(console, record)
    if wrong and not explain:
        console.print("  [dim]--explain shows where[/dim]")
    console.print()
    console.print(verdict(records), highlight=False, markup=False)


def _table(records: Sequence[Record]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("implementation", no_wrap=True)
    for status in ("ok", "wrong", "unsupported"):
        table.add_column(status, justify="right")
    table.add_column("worst error / allowed", justify="right", no_wrap=True)
    table.add_column("why some did not run", overflow="fold")
    for name, counts in summarise(records).items():
        mine = [record for record in records if label(record) == name]
        wrong = sum(counts[status] for status in STATUSES[1:5])
        reasons = Counter(record.reason for record in mine if isinstance(record, Unsupported))
        told = "; ".join(f"{reason} ({n})" if n > 1 else reason for reason, n in reasons.most_common(3))
        figures = (_count(counts["ok"], "green"), _count(wrong, "red"), _count(counts["unsupported"], "dim"))
        table.add_row(escape(shortened(name)), *figures, _worst(mine), escape(shortened(told)))
    return table


def _count(number: int, style: str) -> str:
    return f"[{style}]{number}[/{style}]" if number else units.DASH


def _worst(records: Iterable[Record]) -> str:
    """The largest share of the allowed error that any verified cell used up."""
    shares = []
    for record in records:
        if isinstance(record, Ok):
            e = record.errors
            pairs = ((e.forward, e.forward_allowed), (e.backward, e.backward_allowed))
            shares += [error / allowed for error, allowed in pairs if error is not None and allowed]
    return units.percent(max(shares)) if shares else units.DASH


def _explain(console: Console, record: Record) -> None:
    errors: Any = record.errors
    if errors is not None:
        pairs = {
            "forward": (errors.forward, errors.forward_allowed),
            "gradients": (errors.backward, errors.backward_allowed),
        }
        for part, (error, allowed) in pairs.items():
            if error is not None:
                console.print(
                    f"      {part}: error {units.error(error)}, allowed {units.error(allowed)}", highlight=False
                )
    for line in () if isinstance(record, Ok) else detail_lines(record.detail):
        console.print(f"      {escape(line)}", highlight=False)


def verdict(records: Iterable[Record]) -> str:
    """The answer, last."""
    counts = summarise(records)
    tried = {name: found for name, found in counts.items() if sum(found.values()) > found["unsupported"]}
    bad = [name for name, found in tried.items() if sum(found[status] for status in STATUSES[1:4])]
    checked = sum(found["ok"] for found in counts.values())
    noun = "configuration" if any(name.endswith("]") for name in tried) else "implementation"
    if bad:
        are = "is" if len(bad) == 1 else "are"
        return f"{len(bad)} of {counted(len(tried), noun)} {are} broken: {', '.join(bad)}."
    if not checked:
        return "Nothing could be verified: no implementation runs these workloads here. See `attnbench doctor`."
    cells = counted(checked, "cell")
    if len(tried) == 1:
        return f"{next(iter(tried))} is right on everything it claims ({cells})."
    return f"All {len(tried)} {noun}s that run here are right on everything they claim ({cells})."
