"""Progress of a run on stderr: two bars in a terminal, a line per workload elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from attnbench.printable import printable
from attnbench.results.records import is_anchor
from attnbench.results.sentences import counted
from attnbench.run.launch import Listener
from attnbench.run.plan import Planned
from attnbench.spec import Cell, Environment, Ok, Record


class Count:
    """Cells asked for, checked and finished, for the bars and for the plain lines."""

    def __init__(self) -> None:
        self.runnable: set[str] = set()
        self.checked: dict[str, bool] = {}
        """Ids of the cells that were verified -> whether they passed."""
        self.finished: dict[str, bool] = {}
        self.left: Counter[str] = Counter()
        """Cells without a record, by workload."""

    def plan(self, cells: Sequence[Planned]) -> None:
        """Add cells to run; cells with a reason will not run."""
        for cell in (one.cell for one in cells if one.reason is None and one.cell.id not in self.runnable):
            self.runnable.add(cell.id)
            self.left[cell.workload.id] += 1

    def check(self, cell: Cell, ok: bool) -> None:
        """Count a cell that was verified; one that passed and fails later has passed."""
        self.checked[cell.id] = ok or self.checked.get(cell.id, False)

    def finish(self, record: Record) -> None:
        """Count a cell with a final record, also a crashed one, which was never reported as verified."""
        cell = record.cell
        if cell.id in self.runnable:
            self.left[cell.workload.id] -= cell.id not in self.finished
            self.finished[cell.id] = isinstance(record, Ok)
            self.check(cell, isinstance(record, Ok))

    @property
    def to_measure(self) -> int:
        """Number of cells that are, or may still be, worth timing."""
        return len(self.runnable) - sum(not ok for ok in self.finished.values())


class Silent(Listener):
    """Listener for `--quiet`, which prints warnings only."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.environments: dict[str, Environment] = {}

    def environment(self, framework: str, environment: Environment) -> None:
        self.environments[framework] = environment

    def warning(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}")

    def waiting(self, text: str) -> None:
        self.console.print(escape(text))

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class Lines(Silent):
    """Listener without a terminal, which prints one line when a workload is over."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.count = Count()
        self._announced: set[str] = set()

    def planned(self, cells: Sequence[Planned]) -> None:
        self.count.plan(cells)
        self.console.print(escape(headline(self.environments, cells)))

    def finished(self, record: Record) -> None:
        if is_anchor(record):
            return
        self.count.finish(record)
        workload = record.workload.id
        if workload not in self._announced and not self.count.left[workload]:
            self._announced.add(workload)
            done = f"{len(self.count.finished)}/{len(self.count.runnable)} cells"
            self.console.print(f"{done} · {escape(workload)}")


class ToldColumn(ProgressColumn):
    """Column with the text of the field `told`, which is not read as markup."""

    def render(self, task: Task) -> Text:
        return task.fields["told"]


class Bars(Silent):
    """Listener of a terminal: bars for verify and measure, the current cell, the time left."""

    def __init__(self, console: Console, measure: bool = True) -> None:
        super().__init__(console)
        self.count = Count()
        columns = (
            TextColumn("  {task.description:8}"), BarColumn(), MofNCompleteColumn(), ToldColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, transient=False)
        names = ("verify", "measure") if measure else ("verify",)
        self._bars: dict[str, TaskID] = {name: self._progress.add_task(name, total=None, told=Text()) for name in names}

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def planned(self, cells: Sequence[Planned]) -> None:
        self.count.plan(cells)
        self._progress.start()
        self._progress.console.print(escape(headline(self.environments, cells)))
        self._draw()

    def stage(self, cell: Cell, stage: str) -> None:
        bar = self._bars.get(stage, self._bars["verify"])
        self._draw()
        self._progress.update(bar, told=Text(printable(f"{cell.implementation} · {cell.workload.id}")))

    def verified(self, cell: Cell, ok: bool) -> None:
        self.count.check(cell, ok)
        self._draw()

    def finished(self, record: Record) -> None:
        if not is_anchor(record):
            self.count.finish(record)
            self._draw()

    def _draw(self) -> None:
        count = self.count
        good = sum(count.checked.values())
        bad = len(count.checked) - good
        told = Text.assemble((f"✓ {good}", "green"), (f" ✗ {bad}" if bad else "", "red"))
        self._progress.update(self._bars["verify"], total=len(count.runnable), completed=len(count.checked), told=told)
        if "measure" in self._bars:
            done = sum(count.finished.values())
            self._progress.update(self._bars["measure"], total=max(count.to_measure, 1), completed=done, told=Text())


def make_listener(console: Console, quiet: bool, measure: bool = True) -> Silent:
    """Return bars in a terminal, lines elsewhere, and only warnings if `quiet`."""
    if quiet:
        return Silent(console)
    return Bars(console, measure) if console.is_terminal else Lines(console)


def headline(environments: dict[str, Environment], cells: Sequence[Planned]) -> str:
    """Return devices, frameworks and the number of cells in one line."""
    devices = list(dict.fromkeys(e.device_name for e in environments.values()))
    frameworks = [f"{name} {e.packages.get(name, '')}".strip() for name, e in environments.items()]
    shadowed = [
        f"{library.name} {library.version} hides {len(library.shadowed)} other(s)"
        for e in environments.values()
        for library in e.libraries
        if library.shadowed and e.device != "cpu" and library.name.startswith("libcudnn.")
    ]
    running = [one.cell for one in cells if one.reason is None]
    implementations = len({cell.implementation for cell in running})
    workloads = len({one.cell.workload.id for one in cells})
    amount = f"{counted(implementations, 'implementation')} x {counted(workloads, 'workload')}"
    return " · ".join(["attnbench", *devices, *frameworks, *list(dict.fromkeys(shadowed))[:2], amount])
