"""`attnbench show`: read a run file."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.inputs import check_against, find_run, has_words
from attnbench.cli.options import Flag, Json, Many, Words
from attnbench.cli.output import print_json, say, stdout_console, warn
from attnbench.errors import UsageError


def show(
    run: Annotated[str, Parameter(help="A run file, a part of its name, or `latest`.")] = "latest",
    /,
    *,
    detail: Annotated[bool, Flag, Parameter(help="Every cell in full: percentiles, memory, errors, kernels.")] = False,
    words: Words = "",
    against: Annotated[
        tuple[str, ...],
        Many,
        Parameter(help="Implementation that the others are compared with; by default that of the run."),
    ] = (),
    json: Json = False,
) -> int:
    """Show the tables and the closing sentence of a run; `--detail` adds every cell in full."""
    from attnbench.cli.run import document
    from attnbench.report.terminal import print_cell, print_rankings
    from attnbench.results.run_file import read_run
    from attnbench.results.sentences import answer
    from attnbench.results.standings import Standings
    from attnbench.run.recorder import describe_unreached

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
