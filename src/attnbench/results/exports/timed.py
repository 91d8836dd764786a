"""What the formats of other benchmark tools share: timed cells, each once, under a name that is safe to print."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from attnbench.measuring.anchors import NAMES as ANCHORS
from attnbench.printable import printable
from attnbench.results.exports.table import Source
from attnbench.results.run_file import Header
from attnbench.spec import Ok, Time

LONGEST_NAME = 1024
"""Bencher takes no longer ones."""


class Timed(Struct, frozen=True):
    """A cell with a speed, and the header of its run."""

    name: str
    record: Ok
    time: Time
    header: Header


def timed(sources: Sequence[Source]) -> list[Timed]:
    """Timed cells without the anchors; these tools know a benchmark by its name, so of several the last counts."""
    found: dict[str, Timed] = {}
    for source in sources:
        for record in source.records:
            if isinstance(record, Ok) and record.time is not None and record.implementation not in ANCHORS:
                name = _name(record.cell.id)
                found[name] = Timed(name, record, record.time, source.header)
    return list(found.values())


def _name(text: str) -> str:
    """A long one is cut, with digits that tell it from others that begin alike."""
    name = printable(text)
    if len(name) <= LONGEST_NAME:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_NAME - len(digits) - 1]}-{digits}"


def facts(one: Timed) -> dict[str, str]:
    """Where and how it was measured."""
    environment, cost = one.record.environment, one.record.cost
    told = {"clock": one.time.clock, "workload": one.record.workload.title}
    if environment is not None:
        told |= {"device": environment.device_name, "fingerprint": environment.fingerprint}
    if cost.tflops is not None:
        told["tflops"] = f"{cost.tflops:.4g}"
    if one.record.approximate:
        told["approximate"] = "yes"
    return {name: printable(text) for name, text in told.items()}
