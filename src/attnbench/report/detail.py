"""One cell in full, for `attnbench show RUN --detail`: percentiles, compile, memory, errors, kernels, where it ran."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.measuring.rates import notes_of
from attnbench.printable import shortened
from attnbench.report import units
from attnbench.results.records import label
from attnbench.spec import Environment, Ok, Ranks, Record, Time, VerifiedAt

Line = tuple[str, str]
MOST_LINES = 200
"""Of the output that a failed cell left behind."""


def print_cell(console: Console, record: Record) -> None:
    """Every figure of the record, unmeasured ones with the reason."""
    console.print()
    console.print(f"[bold]{escape(label(record))}[/bold] on {escape(record.workload.title)}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in cell_lines(record):
        table.add_row(escape(shortened(name)), escape(value))
    console.print(table, highlight=False)


def cell_lines(record: Record) -> Iterator[Line]:
    """Name and text of each line."""
    yield "status", record.status
    if isinstance(record, Ok):
        yield from _times(record)
        yield from _resources(record)
        yield from () if record.ranks is None else _ranks(record.ranks)
        yield from _correctness(record)
    else:
        yield "reason", shortened(record.reason)
        if record.errors is not None:
            yield (
                "forward error",
                f"{units.error(record.errors.forward)} (allowed {units.error(record.errors.forward_allowed)})",
            )
        for number, line in enumerate(detail_lines(record.detail)):
            yield "" if number else "detail", line
    if record.workload.source:
        yield "shape from", record.workload.source
    if record.environment is not None:
        yield "ran on", environment_line(record.environment)
    yield "process", record.isolation


def detail_lines(detail: str) -> list[str]:
    """Return the lines that a failed cell left behind, and how many more there are."""
    lines = detail.splitlines()
    left = len(lines) - MOST_LINES
    return [*map(shortened, lines[:MOST_LINES]), *([f"… ({left} more lines; --json has all)"] if left > 0 else [])]


def _times(record: Ok) -> Iterator[Line]:
    if record.time is None:
        yield "time", f"{units.DASH} (verified, not timed)"
        return
    for name, time in {record.workload.pass_: record.time, **record.also}.items():
        yield f"time, {name}", _percentiles(time)
    yield "compile", units.duration(record.compile_ns) if record.compile_ns else "none"
    yield "first call", units.duration(record.first_call_ns)
    if record.throughput is not None:
        yield (
            "throughput",
            f"{record.throughput.tokens_per_s:,.0f} tokens/s, {record.throughput.calls_per_s:,.1f} calls/s",
        )


def _percentiles(time: Time) -> str:
    low, high = (units.duration(edge) for edge in time.ci95_ns or (None, None))
    figures = {"p95": time.p95_ns, "p99": time.p99_ns, "min": time.min_ns, "max": time.max_ns, "mean": time.mean_ns}
    told = ", ".join(f"{name} {units.duration(value)}" for name, value in figures.items())
    counts = f"{len(time.samples_ns)} samples of {time.calls_per_sample} call(s), {time.outliers} outliers kept"
    median = f"median {units.duration(time.median_ns)} (95 %: {low} to {high})"
    return f"{median}, {told}, std {units.duration(time.std_ns)}; {counts}; clock {time.clock}"


def _resources(record: Ok) -> Iterator[Line]:
    memory, cost = record.memory, record.cost
    peak = units.size(memory.peak_bytes)
    why = f" ({memory.reason})" if memory.peak_bytes is None and memory.reason else ""
    method = f" by {memory.method}" if memory.method else ""
    theory = {"theory": memory.theory_bytes, "scores": memory.scores_bytes, "KV cache": memory.kv_cache_bytes}
    told = ", ".join(f"{name} {units.size(count)}" for name, count in theory.items() if count)
    yield "peak memory", f"{peak}{why}{method}" + (f"; {told}" if told else "")
    if memory.reserved_bytes is not None:
        yield "reserved", f"{units.size(memory.reserved_bytes)}, fragmentation {units.percent(memory.fragmentation)}"
    rates = f"{units.significant(cost.tflops)} TFLOP/s, {units.significant(cost.gb_per_s)} GB/s"
    share = f"{units.percent(cost.roofline)} of the {cost.bound or 'measured'} ceiling"
    roofline = cost.reason or "no roofline" if cost.roofline is None else share
    yield "cost", f"{cost.flops:,} FLOP, {cost.bytes:,} bytes; {rates}; {roofline}"
    kernels = record.kernels_reason or units.DASH if record.kernels is None else ", ".join(record.kernels)
    yield "kernels", kernels


def _ranks(ranks: Ranks) -> Iterator[Line]:
    """What each rank of a ring did."""
    kernels = f", by {', '.join(ranks.inner)}" if ranks.inner else ""
    yield "ranks", f"{ranks.world}, {ranks.how}; {ranks.layout} layout; balance {units.percent(ranks.balance)}{kernels}"
    yield "held by ranks", ", ".join(f"{n} queries" for n in ranks.tokens)
    times = {"compute": ranks.compute_ns, "waiting": ranks.waiting_ns, "communication": ranks.communication_ns}
    for name, values in times.items():
        told = None if values is None else ", ".join(units.duration(value) for value in values)
        yield f"{name} by rank", told or f"{units.DASH} ({ranks.reason})"
    peaks = None if ranks.peak_bytes is None else ", ".join(units.size(value) for value in ranks.peak_bytes)
    yield "peak by rank", f"{peaks or units.DASH}, beside inputs of {units.size(max(ranks.shard_bytes))}"


def _correctness(record: Ok) -> Iterator[Line]:
    errors = record.errors
    allowed = units.error(errors.forward_allowed)
    yield "forward error", f"{units.error(errors.forward)} (allowed {allowed}), largest {units.error(errors.max_abs)}"
    if errors.backward is not None:
        yield "gradient error", f"{units.error(errors.backward)} (allowed {units.error(errors.backward_allowed)})"
    if errors.lse is not None:
        yield "LSE error", units.error(errors.lse)
    if record.quality:
        yield "quality", ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in record.quality.items())
    checks = [*errors.properties, *([f"stable at {errors.stability}"] if errors.stability else [])]
    if checks:
        yield "also checked", ", ".join(checks)
    if errors.hidden_nan:
        yield "hidden NaN", errors.hidden_nan
    yield "verified at", _verified(record.verified_at)
    yield "deterministic", "yes" if record.deterministic else "no"
    if notes := notes_of(record):
        yield "notes", "; ".join(notes)


def _verified(at: VerifiedAt) -> str:
    def place(shape: dict[str, int], share: float | None) -> str:
        sizes = ", ".join(f"{name} {value}" for name, value in shape.items())
        return f"{units.percent(share)} of the rows at {sizes}"

    forward = place(at.shape, at.share)
    return (
        forward if at.backward_shape is None else f"{forward}; gradients {place(at.backward_shape, at.backward_share)}"
    )


def environment_line(environment: Environment) -> str:
    """The part of an environment that matters most, in one line."""
    packages = environment.packages
    framework = f"{environment.framework} {packages.get(environment.framework, '')}".strip()
    threads = f"{environment.threads} threads" if environment.threads else ""
    facts = [environment.device_name, framework, threads, f"fingerprint {environment.fingerprint}"]
    return " · ".join(fact for fact in facts if fact)
