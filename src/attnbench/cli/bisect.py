"""`attnbench bisect`: the commit that made an implementation slower, found by direct comparisons."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from attnbench.cli.options import OWN_SHAPE, Json, Quiet, Selection, ShapeOptions, select_workloads
from attnbench.cli.output import note, print_json, say
from attnbench.errors import UsageError


def bisect(
    implementation: Annotated[str, Parameter(help="A name, file.py:function or package.module:function.")],
    /,
    *,
    good: Annotated[str, Parameter(help="Git ref at which it was fast enough.")],
    bad: Annotated[str, Parameter(help="Git ref at which it is slower.")] = "HEAD",
    shape: ShapeOptions = ShapeOptions(),  # noqa: B008 (frozen)
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Find the commit that made an implementation slower, by comparing commits with the good one and halving the rest.

    Device, framework and threads come from the settings (attnbench.toml, ATTNBENCH_THREADS=1).

    Example: `attnbench bisect torch.sdpa --good v1.0 --bad main --seq-len 1024 --causal`
    """
    from attnbench.comparing import bisect as bisecting

    _, workloads = select_workloads(None, False, OWN_SHAPE if shape == ShapeOptions() else shape, Selection())
    if len(workloads) != 1:
        raise UsageError(f"bisect takes one workload at a time, and these options make {len(workloads)}.")
    tell = (lambda _: None) if quiet or json else note
    found, code = bisecting.bisect(implementation, workloads[0], good, bad, tell)
    if json:
        print_json(found)
    else:
        say(found["closing"])
    return code
