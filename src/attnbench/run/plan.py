"""The plan of a run: its cells, the worker of each, and whether its arrays fit into memory. Deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.spec import DTYPE_BYTES, Cell, Config, Environment, Implementation, Workload
from attnbench.verifying.draws import SETS
from attnbench.workloads.cost import demand

LISTED_REASONS = 3
USER_CODE = "user function "


class Group(NamedTuple):
    """Key of a worker: cells with the same group share one."""

    framework: str
    process: str = ""
    """Name of a separate process, for libraries that need one and for every user function; else empty."""
    lane: int = 0
    """Number of the worker among those of one framework: on an accelerator each implementation has its own."""

    @property
    def has_user_code(self) -> bool:
        """Whether code that is not attnbench's own is loaded in this worker."""
        return self.process.startswith(USER_CODE)


class Planned(Struct, frozen=True):
    """A cell, and the reason if it will not run."""

    cell: Cell
    reason: str | None = None
    unstarted: bool = False
    """Whether no worker could be started, which says nothing about the cell itself."""


def process_of(name: str) -> str:
    """Return the process name of a user function: each has its own, so that it cannot change the times of others."""
    return f"{USER_CODE}{name}"


def group_of(implementation: Implementation) -> Group:
    """Return the worker of an implementation; each one from another distribution than attnbench has its own."""
    ours = registry.origin(implementation.name) == registry.OURS
    process = implementation.process if ours else process_of(implementation.name)
    return Group(implementation.framework, process)


def distinct(workloads: Sequence[Workload]) -> list[Workload]:
    """Return each workload once, in order."""
    return list({workload.id: workload for workload in workloads}.values())


class Asked(NamedTuple):
    """A requested implementation with its settings."""

    name: str
    config: dict[str, int | float | str | bool] = {}
    step: str = ""


def cells_of(
    workloads: Sequence[Workload],
    wanted: Sequence[Asked],
    configs: Callable[[Asked, Workload], Sequence[Config]] = lambda one, workload: (one.config,),
) -> list[Cell]:
    """Return all cells, workload by workload; `configs` returns the settings to run one with, by default as asked.

    An implementation of one training step gets no cell of another step, unless no requested implementation computes
    that step: then its refusal is recorded.
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
    """Raise UsageError if every cell is refused for its dtype."""
    refused: dict[str, dict[str, None]] = {}
    for one in planned:
        if one.reason is None or one.cell.workload.dtype not in one.reason:
            return
        refused.setdefault(one.reason.rstrip("."), {})[one.cell.implementation] = None
    listed = [f"{', '.join(names)}: {reason}" for reason, names in list(refused.items())[:LISTED_REASONS]]
    more = "; `run --list` with the same options lists the rest" if len(refused) > LISTED_REASONS else ""
    if listed:
        raise UsageError(f"no implementation here supports this dtype. {'; '.join(listed)}{more}.")


def shard(workloads: Sequence[Workload], index: int, count: int) -> list[Workload]:
    """Return part `index` (from 1) of `count` parts: whole workloads, dealt out in turn."""
    return list(workloads[index - 1 :: count])


SCORE_COPIES = {"forward": 2, "backward": 3, "train": 3}
"""Number of arrays of the scores' size (logits, probabilities, their gradient) that an implementation which stores them
holds at once, by pass."""


def least_bytes(implementation: Implementation, workload: Workload) -> int:
    """Return the bytes that a cell needs at least: input sets, outputs and stored scores."""
    need = demand(workload)
    scores = need.scores_bytes * SCORE_COPIES[workload.pass_] if implementation.materialises_scores else 0
    return SETS * need.io_bytes + need.output_bytes + scores


def inputs_do_not_fit(workload: Workload, environment: Environment) -> str | None:
    """Return why Q, K and V do not fit into memory, or None; computed from the shape, without the mask."""
    w = workload
    keys = w.kv_len * w.kv_heads * (w.head_dim + w.value_dim)
    need = SETS * w.batch * (w.q_len * w.heads * w.head_dim + keys) * DTYPE_BYTES[w.dtype]
    return _too_much(need, environment)


def does_not_fit(implementation: Implementation, workload: Workload, environment: Environment) -> str | None:
    """Return why a cell does not fit into memory, such as `needs 38 GB, 24 GB here`, or None."""
    return _too_much(least_bytes(implementation, workload), environment)


def _too_much(need: int, environment: Environment) -> str | None:
    have = environment.memory_bytes
    return None if have is None or need <= have else f"needs {_size_text(need)}, {_size_text(have)} here"


def _size_text(size: int) -> str:
    """Return a size with three significant digits and no exponent."""
    unit, least = ("GB", 1e9) if size < 1e12 else ("TB", 1e12)
    return f"{float(f'{size / least:.3g}'):.10g} {unit}"
