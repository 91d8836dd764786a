"""`attnbench show`: read a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.inputs import check_against
from attnbench.cli.options import Json, Many
from attnbench.errors import UsageError


def show(
    run: Annotated[str, Parameter(help="A run file, a part of its name, or `latest`.")] = "latest",
    /,
    *,
    detail: Annotated[
        bool, Parameter(negative="", help="Every cell in full: percentiles, memory, errors, kernels.")
    ] = False,
    words: Annotated[
        str, Parameter(name=["--filter", "-k"], help="Only cells whose id contains all these words.")
    ] = "",
    against: Annotated[
        tuple[str, ...], Many, Parameter(help="What the others are compared with; else what the run named.")
    ] = (),
    json: Json = False,
) -> int:
    """Tables and closing sentence of a run; `--detail` for each cell."""
    from attnbench.cli.output import print_json, stderr_console, stdout_console
    from attnbench.cli.session import document
    from attnbench.report.terminal import print_cell, print_rankings
    from attnbench.results.run_file import read_run
    from attnbench.results.sentences import answer
    from attnbench.results.standings import Standings
    from attnbench.results.unreached import tell_unreached

    path = find_run(run)
    found = read_run(path)
    left = tell_unreached(str(path), found)
    for warning in (*found.warnings, *([left] if left else [])):
        stderr_console().print(f"warning: {warning}", highlight=False, markup=False, soft_wrap=True)
    records = [r for r in found.records if all(word in r.cell.id for word in words.split())]
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
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    return 0


def find_run(text: str) -> Path:
    """The file of that path, or the newest in the runs folder whose name contains the text."""
    from attnbench.config import load_settings
    from attnbench.reading import files_in

    if Path(text).is_file():
        return Path(text)
    folder = Path(load_settings().runs_dir)
    wanted = "" if text == "latest" else text
    found = sorted((p for p in files_in(folder, "*.jsonl") if wanted in str(p)), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UsageError(
            f'there is no run file "{text}", and none of that name in {folder}: `attnbench run --quick` makes one.'
        )
    return found[-1]
