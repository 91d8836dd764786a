"""`attnbench export`: runs in the formats of other tools."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from attnbench.cli.inputs import spare_runs
from attnbench.cli.output import note, print_json_text, warn
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.results.exports.table import Source

Format = Literal[
    "parquet", "csv", "sqlite", "pytest-benchmark", "google-benchmark", "bencher", "github-action-benchmark"
]
NOTHING = 3
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
    words: Annotated[
        str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")
    ] = "",
) -> int:
    """Write runs as a table (parquet, csv, sqlite: every record) or for another benchmark tool (timed cells only).

    Examples: `attnbench export latest --format parquet -o run.parquet` · `attnbench export latest --format csv`
    """
    from attnbench.results.exports.benchmark_tools import timed
    from attnbench.results.exports.formats import BINARY, JSON, export_file, export_text

    sources, paths = _read(runs or ("latest",), words)
    if form in JSON:
        kept = len(timed(sources))
        if not kept:
            note("nothing was timed in these runs, so there is nothing that this format could hold.")
            return NOTHING
        if again := sum(len(timed([source])) for source in sources) - kept:
            note(f"note: {again} of the timed cells are in several runs; {form} knows cells by name: the last is kept.")
    target = output or (f"{paths[0].stem}.{form}" if form in BINARY else STDOUT)
    if target == STDOUT:
        if form in BINARY:
            raise UsageError(f"{form} is no text: name a file with -o.")
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


def _read(names: Sequence[str], words: str) -> tuple[list[Source], list[Path]]:
    from attnbench.cli.inputs import find_run
    from attnbench.results.exports.table import Source
    from attnbench.results.run_file import read_run

    paths = list(dict.fromkeys(find_run(name) for name in names))
    sources = []
    for path in paths:
        run = read_run(path)
        for warning in run.warnings:
            warn(warning)
        records = [r for r in run.records if all(word in r.cell.id for word in words.split())]
        sources.append(Source(path.stem, run.header, records))
    if not any(source.records for source in sources):
        named = f' with "{words}" in its id' if words else ""
        raise UsageError(f"{', '.join(map(str, paths))}: no record{named}; `attnbench show` lists what there is.")
    return sources, paths
