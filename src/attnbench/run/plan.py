"""plan"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.spec import DTYPE_BYTES, Cell, Config, Environment, Implementation, Workload
from attnbench.verifying.draws import SETS
from attnbench.workloads.cost import demand

TOLD_REASONS = 3
USER_CODE = "user function "


class Group(NamedTuple):
    """Cells with the same group share a worker."""

    framework: str
    process: str = ""
    """Set by libraries that need a process of their own, and for every user function."""
    lane: int = 0
    """On an accelerator, where workers open side by side, each implementation of a framework has its own."""

    @property
    def has_user_code(self) -> bool:
        """Whether code that is not attnbench's own is loaded in this worker."""
        return self.process.startswith(USER_CODE)


class Planned(Struct, frozen=True):
    """A cell, and why it will not run."""

    cell: Cell
    reason: str | None = None
    unstarted: bool = False
    """Whether the reason is that no process could be started, which says nothing about the cell."""


def process_of(name: str) -> str:
    """Return the process of a user function: its own, so that whatever its code changes changes nobody else's time."""
    return f"{USER_CODE}{name}"


def group_of(implementation: Implementation) -> Group:
    """Return the worker of an implementation; those of other distributions than attnbench each have their own."""
    ours = registry.origin(implementation.name) == registry.OURS
    process = implementation.process if ours else process_of(implementation.name)
    return Group(implementation.framework, process)


def distinct(workloads: Sequence[Workload]) -> list[Workload]:
    """Each problem once, in order."""
    return list({workload.id: workload for workload in workloads}.values())


class Asked(NamedTuple):
    """An implementation, and what it is set to beyond its defaults."""

    name: str
    config: dict[str, int | float | str | bool] = {}
    step: str = ""


def as_asked(one: Asked, workload: Workload) -> Sequence[Config]:
    """One setting for all workloads."""
    del workload
    return (one.config,)


def cells_of(
    workloads: Sequence[Workload],
    wanted: Sequence[Asked],
    configs: Callable[[Asked, Workload], Sequence[Config]] = as_asked,
) -> list[Cell]:
    """All cells, workload by workload: what ratios are taken over stays together.

    Who computes one step has no cell on another, unless that is all there is: then it says so.
    """
    steps = {workload.step for workload in workloads}
    cells = [
        Cell(one.name, workload, dict(config))
        for workload in workloads
        for one in wanted
        if one.step == workload.step or one.step not in steps
        for config in configs(one, workload)
    ]
    return list({cell.id: cell for cell in cells}.values())


def require_dtype(planned: Sequence[Planned]) -> None:
    """Raise where every cell is refused for its dtype: that is a wrong request, not something that failed."""
    refused: dict[str, dict[str, None]] = {}
    for one in planned:
        if one.reason is None or one.cell.workload.dtype not in one.reason:
            return
        refused.setdefault(one.reason.rstrip("."), {})[one.cell.implementation] = None
    told = [f"{', '.join(names)}: {reason}" for reason, names in list(refused.items())[:TOLD_REASONS]]
    more = "; `run --list` with the same options tells the rest" if len(refused) > TOLD_REASONS else ""
    if told:
        raise UsageError(f"nothing here takes this dtype. {'; '.join(told)}{more}.")


def shard(workloads: Sequence[Workload], index: int, count: int) -> list[Workload]:
    """Part `index` (from 1) of `count`: whole workloads, dealt out in turn."""
    return list(workloads[index - 1 :: count])


SCORE_COPIES = {"forward": 2, "backward": 3, "train": 3}
"""Logits and probabilities, and their gradient, live at once in an implementation that stores them."""
GB = 1e9


def least_bytes(implementation: Implementation, workload: Workload) -> int:
    """Input sets, outputs and stored scores."""
    need = demand(workload)
    scores = need.scores_bytes * SCORE_COPIES[workload.pass_] if implementation.materialises_scores else 0
    return SETS * need.io_bytes + need.output_bytes + scores


def inputs_do_not_fit(workload: Workload, environment: Environment) -> str | None:
    """The same of Q, K and V alone, by arithmetic: a mask of such a size must not even be asked how much it hides."""
    w = workload
    keys = w.kv_len * w.kv_heads * (w.head_dim + w.value_dim)
    need = SETS * w.batch * (w.q_len * w.heads * w.head_dim + keys) * DTYPE_BYTES[w.dtype]
    return _too_much(need, environment)


def does_not_fit(implementation: Implementation, workload: Workload, environment: Environment) -> str | None:
    """`needs 38 GB, 24 GB here`, or None."""
    return _too_much(least_bytes(implementation, workload), environment)


def _too_much(need: int, environment: Environment) -> str | None:
    have = environment.memory_bytes
    if have is None or need <= have:
        return None
    return f"needs {_size_text(need)}, {_size_text(have)} here"


def _size_text(size: int) -> str:
    return f"{_rounded(size / GB)} GB" if size < 1000 * GB else f"{_rounded(size / GB / 1000)} TB"


def _rounded(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{float(f'{value:.3g}'):.10g}"
