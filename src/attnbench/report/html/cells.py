"""Records of a section -> flat rows: what charts and tables of the page are made of. No samples leave this file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from attnbench.analyse.speedup import category
from attnbench.measuring.rates import host_limit, notes_of
from attnbench.report.html.families import Families, find_families, kind_words, length_text
from attnbench.report.html.map import WinnerMap, lay_out
from attnbench.report.html.picks import set_beside
from attnbench.report.html.sections import Section
from attnbench.results.ratios import RANK_LEVEL, paired_ratio
from attnbench.results.records import baseline, clock_of, exact, framework_of, is_timed, label
from attnbench.results.standings import Row, Standing, Standings
from attnbench.spec import Ok, Record

Cell = dict[str, Any]
LONGEST = 2000
"""Characters of a text on the page; names of kernels may have a thousand."""


MOST_BASELINES = 6
MOST_RATIOS = 10_000
"""Bootstraps that a choice of baselines may cost, about 4 s; a long run gets fewer to choose from."""


class Cells(Struct, frozen=True):
    """The rows of a section, and what they are made of."""

    rows: list[Cell]
    standings: Standings
    families: Families
    baselines: list[str]
    maps: list[WinnerMap] = []
    repeated: int = 0
    """Cells that several runs hold; one record of each is shown."""
    pooled: int = 0
    """Shapes whose cells are of several runs, which took no turns with each other."""

    @property
    def records(self) -> list[Record]:
        """The record of each cell that is shown, whole."""
        return self.standings.records


def make_cells(section: Section, against: Sequence[str] = ()) -> Cells:
    """Return a row for each cell of a section, with its place in the standing of its shape."""
    standings = Standings(list(section.runs.values()), against)
    records = standings.records
    families = find_families(record.workload for record in records)
    baselines = choose_baselines(records, against)
    positions = {
        (key, position.row.implementation): position for key in standings.overall for position in standings.order(key)
    }
    made_by = [{(key, row.record.cell.id): (row, one) for key, one in run.items() for row in one.rows}
               for run in standings.by_run]  # fmt: skip
    rows: list[Cell] = []
    runs: dict[str, set[int]] = {}
    for number, record in standings.shown:
        row, standing = made_by[number][record.workload.id, record.cell.id]
        cell = _cell(record, row, families) | _speedups(row, standing, baselines)
        position = positions.get((record.workload.id, row.implementation))
        if position is not None and position.row.record is row.record:
            overall = row.implementation in standings.overall[record.workload.id].ranked
            cell |= {"rank": position.row.rank if overall else None, "place": position.place, "tie": position.tie}
            cell |= {"within": position.within, "kernel": position.kernel, "group": position.group}
        rows.append(cell)
        if is_timed(record) and not record.approximate:
            runs.setdefault(record.workload.id, set()).add(number)
    maps = lay_out([row for row in rows if "place" in row])
    set_beside(rows)
    repeated = len(section.records) - len(records)
    return Cells(rows, standings, families, baselines, maps, repeated, sum(len(one) > 1 for one in runs.values()))


def choose_baselines(records: Sequence[Record], against: Sequence[str] = ()) -> list[str]:
    """Return the implementations that a reader may choose as the baseline of speed-ups: the one that the terminal takes
    first, then those measured on most shapes."""
    timed = exact(records)
    first = baseline(records, against)
    if first is None:
        return []
    counts = Counter(record.implementation for record in timed)
    allowed = max(1, min(MOST_BASELINES, MOST_RATIOS // max(1, len(timed))))
    others = [name for name, _ in counts.most_common() if name != first]
    return [first, *others[: allowed - 1]]


def _cell(record: Record, row: Row, families: Families) -> Cell:
    cell = _identity(record, families) | {"status": record.status, "reason": short(row.reason) or None, "rank": None}
    if isinstance(record, Ok):
        cell |= _timing(record) | _resources(record) | _correctness(record)
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


def _timing(record: Ok) -> Cell:
    time, cost = record.time, record.cost
    if time is None:
        return {}
    low, high = time.ci95_ns or (None, None)
    return {
        "exact": not record.approximate,
        "ns": time.median_ns,
        "samples": len(time.samples_ns),
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


def _speedups(row: Row, standing: Standing, baselines: Sequence[str]) -> Cell:
    """Return the ratios of a row to each baseline that its run timed on the same shape, by the same clock."""
    cell: Cell = {}
    record = row.record
    for place, name in enumerate(baselines if is_timed(record) else ()):
        others = (one.record for one in standing.rows if one.record.implementation == name)
        other = next((one for one in others if is_timed(one)), None)
        if other is None or clock_of(other) != clock_of(record) or not is_timed(record):
            continue
        both = row.implementation in standing.ranked and label(other) in standing.ranked
        ratio = standing.ratio(row.implementation, label(other)) if both else paired_ratio(record, other, RANK_LEVEL)
        word = "baseline" if record.implementation == name and not record.config else category(ratio)
        cell |= {
            f"gain{place}": ratio.value,
            f"gain{place}_low": ratio.low,
            f"gain{place}_high": ratio.high,
            f"gain{place}_is": word,
        }
    return cell
