"""`attnbench show`: read a run file."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.inputs import check_against, find_run
from attnbench.cli.options import Json, Many
from attnbench.cli.output import print_json, say, stdout_console, warn
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
    """Show the tables and the closing sentence of a run; `--detail` adds every cell in full."""
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
        warn(warning)
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
    say(sentence)
    return 0
