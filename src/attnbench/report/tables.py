"""Ranked tables for the terminal: one per workload, what did not run below it, the answer last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.analyse.summary import count_notes, format_ratio, not_run
from attnbench.measuring.rates import HOST_LIMITED, host_limit
from attnbench.printable import shortened
from attnbench.report import units
from attnbench.report.units import DASH
from attnbench.results.records import is_timed
from attnbench.results.standings import NOT_COMPARED, Row, Standings
from attnbench.spec import Ok, Record, Time, Unsupported

PARTS = ("forward", "backward")
EXPENDABLE = ("roofline", "TFLOP/s", "backward", "forward", "remarks", "peak")
"""The least telling first; `forward` and `backward` as parts of a training step only."""
MARK = "*"
"""On a time of kernels of which the call takes much longer."""
STYLES = {"incorrect": "red", "failed": "red", "timeout": "red", "out_of_memory": "yellow"}


def print_rankings(console: Console, records: Sequence[Record] | Standings, against: Sequence[str] = ()) -> None:
    """Print a table per workload, then what did not run, then the warnings, of records or of standings made of them."""
    standings = records if isinstance(records, Standings) else Standings([records], against)
    for standing in standings.overall.values():
        console.print()
        console.print(f"[bold]{escape(standing.workload.title)}[/bold]", highlight=False)
        print_ranking(console, standing.rows, standings.baselines[standing.workload.step])
    print_not_run(console, standings.records)
    for note in count_notes(standings.records):
        console.print(f"[yellow]note:[/yellow] {escape(note)}", highlight=False)


def print_ranking(console: Console, rows: Sequence[Row], base: str | None) -> None:
    """The rows of one workload: those with a speed in a table, the others under it with their reasons."""
    timed = [(row, row.record) for row in rows if is_timed(row.record)]
    if timed:
        console.print(ranking_table(timed, base, console.width))
        waits = [(row.implementation, ratio) for row, record in timed if (ratio := host_limit(record)) is not None]
        if waits:
            told = ", ".join(f"{ratio:.1f}x its kernel time ({escape(name)})" for name, ratio in waits)
            console.print(f"  {MARK} {HOST_LIMITED}: the call takes {told}", highlight=False, soft_wrap=True)
    for row in rows:
        if is_timed(row.record) and row.reason.startswith(NOT_COMPARED):
            told = f"{shortened(row.implementation)}  {shortened(row.reason)}"
            console.print(f"  [dim]{DASH}  {escape(told)}[/dim]", highlight=False)
        if is_timed(row.record) or isinstance(row.record, Unsupported):
            continue
        status = row.record.status
        told = (
            "" if isinstance(row.record, Ok) else f"[{STYLES[status]}]{status.replace('_', ' ')}[/{STYLES[status]}]  "
        )
        name, why = escape(shortened(row.implementation)), escape(shortened(row.reason))
        console.print(f"  {DASH}  {name}  {told}{why}", highlight=False, soft_wrap=True)


def ranking_table(timed: Sequence[tuple[Row, Ok]], base: str | None, width: int = 200) -> Table:
    """Rank, name and time are never cut: where the screen is narrow, whole columns go, the least telling first."""
    columns = _columns(timed, base)
    for name in (*EXPENDABLE, f"against {base}"):
        if _width(columns) <= width:
            break
        if name != timed[0][1].workload.pass_:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=True, header_style="bold", show_edge=False)
    for heading, cells in columns.items():
        right = heading not in ("implementation", "remarks") and not heading.startswith("against")
        table.add_column(
            "" if heading == "remarks" else escape(heading), justify="right" if right else "left", no_wrap=True
        )
        del cells
    for cells in zip(*columns.values()):
        table.add_row(*cells)
    return table


def _columns(timed: Sequence[tuple[Row, Ok]], base: str | None) -> dict[str, list[str]]:
    """Heading -> cells. A part that no record has is left out; a single missing figure prints as a dash."""
    parts = [part for part in PARTS if any(part in record.also for _, record in timed)]
    records = [record for _, record in timed]
    columns = {
        "#": [_place(row) for row, _ in timed],
        "implementation": [escape(shortened(row.implementation)) for row, _ in timed],
        records[0].workload.pass_: _published(records),
        **{part: [_time(record.also.get(part)) for record in records] for part in parts},
        "TFLOP/s": [units.significant(record.cost.tflops) for record in records],
        "roofline": [units.percent(record.cost.roofline) for record in records],
        "peak": [units.size(record.memory.peak_bytes) for record in records],
    }
    if base is not None:
        columns[f"against {base}"] = [_speedup(row, base) for row, _ in timed]
    if any(remarks := [_remarks(record) for record in records]):
        columns["remarks"] = remarks
    return columns


def _width(columns: dict[str, list[str]]) -> int:
    return sum(max(len(heading), *map(len, cells)) + 2 for heading, cells in columns.items())


def _place(row: Row) -> str:
    if row.rank is None:
        return "~" if isinstance(row.record, Ok) and row.record.approximate else DASH
    return ">=" if row.behind else "=" if row.tied else str(row.rank)


def _time(time: Time | None) -> str:
    if time is None:
        return DASH
    return f"{units.duration(time.median_ns)} {units.half_interval(time.median_ns, time.ci95_ns):>7}"


def _published(records: Sequence[Ok]) -> list[str]:
    """Return the times that are ranked, with a mark on those that are not what a caller waits for."""
    marks = ["" if host_limit(record) is None else f" {MARK}" for record in records]
    width = max(map(len, marks))
    return [f"{_time(record.time)}{mark:<{width}}" for record, mark in zip(records, marks)]


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
    return escape(shortened(", ".join(remarks)))


def print_not_run(console: Console, records: Iterable[Record]) -> None:
    """One line per reason with everybody whom it kept from running."""
    refused = not_run(records)
    if refused:
        told = "; ".join(f"{', '.join(map(shortened, names))} ({shortened(reason)})" for reason, names in refused)
        console.print()
        console.print(f"[dim]Not run:[/dim] {escape(told)}", highlight=False, soft_wrap=True)
