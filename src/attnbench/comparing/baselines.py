"""Baselines: one small JSON file per machine, implementation and workload, made to be committed.

A file is written once and replaced only on purpose (`update`). It holds the record with one time per round instead of
every sample, and the anchors of its run, by which it can be compared with a later run on the same machine.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from attnbench.errors import BrokenFile, UsageError
from attnbench.files import convert, decode_json, files_in, read_content, write_errors, write_texts
from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.measuring.anchors import anchors_beside, lacks_anchors
from attnbench.measuring.sampling import round_medians
from attnbench.results.records import outcome_text
from attnbench.results.run_file import impossible_times, slug
from attnbench.spec import Cell, Environment, Ok, Record, Time, Workload

SCHEMA = 1


class Baseline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored measurement of one cell on one machine at one commit, to compare later ones with."""

    schema: int
    created: str
    commit: str = ""
    note: str = ""
    environment: Environment
    """Environment of the record, and of the anchors unless they name their own."""
    record: Ok
    anchors: tuple[Ok, ...]
    source: str = ""
    """File or module of a function that was given by reference, as it was written; empty if it is not known."""

    @property
    def id(self) -> str:
        """Storage key of the machine, implementation and workload, separated by slashes."""
        return f"{self.environment.storage_key}/{self.record.cell.id}"

    @property
    def records(self) -> tuple[Ok, ...]:
        """Records of the cell and its anchors as a run file would hold them."""
        return tuple(
            msgspec.structs.replace(one, environment=one.environment or self.environment)
            for one in (self.record, *self.anchors)
        )


class Saved(NamedTuple):
    """The baselines that were written, and (cell, reason) of every record that was not."""

    written: tuple[Baseline, ...]
    skipped: tuple[tuple[str, str], ...]


