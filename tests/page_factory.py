"""Run files made by hand, for the tests of the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from record_factory import CPU, incorrect, noisy, ok, unsupported, workload

from attnbench.report.html.sections import Section, gather
from attnbench.results.run_file import Header, NamedRun, Run
from attnbench.spec import Environment, Ok, Record

if TYPE_CHECKING:
    from attnbench.report.html.page import Page

HOSTILE = "<img src=x onerror=alert(1)>"
BREAKER = "</script><script>alert(2)</script><!--"
JAX = msgspec.structs.replace(CPU, framework="jax", packages={"jax": "0.10.2"})


def source(*records: Record, name: str = "run.jsonl", created: str = "2026-01-01T00:00:00+00:00") -> NamedRun:
    header = Header(schema=1, attnbench="0", created=created, suite="quick")
    return NamedRun(name, Run(header, {}, records))


def timed(name: str, median: float, q_len: int = 128, environment: Environment = CPU, **fields) -> Ok:
    on = fields.pop("on", None) or workload(q_len)
    return ok(name, noisy(median, seed=len(name) + q_len), on=on, environment=environment, **fields)


def page_of(*records: Record) -> Page:
    from attnbench.report.html.page import compose

    return compose([source(*records)])


def section_of(*records: Record) -> Section:
    (section,) = gather([source(*records)])
    return section


def two_frameworks() -> list[Record]:
    return [
        timed("torch.eager", 4e6),
        timed("torch.sdpa", 1e6, kernels=("flash_fwd",)),
        timed("jax.xla", 2e6, environment=JAX),
        timed("torch.eager", 16e6, 256),
        timed("torch.sdpa", 4e6, 256, kernels=("flash_fwd",)),
        unsupported("torch.fa3", "needs a GPU"),
        unsupported("torch.fa4", "needs a GPU"),
        incorrect("mine", "first wrong row 3"),
    ]
