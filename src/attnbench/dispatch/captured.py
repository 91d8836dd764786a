"""What `ab.capture` found: the calls of a step, their share of its time, and what a faster kernel would gain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from attnbench.errors import UsageError
from attnbench.spec import Workload
from attnbench.workloads.suite_file import write_suite


class Captured(Struct, frozen=True):
    """Calls of one workload through one function."""

    workload: Workload
    count: int
    via: str
    seconds: float | None
    """Forward and backward of all of them; None where they could not be timed."""
    note: str = ""


class Calls:
    """Filled when the block of `ab.capture` ends; empty before."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []
        self.unread: tuple[str, ...] = ()
        """Why calls that were made are not among them, one reason for each."""
        self.step_seconds: float | None = None
        """Wall time of the block, the device's work included."""
        self.method = ""
        """How the share was measured."""
        self.reason = "the block has not ended"
        """Why there is no share; empty when there is one."""

    def __len__(self) -> int:
        return sum(one.count for one in self.captured)

    def __iter__(self) -> Iterator[Captured]:
        return iter(self.captured)

    @property
    def workloads(self) -> list[Workload]:
        """Each once, with where it was seen as its source; the most frequent first."""
        counts: Counter[str] = Counter()
        told: dict[str, Workload] = {}
        for one in self.captured:
            counts[one.workload.id] += one.count
            told[one.workload.id] = one.workload
        notes = {one.workload.id: f"; {one.note}" for one in self.captured if one.note}
        return [
            replace(told[key], source=f"{count} of {len(self)} calls captured in a step{notes.get(key, '')}")
            for key, count in counts.most_common()
        ]

    @property
    def seconds(self) -> float | None:
        """In attention, forward and backward; None when a call could not be timed."""
        if self.reason:
            return None
        return sum(one.seconds or 0.0 for one in self.captured)

    @property
    def share(self) -> float | None:
        """Approximate share of the block's wall time that attention takes (`method` says how it was measured)."""
        if self.seconds is None or not self.step_seconds:
            return None
        return self.seconds / self.step_seconds

    def gain(self, speedup: float) -> float:
        """How much faster the whole step becomes when attention becomes `speedup` times as fast (Amdahl)."""
        if not speedup > 0:
            raise UsageError(f"a speedup is a positive ratio, not {speedup!r}.")
        share = self.share
        if share is None:
            raise UsageError(f"the share of attention is not known: {self.reason}.")
        share = min(share, 1.0)
        return 1 / (1 - share + share / speedup)

    def save(self, path: str | Path, name: str | None = None) -> Path:
        """A suite file for `attnbench run PATH` and every command that takes a suite."""
        path = Path(path)
        if not self.captured:
            raise UsageError(f"nothing was captured, so {path} would be empty: {self.reason}.")
        description = f"{len(self)} attention calls of a model's step, captured"
        if self.unread:
            description += f"; {len(self.unread)} more have no workload of ours"
        write_suite(path, name or path.stem, description, self.workloads)
        return path

    def __str__(self) -> str:
        lines = [
            f"{one.count:5} call{'s' * (one.count > 1)}  {one.workload.title}  via {one.via}{_times(one)}{_note(one)}"
            for one in self
        ]
        lines += [f"{count:5} not captured: {why}" for why, count in Counter(self.unread).items()]
        if self.share is None:
            lines.append(f"share of the step: not known, {self.reason}")
        else:
            lines.append(
                f"attention takes about {self.share:.0%} of the step's {1e3 * (self.step_seconds or 0):.3g} ms "
                f"({self.method}): twice as fast, it would make the step {self.gain(2):.2f}x as fast"
            )
        return "\n".join(lines)


def _times(one: Captured) -> str:
    return "" if one.seconds is None else f"  {1e3 * one.seconds:.3g} ms"


def _note(one: Captured) -> str:
    return f"  ({one.note})" if one.note else ""
