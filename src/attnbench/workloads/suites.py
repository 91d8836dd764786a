"""Suites by name or from a user's TOML file: where a run's workloads come from."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from attnbench.errors import BrokenFile, UnknownName
from attnbench.masks.text import parse_mask
from attnbench.spec import Workload
from attnbench.workloads.catalogue import BUILTIN
from attnbench.workloads.shrink import shrink
from attnbench.workloads.suite_file import Suite, read_suite

STEP_HEAD_DIM = 32

__all__ = ["Suite", "load", "names", "parse_mask", "quicken"]


def names() -> list[str]:
    """Built-in suites, the default first."""
    return list(BUILTIN)


def load(name_or_path: str | Path) -> Suite:
    """A built-in suite, or a file whose name ends in .toml."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise BrokenFile(path, None, "it is a folder, not a file." if path.is_dir() else "there is no such file.")
        return read_suite(path)
    name = str(name_or_path)
    if name not in BUILTIN:
        raise UnknownName("suite", name, BUILTIN, "attnbench list suites")
    description, make = BUILTIN[name]
    return Suite(name, description, tuple(make()))


def quicken(suite: Suite) -> Suite:
    """The suite with shapes capped (see `shrink`); workloads that become the same are kept once.

    Heads of a step are narrowed too: its weights grow with the square of their width.
    """
    small: dict[str, Workload] = {}
    for workload in map(shrink, suite.workloads):
        narrow = min(workload.head_dim, STEP_HEAD_DIM)
        capped = replace(workload, head_dim=narrow, v_head_dim=narrow) if workload.step else workload
        small.setdefault(capped.id, capped)
    return Suite(f"{suite.name}-quick", suite.description, tuple(small.values()))
