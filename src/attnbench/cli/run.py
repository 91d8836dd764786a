"""`attnbench run`: measure, write a run file, rank. `attnbench show`: rank what a run file holds."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from msgspec import structs

from attnbench.cli.options import (
    DEFAULT_SUITE,
    INTERRUPTED,
    NOTHING,
    Json,
    Names,
    Quick,
    Quiet,
    RunsFolder,
    Sampling,
    Selection,
    ShapeOptions,
    Suite,
    Switch,
    Words,
    check_against,
    filter_words,
    find_run,
    has_words,
    select_implementations,
    select_workloads,
    spell,
    spell_workload,
)
from attnbench.cli.output import note, print_json, print_rows, say, stderr_console, stdout_console, warn
from attnbench.config import load_settings
from attnbench.errors import UsageError
from attnbench.measuring.rates import host_limit
from attnbench.registry import is_reference
from attnbench.report.progress import Silent, make_listener
from attnbench.report.terminal import print_cell, print_rankings
from attnbench.results.records import baseline, grouped, is_anchor, is_timed, label
from attnbench.results.run_file import Run, RunWriter, read_run
from attnbench.results.sentences import answer
from attnbench.results.standings import Standings
from attnbench.run import launch as launcher
from attnbench.run.launch import Request
from attnbench.run.recorder import (
    Prepared,
    Recorder,
    describe_unreached,
    function_place,
    name_functions,
    references,
    refuse_shared_names,
    resume_command,
    stored_requests,
)
from attnbench.run.user_functions import refuse_changed_sources
from attnbench.spec import ONLY_TIMED, Incorrect, Record

QUICK_BUDGET_S = 0.5
MOST = 1_000_000_000
"""Largest count of samples and the like that is accepted."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command line of `run`, parsed."""

    suite: str | None
    quick: bool
    shape: ShapeOptions
    choice: Selection
    sampling: Sampling
    resume: Path | None
    out: Path | None


