"""`attnbench tune`: measure what sharpens a policy most, for so many minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Annotated

from cyclopts import Parameter
from msgspec import structs

from attnbench import registry
from attnbench.choosing.candidates import allowed
from attnbench.choosing.choose import Chosen
from attnbench.choosing.next_measurements import batch, proposals
from attnbench.choosing.text import document
from attnbench.cli.choose import Within, choose_from, describe_replaced, print_chosen, read_constraints, write
from attnbench.cli.options import (
    INTERRUPTED,
    NOTHING,
    Json,
    Quick,
    Quiet,
    RunsFolder,
    Sampling,
    Selection,
    ShapeOptions,
    Suite,
)
from attnbench.cli.output import note, print_json, stderr_console
from attnbench.cli.run import Order, prepare
from attnbench.errors import UsageError
from attnbench.policy import Constraints
from attnbench.policy.labels import label_of
from attnbench.report.progress import make_listener
from attnbench.results.run_file import NamedRun, read_run
from attnbench.results.sentences import capped, counted
from attnbench.run import launch as launcher
from attnbench.run.recorder import Prepared, Recorder
from attnbench.spec import Record, Workload

SUITE = "tune"
MOST_CONFIGS = 8
"""Largest number of configs of one implementation that are measured at one shape."""
MOST_NAMED = 12
"""Largest number of shapes that a line names."""


def tune(
    suite: Suite = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The policy file.")] = Path("policy.json"),
    minutes: Annotated[
        float,
        Parameter(
            help="The first workload is always measured, another only if it would end in time at the pace of the last."
        ),
    ] = 10.0,
    quick: Quick = False,
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    choice: Selection = Selection(),  # noqa: B008
    sampling: Sampling = Sampling(),  # noqa: B008
    within: Within = Within(),  # noqa: B008
    out: RunsFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Measure a suite, then lengths between different choices, then configs of the leaders; write the policy.

    Every round is a run file of its own, and the policy is written after each: Ctrl-C keeps what there is.

    Examples: `attnbench tune --seq-len 256 4096 --causal --minutes 5 -o policy.json`
    """
    if not (minutes > 0 and isfinite(minutes)):
        raise UsageError(f"--minutes must be more than 0 and finite, not {minutes:g}.")
    constraints = read_constraints(within)
    before = describe_replaced(output)
    order = Order(suite=suite, quick=quick, shape=shape, choice=choice, sampling=sampling, resume=None, out=out)
    session = TuningSession(narrowed(prepare(order), constraints), constraints, output, 60 * minutes, quiet or json)
    chosen, end = session.carry_out()
    if chosen is None:
        note(f"{end}; nothing was measured." if end == "interrupted" else "Nothing could be measured.")
        return INTERRUPTED if end == "interrupted" else NOTHING
    written = output if chosen.policy.entries else None
    reached = {record.workload.id for source in session.sources for record in source.run.records}
    left = [one.id for one in session.prepared.request.workloads if one.id not in reached]
    if json:
        print_json(document(chosen, written) | {"runs": session.paths, "end": end, "not_measured": left})
    else:
        print_chosen(chosen)
        cells = sum(len(source.run.records) for source in session.sources)
        spent = f"{session.elapsed / 60:.1f} of {minutes:g} minutes"
        note(f"{counted(len(session.paths), 'round')}, {cells} records, {spent}: {end}.")
        if left:
            note(f"not measured: {', '.join(capped(left, MOST_NAMED))}")
        note(f"wrote {output}{before}" if written else "no policy was written: nothing could be chosen")
    return INTERRUPTED if end == "interrupted" else 0 if written else NOTHING


class TimeIsUp(Exception):
    """The next workload would end too late."""


@dataclass
class TuningSession:
    """Rounds of measuring and choosing."""

    prepared: Prepared
    constraints: Constraints
    output: Path
    seconds: float
    quiet: bool

    def __post_init__(self) -> None:
        self.sources: list[NamedRun] = []
        self.paths: list[Path] = []
        self.started, self.elapsed = monotonic(), 0.0

    def carry_out(self) -> tuple[Chosen | None, str]:
        """Measure and choose in rounds; return the last policy (None if nothing was measured) and why it ended."""

        def allowed_variants(name: str, workload: Workload) -> list[str]:
            return [label for label in variants(name, workload) if allowed(name, label, self.constraints)]

        workloads, labels = self.prepared.request.workloads, tuple(self.prepared.request.implementations)
        while True:
            end = self._round(workloads, labels)
            if not self.sources:
                return None, end
            chosen = choose_from(self.sources, self.constraints)
            write(chosen, self.output)
            measured = {record.cell.id for source in self.sources for record in source.run.records}
            found = proposals(chosen, allowed_variants) if not end else []
            found = [one for one in found if any(f"{name}/{one.workload.id}" not in measured for name in one.labels)]
            if not found:
                return chosen, end or "no further measurement would improve the policy"
            following = batch(found)
            workloads, labels = tuple(one.workload for one in following), following[0].labels
            if not self.quiet:
                more = f", and {len(following) - 1} more like it" if len(following) > 1 else ""
                note(f"round {len(self.paths) + 1}: {following[0].why}{more}")

    def _round(self, workloads: Sequence[Workload], labels: Sequence[str]) -> str:
        """Measure one round and keep its run; return what stopped it before its end, or an empty text."""
        request = structs.replace(self.prepared.request, workloads=tuple(workloads), implementations=tuple(labels))
        end = ""
        with make_listener(stderr_console(), self.quiet) as listener:
            recorder = Recorder(replace(self.prepared, request=request, suite=SUITE), listener, listener.environments)

            def sink(records: Sequence[Record]) -> None:
                recorder(records)
                now = monotonic() - self.started
                took, self.elapsed = now - self.elapsed, now
                if now + took > self.seconds:  # the next workload may take as long as this one
                    raise TimeIsUp

            try:
                launcher.launch(request, sink, listener)
            except KeyboardInterrupt:
                end = "interrupted"
            except TimeIsUp:
                end = "the time is up"
        if recorder.writer is not None:
            recorder.writer.close()
            self.paths.append(recorder.writer.path)
            self.sources.append(NamedRun(recorder.writer.path.name, read_run(recorder.writer.path)))
        return end


def narrowed(prepared: Prepared, constraints: Constraints) -> Prepared:
    """Leave out implementations that may not be chosen; refuse an --only that names none of those measured."""
    kept: dict[str, str] = {}
    for asked in prepared.request.implementations:
        called = str(prepared.names.get(asked, asked))
        labels = [one for one in constraints.only if one.startswith(f"{called}[")]
        may_be = [one for one in (called, *labels) if allowed(_bare(one), one, constraints)]
        kept |= {asked if one == called else one: one for one in may_be}
    for one in constraints.only:
        if not any(allowed(_bare(name), name, Constraints(only=(one,))) for name in kept.values()):
            raise UsageError(f"--only {one} matches nothing that would be measured: name it with --impl too.")
    if not kept:
        raise UsageError(f"the constraints leave nothing to choose from ({constraints}).")
    return replace(prepared, request=structs.replace(prepared.request, implementations=tuple(kept)))


def _bare(label: str) -> str:
    return label.partition("[")[0]


def variants(name: str, workload: Workload) -> list[str]:
    """Return labels of the other configs of an implementation that may be asked for by name."""
    implementation = registry.get(name)
    others = [dict(config) for config in implementation.configs(workload)[1 : MOST_CONFIGS + 1]]
    return [label_of(name, config) for config in others if config.keys() <= implementation.tunables.keys()]
