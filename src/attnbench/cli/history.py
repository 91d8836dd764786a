"""`attnbench history`: times of cells over commits, and the commits at which they changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attnbench.cli.options import Json, Many
from attnbench.cli.output import note, print_json, say, stdout_console, warn
from attnbench.errors import BrokenFile, UsageError

if TYPE_CHECKING:
    from attnbench.comparing.history import Change, Source, Trend


def history(
    *runs: Annotated[
        str, Parameter(help="Run files, baselines, folders of them, or parts of run files' names; all when not given.")
    ],
    impl: Annotated[tuple[str, ...], Many, Parameter(help="Only these: names, a framework or a family.")] = (),
    words: Annotated[
        str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")
    ] = "",
    json: Json = False,
) -> int:
    """Show every cell over the commits it was measured at, relative to the anchor kernels of its run, with its changes.

    Examples: `attnbench history` · `attnbench history runs/ --impl torch.sdpa -k causal`
    """
    from attnbench.cli.inputs import asker, commit_places
    from attnbench.comparing.history import Trend, find_changes, gather
    from attnbench.comparing.history_text import closing, print_history

    sources = _only(_sources(runs), impl, words)
    places = commit_places(record for source in sources for record in source.records)
    series, excluded = gather(sources, places)
    between = asker(places)
    trends = [Trend(one, find_changes(one, between)) for one in series]
    unknown = {point.commit for one in series for point in one.points} - places.keys() - {""}
    if unknown:
        told = f"note: {len(unknown)} commits are not in this clone; their series are in order of time."
        note(told)
    sentence = closing(trends, _command)
    if json:
        print_json({"trends": trends, "excluded": excluded, "closing": sentence})
        return 0
    console = stdout_console()
    print_history(console, trends, excluded)
    for line in ["", *sentence.split("\n")] if trends else [sentence]:
        say(line)
    return 0


def _sources(names: Sequence[str]) -> list[Source]:
    """Read the runs and baselines that are named; a broken file is an error if named itself, a warning in a folder."""
    from attnbench.config import load_settings
    from attnbench.reading import files_in
    from attnbench.report.summaries import FILES as SUMMARIES

    settings = load_settings()
    runs_dir, folders = Path(settings.runs_dir), [Path(name) for name in names if Path(name).is_dir()]
    files = [Path(name) for name in names if Path(name).is_file()]
    parts = [name for name in names if not Path(name).exists()]
    for place in folders if names else [runs_dir, Path(settings.baselines_dir)]:
        files += [path for path in files_in(place, "*.jsonl", "*.json") if path.name not in SUMMARIES]
    for part in parts:
        found = [path for path in files_in(runs_dir, "*.jsonl") if part in str(path)]
        if not found:
            raise UsageError(f'there is no run file or folder "{part}", and none of that name in {runs_dir}.')
        files += found
    if not files:
        raise UsageError(f"there are no run files in {runs_dir}: `attnbench run --quick` makes one.")
    sources: list[Source] = []
    warnings: list[str] = []
    for path in dict.fromkeys(files):
        try:
            sources.append(_read(path, warnings))
        except BrokenFile as error:
            if path in map(Path, names):
                raise
            warnings.append(str(error))
    for warning in warnings:
        warn(warning)
    return sources


def _read(path: Path, warnings: list[str]) -> Source:
    """Return the records of a file; the warnings of its reader are added to `warnings`."""
    from attnbench.comparing.baselines import read_baseline
    from attnbench.comparing.history import Source
    from attnbench.results.run_file import read_run
    from attnbench.run.user_functions import sources_of

    if path.suffix == ".json":
        baseline = read_baseline(path)
        places = {baseline.record.implementation: baseline.source} if baseline.source else {}
        return Source(baseline.created, baseline.records, places)
    run = read_run(path)
    warnings += run.warnings
    return Source(run.header.created, run.records, sources_of(run))


def _only(sources: Sequence[Source], impl: Sequence[str], words: str) -> list[Source]:
    """Return the records asked for, and the anchors."""
    from attnbench.comparing.history import Source
    from attnbench.results.records import ANCHOR, matches
    from attnbench.spec import Record

    def wanted(record: Record) -> bool:
        name = record.implementation
        named = not impl or any(matches(name, one) for one in impl)
        return name.startswith(ANCHOR) or (named and all(word in record.cell.id for word in words.split()))

    kept = [Source(source.created, [r for r in source.records if wanted(r)], source.places) for source in sources]
    if not any(not r.implementation.startswith(ANCHOR) for source in kept for r in source.records):
        raise UsageError(f'no record is of "{" ".join([*impl, words]).strip()}": `attnbench show` lists what there is.')
    return kept


def _command(trend: Trend, change: Change) -> str:
    """Return the bisect command that would confirm a change."""
    from attnbench.cli.selection import spell_workload

    shape = spell_workload(trend.series.workload)
    if shape is None or not (change.old and change.new) or change.direction == "faster":
        return ""
    refs = ["--good", change.old, "--bad", change.new]
    return shlex.join(["attnbench", "bisect", trend.series.key.implementation, *refs, *shape])