def run(
    suite: Suite = None,
    /,
    *,
    quick: Quick = False,
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    choice: Selection = Selection(),  # noqa: B008
    sampling: Sampling = Sampling(),  # noqa: B008
    list_: Annotated[Switch, Parameter(name="--list", help="Only list the cells, and why some would not run.")] = False,
    resume: Annotated[
        str | None,
        Parameter(
            help="A run file (or `latest`) to continue; the cells that it holds are not run again. "
            "Functions that it names by file or module must be named again with --impl."
        ),
    ] = None,
    out: RunsFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Verify and time every implementation that works here, and rank them.

    Examples: `attnbench run --quick` · `attnbench run --impl my_kernel.py:my_attention --seq-len 2048 --causal`
    """
    path = None if resume is None else find_run(resume)
    order = Order(suite=suite, quick=quick, shape=shape, choice=choice, sampling=sampling, resume=path, out=out)
    prepared = prepare(order, only_listed=list_)
    return list_cells(prepared, json) if list_ else carry_out(prepared, json, quiet or json)


def prepare(order: Order, only_listed: bool = False) -> Prepared:
    """Check the whole command line before anything runs, and return what will be run. A file to resume is locked and,
    if its last line is torn, repaired; it is left alone if cells are only listed."""
    runs_dir = Path(load_settings({"runs_dir": None if order.out is None else str(order.out)}).runs_dir)
    if order.resume is None:
        suite, request = make_request(order)
        return Prepared(request, suite, runs_dir, _against(order, request), _verify_options(order))
    kept = read_run(order.resume)
    warnings = list(kept.warnings)
    is_new = not _only_continues(order, kept)
    if is_new:
        suite, request = make_request(order)
        requests = [request]
    else:
        suite, sampling = kept.header.suite, order.sampling
        requests, more = stored_requests(order.resume, kept, order.choice.impl, sampling.trace, sampling.timeout)
        warnings += more
    for header in kept.headers:
        refuse_changed_sources(order.resume, header.sources, [name for one in requests for name in one.implementations])
    warnings += refuse_shared_names(order.resume, kept, requests)
    prepared = Prepared(
        request=requests[0],
        suite=suite,
        runs_dir=order.resume.parent,
        against=_against(order, requests[0]) or kept.against,
        resumed=order.resume,
        done=kept.done,
        more=tuple(requests[1:]),
        is_new=is_new,
    )
    if not only_listed:
        writer = RunWriter(order.resume)
        prepared = replace(prepared, writer=writer, done=read_run(order.resume).done)
    for warning in dict.fromkeys(warnings):
        warn(warning)
    return prepared


def make_request(order: Order) -> tuple[str, Request]:
    """Return the suite's name and the request, with settings for what the command line leaves open."""
    choice, sampling = order.choice, order.sampling
    quick_budget = QUICK_BUDGET_S if order.quick else None
    settings = load_settings(
        {
            "device": choice.device,
            "framework": choice.framework,
            "threads": sampling.threads,
            "budget_s": quick_budget if sampling.budget is None else sampling.budget,
            "timeout_s": sampling.timeout,
            "seed": sampling.seed,
        }
    )
    for option, value in {"--trials": sampling.trials, "--precision": sampling.precision}.items():
        if value is not None and not 0 < value <= MOST:
            raise UsageError(f"{option} must be more than 0 and at most {MOST}, not {value:g}.")
    suite, workloads = select_workloads(order.suite, order.quick, order.shape, choice)
    names = select_implementations(choice, settings.framework, {w.step for w in workloads})
    workloads, implementations = filter_words(choice.words, workloads, names)
    request = Request(
        workloads=workloads,
        implementations=implementations,
        framework=settings.framework or "torch",
        device=settings.device,
        budget_s=settings.budget_s,
        trials=sampling.trials,
        timeout_s=settings.timeout_s,
        threads=settings.threads,
        seed=secrets.randbits(31) if settings.seed is None else settings.seed,
        clock=sampling.clock,
        trace=sampling.trace,
        every_config=True,
        strict=choice.shard is None,
    )
    if sampling.precision is not None:
        request = structs.replace(request, precision=sampling.precision)
    return suite, request


def _against(order: Order, request: Request) -> tuple[str, ...]:
    names = name_functions(request)
    return tuple(names.get(one, one) for one in order.choice.against)


def _verify_options(order: Order) -> tuple[str, ...]:
    """Return the options by which `verify` looks at the workloads of a run in the same way."""
    shape = spell(order.shape)
    suite = [] if order.suite is None and shape else ["--suite", order.suite or DEFAULT_SUITE]
    quick = ["--quick"] if order.quick and suite else []
    return (*suite, *quick, *shape, *_device_options(order.choice.framework, order.choice.device))


def _device_options(framework: str | None, device: str | None) -> list[str]:
    given = {"--framework": framework, "--device": device}
    return [word for option, value in given.items() if value is not None for word in (option, value)]


def _only_continues(order: Order, kept: Run) -> bool:
    """Return whether only the requests of the file are asked for again: its functions may be named again, and options
    that a file does not decide may be given. Raises UsageError for options that would need something to be added."""
    stored = {function_place(one) for one in references(kept)}
    again = all(is_reference(one) and function_place(one) in stored for one in order.choice.impl)
    how = {name: getattr(order.choice, name) for name in ("against", "framework", "device")}
    how |= vars(replace(order.sampling, trace=None, timeout=None))
    choice = replace(order.choice, impl=() if again else order.choice.impl, against=(), framework=None, device=None)
    if (order.suite, order.quick, order.shape, choice) != (None, False, ShapeOptions(), Selection()):
        return False
    if options := [f"--{name}" for name, value in how.items() if value not in (None, ())]:
        raise UsageError(
            f"a resumed run keeps what its file was begun with: leave out {', '.join(options)}, or name a suite, shapes"
            " or implementations to add."
        )
    return True


def carry_out(prepared: Prepared, json: bool, quiet: bool) -> int:
    """Run, then print what is on disk; return the exit code, which says whether anything was measured."""
    interrupted = False
    try:
        with make_listener(stderr_console(), quiet) as listener:
            recorder = Recorder(prepared, listener, listener.environments)
            try:
                for request in prepared.requests:
                    launcher.launch(request, recorder, listener, prepared.done | recorder.done)
            except KeyboardInterrupt:
                interrupted = True
                recorder.write_request()  # or nobody could go on with it
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
    standings = Standings([records], prepared.against)
    sentence = answer(standings, list(prepared.names.values()))
    if json:
        print_json(document(path, records, sentence, standings))
    else:
        console = stdout_console()
        print_rankings(console, standings)
        console.print()
        for line in (sentence, *explain_hints(records, prepared), os.path.relpath(path)):
            say(line)
    if interrupted:
        resume = resume_command(str(path), run, prepared.request.trace, prepared.request.timeout_s)
        note(f"interrupted; {len(records)} records are kept. Continue with: {resume}")
        return INTERRUPTED
    return 0 if any(is_timed(r) and not is_anchor(r) for r in records) else NOTHING


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


def show(
    run: Annotated[str, Parameter(help="A run file, a part of its name, or `latest`.")] = "latest",
    /,
    *,
    detail: Annotated[Switch, Parameter(help="Every cell in full: percentiles, memory, errors, kernels.")] = False,
    words: Words = "",
    against: Annotated[
        Names,
        Parameter(help="Implementation that the others are compared with; by default that of the run."),
    ] = (),
    json: Json = False,
) -> int:
    """Show the tables and the closing sentence of a run; `--detail` adds every cell in full."""
    path = find_run(run)
    found = read_run(path)
    for warning in filter(None, (*found.warnings, describe_unreached(str(path), found))):
        warn(warning)
    records = [record for record in found.records if has_words(record, words)]
    if not records:
        raise UsageError(f'{path} holds no cell with "{words}" in its id.' if words else f"{path} holds no records.")
    check_against(against, records)
    standings = Standings([records], against or found.against)
    sentence = answer(standings)
    if json:
        print_json({"header": found.header, **document(path, records, sentence, standings)})
        return 0
    console = stdout_console()
    print_rankings(console, standings)
    for record in records if detail else ():
        print_cell(console, record)
    console.print()
    say(sentence)
    return 0


def list_cells(prepared: Prepared, json: bool) -> int:
    """Print every cell of `run --list`, with the reason if it would be skipped."""
    listener = Silent(stderr_console())
    planned = {one.cell.id: one for request in prepared.requests for one in launcher.plan_only(request, listener)}
    rows: list[dict[str, Any]] = []
    for one in planned.values():
        reason = "already in the run file" if one.cell.id in prepared.done else one.reason
        cell = {"implementation": label(one.cell), "workload": one.cell.workload.id}
        rows.append(cell | {"runs": reason is None, "reason": reason})
    print_rows(rows if json else [row | {"runs": "yes" if row["runs"] else "no"} for row in rows], json)
    if not json:
        stdout_console().print(f"{sum(row['runs'] for row in rows)} of {len(rows)} cells would run.")
    return 0


def explain_hints(records: Sequence[Record], prepared: Prepared) -> list[str]:
    """Return a sentence for each implementation that is wrong: the command that shows where, or why none can."""
    wrong = grouped((one for one in records if isinstance(one, Incorrect)), lambda record: record.implementation)
    references = {name: reference for reference, name in prepared.names.items()}
    hints: list[str] = []
    for name, failures in wrong.items():
        checked = [record for record in failures if not record.reason.startswith(ONLY_TIMED)]
        if not checked:
            when = "was right when checked and wrong when timed"
            hints.append(f"{name} {when}: `attnbench verify`, which does not time, passes it.")
            continue
        options = prepared.where
        if not options:  # a resumed run, whose own options are not known
            shape = spell_workload(checked[0].workload)
            if shape is None:
                continue
            options = (*shape, *_device_options(prepared.request.framework, prepared.request.device))
        command = ["attnbench", "verify", "--impl", references.get(name, name), *options, "--explain"]
        hints.append(f"`{shlex.join(command)}` shows where {name} is wrong.")
    return hints