def save(
    records: Sequence[Record],
    folder: Path,
    commit: str = "",
    note: str = "",
    created: str = "",
    dates: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Saved:
    """Write each timed record that has no baseline yet, with `replace` also over one; an empty commit or time is the
    record's own or now. `dates`: when the record of each cell was made, if not all were made at `created`. `sources`:
    file or module of the functions that were given by reference, by their names."""
    written: list[Baseline] = []
    skipped: list[tuple[str, str]] = []
    for record in records:
        if record.implementation in ANCHORS:
            continue
        made = _baseline(record, records, commit, note, (dates or {}).get(record.cell.id, created))
        if isinstance(made, str):
            skipped.append((record.cell.id, made))
            continue
        made = msgspec.structs.replace(made, source=(sources or {}).get(record.implementation, ""))
        known = _existing(folder, made.environment, record.cell)
        if known is not None and not replace:
            old = _read_asked(known, made.environment, record.cell)
            why = f"already has a baseline ({old.commit or old.created}): `attnbench baseline update` replaces it"
            skipped.append((record.cell.id, why))
            continue
        path = known or _path(folder, made.environment, record.cell)
        with write_errors(path, "Choose another folder with --dir."):  # indented, so that a change can be reviewed
            write_texts({path: msgspec.json.format(msgspec.json.encode(made), indent=1).decode() + "\n"})
        written.append(made)
    return Saved(tuple(written), tuple(skipped))


update = partial(save, replace=True)
"""Write each timed record as `save` does, and replace existing baselines."""


def find(
    folder: Path,
    environment: Environment,
    implementation: str,
    workload: Workload,
    config: Mapping[str, int | float | str | bool] | None = None,
) -> Baseline | None:
    """Return the baseline of a cell on this machine, or None; `why_missing` says what to do then."""
    cell = Cell(implementation, workload, dict(config or {}))
    path = _existing(folder, environment, cell)
    return None if path is None else _read_asked(path, environment, cell)


def why_missing(folder: Path, environment: Environment | None, implementation: str, workload: Workload) -> str:
    """Return a sentence about a missing baseline, with the commands that make one."""
    cell = f"{implementation}/{workload.id}"
    others = [one.environment for one in list_baselines(folder) if one.record.cell.id == cell]
    make = f"make one with `attnbench run --impl {implementation}` at this shape, then `attnbench baseline save latest`"
    if not others:
        return f"there is no baseline for {cell} in {folder}: {make}."
    differing = [] if environment is None else environment.differing(others[-1])
    why = "comes from another machine" + (f" ({', '.join(differing)} differ)" if differing else "")
    if environment is not None and differing == ["harness"]:
        old, new = (one.harness or "an unknown version" for one in (others[-1], environment))
        why = f"was measured by attnbench {old}, the run by {new}"
    return f"the baseline for {cell} in {folder} {why}: {make}."


def list_baselines(folder: Path) -> list[Baseline]:
    """Return every baseline of a folder, sorted by id."""
    return sorted(map(read_baseline, files_in(folder, "*.json")), key=lambda one: one.id)


def holds_baselines(folder: Path) -> bool:
    """Return whether a folder was written by `save`, by any version; other JSON files in it do not count."""
    paths = [*folder.glob("*/*.json"), *folder.glob("*.json")]
    return any(path.is_file() and _looks_like_baseline(path) for path in paths)


def _looks_like_baseline(path: Path) -> bool:
    try:
        content = decode_json(read_content(path))
    except (OSError, UsageError, msgspec.DecodeError):
        return False
    return isinstance(content, dict) and {"schema", "environment", "record", "anchors"} <= content.keys()


def read_baseline(path: Path) -> Baseline:
    """Read one file; raises BrokenFile if anything is wrong with it."""
    try:
        content = decode_json(read_content(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except msgspec.DecodeError as error:
        raise BrokenFile(path, None, f"not a baseline: {error}.") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise BrokenFile(path, None, f"made by a newer attnbench (schema {schema}, this one reads {SCHEMA}): upgrade.")
    try:
        baseline = convert(content, Baseline)
    except (msgspec.ValidationError, UsageError) as error:
        raise BrokenFile(path, None, f"not a baseline: {error}.") from error
    if problem := next(filter(None, (impossible_times(one, trimmed=True) for one in baseline.records)), ""):
        raise BrokenFile(path, None, f"{problem}: make it again with `attnbench baseline update RUN`.")
    return baseline


def _baseline(record: Record, records: Sequence[Record], commit: str, note: str, created: str) -> Baseline | str:
    """Return the baseline of a record, or the reason why it cannot have one."""
    if not isinstance(record, Ok):
        return outcome_text(record)
    if record.time is None:
        return "verified but not timed"
    if record.environment is None:
        return "its environment is unknown"
    anchors = anchors_beside(record, records)
    if {one.implementation for one in anchors} != set(ANCHORS):
        lacks = lacks_anchors(record, records, "no anchors")
        return f"its run has {lacks} (a matrix product and a copy) for this workload"
    return Baseline(
        schema=SCHEMA,
        created=created or datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit or record.environment.commit,
        note=note,
        environment=record.environment,
        record=_trimmed(record, record.environment),
        anchors=tuple(_trimmed(one, record.environment) for one in anchors),
    )


def _trimmed(record: Ok, home: Environment) -> Ok:
    """Return the record with one time per round, and without its environment if that is the file's own."""
    also = {name: _one_per_round(time) for name, time in record.also.items()}
    environment = None if record.environment == home else record.environment
    time = record.time and _one_per_round(record.time)
    return msgspec.structs.replace(record, environment=environment, time=time, also=also)


def _one_per_round(time: Time) -> Time:
    medians = tuple(round(float(median), 1) for median in round_medians(time))
    return msgspec.structs.replace(time, samples_ns=medians, rounds=(1,) * len(medians)) if medians else time


def _path(folder: Path, environment: Environment, cell: Cell) -> Path:
    """Return baselines/<machine>-<storage key>/<cell>-<digits>.json; digits distinguish cells with similar names."""
    readable = re.sub(r"[^A-Za-z0-9._=+-]+", "_", cell.id)[:120]
    digits = hashlib.sha256(cell.id.encode()).hexdigest()[:6]
    return folder / f"{slug(environment.device_name)}-{environment.storage_key}" / f"{readable}-{digits}.json"


def _existing(folder: Path, environment: Environment, cell: Cell) -> Path | None:
    """Return the file of a baseline; older versions computed the key in a folder's name from fewer facts."""
    path = _path(folder, environment, cell)
    if path.is_file():
        return path
    elsewhere = (one for one in sorted(folder.glob(f"*/{glob.escape(path.name)}")) if _looks_like_baseline(one))
    return next((one for one in elsewhere if not environment.differing(read_baseline(one).environment)), None)


def _read_asked(path: Path, environment: Environment, cell: Cell) -> Baseline:
    """Read the file that is named after a cell and a machine; raises BrokenFile if it holds another baseline."""
    baseline = read_baseline(path)
    if baseline.record.cell.id != cell.id or environment.differing(baseline.environment):
        why = f"holds the baseline {baseline.id}, but is named after {environment.storage_key}/{cell.id}"
        raise BrokenFile(path, None, f"{why}: make it again with `attnbench baseline update RUN`.")
    return baseline
