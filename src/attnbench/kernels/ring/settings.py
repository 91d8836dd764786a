"""Settings of a ring, `torch.ring[world=4,layout=striped]`, the masks it takes, and figures of its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnbench import registry
from attnbench.errors import UsageError
from attnbench.impls.conditions import needs_mask
from attnbench.kernels.ring.schedule import Problem, check_layout
from attnbench.masks import Causal
from attnbench.masks.base import query_offset
from attnbench.spec import DTYPE_BYTES, Config, Workload

TUNABLES: Config = {"world": 2, "layout": "zigzag", "inner": "auto", "timeout_s": 120.0}
DENSE = ("full", "causal")
BY_NAME_ONLY = "spans several processes or devices, which is another question than which kernel is fastest"


class Settings(NamedTuple):
    """A config with its defaults, checked."""

    world: int
    layout: str
    inner: str
    timeout_s: float

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Read a config; raise UsageError for unknown settings and impossible values."""
        unknown = sorted(set(config) - set(TUNABLES))
        if unknown:
            raise UsageError(f"a ring has no setting {', '.join(unknown)}; it has {', '.join(TUNABLES)}.")
        given = {**TUNABLES, **config}
        world, timeout_s = given["world"], given["timeout_s"]
        if not isinstance(world, int) or world < 1:
            raise UsageError(f"world must be a whole number of at least 1, not {world!r}.")
        if isinstance(timeout_s, str) or not timeout_s > 0:
            raise UsageError(f"timeout_s must be positive, not {timeout_s!r}.")
        check_layout(str(given["layout"]))
        return cls(world, str(given["layout"]), str(given["inner"]), float(timeout_s))


def check_inner(inner: object) -> None:
    """Raise UsageError unless `inner` is "auto" or an implementation with that name exists."""
    if inner != TUNABLES["inner"]:
        registry.get(str(inner))


def problem_of(workload: Workload, world: int, layout: str) -> Problem:
    """Shard a workload; its causal mask shows query i the keys up to i + shift."""
    causal = next((part for part in workload.visible_mask.split() if isinstance(part, Causal)), None)
    shift = 0 if causal is None else query_offset(causal.align, workload.mask_shape)
    return Problem(workload.q_len, workload.kv_len, world, layout, causal is not None, shift)


def needs_dense_mask(workload: Workload) -> str | None:
    """Refuse every mask but full and one causal mask."""
    several = len(workload.visible_mask.kinds) > 1
    return needs_mask(workload, *DENSE) or ("takes one mask, not several" if several else None)


def needs_ring_mask(workload: Workload) -> str | None:
    """Refuse every mask but full, causal, dilated, and dilated with causal, each once."""
    kinds = workload.visible_mask.kinds
    repeated = "takes each kind of mask once" if len(set(kinds)) < len(kinds) else None
    return needs_mask(workload, *DENSE, "dilated") or repeated


def shard_bytes(workload: Workload, problem: Problem) -> tuple[int, ...]:
    """Count the bytes of q, k and v that each rank holds."""
    itemsize = DTYPE_BYTES[workload.dtype]
    per_query = workload.batch * workload.heads * workload.head_dim * itemsize
    per_key = workload.batch * workload.kv_heads * (workload.head_dim + workload.value_dim) * itemsize
    return tuple(q * per_query + kv * per_key for q, kv in zip(problem.q_sizes(), problem.kv_sizes()))


def balance(work: Sequence[float]) -> float:
    """Return the mean over the largest of the ranks' work: 1 if all ranks have the same to do."""
    return sum(work) / len(work) / max(work) if max(work) else 1.0
