"""`attnbench report`: runs as one HTML page, charts and summaries."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.options import Json, Names, Runs, Switch, check_against, read_together, spare_runs
from attnbench.cli.output import note, print_json, say, warn
from attnbench.comparing.ci_files import record_commands
from attnbench.comparing.history import commits_in_git
from attnbench.errors import UsageError
from attnbench.files import write_errors, write_texts
from attnbench.report.summaries import FILES, folder_of, write_summaries
from attnbench.results.run_file import NamedRun

NEEDED = ("altair", "jinja2", "vl_convert")


def report(
    *runs: Runs,
    out: Annotated[
        Path | None, Parameter(name=["--out", "--output", "-o"], help="The page; beside the first run file.")
    ] = None,
    png: Annotated[Path | None, Parameter(help="Folder for every chart as PNG and SVG.")] = None,
    markdown: Annotated[Switch, Parameter(help="Also print a summary for a pull request or a job's page.")] = False,
    summaries: Annotated[
        Path | None,
        Parameter(help="Folder for summary.txt, performance.json, memory.json and correctness.json; beside the page."),
    ] = None,
    against: Annotated[Names, Parameter(help="Implementation that the others are compared with at first.")] = (),
    json: Json = False,
) -> int:
    """Write runs as one HTML file that needs no network: winners, charts, tables, what did not run and why.

    Several runs of the same cells, at different times or commits, also show how each cell changed.

    Examples: `attnbench report` · `attnbench report results/h200/grid-gpu.jsonl -o report.html --png charts`
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f'the report needs {", ".join(missing)}: pip install "attnbench[report]".')
    from attnbench.report.html.history import NO_HISTORY, find_history
    from attnbench.report.html.images import write_images
    from attnbench.report.html.page import compose, render, summarise

    read = read_together(runs or ("latest",))
    paths = list(read)
    # The oldest first, so that the newest of a repeated cell is the one that stays.
    sources = [NamedRun(path.name, run, str(path)) for path, run in read.items()]
    sources.sort(key=lambda source: source.run.header.created)
    path = paths[0].with_suffix(".html") if out is None else out
    folder = summaries or folder_of(path)
    spare_runs([path], paths, "-o")
    spare_runs([folder / name for name in FILES], paths, "--summaries")
    if png is not None:
        spare_runs([png, *(png / run.name for run in paths if run.suffix in (".png", ".svg"))], paths, "--png")
    records = [record for source in sources for record in source.run.records]
    check_against(against, records)
    history = find_history(sources, *commits_in_git(records)) if len(sources) > 1 else NO_HISTORY
    page = compose(sources, against, history)
    for warning in page.left:
        warn(warning)
    if not page.parts:
        raise UsageError(f"{paths[0]} holds no records: `attnbench run --quick` makes some.")
    text = render(page)
    with write_errors(path, "Choose another place with -o."):
        write_texts({path: text})
    try:
        texts = write_summaries(page.parts, folder, page.left)
    except UsageError as error:
        raise UsageError(f"the page was written to {path}, but its summaries were not: {error}") from error
    images = [] if png is None else write_images(page, png)
    if markdown and os.environ.get("GITHUB_ACTIONS") == "true":
        for part in page.parts:
            titled = part.title if len(page.parts) > 1 else ""
            for line in record_commands(part.cells.standings.newest, titled):
                print(line, file=sys.stderr)
    if json:
        closing = [" ".join(part.answer) for part in page.parts]
        found = {"report": path, "images": images, "summaries": texts, "closing": closing}
        print_json(found | ({"markdown": summarise(page)} if markdown else {}))
        return 0
    if markdown:
        print(summarise(page), end="")
    for written in (path, *images, f"{folder}{os.sep}"):
        (note if markdown else say)(written)
    return 0
