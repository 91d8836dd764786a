"""Ranked tables for the terminal: one per workload, what did not run below it, the answer last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.analyse.ranking import Row, baseline, by_workload, is_timed, rank
from attnbench.analyse.summary import count_notes, format_ratio, not_run
from attnbench.report import units
from attnbench.report.units import DASH
from attnbench.spec import Ok, Record, Time, Unsupported

PARTS = ("forward", "backward")
STYLES = {"incorrect": "red", "failed": "red", "timeout": "red", "out_of_memory": "yellow"}


def print_rankings(console: Console, records: Sequence[Record], against: Sequence[str] = ()) -> None:
    """A table per workload, then what did not run, then the warnings."""
    base = baseline(records, against)
    groups = by_workload(records)
    for group in groups.values():
        console.print()
        console.print(f"[bold]{escape(group[0].workload.title)}[/bold]", highlight=False)
        print_ranking(console, rank(group, base), base)
    kept = [record for group in groups.values() for record in group]
    print_not_run(console, kept)
    for note in count_notes(kept):
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)


def print_ranking(console: Console, rows: Sequence[Row], base: str | None) -> None:
    """The rows of one workload: those with a speed in a table, the others under it with their reasons."""
    timed = [(row, row.record) for row in rows if is_timed(row.record)]
    if timed:
        console.print(ranking_table(timed, base))
    clocks = sorted({record.time.clock for _, record in timed if record.time is not None})
    if len(clocks) > 1:
        console.print(f"  [dim]different clocks ({', '.join(clocks)}): compare across them with care[/dim]")
    for row in rows:
        if is_timed(row.record) or isinstance(row.record, Unsupported):
            continue
        status = row.record.status
        told = (
            "" if isinstance(row.record, Ok) else f"[{STYLES[status]}]{status.replace('_', ' ')}[/{STYLES[status]}]  "
        )
        console.print(
            f"  {DASH}  {escape(row.implementation)}  {told}{escape(row.reason)}", highlight=False, soft_wrap=True
        )


def ranking_table(timed: Sequence[tuple[Row, Ok]], base: str | None) -> Table:
    """Columns that no row can fill are left out, but a single missing figure prints as a dash."""
    parts = [part for part in PARTS if any(part in record.also for _, record in timed)]
    table = Table(box=None, pad_edge=True, header_style="bold", show_edge=False)
    table.add_column("#", justify="right")
    table.add_column("implementation", no_wrap=True)
    for heading in [timed[0][1].workload.pass_, *parts, "TFLOP/s", "roofline", "peak"]:
        table.add_column(heading, justify="right", no_wrap=True)
    if base is not None:
        table.add_column(f"against {base}", no_wrap=True)
    table.add_column("")
    for row, record in timed:
        figures = [
            _time(record.time),
            *(_time(record.also.get(part)) for part in parts),
            units.significant(record.cost.tflops),
            units.percent(record.cost.roofline),
            units.size(record.memory.peak_bytes),
        ]
        ratio = [] if base is None else [_speedup(row, base)]
        table.add_row(_place(row), escape(row.implementation), *figures, *ratio, _remarks(record))
    return table


def _place(row: Row) -> str:
    return "~" if row.rank is None else "=" if row.tied else str(row.rank)


def _time(time: Time | None) -> str:
    if time is None:
        return DASH
    return f"{units.duration(time.median_ns)} {units.half_interval(time.median_ns, time.ci95_ns):>7}"


def _speedup(row: Row, base: str) -> str:
    if row.implementation == base:
        return "1"
    return DASH if row.speedup is None else format_ratio(row.speedup)


def _remarks(record: Ok) -> str:
    remarks = [note.partition(":")[0] for note in record.notes]
    if record.approximate:
        remarks.insert(0, "approximate")
    if not record.deterministic:
        remarks.append("not deterministic")
    return escape(", ".join(remarks))


def print_not_run(console: Console, records: Iterable[Record]) -> None:
    """One line per reason with everybody whom it kept from running."""
    refused = not_run(records)
    if refused:
        told = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in refused)
        console.print()
        console.print(f"[dim]Not run:[/dim] {escape(told)}", highlight=False, soft_wrap=True)
