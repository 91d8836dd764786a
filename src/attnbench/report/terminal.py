"""Tables of the terminal: listings, rankings, one cell in full, and the result of `attnbench verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.measuring.rates import HOST_LIMITED, host_limit, notes_of
from attnbench.printable import shortened
from attnbench.report import units
from attnbench.report.environment import environment_line
from attnbench.report.units import DASH
from attnbench.results.records import grouped, is_anchor, is_timed, label, share_of_allowed, status_words
from attnbench.results.sentences import capped, count_notes, counted, format_ratio, not_run
from attnbench.results.standings import NOT_COMPARED, Row, Standings
from attnbench.spec import Ok, OutOfMemory, Ranks, Record, Time, Unsupported

PARTS = ("forward", "backward")
EXPENDABLE = ("roofline", "TFLOP/s", "backward", "forward", "remarks", "peak")
"""Columns left out on a narrow screen, the first one first; `forward` and `backward` as parts of a training step."""
MARK = "*"
"""Mark on the time of kernels if the call takes much longer."""
STYLES = {"incorrect": "red", "failed": "red", "timeout": "red", "out_of_memory": "yellow"}
STATUSES = ("ok", "incorrect", "failed", "timeout", "out_of_memory", "unsupported")
MOST_LINES = 200
"""Most lines shown of the output that a failed cell left behind."""
Line = tuple[str, str]


def plain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return rows as a plain table with the keys of the first row as columns; None and False print as nothing, True as
    yes."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = list(rows[0]) if rows else []
    for position, heading in enumerate(headings):
        table.add_column(heading, no_wrap=position == 0, overflow="fold")
    for row in rows:
        values = (row[heading] for heading in headings)
        told = ("" if one is None or one is False else "yes" if one is True else str(one) for one in values)
        table.add_row(*(escape(shortened(one)) for one in told))
    return table


def print_rankings(console: Console, records: Sequence[Record] | Standings, against: Sequence[str] = ()) -> None:
    """Print a table per workload, then what did not run, then the warnings, of records or of standings made of them."""
    standings = records if isinstance(records, Standings) else Standings([records], against)
    for standing in standings.overall.values():
        console.print()
        console.print(f"[bold]{escape(standing.workload.title)}[/bold]")
        print_ranking(console, standing.rows, standings.baselines[standing.workload.step])
    print_not_run(console, standings.records)
    for note in count_notes(standings.records):
        console.print(f"[yellow]note:[/yellow] {escape(note)}")


def print_ranking(console: Console, rows: Sequence[Row], base: str | None) -> None:
    """Print the rows of one workload: those with a speed in a table, the others below with their reasons."""
    timed = [(row, row.record) for row in rows if is_timed(row.record)]
    if timed:
        console.print(ranking_table(timed, base, console.width))
        waits = [(row.implementation, ratio) for row, record in timed if (ratio := host_limit(record)) is not None]
        if waits:
            told = ", ".join(f"{ratio:.1f}x its kernel time ({escape(name)})" for name, ratio in waits)
            console.print(f"  {MARK} {HOST_LIMITED}: the call takes {told}", soft_wrap=True)
    for row in rows:
        if is_timed(row.record) and row.reason.startswith(NOT_COMPARED):
            told = f"{shortened(row.implementation)}  {shortened(row.reason)}"
            console.print(f"  [dim]{DASH}  {escape(told)}[/dim]")
        if is_timed(row.record) or isinstance(row.record, Unsupported):
            continue
        style = STYLES.get(row.record.status)
        told = "" if style is None else f"[{style}]{status_words(row.record)}[/{style}]  "
        name, why = escape(shortened(row.implementation)), escape(shortened(row.reason))
        console.print(f"  {DASH}  {name}  {told}{why}", soft_wrap=True)


def ranking_table(timed: Sequence[tuple[Row, Ok]], base: str | None, width: int = 200) -> Table:
    """Return the table of the rows with a speed. On a narrow screen whole columns are left out, the least important
    first; rank, name and time always stay."""
    columns = _columns(timed, base)
    for name in (*EXPENDABLE, f"against {base}"):
        if sum(max(len(heading), *map(len, cells)) + 2 for heading, cells in columns.items()) <= width:
            break
        if name != timed[0][1].workload.pass_:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=True, header_style="bold", show_edge=False)
    for heading in columns:
        right = heading not in ("implementation", "remarks") and not heading.startswith("against")
        told = "" if heading == "remarks" else escape(heading)
        table.add_column(told, justify="right" if right else "left", no_wrap=True)
    for cells in zip(*columns.values()):
        table.add_row(*cells)
    return table


def _columns(timed: Sequence[tuple[Row, Ok]], base: str | None) -> dict[str, list[str]]:
    """Return heading -> cells. A part that no record has is left out; a single missing figure prints as a dash."""
    records = [record for _, record in timed]
    columns: dict[str, list[str]] = {"#": [], "implementation": [], records[0].workload.pass_: []}
    marks = ["" if host_limit(record) is None else f" {MARK}" for record in records]
    width = max(map(len, marks))
    for (row, record), mark in zip(timed, marks):
        place = str(row.rank) if row.rank is not None else "~" if record.approximate else DASH
        columns["#"].append(">=" if row.behind else "=" if row.tied else place)
        columns["implementation"].append(escape(shortened(row.implementation)))
        columns[record.workload.pass_].append(f"{_time_text(record.time)}{mark:<{width}}")
    for part in PARTS:
        if any(part in record.also for record in records):
            columns[part] = [_time_text(record.also.get(part)) for record in records]
    columns |= {
        "TFLOP/s": [units.significant(record.cost.tflops) for record in records],
        "roofline": [units.percent(record.cost.roofline) for record in records],
        "peak": [units.size(record.memory.peak_bytes) for record in records],
    }
    if base is not None:
        columns[f"against {base}"] = [
            "1" if row.implementation == base else DASH if row.speedup is None else format_ratio(row.speedup)
            for row, _ in timed
        ]
    remarks: list[str] = []
    for record in records:
        told = ["approximate"] * record.approximate + [note.partition(":")[0] for note in record.notes]
        told += ["not deterministic"] * (not record.deterministic)
        remarks.append(escape(shortened(", ".join(told))))
    if any(remarks):
        columns["remarks"] = remarks
    return columns


def _time_text(time: Time | None) -> str:
    if time is None:
        return DASH
    return f"{units.duration(time.median_ns)} {units.half_interval(time.half_width):>7}"


def print_not_run(console: Console, records: Iterable[Record]) -> None:
    """Print one line with every reason for which implementations were refused, and their names."""
    refused = not_run(records)
    if refused:
        told = "; ".join(f"{', '.join(map(shortened, names))} ({shortened(reason)})" for reason, names in refused)
        console.print()
        console.print(f"[dim]Not run:[/dim] {escape(told)}", soft_wrap=True)


def print_cell(console: Console, record: Record) -> None:
    """Print every figure of a record; figures that were not measured have the reason."""
    console.print()
    console.print(f"[bold]{escape(label(record))}[/bold] on {escape(record.workload.title)}")
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in cell_lines(record):
        table.add_row(escape(shortened(name)), escape(value))
    console.print(table)


def cell_lines(record: Record) -> Iterator[Line]:
    """Yield name and text of each line of a record."""
    yield "status", record.status
    if isinstance(record, Ok):
        figures = _times(record) | _resources(record) | _ranks(record.ranks) | _correctness(record)
        yield from ((name, told) for name, told in figures.items() if told)
    else:
        yield "reason", shortened(record.reason)
        if record.errors is not None:
            yield "forward error", _error(record.errors.forward, record.errors.forward_allowed)
        for number, line in enumerate(detail_lines(record.detail)):
            yield "" if number else "detail", line
    if record.workload.source:
        yield "shape from", record.workload.source
    if record.environment is not None:
        yield "ran on", environment_line(record.environment)
    yield "process", record.isolation


def detail_lines(detail: str) -> list[str]:
    """Return the lines of output that a failed cell left behind, and how many more there are."""
    return capped([*map(shortened, detail.splitlines())], MOST_LINES, "… ({} more lines; --json has all)")


def _error(error: float | None, allowed: float | None) -> str:
    return f"{units.error(error)} (allowed {units.error(allowed)})"


def _times(record: Ok) -> dict[str, str]:
    if record.time is None:
        return {"time": f"{DASH} (verified, not timed)"}
    lines: dict[str, str] = {}
    for name, time in {record.workload.pass_: record.time, **record.also}.items():
        low, high = (units.duration(edge) for edge in time.ci95_ns or (None, None))
        figures = {"p95": time.p95_ns, "p99": time.p99_ns, "min": time.min_ns, "max": time.max_ns, "mean": time.mean_ns}
        told = ", ".join(f"{name} {units.duration(value)}" for name, value in figures.items())
        counts = f"{len(time.samples_ns)} samples of {time.calls_per_sample} call(s), {time.outliers} outliers kept"
        median = f"median {units.duration(time.median_ns)} (95 %: {low} to {high})"
        lines[f"time, {name}"] = f"{median}, {told}, std {units.duration(time.std_ns)}; {counts}; clock {time.clock}"
    rates = record.throughput
    return lines | {
        "compile": units.duration(record.compile_ns) if record.compile_ns else "none",
        "first call": units.duration(record.first_call_ns),
        "throughput": "" if rates is None else f"{rates.tokens_per_s:,.0f} tokens/s, {rates.calls_per_s:,.1f} calls/s",
    }


def _resources(record: Ok) -> dict[str, str]:
    memory, cost = record.memory, record.cost
    why = f" ({memory.reason})" if memory.peak_bytes is None and memory.reason else ""
    method = f" by {memory.method}" if memory.method else ""
    theory = {"theory": memory.theory_bytes, "scores": memory.scores_bytes, "KV cache": memory.kv_cache_bytes}
    told = ", ".join(f"{name} {units.size(count)}" for name, count in theory.items() if count)
    reserved = f"{units.size(memory.reserved_bytes)}, fragmentation {units.percent(memory.fragmentation)}"
    rates = f"{units.significant(cost.tflops)} TFLOP/s, {units.significant(cost.gb_per_s)} GB/s"
    share = f"{units.percent(cost.roofline)} of the {cost.bound or 'measured'} ceiling"
    roofline = cost.reason or "no roofline" if cost.roofline is None else share
    return {
        "peak memory": f"{units.size(memory.peak_bytes)}{why}{method}" + (f"; {told}" if told else ""),
        "reserved": "" if memory.reserved_bytes is None else reserved,
        "cost": f"{cost.flops:,} FLOP, {cost.bytes:,} bytes; {rates}; {roofline}",
        "kernels": record.kernels_reason or DASH if record.kernels is None else ", ".join(record.kernels) or DASH,
    }


def _ranks(ranks: Ranks | None) -> dict[str, str]:
    """Return the lines of the ranks of a ring: their shares, times and peaks."""
    if ranks is None:
        return {}
    kernels = f", by {', '.join(ranks.inner)}" if ranks.inner else ""
    times = {"compute": ranks.compute_ns, "waiting": ranks.waiting_ns, "communication": ranks.communication_ns}
    peaks = ", ".join(map(units.size, ranks.peak_bytes or ()))
    return {
        "ranks": f"{ranks.world}, {ranks.how}; {ranks.layout} layout; balance {units.percent(ranks.balance)}{kernels}",
        "held by ranks": ", ".join(f"{n} queries" for n in ranks.tokens),
        **{
            f"{name} by rank": ", ".join(map(units.duration, values or ())) or f"{DASH} ({ranks.reason})"
            for name, values in times.items()
        },
        "peak by rank": f"{peaks or DASH}, beside inputs of {units.size(max(ranks.shard_bytes))}",
    }


def _correctness(record: Ok) -> dict[str, str]:
    errors, at = record.errors, record.verified_at
    checks = [*errors.properties, *([f"stable at {errors.stability}"] if errors.stability else [])]

    def verified(share: float | None, shape: dict[str, int]) -> str:
        return f"{units.percent(share)} of the rows at {', '.join(f'{name} {size}' for name, size in shape.items())}"

    gradients = "" if at.backward_shape is None else f"; gradients {verified(at.backward_share, at.backward_shape)}"
    forward = _error(errors.forward, errors.forward_allowed)
    return {
        "forward error": f"{forward}, largest {units.error(errors.max_abs)}",
        "gradient error": "" if errors.backward is None else _error(errors.backward, errors.backward_allowed),
        "LSE error": "" if errors.lse is None else units.error(errors.lse),
        "quality": ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in record.quality.items()),
        "also checked": ", ".join(checks),
        "hidden NaN": errors.hidden_nan,
        "verified at": f"{verified(at.share, at.shape)}{gradients}",
        "deterministic": "yes" if record.deterministic else "no",
        "notes": "; ".join(notes_of(record)),
    }


def count_statuses(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """Return implementation, with its tunables -> number of cells by status."""
    groups = grouped((record for record in records if not is_anchor(record)), label)
    return {
        name: {status: sum(one.status == status for one in group) for status in STATUSES}
        for name, group in groups.items()
    }


def print_verification(console: Console, records: Sequence[Record], explain: bool = False) -> None:
    """Print the table of what was verified, the reasons of failures and the verdict; `explain` adds the details."""
    tried = {label(record) for record in records if not isinstance(record, Unsupported)}
    console.print(_verification_table([record for record in records if label(record) in tried]))
    print_not_run(console, [record for record in records if label(record) not in tried])
    wrong = [r for r in records if not isinstance(r, Ok | Unsupported)]
    for record in wrong:
        title = f"{label(record)} · {record.workload.id}"
        told = f"{shortened(title)}: {shortened(record.reason)}"
        console.print(f"  [red]{status_words(record)}[/red]  {escape(told)}")
        if explain:
            _explain(console, record)
    if wrong and not explain:
        console.print("  [dim]--explain shows where[/dim]")
    console.print()
    console.print(verification_verdict(records), markup=False)


def _verification_table(records: Sequence[Record]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("implementation", no_wrap=True)
    for status in ("ok", "wrong", "unsupported"):
        table.add_column(status, justify="right")
    table.add_column("worst error / allowed", justify="right", no_wrap=True)
    table.add_column("why some did not run", overflow="fold")

    def count(number: int, style: str) -> str:
        return f"[{style}]{number}[/{style}]" if number else DASH

    for name, counts in count_statuses(records).items():
        mine = [record for record in records if label(record) == name]
        wrong = sum(counts[status] for status in STATUSES[1:4])
        reasons = Counter(record.reason for record in mine if isinstance(record, Unsupported))
        reasons |= Counter(f"out of memory: {record.reason}" for record in mine if isinstance(record, OutOfMemory))
        told = "; ".join(f"{reason} ({n})" if n > 1 else reason for reason, n in reasons.most_common(3))
        figures = (count(counts["ok"], "green"), count(wrong, "red"), count(counts["unsupported"], "dim"))
        shares = (share_of_allowed(record.errors) for record in mine if isinstance(record, Ok))
        worst = max((share for share in shares if share is not None), default=None)
        table.add_row(escape(shortened(name)), *figures, units.percent(worst), escape(shortened(told)))
    return table


def _explain(console: Console, record: Record) -> None:
    errors: Any = record.errors
    lines: list[str] = []
    for part, field in (("forward", "forward"), ("gradients", "backward")):
        if errors is not None and (error := getattr(errors, field)) is not None:
            allowed = getattr(errors, f"{field}_allowed")
            lines.append(f"{part}: error {units.error(error)}, allowed {units.error(allowed)}")
    for line in lines if isinstance(record, Ok) else [*lines, *detail_lines(record.detail)]:
        console.print(f"      {escape(line)}")


def verification_verdict(records: Iterable[Record]) -> str:
    """Return the closing sentence of a verification."""
    counts = count_statuses(records)
    tried = {name: found for name, found in counts.items() if sum(found.values()) > found["unsupported"]}
    bad = [name for name, found in tried.items() if sum(found[status] for status in STATUSES[1:4])]
    checked = sum(found["ok"] for found in counts.values())
    noun = "configuration" if any(name.endswith("]") for name in tried) else "implementation"
    if bad:
        are = "is" if len(bad) == 1 else "are"
        return f"{len(bad)} of {counted(len(tried), noun)} {are} broken: {', '.join(bad)}."
    lost = {name: found["out_of_memory"] for name, found in tried.items() if found["out_of_memory"]}
    unchecked = f"memory ran out on {counted(sum(lost.values()), 'cell')} ({', '.join(lost)})"
    if not checked:
        why = unchecked if lost else "no implementation runs these workloads here. See `attnbench doctor`"
        return f"Nothing could be verified: {why}."
    right, cells = [name for name, found in tried.items() if found["ok"]], counted(checked, "cell")
    who, claim = f"All {len(right)} {noun}s that run here are", "everything they claim"
    if len(right) == 1:
        who, claim = f"{right[0]} is", "everything it claims"
    return f"{who} right on {cells}; {unchecked}." if lost else f"{who} right on {claim} ({cells})."
