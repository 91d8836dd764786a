"""Records of a section -> flat rows: what charts and tables of the page are made of. No samples leave this file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from attnbench.analyse.across_runs import CLEARLY
from attnbench.analyse.clocks import clock_of, on_one_clock
from attnbench.analyse.ranking import RANK_LEVEL, Row, by_workload, is_timed, label, rank
from attnbench.analyse.ratios import condensed, paired_ratio
from attnbench.analyse.speedup import category
from attnbench.analyse.together import newest
from attnbench.measuring.host_limit import host_limit, notes_of
from attnbench.report.html.baselines import choose_baselines
from attnbench.report.html.families import Families, find_families, kind_words, length_text
from attnbench.report.html.map import WinnerMap, lay_out
from attnbench.report.html.picks import set_beside
from attnbench.report.html.sections import Section
from attnbench.spec import Ok, Record

Cell = dict[str, Any]
LONGEST = 2000
"""Characters of a text on the page; names of kernels may have a thousand."""
OTHER_CLOCK = -1
"""In place of a run: timed beside the others, by a clock that they do not hold."""


class Cells(Struct, frozen=True):
    """The rows of a section, and what they are compared with."""

    rows: list[Cell]
    groups: list[list[Row]]
    """The same as ranked rows, one list per shape and run."""
    records: list[Record]
    """The newest of each cell, whole."""
    families: Families
    baselines: list[str]
    runs: list[list[Record]]
    """Run by run, the oldest first, with a sample per round, in the order of the rankings."""
    maps: list[WinnerMap] = []
    repeated: int = 0
    """Cells that several runs hold; only the newest of each is shown."""
    pooled: int = 0
    """Shapes whose newest cells are of several runs: not timed in the same rounds, so not all ranked."""

    @property
    def newest(self) -> list[Record]:
        """Of each cell the newest, with a sample per round."""
        return newest(self.runs)

    @property
    def deciding(self) -> list[list[Row]]:
        """Of each shape one ranking: of the run that ranked most, the newest of such."""
        best: dict[str, list[Row]] = {}
        for group in self.groups:
            key = group[0].record.workload.id
            if _ranked(group) >= _ranked(best.get(key, ())):
                best[key] = group
        return list(best.values())


def make_cells(section: Section, against: Sequence[str] = ()) -> Cells:
    """Rank every shape of every run, then keep the newest of each cell.

    Rounds are paired within a run only, so ratios are taken before runs are put together.
    """
    runs = [[on_one_clock(group) for group in by_workload(run).values()] for run in section.runs.values()]
    records = newest([record for group in run for record in group] for run in runs)
    families = find_families(record.workload for record in records)
    baselines = choose_baselines(records, against)
    ranked = [[rank(map(condensed, group), baselines[0] if baselines else None) for group in run] for run in runs]
    kept: dict[str, Cell] = {}
    places: dict[str, dict[str, int]] = {}
    times: dict[str, dict[int, dict[str, float]]] = {}
    for place, run in enumerate(ranked):
        for group in run:
            ranked_here = [row.record for row in group if row.rank is not None]
            took = {record.cell.id: record.time.median_ns for record in ranked_here if is_timed(record) and record.time}
            times.setdefault(group[0].record.workload.id, {})[place] = took
            others = {name: _timed_record(group, name) for name in baselines}
            for row in group:
                kept[row.record.cell.id] = _cell(row, families, baselines, others)
                if is_timed(row.record) and not row.record.approximate:
                    home = OTHER_CLOCK if row.rank is None else place
                    places.setdefault(row.record.workload.id, {})[row.record.cell.id] = home
    for workload, homes in places.items():
        for name in _without_rank(homes, times[workload]):
            kept[name]["rank"] = None
    pooled = sum(len({*cells.values()} - {OTHER_CLOCK}) > 1 for cells in places.values())
    for record in records:
        if record.time is not None:
            kept[record.cell.id]["samples"] = len(record.time.samples_ns)
    _number_kernels(records, kept)
    rows = list(kept.values())
    maps = lay_out([row for row in rows if row.get("ns") is not None and row["exact"]])
    set_beside(rows)
    groups = [group for run in ranked for group in run]
    by_run = [[row.record for group in run for row in group] for run in ranked]
    repeated = len(section.records) - len(records)
    return Cells(rows, groups, records, families, baselines, by_run, maps, repeated, pooled)


def _without_rank(homes: Mapping[str, int], times: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Of a shape's cells and the runs they are of: those of another run than the fastest, which took no turns with it,
    and all where one of these may be as fast, by what both runs hold."""
    if len(set(homes.values())) == 1:
        return []
    took = {name: times.get(home, {}).get(name, 0.0) for name, home in homes.items()}
    first = min(homes, key=lambda name: took[name])
    own = times.get(homes[first], {})

    def may_be_as_fast(name: str) -> bool:
        there = times.get(homes[name], {})
        likely = [took[name] * own[link] / there[link] for link in own.keys() & there.keys()]
        return min(likely, default=0.0) <= CLEARLY * took[first]

    elsewhere = [name for name in homes if homes[name] != homes[first]]
    return list(homes) if any(map(may_be_as_fast, elsewhere)) else elsewhere


