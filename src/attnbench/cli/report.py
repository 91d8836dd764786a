"""`attnbench report`: runs as one HTML page, charts and summaries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attnbench.cli.inputs import check_against, spare_runs
from attnbench.cli.options import Json, Many
from attnbench.cli.output import note, print_json, say, warn
from attnbench.errors import UsageError

if TYPE_CHECKING:
    from attnbench.report.html.history import History
    from attnbench.report.html.page import Page
    from attnbench.report.html.sections import Source

NEEDED = ("altair", "jinja2", "vl_convert")


def report(
    *runs: Annotated[str, Parameter(help="Run files, parts of their names, or `latest` (when none is given).")],
    out: Annotated[
        Path | None, Parameter(name=["--out", "--output", "-o"], help="The page; beside the first run file.")
    ] = None,
    png: Annotated[Path | None, Parameter(help="Folder for every chart as PNG and SVG.")] = None,
    markdown: Annotated[
        bool, Parameter(negative="", help="Also print a summary for a pull request or a job's page.")
    ] = False,
    summaries: Annotated[
        Path | None,
        Parameter(help="Folder for summary.txt, performance.json, memory.json and correctness.json; beside the page."),
    ] = None,
    against: Annotated[tuple[str, ...], Many, Parameter(help="What the others are compared with at first.")] = (),
    json: Json = False,
) -> int:
    """Write runs as one HTML file that needs no network: winners, charts, tables, what did not run and why.

    Several runs of the same cells, at different times or commits, also show how each cell changed.

    Examples: `attnbench report` · `attnbench report results/h200/grid-gpu.jsonl -o report.html --png charts`
    """
    _check_installed()
    from attnbench.report.html.images import write_images
    from attnbench.report.html.markdown import summarise
    from attnbench.report.html.page import compose, render
    from attnbench.report.summaries import folder_of

    paths, sources = _read(runs or ("latest",))
    path = paths[0].with_suffix(".html") if out is None else out
    folder = summaries or folder_of(path)
    _spare(paths, path, folder, png)
    check_against(against, (record for source in sources for record in source.run.records))
    page = compose(sources, against, _history(sources))
    _warn(page.left)
    if not page.parts:
        raise UsageError(f"{paths[0]} holds no records: `attnbench run --quick` makes some.")
    _write(path, render(page))
    texts = _summarise(page, folder, path)
    images = [] if png is None else write_images(page, png)
    if markdown:
        _annotate(page)
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


def _check_installed() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f'the report needs {", ".join(missing)}: pip install "attnbench[report]".')


def _read(names: Sequence[str]) -> tuple[list[Path], list[Source]]:
    """Read every run named, the oldest first, so that the newest of a repeated cell is the one that stays."""
    from attnbench.cli.inputs import find_run
    from attnbench.report.html.sections import Source
    from attnbench.results.run_file import read_run

    paths = list(dict.fromkeys(find_run(name) for name in names))
    sources = [Source(path.name, read_run(path), str(path)) for path in paths]
    _warn(warning for source in sources for warning in source.run.warnings)
    return paths, sorted(sources, key=lambda source: source.run.header.created)


def _spare(runs: Sequence[Path], page: Path, folder: Path, png: Path | None) -> None:
    from attnbench.report.summaries import FILES

    spare_runs([page], runs, "-o")
    spare_runs([folder / name for name in FILES], runs, "--summaries")
    if png is not None:
        spare_runs([png, *(png / run.name for run in runs if run.suffix in (".png", ".svg"))], runs, "--png")


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        warn(warning)


def _history(sources: Sequence[Source]) -> History:
    from attnbench.cli.inputs import asker, commit_places
    from attnbench.report.html.history import NO_HISTORY, find_history

    if len(sources) < 2:
        return NO_HISTORY
    places = commit_places(record for source in sources for record in source.run.records)
    return find_history(sources, places, asker(places))


def _annotate(page: Page) -> None:
    """Print workflow annotations to stderr if the command runs on GitHub."""
    from attnbench.comparing.ci_files import record_commands

    if os.environ.get("GITHUB_ACTIONS") == "true":
        titled = len(page.parts) > 1
        for part in page.parts:
            for line in record_commands(part.cells.standings.newest, part.title if titled else ""):
                print(line, file=sys.stderr)


def _summarise(page: Page, folder: Path, path: Path) -> list[Path]:
    from attnbench.report.html.page import measured
    from attnbench.report.summaries import write_summaries

    try:
        return write_summaries(measured(page), folder, page.left)
    except UsageError as error:
        raise UsageError(f"the page is written to {path}, its summaries are not: {error}") from error


def _write(path: Path, text: str) -> None:
    from attnbench.drafts import write_texts

    try:
        write_texts({path: text})
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}. Choose another place with -o.") from error
