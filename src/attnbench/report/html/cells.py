"""Flat rows of the cells of a section, of which the charts and tables of the page are made, and rows as compact JSON.

Samples are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from attnbench.measuring.rates import host_limit, notes_of
from attnbench.report.html.layout import Cell, WinnerMap, lay_out, set_beside
from attnbench.report.html.sections import Section, ShapeNames, name_shapes
from attnbench.results.families import length_text
from attnbench.results.records import baseline, exact, framework_of, grouped, is_timed, label, share_of_allowed
from attnbench.results.sentences import format_ratio, speedups
from attnbench.results.standings import Row, Setback, Standings
from attnbench.spec import Errors, Incorrect, Ok, Record

LONGEST = 2000
"""Characters of a text on the page; names of kernels may have a thousand."""
MOST_BASELINES = 6
MOST_RATIOS = 10_000
"""Bootstraps that a choice of baselines may cost, about 4 s; a long run gets fewer to choose from."""
DIGITS = 5
"""Significant digits of a figure on the page."""
FARTHEST = 1e3
"""Times the allowed error at which a cell is drawn if it is farther off."""


class Cells(Struct, frozen=True):
    """The rows of a section, and the standings behind them."""

    rows: list[Cell]
    standings: Standings
    names: ShapeNames
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


def make_cells(
    section: Section,
    against: Sequence[str] = (),
    known: Iterable[Setback] | None = None,
    dates: Mapping[int, str] | None = None,
) -> Cells:
    """Return a row for each cell of a section, with its place in the standing of its shape; `known` are the setbacks of
    all sections, `dates` those of records by their identity."""
    standings = Standings(list(section.runs.values()), against, known, dates)
    records = standings.records
    names = name_shapes(record.workload for record in records)
    baselines = choose_baselines(records, against)
    positions = {
        (key, position.row.implementation): position for key in standings.overall for position in standings.order(key)
    }
    made_by = [{(key, row.record.cell.id): row for key, one in run.items() for row in one.rows}
               for run in standings.by_run]  # fmt: skip
    gains = _gains(standings, baselines)
    rows: list[Cell] = []
    runs: dict[str, set[int]] = {}
    for number, record in standings.shown:
        row = made_by[number][record.workload.id, record.cell.id]
        cell = _cell(record, row, names) | gains.get((number, record.cell.id), {})
        position = positions.get((record.workload.id, row.implementation))
        if position is not None and position.row.record is row.record:
            overall = row.implementation in standings.overall[record.workload.id].ranked
            cell |= {"rank": position.row.rank if overall else None, "place": position.place}
            cell |= {"kernel": position.kernel, "group": position.group, "near": position.near or None}
            cell["ratio"] = position.ratio
        rows.append(cell)
        if is_timed(record) and not record.approximate:
            runs.setdefault(record.workload.id, set()).add(number)
    maps = lay_out([row for row in rows if "place" in row])
    set_beside(rows)
    repeated = sum(map(len, standings.runs)) - len(records)
    return Cells(rows, standings, names, baselines, maps, repeated, sum(len(one) > 1 for one in runs.values()))


def winner_rows(cells: Iterable[Cell]) -> list[Cell]:
    """Return a row for each shape: the cell with the first place, the other names of its kernel, and the next kernel.
    Places, kernels and who cannot be told apart come from the standings; the page reads the same of what passes its
    filters."""
    ranked = (cell for cell in cells if cell.get("place") is not None)
    rows: list[Cell] = []
    for members in grouped(ranked, lambda cell: cell["workload"]).values():
        first, *others = sorted(members, key=lambda cell: cell["place"])
        same = [cell["label"] for cell in others if cell["kernel"] == first["kernel"]]
        left = [cell for cell in others if cell["kernel"] != first["kernel"]]
        second = next((cell for cell in left if cell["group"] == first["group"]), None)
        close = any(cell["place"] in (first.get("near") or ()) for cell in left)
        rows.append(first | {
            "same": ", ".join(same) or None,
            "next_label": None if second is None else second["label"],
            "regret": None if second is None else max(0.0, second["ratio"] / first["ratio"] - 1),
            "close": close,
            "certain": "no, too close to call" if close else "only one measured" if second is None else "yes",
            "field": len(members),
        })  # fmt: skip
    return rows


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


def _gains(standings: Standings, baselines: Sequence[str]) -> dict[tuple[int, str], Cell]:
    """Return run and cell -> its speed-ups against each baseline that the run timed together with it."""
    found: dict[tuple[int, str], Cell] = {}
    for number, run in enumerate(standings.by_run):
        for standing in run.values():
            cells = {row.implementation: row.record.cell.id for row in standing.rows}
            for place, base in enumerate(baselines):
                others = list(speedups(standing, base))
                gains = {one.implementation: (one.ratio.value, format_ratio(one.ratio), one.category) for one in others}
                if any(row.implementation == base and is_timed(row.record) for row in standing.rows):
                    gains[base] = (1.0, "1.00x (1.00-1.00)", "baseline")
                for name, values in gains.items():
                    keys = (f"gain{place}", f"gain{place}_text", f"gain{place}_is")
                    found.setdefault((number, cells[name]), {}).update(zip(keys, values))
    return found


def _cell(record: Record, row: Row, names: ShapeNames) -> Cell:
    workload = record.workload
    cell: Cell = names.fields(workload) | {
        "label": label(record),
        "framework": framework_of(record),
        "family": names.family(workload),
        "model": names.model(workload) or None,
        "batch": workload.batch,
        "len": workload.kv_len,
        "length": length_text(workload),
        "status": record.status,
        "reason": short(row.reason) or None,
        "rank": None,
    }
    if isinstance(record, Ok):
        memory = record.memory
        cell |= _timing(record) | _errors(record.errors)
        cell |= {
            "peak": memory.peak_bytes,
            "theory": memory.theory_bytes or None,
            "reserved": memory.reserved_bytes,
            "fragmentation": memory.fragmentation,
            "method": short(memory.method or memory.reason or "") or None,
            "deterministic": "yes" if record.deterministic else "no",
            "checked": record.verified_at.share,
            "approximate": "declared" if record.approximate else None,
        }
    if isinstance(record, Incorrect):
        cell |= {"why": short(record.reason)} | _errors(record.errors)
    if isinstance(record, Ok | Incorrect):
        cell["verdict"] = "right" if isinstance(record, Ok) else "wrong"
        share = share_of_allowed(record.errors)
        if share is not None:
            cell |= {"share": share, "drawn_share": min(share, FARTHEST)}
    return cell


def short(text: str, most: int = LONGEST) -> str:
    """Return as much of a reason, note or kernel as the page shows; the documents beside the page have all of it."""
    return f"{text[: most - 1]}…" if len(text) > most else text


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
        "notes": "; ".join(short(note) for note in notes_of(record)) or None,
        "host": host_limit(record),
    }


def _errors(errors: Errors | None) -> Cell:
    if errors is None:
        return {}
    return {
        "error": errors.forward,
        "allowed": errors.forward_allowed,
        "gradient": errors.backward,
        "gradient_allowed": errors.backward_allowed,
        "lse": errors.lse,
        "stable": errors.stability or None,
        "hidden_nan": errors.hidden_nan or None,
    }


def pack(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as columns, with text as places in a list of words; columns that are empty are left out."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            words = {word: place for place, word in enumerate(dict.fromkeys(v for v in values if v is not None))}
            columns[name] = {"words": list(words), "codes": [None if v is None else words[v] for v in values]}
        elif any(value is not None for value in values):
            columns[name] = [rounded(value) for value in values]
    return {"count": len(rows), "columns": columns}


def rounded(value: Any) -> Any:
    """Return a float with two digits more than are shown, so that rounding twice changes hardly any; whole floats lose
    their point, other values stay."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if abs(short) < 1e15 and short.is_integer() else short


def unpack(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return packed rows again, without the fields that are not known."""
    rows: list[dict[str, Any]] = [{} for _ in range(packed["count"])]
    for name, column in packed["columns"].items():
        values = column
        if isinstance(column, dict):
            values = [None if code is None else column["words"][code] for code in column["codes"]]
        for row, value in zip(rows, values):
            if value is not None:
                row[name] = value
    return rows
