"""Floors per case, from a TOML file that is reviewed like code: a noisy case may get a higher one, never a lower one.

[[case]]
implementation = "torch.sdpa"
workload = "*causal*"
floor = 0.03
reason = "thread pool of the library: 2 % between launches"
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from attnbench.comparison import FLOOR
from attnbench.errors import BrokenFile
from attnbench.reading import convert, read_toml
from attnbench.workloads.suite_file import line_of, lines_of

Floors = Callable[[str, str], float]
"""(implementation, workload id) -> share that a case must be slower by before it counts."""


class Threshold(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry; both names are patterns as in a shell."""

    floor: float
    reason: str
    implementation: str = "*"
    workload: str = "*"

    def __post_init__(self) -> None:
        if self.floor < FLOOR:
            raise ValueError(f"floor = {self.floor:g} is below {FLOOR:g}: floors go only upward")
        if not self.floor < 1:
            raise ValueError(f"floor = {self.floor:g} is no share: write 0.03 for 3 %")
        if not self.reason.strip():
            raise ValueError("reason is empty: say why this case needs a higher floor")

    def covers(self, implementation: str, workload: str) -> bool:
        """Whether the entry is about this case."""
        return fnmatchcase(implementation, self.implementation) and fnmatchcase(workload, self.workload)


def load_thresholds(path: Path | str | None) -> Floors:
    """The floor of each case: the highest of the entries that cover it, else FLOOR; everywhere FLOOR without a file."""
    entries = [] if path is None else read_thresholds(Path(path))

    def floor(implementation: str, workload: str) -> float:
        return max([FLOOR, *(entry.floor for entry in entries if entry.covers(implementation, workload))])

    return floor


def read_thresholds(path: Path) -> list[Threshold]:
    """The entries of a file; a wrong one is a BrokenFile with its line."""
    table, text = read_toml(path)
    for key in table:
        if key != "case":
            raise BrokenFile(path, line_of(text, key), f'there is no "{key}" here: write [[case]] tables.')
    cases = table.get("case", [])
    if not isinstance(cases, list):
        raise BrokenFile(path, line_of(text, "case"), "write [[case]] with two brackets.")
    headers = list(lines_of(text, "case")) or [0]
    return [_entry(path, text, headers[min(place, len(headers) - 1)], case) for place, case in enumerate(cases)]


def _entry(path: Path, text: str, header: int, case: Any) -> Threshold:
    try:
        return convert(case, Threshold)
    except msgspec.ValidationError as error:
        keys = case if isinstance(case, dict) else ()
        named = min((key for key in keys if key in str(error)), key=str(error).index, default="")
        line = line_of(text, named, after=header) if named else None
        raise BrokenFile(path, line or header, f"{str(error).partition(' - at')[0]}.") from error
