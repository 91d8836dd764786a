"""`attnbench run`: measure, write a run file, rank."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.options import Choice, Json, Quiet, Sampling, Shape

Flag = Parameter(negative="")


def run(
    suite: Annotated[
        str | None, Parameter(help="A suite by name or a TOML file; `quick` when no shape is given.")
    ] = None,
    /,
    *,
    quick: Annotated[bool, Flag, Parameter(help="Cap shapes and sampling time of the suite.")] = False,
    shape: Shape = Shape(),  # noqa: B008 (frozen)
    choice: Choice = Choice(),  # noqa: B008
    sampling: Sampling = Sampling(),  # noqa: B008
    list_: Annotated[
        bool, Flag, Parameter(name="--list", help="Only list the cells, and why some would not run.")
    ] = False,
    resume: Annotated[
        str | None,
        Parameter(
            help="A run file (or `latest`) to go on with; what it holds is not run again. "
            "Functions that it names by file or module must be named again with --impl."
        ),
    ] = None,
    out: Annotated[Path | None, Parameter(help="Folder of run files.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Verify and time every implementation that works here, and rank them.

    Examples: `attnbench run --quick` · `attnbench run --impl my_kernel.py:my_attention --seq-len 2048 --causal`
    """
    from attnbench.cli import session
    from attnbench.cli.inputs import find_run
    from attnbench.cli.order import Order, prepare

    order = Order(
        suite=suite,
        quick=quick,
        shape=shape,
        choice=choice,
        sampling=sampling,
        resume=None if resume is None else find_run(resume),
        out=out,
    )
    prepared = prepare(order, only_listed=list_)
    if list_:
        return session.list_cells(prepared, json)
    return session.carry_out(prepared, json, quiet or json)
