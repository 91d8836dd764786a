"""`attnbench export`: runs in the formats of other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from attnbench.cli.options import NOTHING, Words, has_words, read_together, spare_runs
from attnbench.cli.output import note, print_json_text
from attnbench.errors import UsageError
from attnbench.results.exports.benchmark_tools import commits_of, machines_of, timed
from attnbench.results.exports.formats import BINARY, JSON, export_file, export_text
from attnbench.results.run_file import NamedRun

Format = Literal[
    "parquet", "csv", "sqlite", "pytest-benchmark", "google-benchmark", "bencher", "github-action-benchmark"
]
STDOUT = "-"


def export(
    *runs: Annotated[str, Parameter(help="Run files, parts of their names, or `latest`.")],
    form: Annotated[Format, Parameter(name=["--format", "-f"], help="What to write.")],
    output: Annotated[
        str | None,
        Parameter(
            name=["--output", "--out", "-o"],
            allow_leading_hyphen=True,
            help="The file. Without one, text goes to stdout (also -), parquet and sqlite to RUN.parquet and "
            "RUN.sqlite in the working directory.",
        ),
    ] = None,
    words: Words = "",
) -> int:
    """Write runs as a table (parquet, csv, sqlite: every record) or for another benchmark tool (timed cells only).

    Examples: `attnbench export latest --format parquet -o run.parquet` · `attnbench export latest --format csv`
    """
    read = read_together(runs or ("latest",))
    paths = list(read)
    sources = [NamedRun(path.stem, run.only(lambda record: has_words(record, words))) for path, run in read.items()]
    if not any(source.run.records for source in sources):
        named = f' with "{words}" in its id' if words else ""
        raise UsageError(f"{', '.join(map(str, paths))}: no record{named}; `attnbench show` lists what there is.")
    if form in JSON:
        cells = timed(sources)
        if not (count := len(cells)):
            note("nothing was timed in these runs, and this format holds timed cells only.")
            return NOTHING
        kept = {one.name for one in cells}
        names = [one.name for source in sources for one in timed([source])]
        if wrong := len(set(names) - kept):
            note(f"note: {wrong} timed cells are left out: a newer run found them incorrect.")
        if again := sum(name in kept for name in names) - count:
            note(f"note: {again} timed cells are in several runs; {form} knows cells by name only: the newest is kept.")
        if len(commits := commits_of(cells)) > 1:
            named = ", ".join(commit or "unknown" for commit in commits)
            note(f"warning: these times are of {len(commits)} commits ({named}): {form} has room for one at most.")
        if len(machines := machines_of(cells)) > 1:
            named = ", ".join(machine or "unknown" for machine in machines)
            note(f"warning: these times are of {len(machines)} machines ({named}): {form} has room for one at most.")
    target = output or (f"{paths[0].stem}.{form}" if form in BINARY else STDOUT)
    if target == STDOUT:
        if form in BINARY:
            raise UsageError(f"{form} is not a text format: name a file with -o.")
        text = export_text(sources, form)
        if form in JSON:
            print_json_text(text)
        else:
            sys.stdout.write(text)
        return 0
    spare_runs([Path(target)], paths, "-o")
    export_file(sources, form, Path(target))
    note(f"wrote {target}")
    return 0
