"""Carry out an `attnbench run`: write every record to disk, then print the ranking."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.cli.order import Prepared, place_words, store_request
from attnbench.cli.output import note, print_json, say, stderr_console, stdout_console
from attnbench.cli.selection import spell_workload
from attnbench.measuring.rates import host_limit
from attnbench.report.progress import Silent, make_listener
from attnbench.report.terminal import plain_table, print_rankings
from attnbench.results.records import ANCHOR, baseline, is_timed, label
from attnbench.results.run_file import Header, RunWriter, check_writable, new_header, read_run
from attnbench.results.sentences import answer
from attnbench.results.standings import Standings
from attnbench.results.unreached import resume_command
from attnbench.run import launch as launcher
from attnbench.run.user_functions import fingerprint_sources
from attnbench.spec import ONLY_TIMED, Environment, Incorrect, Record

NOTHING, INTERRUPTED = 3, 130


class Recorder:
    """Writer of a run's records: makes the file with the first ones, because only then the device has a name.

    A resumed file gets another header if its own do not hold the request.
    """

    def __init__(self, prepared: Prepared, listener: Silent) -> None:
        self._prepared = prepared
        self._listener = listener
        self._sources = fingerprint_sources(prepared.request.implementations)
        self.writer: RunWriter | None = prepared.writer
        self._request_unwritten = prepared.is_new
        self.done: frozenset[str] = frozenset()
        """Ids of the cells that were recorded since the start."""
        self._earlier = set() if prepared.resumed is None else _fingerprints(prepared.resumed)
        if prepared.resumed is None:
            check_writable(prepared.runs_dir)
        if prepared.request.trace is not None:
            check_writable(prepared.request.trace, "--trace")

    def __call__(self, records: Sequence[Record]) -> None:
        """Put the records of a workload on disk."""
        if self.writer is None:
            machine = device_name(
                [*self._listener.environments.values(), *(r.environment for r in records if r.environment)]
            )
            self.writer = RunWriter.create(self._prepared.runs_dir, machine, self._prepared.suite, self._header())
            self._request_unwritten = False
        self.tell_request()
        self.writer.write(records)
        self.done |= {record.cell.id for record in records}
        now = {record.environment.fingerprint for record in records if record.environment is not None}
        if self._earlier and not now <= self._earlier:
            self._earlier = set()
            self._listener.warning("the run file was made in another environment: old and new times do not compare")

    def tell_request(self) -> None:
        """Add the request to a resumed file, unless a header of it holds the request already."""
        if self._request_unwritten and self.writer is not None:
            self.writer.add_header(self._header())
            self._request_unwritten = False

    def _header(self) -> Header:
        from attnbench.cli import installed_version

        asked = self._prepared
        request = store_request(asked.request)
        return new_header(installed_version(), asked.suite, request, asked.request.seed, asked.against, self._sources)


def _fingerprints(path: Path) -> set[str]:
    return {environment.fingerprint for environment in read_run(path).environments.values()}


def device_name(environments: Sequence[Environment]) -> str:
    """Return the name of the machine's folder: that of the accelerator, if there is one."""
    ordered = sorted(environments, key=lambda environment: environment.device == "cpu")
    return ordered[0].device_name if ordered else "unknown"


def carry_out(prepared: Prepared, json: bool, quiet: bool) -> int:
    """Run, then print what is on disk; return the exit code, which says whether anything was measured."""
    interrupted = False
    try:
        with make_listener(stderr_console(), quiet) as listener:
            recorder = Recorder(prepared, listener)
            try:
                for request in prepared.requests:
                    launcher.launch(request, recorder, listener, prepared.done | recorder.done)
            except KeyboardInterrupt:
                interrupted = True
                recorder.tell_request()  # or nobody could go on with it
    finally:
        if prepared.writer is not None:
            prepared.writer.close()
    if recorder.writer is None:
        stderr_console().print(
            "interrupted; nothing was measured yet." if interrupted else "Nothing could be measured."
        )
        return INTERRUPTED if interrupted else NOTHING
    path = recorder.writer.path
    recorder.writer.close()
    run = read_run(path)
    records = run.records
    _print_run(path, records, prepared, json)
    if interrupted:
        resume = resume_command(str(path), run, prepared.request.trace, prepared.request.timeout_s)
        told = f"interrupted; {len(records)} records are kept. Go on with: {resume}"
        note(told)
        return INTERRUPTED
    return 0 if any(is_timed(r) and not r.implementation.startswith(ANCHOR) for r in records) else NOTHING


