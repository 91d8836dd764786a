"""pi0's small steps by name, and what a session says about one."""

from __future__ import annotations

from msgspec.structs import replace

from attnbench.run import protocol as p
from attnbench.run.remote import Local
from attnbench.spec import Cell, Workload
from attnbench.workloads.catalogue import pi0_edges


def small_step(step: str, **fields) -> Workload:
    found = next(one for one in pi0_edges() if one.step == step)
    return replace(found, **fields)


def opened(step: str, end: str = "", **fields):
    """The answer to opening jax.STEP, or with "-flash" the flash one by jax.nn's own attention."""
    config = {"impl": "jax"} if end else {}
    cell = Cell(f"jax.{step}{end}", small_step(step, **fields), config)
    return Local("jax", "cpu").ask(p.Open(cell, False, True, None, 3, None, False), 300)


def require_right(answer) -> None:
    assert isinstance(answer, p.Opened), answer
    errors = answer.record.errors
    assert 0 < errors.forward <= errors.forward_allowed
    if answer.record.workload.needs_gradients:
        assert 0 < errors.backward <= errors.backward_allowed