def _number_kernels(records: Iterable[Record], cells: Mapping[str, Cell]) -> None:
    """Give cells that launched the same kernels the same number, and every label its place from plain to long."""
    numbers: dict[frozenset[str], int] = {}
    names = sorted({cell["label"] for cell in cells.values()}, key=lambda name: (len(name), name))
    places = {name: place for place, name in enumerate(names)}
    for record in records:
        cells[record.cell.id]["plain"] = places[label(record)]
        if isinstance(record, Ok) and record.kernels:
            cells[record.cell.id]["kernel"] = numbers.setdefault(frozenset(record.kernels), len(numbers))


def _ranked(group: Iterable[Row]) -> int:
    return sum(row.rank is not None for row in group)


def _timed_record(group: Iterable[Row], name: str) -> Ok | None:
    found = (row.record for row in group if row.record.implementation == name)
    return next((record for record in found if is_timed(record)), None)


def _cell(row: Row, families: Families, baselines: Sequence[str], others: Mapping[str, Ok | None]) -> Cell:
    record = row.record
    cell = _identity(record, families) | {
        "status": record.status,
        "reason": short(row.reason) or None,
        "rank": row.rank,
    }
    if isinstance(record, Ok):
        cell |= _timing(record) | _resources(record) | _correctness(record)
        cell |= _speedups(record, baselines, others)
    return cell


def short(text: str) -> str:
    """Return what the page shows of a reason, note or kernel; the documents beside it have all of it."""
    return f"{text[: LONGEST - 1]}…" if len(text) > LONGEST else text


def _identity(record: Record, families: Families) -> Cell:
    workload = record.workload
    return {
        "label": label(record),
        "framework": framework_of(record),
        "workload": workload.id,
        "shape": families.shape(workload),
        "family": families.family(workload),
        "track": families.track(workload),
        "kind": kind_words(workload),
        "model": families.model(workload) or None,
        "pass": workload.pass_,
        "batch": workload.batch,
        "len": workload.kv_len,
        "length": length_text(workload),
    }


def framework_of(record: Record) -> str:
    """The framework it ran in; a bare function does not say so in its name."""
    if record.environment is not None and record.environment.framework:
        return record.environment.framework
    return record.implementation.partition(".")[0]


def _timing(record: Ok) -> Cell:
    time, cost = record.time, record.cost
    if time is None:
        return {}
    low, high = time.ci95_ns or (None, None)
    return {
        "exact": not record.approximate,
        "ns": time.median_ns,
        "low": low,
        "high": high,
        "p95": time.p95_ns,
        "p99": time.p99_ns,
        "max": time.max_ns,
        "clock": time.clock,
        "outliers": time.outliers,
        "tokens": None if record.throughput is None else record.throughput.tokens_per_s,
        "tflops": cost.tflops,
        "gbs": cost.gb_per_s,
        "intensity": cost.flops / cost.bytes if cost.bytes else None,
        "roofline": cost.roofline,
        "bound": cost.bound or None,
        "compile": record.compile_ns or None,
        "first": record.first_call_ns,
        "notes": "; ".join(map(short, notes_of(record))) or None,
        "host": host_limit(record),
    }


def _resources(record: Ok) -> Cell:
    memory = record.memory
    return {
        "peak": memory.peak_bytes,
        "theory": memory.theory_bytes or None,
        "reserved": memory.reserved_bytes,
        "fragmentation": memory.fragmentation,
        "method": short(memory.method or memory.reason or "") or None,
    }


def _correctness(record: Ok) -> Cell:
    errors = record.errors
    return {
        "error": errors.forward,
        "allowed": errors.forward_allowed,
        "gradient": errors.backward,
        "gradient_allowed": errors.backward_allowed,
        "lse": errors.lse,
        "largest": errors.max_abs,
        "deterministic": "yes" if record.deterministic else "no",
        "stable": errors.stability or None,
        "hidden_nan": errors.hidden_nan or None,
        "checked": record.verified_at.share,
        "approximate": "declared" if record.approximate else None,
    }


def _speedups(record: Ok, baselines: Sequence[str], others: Mapping[str, Ok | None]) -> Cell:
    cell: Cell = {}
    if not is_timed(record):
        return cell
    for place, name in enumerate(baselines):
        other = others.get(name)
        if other is None or clock_of(other) != clock_of(record):
            continue
        ratio = paired_ratio(record, other, RANK_LEVEL)
        word = "baseline" if record.implementation == name and not record.config else category(ratio)
        cell |= {
            f"gain{place}": ratio.value,
            f"gain{place}_low": ratio.low,
            f"gain{place}_high": ratio.high,
            f"gain{place}_is": word,
        }
    return cell
