"""What is going on in a comparison: one line on stderr, only on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from attnbench.comparing.statistics import Decision, published
from attnbench.comparison import Launch
from attnbench.printable import printable


class ExperimentProgress:
    """Called after each launch."""

    def __init__(self, console: Console, quiet: bool) -> None:
        shown = console.is_terminal and not quiet
        self._title = ""
        self._lines = None if quiet or console.is_terminal else console
        """Where nobody looks at a terminal (a CI job) each comparison is told by a line."""
        self._status = Status("starting both", console=console) if shown else None

    def __enter__(self) -> ExperimentProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, title: str) -> None:
        """Another comparison starts."""
        self._title = f"{escape(printable(title))} · "
        if self._lines is not None:
            self._lines.print(f"measuring {title}", highlight=False, markup=False, soft_wrap=True)
        if self._status is not None:
            self._status.update(f"{self._title}starting both")

    def __call__(self, launches: Sequence[Launch], decision: Decision | None) -> None:
        """One more launch is over."""
        if self._status is not None:
            self._status.update(f"{self._title}{_words(len(launches), decision)}")


def _words(launches: int, decision: Decision | None) -> str:
    text = f"launch {launches}"
    estimates = {} if decision is None else decision.estimates
    if not estimates:
        return text
    best = estimates[published(tuple(estimates))]
    return f"{text} · ratio {best.ratio:.3f} ({best.interval[0]:.3f}-{best.interval[1]:.3f})"