def _print_run(path: Path, records: Sequence[Record], prepared: Prepared, json: bool) -> None:
    standings = Standings([records], prepared.against)
    sentence = answer(standings, list(prepared.names.values()))
    if json:
        print_json(document(path, records, sentence, standings))
        return
    console = stdout_console()
    print_rankings(console, standings)
    console.print()
    say(sentence)
    for hint in explain_hints(records, prepared):
        say(hint)
    say(os.path.relpath(path))


def document(path: Path, records: Sequence[Record], sentence: str, standings: Standings) -> dict[str, Any]:
    """Return what `run --json` and `show --json` print."""
    ranking = {
        workload: [
            {
                "implementation": row.implementation,
                "rank": row.rank,
                "tied": row.tied,
                "behind": row.behind,
                "status": row.record.status,
                "median_ns": row.record.time.median_ns if row.record.time is not None else None,
                "speedup": row.speedup,
                "host_limited": host_limit(row.record),
                "reason": row.reason or None,
            }
            for row in standing.rows
        ]
        for workload, standing in standings.overall.items()
    }
    return {
        "run": path,
        "records": records,
        "baseline": baseline(records, standings.against),
        "ranking": ranking,
        "closing": sentence,
    }


def list_cells(prepared: Prepared, json: bool) -> int:
    """Print every cell of `run --list`, with the reason if it would be skipped."""
    listener = Silent(stderr_console())
    planned = {one.cell.id: one for request in prepared.requests for one in launcher.plan_only(request, listener)}
    rows: list[dict[str, Any]] = []
    for one in planned.values():
        reason = "already in the run file" if one.cell.id in prepared.done else one.reason
        rows.append(
            {
                "implementation": label(one.cell),
                "workload": one.cell.workload.id,
                "runs": reason is None,
                "reason": reason,
            }
        )
    if json:
        print_json(rows)
        return 0
    console = stdout_console()
    console.print(plain_table([row | {"runs": "yes" if row["runs"] else "no"} for row in rows]), highlight=False)
    running = sum(row["runs"] for row in rows)
    console.print(f"{running} of {len(rows)} cells would run.", highlight=False)
    return 0


def explain_hints(records: Sequence[Record], prepared: Prepared) -> list[str]:
    """Return a sentence for each implementation that is wrong: the command that shows where, or why none can."""
    wrong: dict[str, list[Incorrect]] = {}
    for record in records:
        if isinstance(record, Incorrect):
            wrong.setdefault(record.implementation, []).append(record)
    references = {name: reference for reference, name in prepared.names.items()}
    hints = (_hint(name, references.get(name, name), found, prepared) for name, found in wrong.items())
    return [hint for hint in hints if hint]


def _hint(name: str, asked: str, found: Sequence[Incorrect], prepared: Prepared) -> str:
    checked = [record for record in found if not record.reason.startswith(ONLY_TIMED)]
    if not checked:
        return (
            f"{name} was right when checked and wrong when timed: `attnbench verify`, which does not time, passes it."
        )
    where = prepared.where or _shape_options(checked[0], prepared)
    if where is None:
        return ""
    command = shlex.join(["attnbench", "verify", "--impl", asked, *where, "--explain"])
    return f"`{command}` shows where {name} is wrong."


def _shape_options(record: Incorrect, prepared: Prepared) -> Sequence[str] | None:
    """Return the options that make the shape, for a resumed run, whose own options are not known; None if none do."""
    shape = spell_workload(record.workload)
    return None if shape is None else [*shape, *place_words(prepared.request.framework, prepared.request.device)]
