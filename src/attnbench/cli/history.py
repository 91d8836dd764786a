"""`attnbench history`: times of cells over commits, and the commits at which they changed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.options import Json, Names, Words, has_words, spell_workload
from attnbench.cli.output import note, print_json, say, stdout_console, warn
from attnbench.comparing import history as over_commits
from attnbench.comparing.baselines import read_baseline
from attnbench.config import load_settings
from attnbench.errors import BrokenFile, UsageError
from attnbench.files import files_in
from attnbench.printable import printable
from attnbench.report.summaries import FILES as SUMMARIES
from attnbench.results.records import is_anchor, label, matches
from attnbench.results.run_file import Header, Run, read_run
from attnbench.results.sentences import counted
from attnbench.results.standings import by_date, setbacks
from attnbench.run.user_functions import one_source, sources_of
from attnbench.spec import Record


def history(
    *runs: Annotated[
        str, Parameter(help="Run files, baselines, folders of them, or parts of run files' names; all when not given.")
    ],
    impl: Annotated[Names, Parameter(help="Only these: names, a framework or a family.")] = (),
    words: Words = "",
    json: Json = False,
) -> int:
    """Show every cell over the commits it was measured at, relative to the anchor kernels of its run, with its changes.

    Examples: `attnbench history` · `attnbench history runs/ --impl torch.sdpa -k causal`
    """
    sources = _only(_sources(runs), impl, words)
    places, between = over_commits.commits_in_git(record for source in sources for record in source.run.records)
    series, excluded = over_commits.gather(sources, places)
    trends = [over_commits.Trend(one, over_commits.find_changes(one, between)) for one in series]
    unknown = {point.commit for one in series for point in one.points} - places.keys() - {""}
    if unknown:
        note(f"note: {len(unknown)} commits are not in this clone; their runs are placed by time.")

    def bisect_command(trend: over_commits.Trend, change: over_commits.LevelChange) -> str:
        shape = spell_workload(trend.series.workload)
        if shape is None or not (change.old and change.new) or change.direction == "faster":
            return ""
        refs = ["--good", change.old, "--bad", change.new]
        return shlex.join(["attnbench", "bisect", _asked_as(trend.series.key), *refs, *shape])

    sentence = "\n".join([over_commits.closing(trends, bisect_command), *_contradicted(sources)])
    if json:
        print_json({"trends": trends, "excluded": excluded, "closing": sentence})
        return 0
    console = stdout_console()
    over_commits.print_history(console, trends, excluded)
    for line in ["", *sentence.split("\n")] if trends else [sentence]:
        say(line)
    return 0


def _asked_as(key: over_commits.Key) -> str:
    """Return the name by which a command finds what was measured: of a function given by reference, its reference."""
    function = key.implementation.rpartition(":")[2].partition("-")[0]  # without what told it apart within its run
    return f"{key.source}:{function}" if key.source else key.implementation


def _contradicted(sources: Sequence[over_commits.HistoryFile]) -> list[str]:
    """Return a sentence for each implementation whose times a newer run on the same device contradicts."""
    dated = [(when, record, source.places) for source in sources for when, record in source.run.dated]
    places = {id(record): known.get(record.implementation, "") for _, record, known in dated}
    shapes: dict[str, set[str]] = {}
    for one in setbacks([by_date((when, record) for when, record, _ in dated)]):
        if one.is_wrong and one_source(places[id(one.record)], places[id(one.newer)]):
            shapes.setdefault(label(one.record), set()).add(one.record.workload.id)
    return [
        f"{printable(name)}: a newer run found it incorrect on {counted(len(wrong), 'shape')}; "
        "these are the times that each commit had."
        for name, wrong in shapes.items()
    ]


def _sources(names: Sequence[str]) -> list[over_commits.HistoryFile]:
    """Read the runs and baselines that are named; a broken file is an error if named itself, a warning in a folder."""
    settings = load_settings()
    runs_dir, folders = Path(settings.runs_dir), [Path(name) for name in names if Path(name).is_dir()]
    files = [Path(name) for name in names if Path(name).is_file()]
    parts = [name for name in names if not Path(name).exists()]
    for place in folders if names else [runs_dir, Path(settings.baselines_dir)]:
        files += [path for path in files_in(place, "*.jsonl", "*.json") if path.name not in SUMMARIES]
    for part in parts:
        found = [path for path in files_in(runs_dir, "*.jsonl") if part in str(path)]
        if not found:
            raise UsageError(
                f'there is no run file or folder "{part}", and no run file in {runs_dir} has this in its name.'
            )
        files += found
    if not files:
        raise UsageError(f"there are no run files in {runs_dir}: `attnbench run --quick` makes one.")
    sources: list[over_commits.HistoryFile] = []
    warnings: list[str] = []
    for path in dict.fromkeys(files):
        try:
            if path.suffix == ".json":
                one = read_baseline(path)
                places = {one.record.implementation: one.source} if one.source else {}
                run = Run(Header(schema=one.schema, attnbench="", created=one.created), {}, one.records)
                sources.append(over_commits.HistoryFile(run, places))
            else:
                run = read_run(path)
                warnings += run.warnings
                sources.append(over_commits.HistoryFile(run, sources_of(run)))
        except BrokenFile as error:
            if path in map(Path, names):
                raise
            warnings.append(str(error))
    for warning in warnings:
        warn(warning)
    return sources


def _only(
    sources: Sequence[over_commits.HistoryFile], impl: Sequence[str], words: str
) -> list[over_commits.HistoryFile]:
    """Return the records asked for, and the anchors."""

    def wanted(record: Record) -> bool:
        named = not impl or any(matches(record.implementation, one) for one in impl)
        return is_anchor(record) or (named and has_words(record, words))

    kept = [over_commits.HistoryFile(source.run.only(wanted), source.places) for source in sources]
    if not any(not is_anchor(r) for source in kept for r in source.run.records):
        raise UsageError(
            f'no record matches "{" ".join([*impl, words]).strip()}": `attnbench show` lists what there is.'
        )
    return kept
